"""The configuration as frozen dataclasses: the one list of keys, their types and their defaults.

Keys and defaults are those of verl v0.6.1 in the subset that does something here, with the DAPO recipe's filter and
overlong keys; a default that differs is listed in :data:`core.config.yaml_tables.CHANGED_DEFAULTS`. A default of None
that stands for another key's value is filled in by :func:`core.config.resolution.resolve`, so a resolved configuration
holds None only where a comment here gives its meaning.

Units: a *prompt* is an example of the data, a *trajectory* one answer to it (``rollout.n`` of them a prompt). Batch
sizes named ``..._per_gpu`` count trajectories in one pass of one rank, and are memory knobs: they cannot change the
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from core.config import limits, tables
from core.config.frozen import FrozenDict

AdvEstimator = Annotated[str, limits.names(*tables.ESTIMATORS)]
LossMode = Annotated[str, limits.names(*tables.POLICY_LOSSES)]
AgentLoop = Annotated[str, limits.names(*tables.AGENT_LOOPS)]
EngineName = Literal[*tables.ENGINES]
RewardManager = Literal[*tables.REWARD_MANAGERS]
LossAggMode = Literal[*tables.LOSS_AGG_MODES]
KLKind = Literal[*tables.KL_KINDS]
DType = Literal["bfloat16", "bf16", "float32", "fp32"]
FULL_PRECISION = ("float32", "fp32")
Logger = Literal[*tables.LOGGERS]
Open = Mapping[str, Any]  # keys that are another library's, or the user's own


@dataclass(frozen=True)
class DataConfig:
    train_files: limits.NonEmpty = ("~/data/rlhf/gsm8k/train.parquet",)
    val_files: limits.NonEmpty = ("~/data/rlhf/gsm8k/test.parquet",)
    dataset_weights: tuple[limits.Positive, ...] | None = None  # one a training file; None: by number of examples
    curriculum: tuple[Open, ...] | None = None  # stages {files, prompts, weights}, in place of train_files
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: limits.Count = 512  # tokens
    max_response_length: limits.Count = 512  # tokens, tools' included; in a search episode of one turn
    max_start_length: limits.Count | None = None  # search episodes: tokens of the prompt; None: max_prompt_length
    max_obs_length: limits.Count = 500  # search episodes: tokens of what a search returns
    train_batch_size: limits.Count = 1024  # prompts a step
    gen_batch_size: limits.Count | None = None  # prompts in flight at most; None: train_batch_size
    train_max_samples: limits.OffOrCount = -1  # examples of all training files together
    val_max_samples: limits.OffOrCount = -1  # examples of each validation file
    shuffle: bool = True
    seed: limits.Size | None = None  # order of the training examples; None: trainer.seed
    validation_shuffle: bool = False
    filter_overlong_prompts: bool = False
    truncation: Literal["error", "left", "right", "middle"] = "error"
    apply_chat_template_kwargs: Open = FrozenDict()


@dataclass(frozen=True)
class ModelConfig:
    path: str = "~/models/deepseek-llm-7b-chat"  # org/name on the hub, or a folder: /..., ./..., ~/...
    tokenizer_path: str | None = None  # None: path
    custom_chat_template: str | None = None  # None: the tokenizer's own
    external_lib: str | None = None  # modules to import before the model loads, separated by commas
    trust_remote_code: bool = False
    override_config: Open = FrozenDict()  # fields of the model's own configuration
    enable_gradient_checkpointing: bool = True
    use_remove_padding: bool = False
    lora_rank: limits.Size = 0  # 0: all weights train
    lora_alpha: limits.Count = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    target_modules: limits.Names = ("all-linear",)  # or ends of names, or one pattern of whole names
    exclude_modules: limits.Names | None = None


@dataclass(frozen=True)
class OptimConfig:
    lr: limits.NonNegative = 1e-6
    weight_decay: limits.NonNegative = 0.01
    betas: limits.Betas = (0.9, 0.999)
    lr_warmup_steps: limits.OffOrSize = -1  # RL steps; -1: by the ratio
    lr_warmup_steps_ratio: limits.Share = 0.0  # of the run's RL steps
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: limits.Share | None = 0.0  # of lr, where a cosine ends; None: 0
    num_cycles: limits.Positive = 0.5


@dataclass(frozen=True)
class FSDPConfig:
    dtype: DType = "bfloat16"  # of the passes; weights and reductions are float32
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    fsdp_size: limits.OffOrCount = -1


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: LossMode = "vanilla"


@dataclass(frozen=True)
class ActorConfig:
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"  # both mean PyTorch's FSDP2
    ppo_mini_batch_size: limits.Count = 256  # prompts an optimizer step
    ppo_micro_batch_size_per_gpu: limits.Count | None = None  # None: use_dynamic_bsz decides
    use_dynamic_bsz: bool | None = None  # None: where no micro-batch size is given
    ppo_max_token_len_per_gpu: limits.Count = 16384  # tokens in one pass, with use_dynamic_bsz
    ppo_epochs: limits.Count = 1
    shuffle: bool = False
    data_loader_seed: limits.Size = 42  # of shuffle
    clip_ratio: limits.ClipLow = 0.2
    clip_ratio_low: limits.ClipLow | None = None  # None: clip_ratio
    clip_ratio_high: limits.NonNegative | None = None  # None: clip_ratio
    clip_ratio_c: limits.AboveOne = 3.0  # dual clip
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: limits.Positive | None = None  # of seq-mean-token-sum-norm; None: data.max_response_length
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: limits.NonNegative = 0.001
    kl_loss_type: KLKind = "low_var_kl"
    grad_clip: limits.Positive = 1.0
    tau_pos: limits.Positive = 1.0  # sapo
    tau_neg: limits.Positive = 1.05  # sapo
    overlong_filtering: bool = False  # truncated answers carry no loss
    state_masking: bool = True  # tokens that tools wrote carry no loss; False is Search-R1's ablation
    ulysses_sequence_parallel_size: limits.Count = 1
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()


@dataclass(frozen=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: limits.Count | None = None  # None: the actor's
    log_prob_use_dynamic_bsz: bool | None = None  # None: the actor's
    log_prob_max_token_len_per_gpu: limits.Count | None = None  # None: the actor's
    ulysses_sequence_parallel_size: limits.Count | None = None  # None: the actor's
    fsdp_config: FSDPConfig = FSDPConfig()


@dataclass(frozen=True)
class ValKwargs:
    """Sampling of validation answers; greedy unless ``do_sample``."""

    n: limits.Count = 1  # answers a question
    do_sample: bool = False
    temperature: limits.NonNegative = 0.0
    top_p: limits.PositiveShare = 1.0
    top_k: limits.OffOrCount = -1


@dataclass(frozen=True)
class MultiTurnConfig:
    """The tool agent of core/rollout/tool_agent.py. Limits are those of an episode."""

    enable: bool = False
    max_assistant_turns: limits.Count | None = None  # None: until the response is full
    max_user_turns: limits.Count | None = None  # turns in which tools answer
    max_tool_calls: limits.Count | None = None
    max_parallel_calls: limits.Count = 1  # calls of one turn; those beyond are not made
    tool_config_path: str | None = None  # YAML, see core/rollout/tools.py
    tool_timeout_s: limits.Positive = 30.0  # of a call
    max_tool_response_length: limits.Count = 256  # characters
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"  # what is kept, as verl has it
    format: Literal["hermes"] = "hermes"
    repeatable: bool = False  # decoding waits for tools, so that a run repeats to the bit also with slow ones


@dataclass(frozen=True)
class RolloutConfig:
    name: EngineName | None = None  # None: vllm where it is installed, else hf
    nnodes: limits.Count | None = None  # of the engines' own pool (hybrid_engine=False); None: 1
    n_gpus_per_node: limits.Count | None = None  # of that pool; None: the trainer's
    n: limits.Count = 1  # trajectories a prompt
    do_sample: bool = True
    temperature: limits.NonNegative = 1.0
    top_p: limits.PositiveShare = 1.0
    top_k: limits.OffOrCount = -1
    ignore_eos: bool = False
    val_kwargs: ValKwargs = ValKwargs()
    dtype: DType = "bfloat16"
    tensor_model_parallel_size: limits.Count = 2
    gpu_memory_utilization: limits.PositiveShare = 0.5
    enforce_eager: bool = False
    free_cache_engine: bool = True
    max_num_batched_tokens: limits.Count = 8192
    max_num_seqs: limits.Count = 1024
    max_model_len: limits.Count | None = None  # None: max_prompt_length + max_response_length
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    engine_kwargs: Open = FrozenDict()
    agent_loop: AgentLoop | None = None  # None: multi_turn's where it is on, else a trajectory is one turn
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    log_prob_micro_batch_size_per_gpu: limits.Count | None = None  # None: the actor's
    log_prob_use_dynamic_bsz: bool | None = None  # None: the actor's
    log_prob_max_token_len_per_gpu: limits.Count | None = None  # None: the actor's


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    hybrid_engine: bool = True  # learner and engine alternate on one pool of GPUs; False: the engine has its own
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()


@dataclass(frozen=True)
class CriticModelConfig:
    path: str | None = None  # None: the policy's, and so below
    external_lib: str | None = None
    trust_remote_code: bool | None = None
    override_config: Open | None = None
    enable_gradient_checkpointing: bool = True
    use_remove_padding: bool = False
    lora_rank: limits.Size = 0
    lora_alpha: limits.Count = 16
    target_modules: limits.Names = ("all-linear",)
    exclude_modules: limits.Names | None = None
    fsdp_config: FSDPConfig = FSDPConfig()


@dataclass(frozen=True)
class CriticConfig:
    enable: bool | None = None  # None: where the estimator reads values
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"
    ppo_mini_batch_size: limits.Count | None = None  # None: the actor's, and so below
    ppo_micro_batch_size_per_gpu: limits.Count | None = None
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: limits.Count = 32768
    ppo_epochs: limits.Count | None = None
    shuffle: bool | None = None
    data_loader_seed: limits.Size = 42
    cliprange_value: limits.Positive = 0.5
    loss_agg_mode: LossAggMode | None = None
    loss_scale_factor: limits.Positive | None = None
    grad_clip: limits.Positive = 1.0
    ulysses_sequence_parallel_size: limits.Count = 1
    model: CriticModelConfig = CriticModelConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)


@dataclass(frozen=True)
class OverlongBufferConfig:
    enable: bool = False
    len: limits.Size = 0  # tokens before the limit in which the penalty grows
    penalty_factor: limits.NonNegative = 0.0
    log: bool = False


@dataclass(frozen=True)
class RewardModuleConfig:
    path: str | None = None  # a file or a module
    name: str | None = None


@dataclass(frozen=True)
class SandboxConfig:
    """Where programs that are answers run, if not on a Sandbox Fusion server."""

    allow_unisolated: bool = False  # run them also where nothing isolates them
    timeout_s: limits.Positive = 10.0  # of a test; with workers an answer's share reward_model.timeout_s
    memory_limit_mb: limits.Count = 1024  # MiB that a program may map


@dataclass(frozen=True)
class SandboxFusionConfig:
    url: str | None = None  # the whole address, with /run_code; None: programs run in a sandbox on this machine
    max_concurrent: limits.Count = 64  # requests at a time
    memory_limit_mb: limits.Count = 1024


@dataclass(frozen=True)
class RewardModelModelConfig:
    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"  # a sequence or token classifier with one label
    # The policy's, whose text is put into the reward model's chat template; None: it reads the policy's token ids
    input_tokenizer: str | None = "policy"
    external_lib: str | None = None  # None: the policy's
    trust_remote_code: bool = False
    fsdp_config: FSDPConfig = FSDPConfig()


@dataclass(frozen=True)
class RewardModelConfig:
    enable: bool = False  # a model scores the examples whose reward_model.style is "model"
    weight: float = 0.0  # what the model's number counts beside a rule's score, in the other examples
    model: RewardModelModelConfig = RewardModelModelConfig()
    max_length: limits.Count | None = None  # tokens that the model sees; None: the longest prompt and answer
    micro_batch_size_per_gpu: limits.Count | None = None  # answers a pass; None: use_dynamic_bsz decides
    use_dynamic_bsz: bool | None = None  # None: where no micro-batch size is given
    forward_max_token_len_per_gpu: limits.Count | None = None  # tokens a pass; None: the critic's
    source: Literal["register", "importlib"] = "register"  # importlib: the manager is module.name of module.path
    module: RewardModuleConfig = RewardModuleConfig()
    reward_manager: RewardManager = "naive"
    num_workers: limits.Count | None = None  # grading processes; None: one a core, at most 4
    timeout_s: limits.Positive = 10.0  # of an answer (batch: of a call) and of a program's tests together
    memory_limit_mb: limits.Count | None = 1024  # MiB that a worker may map; None: no limit
    num_examine: limits.Size = 0  # answers of each data source that a training step prints
    val_num_examine: limits.Size = 1  # the same for a validation
    reward_kwargs: Open = FrozenDict()  # scorer's name -> its options, as in {gsm8k: {method: flexible}}
    on_error: Literal["zero", "mask", "raise"] = "zero"  # what becomes of an answer whose scorer failed
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    path: str | None = None  # a file or a module; None: the table of reward_scores
    name: str = "compute_score"
    reward_kwargs: Open = FrozenDict()


@dataclass(frozen=True)
class KLCtrlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: limits.NonNegative = 0.001
    horizon: float = 10000  # sequences
    target_kl: float = 0.1


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = False
    metric: str | None = None  # a part of the score; None: acc
    max_num_gen_batches: limits.Size = 10  # drawn for one step, in units of gen_batch_size prompts
    on_exhausted: Literal["train", "raise"] = "train"


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Of samples that another policy drew: the engine in its own precision, an older one, a truncated one."""

    rollout_is: Literal["token", "sequence"] | None = None  # importance weights; None: none
    rollout_is_threshold: limits.WeightBounds = 2.0  # truncates; "lower_upper" drops what is outside
    rollout_is_batch_normalize: bool = False  # to a mean weight of one
    rollout_rs: limits.Rejection | None = None  # rejection, by one or several statistics; None: none
    rollout_rs_threshold: limits.NumberOrText | None = None
    rollout_rs_threshold_lower: limits.NonNegative | None = None  # of token, sequence, geometric; None: 1 / threshold
    rollout_token_veto_threshold: limits.PositiveShare | None = None  # one such ratio drops the sequence; None: off
    bypass_mode: bool = False  # the engine's log-probs are the old ones: no pass for them, and one ratio

    @property
    def uses_old_log_probs(self) -> bool:
        given = (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold)
        return not self.bypass_mode and any(value is not None for value in given)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: AdvEstimator = "gae"
    gamma: limits.Share = 1.0
    lam: limits.Share = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: KLKind = "kl"
    kl_ctrl: KLCtrlConfig = KLCtrlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


