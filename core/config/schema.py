"""The configuration as frozen dataclasses: the one list of keys, their types and their defaults.

Keys and defaults are those of verl v0.6.1 in the subset that does something here, with the DAPO recipe's filter and
overlong keys; a default that differs is listed in :data:`core.config.yaml_tables.CHANGED_DEFAULTS`. A default of None
that stands for another key's value is filled in by :func:`core.config.derived_defaults.resolve`, so a resolved
configuration holds None only where a comment here gives its meaning.

Units: a *prompt* is an example of the data, a *trajectory* one answer to it (``rollout.n`` of them a prompt). Batch
sizes named ``..._per_gpu`` count trajectories in one pass of one rank, and are memory knobs: they cannot change the
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from core.config import limits, registry
from core.config.frozen import FrozenDict

AdvEstimator = Annotated[str, limits.names(*registry.ESTIMATORS)]
LossMode = Annotated[str, limits.names(*registry.POLICY_LOSSES)]
AgentLoop = Annotated[str, limits.names(*registry.AGENT_LOOPS)]
EngineName = Literal[*registry.ENGINES]
RewardManager = Annotated[str, limits.registered_names(*registry.REWARD_MANAGERS)]
LossAggMode = Literal[*registry.LOSS_AGG_MODES]
KLKind = Literal[*registry.KL_KINDS]
DType = Literal["bfloat16", "bf16", "float32", "fp32"]
FULL_PRECISION = ("float32", "fp32")
Logger = Annotated[str, limits.names(*registry.LOGGERS)]
Open = Mapping[str, Any]  # keys that are another library's, or the user's own


@dataclass(frozen=True)
class DataConfig:
    train_files: limits.NonEmpty = ("~/data/rlhf/gsm8k/train.parquet",)  # parquet files of training examples
    val_files: limits.NonEmpty = ("~/data/rlhf/gsm8k/test.parquet",)  # parquet files of validation questions
    dataset_weights: tuple[limits.Positive, ...] | None = None  # one a training file; None: by number of examples
    curriculum: tuple[Open, ...] | None = None  # stages {files, prompts, weights} in place of train_files
    prompt_key: str = "prompt"  # column that holds the prompt, a list of chat messages
    reward_fn_key: str = "data_source"  # column that names the data source, which chooses the scorer
    image_key: str = "images"  # column that holds the pictures of a prompt, one for each <image> in it
    max_prompt_length: limits.Count = 512  # tokens of the prompt; in a search episode, of prompt and episode
    max_response_length: limits.Count = 512  # tokens of the answer, tools' included; search episodes: of one turn
    max_start_length: limits.Count | None = None  # search episodes: tokens of the prompt; None: max_prompt_length
    max_obs_length: limits.Count = 500  # search episodes: tokens of what a search returns
    train_batch_size: limits.Count = 1024  # prompts a step
    gen_batch_size: limits.Count | None = None  # prompts in flight at most; None: train_batch_size
    train_max_samples: limits.OffOrCount = -1  # examples of all training files together; -1: all
    val_max_samples: limits.OffOrCount = -1  # examples of each validation file; -1: all
    shuffle: bool = True  # training examples in a random order, another one in each epoch
    seed: limits.Size | None = None  # decides the order of the training examples; None: trainer.seed
    validation_shuffle: bool = False  # validation questions in a random order
    filter_overlong_prompts: bool = False  # leave out examples whose prompt is longer than max_prompt_length
    # what is done to a prompt that is longer; left and right name the end that is cut off
    truncation: Literal["error", "left", "right", "middle"] = "error"
    apply_chat_template_kwargs: Open = FrozenDict()  # arguments of the tokenizer's apply_chat_template


@dataclass(frozen=True)
class ModelConfig:
    path: str = (  # model to start from: hub id (org/name), folder (/... ./... ~/...) or URL
        "~/models/deepseek-llm-7b-chat"  # model to start from: hub id (org/name), folder (/... ./... ~/...) or URL
    )
    tokenizer_path: str | None = None  # hub id or folder of the tokenizer; None: path
    custom_chat_template: str | None = None  # chat template, or the file that has it; None: the tokenizer's own
    external_lib: str | None = None  # modules to import before the model loads, separated by commas
    trust_remote_code: bool = False  # run Python code that comes with the model
    override_config: Open = FrozenDict()  # fields of the model's own configuration
    enable_gradient_checkpointing: bool = True  # recompute activations in the backward pass: less memory, more time
    use_remove_padding: bool = False  # pack the sequences of a pass without padding
    fp32_lm_head: bool = False  # logits in float32 where weights and passes are bfloat16, in learner and engine
    lora_rank: limits.Size = 0  # rank of the adapters that train in place of the weights; 0: all weights train
    lora_alpha: limits.Count = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    # layers with adapters: all-linear, ends of names, or one pattern of whole names
    target_modules: limits.Names = ("all-linear",)
    exclude_modules: limits.Names | None = None  # layers without adapters, written likewise; None: no layer is left out


@dataclass(frozen=True)
class OptimConfig:
    lr: limits.NonNegative = 1e-6  # learning rate after the warm-up
    weight_decay: limits.NonNegative = 0.01  # of AdamW
    betas: limits.Betas = (0.9, 0.999)  # of AdamW
    lr_warmup_steps: limits.OffOrSize = -1  # RL steps of warm-up; -1: lr_warmup_steps_ratio decides
    lr_warmup_steps_ratio: limits.Share = 0.0  # warm-up as a share of the run's RL steps
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"  # learning rate after the warm-up
    min_lr_ratio: limits.Share | None = 0.0  # where a cosine ends, as a share of lr; None: 0
    num_cycles: limits.Positive = 0.5  # waves of a cosine; 0.5 falls from lr to its end once


@dataclass(frozen=True)
class FSDPConfig:
    # number format of the passes, whose weights and reductions are float32; None: the policy's, which in one process
    # with the hf engine is the engine's or float32, so that both agree, and bfloat16 elsewhere
    dtype: DType | None = None
    param_offload: bool = False  # keep weights in host memory outside of the phases that need them
    optimizer_offload: bool = False  # keep the optimizer's state in host memory outside of updates
    # keep all of it in host memory always (FSDP2's CPU offload): weights come layer by layer, the CPU takes the steps
    offload_policy: bool = False
    reshard_after_forward: bool = True  # drop gathered weights after a layer's forward pass: less memory, more traffic
    forward_prefetch: bool = False  # gather the next layer's weights while a layer computes
    fsdp_size: limits.OffOrCount = -1  # ranks that share one copy of the state; -1: all


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: LossMode = "vanilla"  # policy loss
    clip_cov_ratio: limits.PositiveShare = 0.0002  # of clip_cov: share of an optimizer step's tokens that are dropped
    clip_cov_lb: float = 1.0  # of clip_cov: they are drawn from those whose covariance is above this
    clip_cov_ub: float = 5.0  # of clip_cov: and below this
    kl_cov_ratio: limits.PositiveShare = 0.0002  # of kl_cov: share of an optimizer step's tokens that are held back
    ppo_kl_coef: limits.NonNegative = 0.1  # of kl_cov: coefficient of the distance to the old policy on those tokens


class Sharing:
    """How the ranks of a learner share what they compute."""

    @property
    def together(self) -> int:
        """Return the ranks that get the same sequences: they share each sequence, or each layer, or both."""
        return self.ulysses_sequence_parallel_size * self.tensor_model_parallel_size


@dataclass(frozen=True)
class ActorConfig(Sharing):
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"  # both mean PyTorch's FSDP2
    ppo_mini_batch_size: limits.Count = 256  # prompts an optimizer step
    # trajectories in one pass of a rank; None: use_dynamic_bsz decides
    ppo_micro_batch_size_per_gpu: limits.Count | None = None
    # fill passes up to a number of tokens; None: where no micro-batch size is given
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: limits.Count = 16384  # tokens in one pass, with use_dynamic_bsz
    ppo_epochs: limits.Count = 1  # times that a step's trajectories are trained on
    shuffle: bool = False  # trajectories in a random order in each epoch of updates
    data_loader_seed: limits.Size = 42  # seed of shuffle
    clip_ratio: limits.ClipLow = 0.2  # distance from 1 at which the ratio of new to old probabilities is clipped
    clip_ratio_low: limits.ClipLow | None = None  # distance of the lower bound from 1; None: clip_ratio
    clip_ratio_high: limits.NonNegative | None = None  # distance of the upper bound from 1; None: clip_ratio
    clip_ratio_c: limits.AboveOne = 3.0  # bound of the ratio where the advantage is negative (dual clip)
    loss_agg_mode: LossAggMode = "token-mean"  # how the losses of tokens become one number
    # divisor of seq-mean-token-sum-norm; None: data.max_response_length
    loss_scale_factor: limits.Positive | None = None
    entropy_coeff: float = 0.0  # coefficient of the entropy, which the loss rewards
    use_kl_loss: bool = False  # add the KL to the reference policy to the loss
    kl_loss_coef: limits.NonNegative = 0.001  # coefficient of the KL in the loss
    kl_loss_type: KLKind = "low_var_kl"  # estimator of the KL in the loss
    grad_clip: limits.Positive = 1.0  # largest norm of the gradient of an update
    tau_pos: limits.Positive = 1.0  # of sapo: temperature where the advantage is positive
    tau_neg: limits.Positive = 1.05  # of sapo: temperature where the advantage is negative
    overlong_filtering: bool = False  # truncated answers carry no loss
    state_masking: bool = True  # tokens that tools wrote carry no loss; False is Search-R1's ablation
    ulysses_sequence_parallel_size: limits.Count = 1  # ranks that share each sequence; use_remove_padding is needed
    tensor_model_parallel_size: limits.Count = 1  # ranks that share each layer's matrices; FSDP2 shards over the others
    freeze_vision_tower: bool = False  # the part of the model that reads pictures does not train
    use_torch_compile: bool = False  # compile the MLPs and norms of the policy and its reference
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()


@dataclass(frozen=True)
class RefConfig(Sharing):
    # trajectories in one log-prob pass of a rank; None: the actor's
    log_prob_micro_batch_size_per_gpu: limits.Count | None = None
    log_prob_use_dynamic_bsz: bool | None = None  # fill log-prob passes up to a number of tokens; None: the actor's
    log_prob_max_token_len_per_gpu: limits.Count | None = None  # tokens in one log-prob pass; None: the actor's
    ulysses_sequence_parallel_size: limits.Count | None = None  # ranks that share each sequence; None: the actor's
    tensor_model_parallel_size: limits.Count | None = None  # ranks that share each layer; None: the actor's
    fsdp_config: FSDPConfig = FSDPConfig()


@dataclass(frozen=True)
class ValKwargs:
    """Sampling of validation answers; greedy unless ``do_sample``."""

    n: limits.Count = 1  # answers a question
    do_sample: bool = False  # sample validation answers; False: greedy
    temperature: limits.NonNegative = 0.0  # of validation answers
    # of validation answers: the likeliest tokens of this probability together are sampled from
    top_p: limits.PositiveShare = 1.0
    top_k: limits.OffOrCount = -1  # of validation answers: the likeliest so many tokens are sampled from; -1: all


@dataclass(frozen=True)
class MultiTurnConfig:
    """The tool agent of core/rollout/tool_agent.py. Limits are those of an episode."""

    enable: bool = False  # trajectories are episodes in which the policy calls tools
    max_assistant_turns: limits.Count | None = (  # turns of the policy; None: until the response is full
        None  # turns of the policy in an episode; None: until the response is full
    )
    max_user_turns: limits.Count | None = None  # turns in which tools or a user answer; None: no limit of its own
    max_tool_calls: limits.Count | None = None  # tool calls of an episode; None: no limit of its own
    max_parallel_calls: limits.Count = 1  # calls of one turn; those beyond are not made
    tool_config_path: str | None = None  # YAML file with the tools, see core/rollout/tools.py
    interaction_config_path: str | None = None  # YAML file with simulated users, see core/rollout/interactions.py
    tool_timeout_s: limits.Positive = 30.0  # seconds a tool call or a user's turn may take; a tool may have its own
    max_tool_response_length: limits.Count = 256  # characters of a tool's answer that are kept
    # the part of a tool's answer that is kept, as verl has it
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    format: Literal[*registry.CALL_FORMATS] = "hermes"  # how a tool call is written
    repeatable: bool = False  # decoding waits for tools, so that a run repeats to the bit also with slow ones


@dataclass(frozen=True)
class RolloutConfig:
    name: EngineName | None = None  # engine that generates; None: vllm where it is installed, else hf
    nnodes: limits.Count | None = None  # nodes of the engines' own pool (hybrid_engine=False); None: 1
    n_gpus_per_node: limits.Count | None = None  # GPUs a node of that pool; None: the trainer's
    n: limits.Count = 1  # trajectories a prompt
    do_sample: bool = True  # sample answers; training needs it
    temperature: limits.NonNegative = 1.0  # of training's answers
    top_p: limits.PositiveShare = 1.0  # the likeliest tokens of this probability together are sampled from
    top_k: limits.OffOrCount = -1  # the likeliest so many tokens are sampled from; -1: all
    ignore_eos: bool = False  # go on to max_response_length beyond the end of an answer, for measuring speed
    val_kwargs: ValKwargs = ValKwargs()
    # number format of the engine; None: the learner's or float32 in one process with the hf engine, else bfloat16
    dtype: DType | None = None
    tensor_model_parallel_size: limits.Count = 2  # GPUs that share each layer of one engine
    gpu_memory_utilization: limits.PositiveShare = 0.5  # share of a GPU's memory for the engine: weights and KV cache
    enforce_eager: bool = False  # run without CUDA graphs
    free_cache_engine: bool = True  # give the engine's memory back while the learner works
    max_num_batched_tokens: limits.Count = 8192  # tokens in one iteration of the engine
    max_num_seqs: limits.Count = 1024  # sequences that an engine decodes at once
    update_weights_bucket_megabytes: limits.Count = 2048  # weights that travel together from learner to engine
    max_model_len: limits.Count | None = None  # tokens of a sequence; None: max_prompt_length + max_response_length
    enable_chunked_prefill: bool = True  # split a long prompt over several iterations
    enable_prefix_caching: bool = True  # compute a prefix that sequences share once
    engine_kwargs: Open = FrozenDict()  # further arguments of the engine: engine_kwargs.vllm.*, engine_kwargs.hf.*
    agent_loop: AgentLoop | None = (
        None  # what plays episodes; None: the tool agent with multi_turn.enable, else one turn
    )
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    # of old log-probs: trajectories in one pass; None: the actor's
    log_prob_micro_batch_size_per_gpu: limits.Count | None = None
    # of old log-probs: fill passes up to a number of tokens; None: the actor's
    log_prob_use_dynamic_bsz: bool | None = None
    # of old log-probs: tokens in one pass; None: the actor's
    log_prob_max_token_len_per_gpu: limits.Count | None = None

    @property
    def loop(self) -> str | None:
        """The agent loop's name or path; None where neither key sets one, and each trajectory is one turn."""
        return self.agent_loop or (registry.TOOL_AGENT if self.multi_turn.enable else None)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    hybrid_engine: bool = True  # learner and engine alternate on the same GPUs; False: the engine has its own
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()