@dataclass(frozen=True)
class HealthBound:
    bound: limits.NonNegative | None = None  # None: off
    action: Literal["warn", "stop"] = "warn"  # stop saves a checkpoint first


@dataclass(frozen=True)
class HealthConfig:
    """What a step's metrics may be; see core.tracking.health for what each bound is compared with."""

    nonfinite: HealthBound = HealthBound(bound=3, action="stop")  # steps in a row that skipped an update
    entropy: HealthBound = HealthBound()  # least, nats a token
    reward_drop: HealthBound = HealthBound()  # of the mean score below its best
    reward_window: limits.Count = 10  # steps over which reward_drop averages
    logp_diff: HealthBound = HealthBound()  # mean |engine - learner|; None: by precision, off where corrected for
    zero_variance: HealthBound = HealthBound()  # share of groups of equal scores
    scorer_errors: HealthBound = HealthBound()  # share of answers with a timeout or a crash


@dataclass(frozen=True)
class TrainerConfig:
    backend: Literal["local", "ray"] = "local"
    device: Literal["cpu", "cuda"] | None = None  # None: cuda if there is one
    cpu_threads: limits.Count | None = None  # None: all cores
    seed: limits.Size = 1
    nnodes: limits.Count = 1
    n_gpus_per_node: limits.Count = 8
    total_epochs: limits.Count = 30
    total_training_steps: limits.Count | None = None  # None: the whole batches of total_epochs
    phase_timeout_s: limits.Positive = 3600  # of a remote phase, after which the run ends and reports what hangs
    heartbeat_timeout_s: limits.Positive = 300  # without a sign of life from a process at work, after which likewise
    max_restarts: limits.Size = 0  # from the last checkpoint, after a process died or hung
    critic_warmup: limits.Size = 0  # steps in which only the critic trains
    balance_batch: bool = True
    max_staleness: limits.Size = 0  # steps a sample may be old; 1: the next collection overlaps the update
    project_name: str | None = None  # None: rlrepro-<recipe>
    experiment_name: str | None = None  # None: <model>-seed<seed>
    default_local_dir: str | None = None  # None: outputs/<recipe>/<experiment_name>
    logger: tuple[Logger, ...] = ("console", "tensorboard")
    log_val_generations: limits.Size = 0
    rollout_data_dir: str | None = None  # None: no dump
    validation_data_dir: str | None = None  # None: no dump
    val_before_train: bool = True
    val_only: bool = False
    test_freq: limits.OffOrCount = -1
    save_freq: limits.OffOrCount = -1
    max_actor_ckpt_to_keep: limits.Count | None = None  # None: all
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    resume_from_path: str | None = None
    health: HealthConfig = HealthConfig()