@dataclass(frozen=True)
class CriticModelConfig:
    path: str | None = None  # org/name on the hub or a folder; None: the policy's
    external_lib: str | None = None  # modules to import before the model loads; None: the policy's
    trust_remote_code: bool | None = None  # run Python code that comes with the model; None: the policy's choice
    override_config: Open | None = None  # fields of the model's own configuration; None: the policy's
    enable_gradient_checkpointing: bool = True  # recompute activations: less memory, more time
    use_remove_padding: bool = False  # pack the sequences of a pass without padding
    lora_rank: limits.Size = 0  # rank of the adapters; 0: all weights train
    lora_alpha: limits.Count = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    target_modules: limits.Names = ("all-linear",)  # layers with adapters, as of the policy
    exclude_modules: limits.Names | None = None  # layers without adapters; None: no layer is left out
    fsdp_config: FSDPConfig = FSDPConfig()


@dataclass(frozen=True)
class CriticConfig(Sharing):
    enable: bool | None = None  # train a critic; None: where the estimator reads values
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"  # both mean PyTorch's FSDP2
    ppo_mini_batch_size: limits.Count | None = None  # prompts an update; None: the actor's
    ppo_micro_batch_size_per_gpu: limits.Count | None = None  # trajectories in one pass; None: use_dynamic_bsz decides
    # fill passes up to a number of tokens; None: where no micro-batch size is given
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: limits.Count = 32768  # tokens in one pass, with use_dynamic_bsz
    ppo_epochs: limits.Count | None = None  # times that a step's trajectories are trained on; None: the actor's
    shuffle: bool | None = None  # trajectories in a random order; None: the actor's choice
    data_loader_seed: limits.Size = 42  # seed of shuffle
    cliprange_value: limits.Positive = 0.5  # how far a value may move from the old one before its loss is clipped
    loss_agg_mode: LossAggMode | None = None  # how the losses of tokens become one number; None: the actor's
    loss_scale_factor: limits.Positive | None = None  # divisor of seq-mean-token-sum-norm; None: the actor's
    grad_clip: limits.Positive = 1.0  # largest norm of the gradient of an update
    ulysses_sequence_parallel_size: limits.Count = 1  # ranks that share each sequence
    tensor_model_parallel_size: limits.Count = 1  # ranks that share each layer's matrices
    use_torch_compile: bool = False  # compile its MLPs and norms
    model: CriticModelConfig = CriticModelConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)