@dataclass(frozen=True)
class NsysConfig:
    worker_nsight_options: Open = (
        FrozenDict(  # arguments of nsys profile; a null one is left to core.tracking.profiling
            {
                "trace": "cuda,nvtx,cublas,ucx",
                "cuda-memory-usage": "true",
                "cuda-graph-trace": "graph",
                "capture-range": "cudaProfilerApi",
                "capture-range-end": None,
                "kill": "none",
            }
        )
    )


@dataclass(frozen=True)
class GlobalToolConfig:
    nsys: NsysConfig = NsysConfig()


@dataclass(frozen=True)
class GlobalProfilerConfig:
    tool: Literal["torch", "nsys"] | None = None  # None: no profile
    steps: tuple[limits.Count, ...] | None = None  # that are profiled
    save_path: str | None = None  # of torch's traces; None: <run folder>/profile
    global_tool_config: GlobalToolConfig = GlobalToolConfig()


@dataclass(frozen=True)
class RayKwargsConfig:
    ray_init: Open = FrozenDict(num_cpus=None)  # arguments of ray.init
    timeline_json_file: str | None = None
    driver_actor: bool | None = None  # the loop in an actor, which outlives the shell; None: on a cluster


@dataclass(frozen=True)
class Config:
    """The whole configuration; ``config.actor_rollout_ref.rollout.n`` is verl's key of that name.

    A recipe may add keys of its own in a subclass: see :mod:`core.config.recipes`.
    """

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    ray_kwargs: RayKwargsConfig = RayKwargsConfig()
    global_profiler: GlobalProfilerConfig = GlobalProfilerConfig()

    @property
    def turns(self) -> int:
        """The policy's turns in the longest episode, for planning; a recipe with longer episodes overrides it."""
        return 1