@dataclass(frozen=True)
class OverlongBufferConfig:
    enable: bool = False  # take a penalty off the reward of answers near data.max_response_length
    len: limits.Size = 0  # tokens before the limit in which the penalty grows
    penalty_factor: limits.NonNegative = 0.0  # the penalty at the limit
    log: bool = False  # record the penalty as a metric


@dataclass(frozen=True)
class RewardModuleConfig:
    path: str | None = None  # file or module of a reward manager of your own (source=importlib)
    name: str | None = None  # class of that manager


@dataclass(frozen=True)
class SandboxConfig:
    """Where programs that are answers run, if not on a Sandbox Fusion server."""

    allow_unisolated: bool = False  # run programs also where nothing isolates them
    timeout_s: limits.Positive = 10.0  # seconds for a test; in graders, an answer's share of reward_model.timeout_s
    memory_limit_mb: limits.Count = 1024  # MiB that a program may map


@dataclass(frozen=True)
class SandboxFusionConfig:
    url: str | None = None  # address of a server, with /run_code; None: programs run in a sandbox on this machine
    max_concurrent: limits.Count = 64  # requests at a time
    memory_limit_mb: limits.Count = 1024  # MiB that a program may use there
    give_up_s: limits.Positive = 120.0  # seconds for which a server that is away is tried again, also in graders
    api_key_env: str | None = None  # environment variable that holds the server's key, if it needs one


@dataclass(frozen=True)
class RewardModelModelConfig:
    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"  # a sequence or token classifier with one label
    # The policy's, whose text is put into the reward model's chat template; None: it reads the policy's token ids
    input_tokenizer: str | None = "policy"
    external_lib: str | None = None  # modules to import before the model loads; None: the policy's
    trust_remote_code: bool = False  # run Python code that comes with the model
    fsdp_config: FSDPConfig = FSDPConfig(dtype="bfloat16")


@dataclass(frozen=True)
class JudgeConfig:
    """A generative model behind a URL, which grades answers in place of a classifier."""

    url: str | None = None  # OpenAI-compatible server, as http://localhost:8000/v1; None: reward_model.model scores
    model: str | None = None  # name of the model there
    api_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the server's key, if it needs one
    # file of what the judge reads, with {question}, {response}, {reference}; None: core/rewards/judge_template.txt
    template: str | None = None
    # regular expression whose one group is the number; None: [[number]], or json_schema
    pattern: str | None = None
    json_schema: str | None = None  # file of a reply's JSON schema, whose property score is the number; None: pattern
    lowest: float = 0.0  # least number that is a verdict
    highest: float = 1.0  # largest number that is a verdict
    votes: limits.Count = 1  # replies an answer, each with a seed of its own
    combine: Literal["mean", "median"] = "mean"  # what becomes of several numbers
    temperature: limits.NonNegative = 0.0  # of the judge's sampling
    seed: limits.Size = 0  # of the judge's sampling; a vote adds its number
    max_tokens: limits.Count = 1024  # tokens of a reply; one that is cut off is no verdict
    extra: Open = FrozenDict()  # further fields of a request; null takes one of the usual fields out
    max_concurrent: limits.Count = 32  # requests at a time
    timeout_s: limits.Positive = 120.0  # seconds for a try of a request
    give_up_s: limits.Positive = 600.0  # seconds in which a request that failed is tried again, with growing pauses
    max_failures: limits.Count = 100  # answers in a row without a verdict, after which the run ends
    cache_dir: str | None = None  # folder of kept replies; None: judge in the run folder
    # file of answers of known grade, as JSON lines; None: core/rewards/judge_canaries.jsonl
    canaries: str | None = None
    canary_every: limits.Size = 32  # a canary is graded beside one answer of so many; 0: none is
    prompt_price: limits.NonNegative = 0.0  # price of a million tokens that the judge reads, in any currency
    completion_price: limits.NonNegative = 0.0  # price of a million tokens that it writes


@dataclass(frozen=True)
class RewardModelConfig:
    enable: bool = False  # a model scores the examples whose reward_model.style is "model"
    weight: float = 0.0  # what the model's number counts beside a rule's score, in the other examples
    model: RewardModelModelConfig = RewardModelModelConfig()
    enable_resource_pool: bool = False  # over Ray, nodes whose ranks share the model; False: one process has it
    nnodes: limits.Size = 0  # nodes of that pool
    n_gpus_per_node: limits.Size = 0  # ranks on each of them, a GPU each
    judge: JudgeConfig = JudgeConfig()
    max_length: limits.Count | None = None  # tokens that the model sees; None: the longest prompt and answer
    micro_batch_size_per_gpu: limits.Count | None = None  # answers a pass; None: use_dynamic_bsz decides
    # fill passes up to a number of tokens; None: where no micro-batch size is given
    use_dynamic_bsz: bool | None = None
    forward_max_token_len_per_gpu: limits.Count | None = None  # tokens a pass; None: the critic's
    # the managers here and those that module.path registers, or your own as module.name of module.path (importlib)
    source: Literal["register", "importlib"] = "register"
    module: RewardModuleConfig = RewardModuleConfig()
    # who grades: this process (naive), graders (prime, dapo), a function of lists (batch), or a class of module.path
    reward_manager: RewardManager = "naive"
    num_workers: limits.Count | None = None  # grading processes; None: one a core, at most 4
    timeout_s: limits.Positive = 10.0  # seconds for an answer (batch: a step's call) and for a program's tests together
    memory_limit_mb: limits.Count | None = 1024  # MiB that a grader may map; None: no limit
    num_examine: limits.Size = 0  # answers of each data source that a training step prints
    val_num_examine: limits.Size = 1  # answers of each data source that a validation prints
    reward_kwargs: Open = FrozenDict()  # scorer's name -> its options, as in {gsm8k: {method: flexible}}
    # what a function of yours gets as solution_str: what the policy wrote, or the whole response with what tools wrote
    solution_str: Literal["policy", "response"] = "policy"
    on_error: Literal["zero", "mask", "raise"] = "zero"  # what becomes of an answer whose scorer failed
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()

    @property
    def judged(self) -> bool:
        """Whether the model is a judge behind a URL."""
        return self.enable and self.judge.url is not None

    @property
    def loads_model(self) -> bool:
        """Whether the model is a classifier, which this run loads."""
        return self.enable and self.judge.url is None

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return self.nnodes * self.n_gpus_per_node if self.enable_resource_pool else 1


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    path: str | None = None  # file or module of your own scorer; None: the table of reward_scores
    name: str = "compute_score"  # the function in that file
    reward_kwargs: Open = FrozenDict()  # arguments of that function


@dataclass(frozen=True)
class KLCtrlConfig:
    # a coefficient that stays, or one that moves so that the KL comes near target_kl
    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: limits.NonNegative = 0.001  # coefficient of the KL in the reward
    horizon: float = 10000  # sequences over which the adaptive coefficient moves
    target_kl: float = 0.1  # the KL that the adaptive coefficient aims at


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = False  # draw more prompts in place of those whose answers all score the same
    metric: str | None = None  # part of the score that has to differ; None: acc
    max_num_gen_batches: limits.Size = 10  # most prompts drawn for one step, in units of gen_batch_size
    on_exhausted: Literal["train", "raise"] = "train"  # at that limit: train on the groups there are, or end the run


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Of samples that another policy drew: the engine in its own precision, an older one, a truncated one."""

    rollout_is: Literal["token", "sequence"] | None = None  # importance weights; None: none
    rollout_is_threshold: limits.WeightBounds = (
        2.0  # upper bound of a weight; "lower_upper" drops what is outside of the two
    )
    rollout_is_batch_normalize: bool = False  # scale the weights to a mean of one
    rollout_rs: limits.Rejection | None = None  # rejection, by one or several statistics; None: none
    rollout_rs_threshold: limits.NumberOrText | None = None  # upper bounds of rejection, one or one a statistic
    rollout_rs_threshold_lower: limits.NonNegative | None = (
        None  # lower bounds of token, sequence, geometric; None: 1 / threshold
    )
    rollout_token_veto_threshold: limits.PositiveShare | None = None  # one such ratio drops the sequence; None: off
    bypass_mode: bool = False  # the engine's log-probs are the old ones: no pass for them, and one ratio

    @property
    def uses_old_log_probs(self) -> bool:
        given = (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold)
        return not self.bypass_mode and any(value is not None for value in given)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: AdvEstimator = "gae"  # advantage estimator
    gamma: limits.Share = 1.0  # discount a token
    lam: limits.Share = 1.0  # lambda of generalised advantage estimation
    norm_adv_by_std_in_grpo: bool = True  # divide by the group's standard deviation; False is Dr. GRPO
    use_kl_in_reward: bool = False  # take the KL to the reference policy off the reward
    kl_penalty: KLKind = "kl"  # estimator of the KL in the reward
    kl_ctrl: KLCtrlConfig = KLCtrlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


@dataclass(frozen=True)
class HealthBound:
    bound: limits.NonNegative | None = None  # the bound that such a number may not cross; None: off
    action: Literal["warn", "stop"] = "warn"  # what a crossed bound does; stop saves a checkpoint first


@dataclass(frozen=True)
class HealthConfig:
    """What a step's metrics may be; see core.tracking.health for what each bound is compared with."""

    nonfinite: HealthBound = HealthBound(bound=3, action="stop")  # steps in a row that skipped an update
    entropy: HealthBound = HealthBound()  # least mean entropy, nats a token
    reward_drop: HealthBound = HealthBound()  # drop of the mean score below its best
    reward_window: limits.Count = 10  # steps over which reward_drop and scorer_errors average
    # mean |engine - learner| of log-probs; None: 1e-4 in float32, else by what rounding costs on the model, which is
    # measured at start; off where the difference is corrected
    logp_diff: HealthBound = HealthBound()
    surprise: HealthBound = HealthBound(bound=6)  # standard errors between entropy and -log p of sampled tokens
    zero_variance: HealthBound = HealthBound()  # share of groups of equal scores
    scorer_errors: HealthBound = HealthBound(bound=0.1)  # share of answers without a score, over reward_window
    judge_agreement: HealthBound = HealthBound(bound=0.75, action="stop")  # least share of canaries graded as known


@dataclass(frozen=True)
class TraceConfig:
    """What is recorded of every token of some steps, for ``python -m results.trace``."""

    freq: limits.OffOrCount = -1  # record every so many steps, the first and the last one too; -1: steps alone
    steps: tuple[limits.Count, ...] | None = None  # record these steps as well
    # groups of a recorded step, questions that recur where possible; the worst, the strangest and the first dropped one
    # are recorded beside them
    groups: limits.Count = 2
    max_mb: limits.Positive = 256  # disk of a run's records; older ones make room, the first one stays


@dataclass(frozen=True)
class TrainerConfig:
    # one process, or learner ranks and engines on the GPUs of one or more nodes (ray)
    backend: Literal["local", "ray"] = "local"
    device: Literal["cpu", "cuda"] | None = None  # where models compute; None: cuda if there is one
    cpu_threads: limits.Count | None = None  # threads of torch on a CPU; None: all cores
    seed: limits.Size = 1  # decides which examples are drawn, how answers are sampled, and new weights
    nnodes: limits.Count = 1  # machines
    n_gpus_per_node: limits.Count = 8  # GPUs a machine; on CPUs, learner ranks
    total_epochs: limits.Count = 30  # passes over the training examples
    total_training_steps: limits.Count | None = None  # RL steps; None: the whole batches of total_epochs
    # seconds of a remote phase, after which the run ends and reports what hangs
    phase_timeout_s: limits.Positive = 3600
    heartbeat_timeout_s: limits.Positive = 300  # seconds without a sign of life from a process, after which likewise
    max_restarts: limits.Size = 0  # times a run starts again from its checkpoint after a process died or hung
    critic_warmup: limits.Size = 0  # steps in which only the critic trains
    balance_batch: bool = True  # give ranks about equal numbers of tokens
    max_staleness: limits.Size = 0  # steps a sample may be old; 1: the next collection overlaps the update
    project_name: limits.Name | None = None  # project at a logger's service; None: rlrepro-<recipe>
    experiment_name: limits.Name | None = None  # name of the run; None: <model>-seed<seed>, see core/config/README.md
    reference: str | None = None  # id of the row of results/references.yaml that the run is to reproduce; None: none
    default_local_dir: str | None = None  # run folder, or a URL; None: outputs/<recipe>/<experiment_name>
    # where metrics go besides metrics.jsonl in the run folder; one that fails three times in a row is switched off
    logger: tuple[Logger, ...] = ("console", "tensorboard")
    log_val_generations: limits.Size = 0  # answers of a validation that go to the loggers
    rollout_data_dir: str | None = None  # folder or URL for every training answer; None: no dump
    validation_data_dir: str | None = None  # folder or URL for every validation answer; None: no dump
    val_before_train: bool = True  # validate the starting model too
    val_only: bool = False  # validate the model and end
    test_freq: limits.OffOrCount = -1  # validate every so many steps and after the last; -1: never
    save_freq: limits.OffOrCount = -1  # write a checkpoint every so many steps and after the last; -1: never
    max_actor_ckpt_to_keep: limits.Count | None = None  # checkpoints that are kept, the newest ones; None: all
    # where a run starts: its newest checkpoint (auto), step 0 (disable), resume_from_path
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    # checkpoint to resume from (a folder or URL global_step_N), with resume_mode=resume_path
    resume_from_path: str | None = None
    resume_with_changes: bool = False  # resume also with another base, other data or another objective; recorded
    trace: TraceConfig = TraceConfig()
    # steps of which all is kept that python -m core.replay needs to compute them again; null: none
    capsule_steps: tuple[limits.Count, ...] | None = None
    capsule_max_mb: limits.Positive = 256  # disk of a run's capsules; weights beyond it stay in checkpoints
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
    tool: Literal["torch", "nsys"] | None = None  # profiler; None: no profile
    steps: tuple[limits.Count, ...] | None = None  # steps that are profiled
    save_path: str | None = None  # folder of torch's traces; None: <run folder>/profile
    global_tool_config: GlobalToolConfig = GlobalToolConfig()


@dataclass(frozen=True)
class RayKwargsConfig:
    ray_init: Open = FrozenDict(num_cpus=None)  # arguments of ray.init
    timeline_json_file: str | None = None  # file for Ray's timeline of the run; None: none
    driver_actor: bool | None = None  # run the loop in an actor, which outlives the shell; None: on a cluster


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

    @property
    def generates(self) -> bool:
        """Whether a step collects answers, for planning; a recipe that trains on what stands in files overrides it."""
        return True

    @property
    def needs_engine(self) -> bool:
        """Whether anything in the run is answered by an engine, in a step or in a validation."""
        return True

    @property
    def search_flops(self) -> float:
        """The FLOP on CPUs that answer one turn, for planning; a recipe whose turns search overrides it."""
        return 0.0

    @property
    def learner_ranks(self) -> int:
        """The processes that hold the learner: one a GPU over Ray, one in all where the trainer's own process does."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node if self.trainer.backend == "ray" else 1
