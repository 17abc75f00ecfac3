"""The keys of a run: every section, put together in :class:`Config`.

Those of data, actor, critic, reference and objective stand in :mod:`core.config.training_keys`.

Keys and defaults are those of verl v0.6.1 in the subset that does something here; a default that
differs is listed in ``core/config/README.md``. A default of None that stands for another key's
value is filled in by :func:`core.config.defaults.resolve`, so a resolved configuration holds None
only where a description gives its meaning.

Units: a *prompt* is an example of the data, a *trajectory* one answer to it (``rollout.n`` of them
a prompt). Batch sizes named ``..._per_gpu`` count trajectories in one pass of one rank, and are
memory settings: they cannot change the result. Rules between keys are in ``rules.py``.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

from core.config import registry
from core.config.section import (
    FULL_PRECISION,
    AllowSingle,
    Condition,
    Count,
    DType,
    Name,
    NonNegative,
    OffOrCount,
    Open,
    Positive,
    PositiveShare,
    SaveFrequency,
    Section,
    Size,
    bookkeeping,
    execution,
    files,
    key,
    name_or_code_path,
    needs,
)
from core.config.training_keys import (
    ANSWERS,
    OVER_RAY,
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    RefConfig,
)

VALUES = "critic.ppo_max_token_len_per_gpu"
FIRST_PHASE_S = 3600  # seconds of a remote phase of which no earlier time is known
AgentLoop = Annotated[str, name_or_code_path(*registry.AGENT_LOOPS)]
AgentFunction = Annotated[str, name_or_code_path()]
EngineName = Literal[*registry.ENGINES]
Loggers = Annotated[tuple[Annotated[str, name_or_code_path(*registry.LOGGERS)], ...], AllowSingle]
Steps = Annotated[tuple[Count, ...], AllowSingle]
ResumeMode = Literal["auto", "disable", "resume_path"]
RewardManager = Literal[*registry.REWARD_MANAGERS]

# When keys have an effect
OWN_POOL = needs("actor_rollout_ref.hybrid_engine", False)
SHARED_POOL = needs("actor_rollout_ref.hybrid_engine")
IN_PROCESS = Condition(
    lambda c, section: c.in_one_process,
    "needs actor_rollout_ref.rollout.name=hf and trainer.backend=local",
)
REFERENCE = Condition(
    lambda c, section: c.needs_ref,
    "needs algorithm.use_kl_in_reward or actor_rollout_ref.actor.use_kl_loss",
)
CRITIC = needs("critic.enable")
QUESTIONS = needs("data.val_files")
EPISODES = needs("actor_rollout_ref.rollout.agent_loop")
BY_EPOCHS = Condition(
    lambda c, section: section.total_training_steps is None, "total_training_steps is set"
)
TRACES = Condition(
    lambda c, section: section.freq != -1 or section.steps, "needs {section}.freq or steps"
)
NOT_ALONE = Condition(
    lambda c, section: c.needs_engine and not section.val_only, "val_only=True validates it"
)
SAVES = Condition(lambda c, section: section.save_freq != 0, "save_freq=0 saves no checkpoint")
FROM_PATH = needs("resume_mode", "resume_path")
GRADERS = Condition(
    lambda c, section: section.reward_manager != "naive",
    "needs another reward_model.reward_manager",
)
CLASSIFIER = Condition(
    lambda c, section: c.reward_model.loads_model, "needs reward_model.enable, and no judge.url"
)
JUDGE = Condition(
    lambda c, section: c.reward_model.judged, "needs reward_model.enable and reward_model.judge.url"
)


class MultiTurnConfig(Section):
    """Limits are those of an episode, which core/rollout/tool_agent.py plays."""

    enable: bool = key(False, "trajectories are episodes in which the policy calls tools")
    max_assistant_turns: Count | None = key(None, "policy's turns; null: until the answer is full")
    max_tool_calls: Count | None = key(None, "tool calls of an episode; null: no limit of its own")
    max_parallel_calls: Count = key(1, "calls of one turn; those beyond are not made")
    tool_config_path: str | None = files(None, "YAML file with tools, see core/rollout/tools.py")
    interaction_config_path: str | None = files(None, "YAML file with simulated users")
    tool_timeout_s: Positive = execution(30.0, "seconds of a tool call or a user's turn")
    max_tool_response_length: Count = key(256, "characters of a tool's answer that are kept")
    tool_response_truncate_side: Literal["left", "middle", "right"] = key("middle", "kept part")
    format: Literal["hermes"] = key("hermes", "how a tool call is written")
    deterministic_tools: bool = execution(False, "wait for tools, to repeat to the bit", IN_PROCESS)


class AgentConfig(Section):
    """An agent of yours that plays episodes, with the policy behind an OpenAI endpoint."""

    path: AgentFunction | None = key(None, "async function run(prompt, client) -> reward or None")
    command: str | None = key(
        None, "program instead: example on its input, reward in its last line, OPENAI_BASE_URL set"
    )
    host: str = execution("127.0.0.1", "address of this machine that the endpoint listens on")

    @property
    def plays(self) -> bool:
        """Return whether there is an agent."""
        return bool(self.path or self.command)


class ValKwargs(Section):
    """Sampling of validation answers; greedy unless ``do_sample``."""

    n: Count = key(1, "answers a question")
    do_sample: bool = key(False, "sample validation answers; False: greedy")
    temperature: NonNegative = key(0.0, "validation's sampling temperature", needs("do_sample"))
    top_p: PositiveShare = key(1.0, "validation's top-p; 1 disables", needs("do_sample"))
    top_k: OffOrCount = key(-1, "validation's top-k; -1 disables", needs("do_sample"))


class RolloutConfig(Section):
    name: EngineName | None = execution(None, "engine; null: vllm where it and a GPU are, else hf")
    nnodes: Count = execution(1, "nodes of engines' own pool", OWN_POOL)
    n_gpus_per_node: Count | None = execution(used_if=OWN_POOL, follows="trainer.n_gpus_per_node")
    n: Count = key(1, "trajectories a prompt")
    do_sample: bool = key(True, "sample answers; training needs it")
    temperature: NonNegative = key(1.0, "sampling temperature for training")
    top_p: PositiveShare = key(1.0, "top-p (nucleus) for training; 1 disables")
    top_k: OffOrCount = key(-1, "top-k for training; -1 disables")
    kept_sets: bool | None = key(
        None,
        "log-probs are over the ids that top-p and top-k kept; null: if the engine returns them",
        Condition(lambda c, section: section.truncates, "needs {section}.top_p or top_k"),
    )
    ignore_eos: bool = key(False, "go on to max_response_length at an answer's end: to measure")
    val_kwargs: ValKwargs = key(ValKwargs())
    dtype: DType | None = key(
        None, "number format; null: float32 or the learner's in one process, else bfloat16"
    )
    tensor_model_parallel_size: Count = execution(2, "GPUs that share an engine's layers", OVER_RAY)
    gpu_memory_utilization: PositiveShare = execution(0.5, "GPU memory for weights and KV cache")
    enforce_eager: bool = execution(False, "run without CUDA graphs")
    free_cache_engine: bool = execution(True, "give memory back for updates", SHARED_POOL)
    max_num_batched_tokens: Count = execution(8192, "tokens in one iteration of the engine")
    max_num_seqs: Count = execution(1024, "sequences that an engine decodes at once")
    update_weights_bucket_megabytes: Count = execution(2048, "MiB of weights on the way", OVER_RAY)
    enable_chunked_prefill: bool = execution(True, "split a long prompt over several iterations")
    enable_prefix_caching: bool = execution(True, "compute a prefix that sequences share once")
    engine_kwargs: Open = execution({}, "an engine's arguments: engine_kwargs.vllm.*, .hf.*")
    agent_loop: AgentLoop | None = key(
        None, "plays episodes; null: agent's, tool agent with multi_turn.enable, else one turn"
    )
    agent: AgentConfig = AgentConfig()
    multi_turn: MultiTurnConfig = key(MultiTurnConfig(), used_if=EPISODES)

    @property
    def truncates(self) -> bool:
        """Return whether training samples from a part of the distribution."""
        return self.do_sample and (self.top_p < 1 or self.top_k > 0)


class ActorRolloutRefConfig(Section):
    hybrid_engine: bool = execution(True, "learner and engine share GPUs; False: own", ANSWERS)
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = key(RefConfig(), used_if=REFERENCE)
    rollout: RolloutConfig = key(RolloutConfig(), used_if=ANSWERS)


# --- who grades ---


class JudgeConfig(Section):
    """A generative model behind a URL, which grades answers in place of a classifier."""

    url: str | None = execution(
        None, "OpenAI-compatible server, http://host:8000/v1; null: reward_model.model scores"
    )
    model: str | None = key(None, "name of the model there")
    api_key_env: str = bookkeeping("OPENAI_API_KEY", "environment variable of the server's key")
    template: str | None = files(None, "file with {question}, {response}, {reference}; null: ours")
    max_tokens: Count = key(1024, "tokens of a reply; one that is cut off has no number")
    max_concurrent: Count = execution(32, "requests at a time")
    timeout_s: Positive = execution(120.0, "seconds for a try of a request")
    cache_dir: str | None = execution(None, "folder of kept replies; null: judge in the run folder")


class ScoringFSDPConfig(Section):
    dtype: DType = key("bfloat16", "number format of the reward model, which one GPU holds")


class RewardModelModelConfig(Section):
    path: str = key("~/models/FsfairX-LLaMA3-RM-v0.1", "sequence or token classifier, one label")
    input_tokenizer: str | None = key("policy", "the policy's; null: it reads the policy's ids")
    trust_remote_code: bool = execution(False, "run Python code that comes with the model")
    fsdp_config: ScoringFSDPConfig = ScoringFSDPConfig()


class SandboxConfig(Section):
    """Where programs that are answers run, if not on a Sandbox Fusion server."""

    allow_unisolated: bool = execution(False, "run programs also where nothing isolates them")
    timeout_s: Positive = execution(10.0, "seconds for a test of a program")
    memory_limit_mb: Count = key(1024, "MiB that a program may map")


class SandboxFusionConfig(Section):
    url: str | None = execution(None, "server, with /run_code; null: a sandbox on this machine")
    max_concurrent: Count = execution(64, "requests at a time", needs("url"))
    memory_limit_mb: Count = key(1024, "MiB that a program may use", needs("url"))


class CustomRewardFunctionConfig(Section):
    path: str | None = files(None, "file or module of your scorer; null: those of reward_scores")
    name: str = key("compute_score", "the function in that file", needs("path"))
    reward_kwargs: Open = key({}, "arguments of that function", needs("path"))


class RewardModelConfig(Section):
    reward_manager: RewardManager = key(
        "naive", "this process (naive), graders (prime, dapo), or with lists (batch)"
    )
    num_workers: Count | None = execution(None, "graders; null: one a core, at most 4", GRADERS)
    timeout_s: Positive = execution(10.0, "seconds for an answer with its tests", GRADERS)
    memory_limit_mb: Count | None = execution(1024, "MiB of a grader; null: no limit", GRADERS)
    num_examine: Size = bookkeeping(0, "answers of a data source that a training step prints")
    val_num_examine: Size = bookkeeping(1, "answers of a data source that a validation prints")
    reward_kwargs: Open = key({}, "scorer -> its options, as in {gsm8k: {method: flexible}}")
    scorers: Open = key({}, "data source -> scorer, for sources of your own: {mine: qa_em}")
    on_error: Literal["zero", "mask", "raise"] = key("zero", "what an answer gets on an error")
    sandbox: SandboxConfig = SandboxConfig()
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()
    enable: bool = key(False, 'a model scores the examples whose reward_model.style is "model"')
    weight: float = key(0.0, "of the model's number needs a rule's score, in other examples")
    model: RewardModelModelConfig = key(RewardModelModelConfig(), used_if=CLASSIFIER)
    judge: JudgeConfig = key(JudgeConfig(), used_if=JUDGE)
    max_length: Count | None = key(
        None, "tokens that the model sees; null: longest prompt and answer", CLASSIFIER
    )
    forward_max_token_len_per_gpu: Count | None = execution(used_if=CLASSIFIER, follows=VALUES)

    @property
    def judged(self) -> bool:
        """Return whether the model is a judge behind a URL."""
        return self.enable and self.judge.url is not None

    @property
    def loads_model(self) -> bool:
        """Return whether the model is a classifier, which this run loads."""
        return self.enable and self.judge.url is None


# --- what a run does and records ---


class HealthBound(Section):
    bound: NonNegative | None = key(None, "the bound that such a number may not cross; null: off")


class HealthConfig(Section):
    """Bounds of a step's metrics. A run warns beyond a bound; nonfinite saves and ends it."""

    nonfinite: HealthBound = key(HealthBound(bound=3), "steps in a row that skipped an update")
    entropy: HealthBound = key(HealthBound(), "least mean entropy, nats a token")
    reward_drop: HealthBound = key(HealthBound(), "drop of the mean score below its best")
    reward_window: Count = key(10, "steps over which reward_drop and scorer_errors average")
    # null: 1e-4 in float32, else 0.06, and off where it is corrected
    logp_diff: HealthBound = key(HealthBound(), "mean |engine - learner|; null: by number format")
    entropy_gap: HealthBound = key(HealthBound(bound=6), "standard errors of entropy + log p")
    zero_variance: HealthBound = key(HealthBound(), "share of groups of equal scores")
    scorer_errors: HealthBound = key(HealthBound(bound=0.1), "share of answers without a score")


class TraceConfig(Section):
    """What is recorded of every token of some steps, for ``python -m results.trace``."""

    freq: OffOrCount = key(-1, "steps between records, first and last included; -1: only steps")
    steps: Steps | None = key(None, "record these steps as well")
    groups: Count = key(2, "groups of a recorded step beside that of the lowest mean score", TRACES)


class TrainerConfig(Section):
    backend: Literal["local", "ray"] = execution("local", "one process, or the GPUs of nodes")
    device: Literal["cpu", "cuda"] | None = execution(None, "of models; null: cuda if there is one")
    cpu_threads: Count | None = execution(
        None, "threads of torch on a CPU; null: OMP_NUM_THREADS, or all cores"
    )
    seed: Size = key(1, "decides the examples drawn, how answers are sampled, and new weights")
    nnodes: Count = execution(1, "machines", OVER_RAY)
    n_gpus_per_node: Count = execution(8, "GPUs a machine; on CPUs, learner ranks", OVER_RAY)
    total_epochs: Count = execution(30, "passes over the training examples", BY_EPOCHS)
    total_training_steps: Count | None = execution(None, "RL steps; null: those of total_epochs")
    phase_timeout_s: Positive | None = bookkeeping(
        None, "most seconds of a remote phase; null: 10 x its longest, at least 600", OVER_RAY
    )
    wait_for_nodes_s: NonNegative = bookkeeping(300, "seconds to wait for free nodes", OVER_RAY)
    max_restarts: Size = bookkeeping(0, "restarts from its checkpoint after a lost process")
    critic_warmup: Size = key(0, "step from which on the policy trains too", CRITIC)
    balance_batch: bool = execution(True, "give ranks about equal numbers of tokens", OVER_RAY)
    max_staleness: Size = key(0, "steps that samples are old; above 0 collecting overlaps updates")
    project_name: Name | None = bookkeeping(None, "project of loggers; null: rlrepro-<recipe>")
    experiment_name: Name | None = bookkeeping(None, "run's name; null: <model>-seed<seed>")
    default_local_dir: str | None = bookkeeping(
        None, "run folder, or a URL; null: outputs/<recipe>/<experiment_name>"
    )
    logger: Loggers = bookkeeping(("console", "tensorboard"), "where metrics go too")
    rollout_data_dir: str | None = bookkeeping(None, "folder or URL for training answers")
    validation_data_dir: str | None = bookkeeping(None, "likewise for validation answers", ANSWERS)
    val_before_train: bool = bookkeeping(True, "validate the starting model too", NOT_ALONE)
    val_only: bool = bookkeeping(False, "validate the model and end")
    test_freq: OffOrCount = bookkeeping(
        -1, "steps between validations, one follows the last; -1: never", QUESTIONS
    )
    save_freq: SaveFrequency = bookkeeping(
        -1, "steps between checkpoints, one follows the last; -1: that; 0: none"
    )
    max_actor_ckpt_to_keep: Count | None = bookkeeping(None, "checkpoints kept; null: all", SAVES)
    resume_mode: ResumeMode = bookkeeping("auto", "newest checkpoint, step 0, or resume_from_path")
    resume_from_path: str | None = bookkeeping(None, "folder or URL global_step_N", FROM_PATH)
    resume_with_changes: bool = bookkeeping(False, "resume with another base, data or objective")
    health: HealthConfig = bookkeeping(HealthConfig())
    trace: TraceConfig = bookkeeping(TraceConfig())

    @property
    def first_phase_s(self) -> float:
        """Return the seconds of a remote phase that has not ended before."""
        return float(self.phase_timeout_s or FIRST_PHASE_S)


class RayKwargsConfig(Section):
    ray_init: Open = key({"num_cpus": None}, "arguments of ray.init")


class FrozenModel(NamedTuple):
    """A language model that scores the policy's tokens beside the reference, and never trains."""

    key: str  # configuration key that holds the model's path
    model: ModelConfig
    dtype: str
    temperature: float


class Config(Section):
    """The whole configuration; ``config.actor_rollout_ref.rollout.n`` is verl's key of that name.

    A recipe may add keys of its own in a subclass: see :mod:`core.config.recipes`.
    """

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = key(CriticConfig(), used_if=CRITIC)
    reward_model: RewardModelConfig = key(RewardModelConfig(), used_if=ANSWERS)
    custom_reward_function: CustomRewardFunctionConfig = key(
        CustomRewardFunctionConfig(), used_if=ANSWERS
    )
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    ray_kwargs: RayKwargsConfig = bookkeeping(RayKwargsConfig(), used_if=OVER_RAY)

    # Facts of a recipe. Its subclass may override them, also by a property that reads keys.
    generates: ClassVar[bool] = True  # a step collects answers; False: it trains on files
    # The key of the data section that limits the tokens of a prompt
    prompt_limit_key: ClassVar[str] = "max_prompt_length"
    drops_groups: ClassVar[bool] = False  # a step leaves groups out, so that more prompts are drawn
    needs_engine: ClassVar[bool] = True  # something is answered, in a step or in a validation
    # Role -> a model whose log-probs the recipe reads
    frozen_models: ClassVar[Mapping[str, FrozenModel]] = {}

    # -- what a step needs --

    @property
    def has_critic(self) -> bool:
        """Return whether a critic trains: the advantage estimator reads values."""
        return self.algorithm.estimator.critic

    @property
    def needs_ref(self) -> bool:
        """Return whether the objective holds a KL to the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def corrects(self) -> bool:
        """Return whether samples of another distribution than the learner's are weighed for it."""
        correction = self.algorithm.rollout_correction
        has_ratio = self.actor_rollout_ref.actor.policy_loss.entry.has_ratio
        return correction.weighs or (correction.bypass_mode and has_ratio)

    # -- sizes --

    @property
    def longest_sequence(self) -> int:
        """Return the tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def learner_ranks(self) -> int:
        """Return the processes that hold the learner: one a GPU over Ray, else the trainer's."""
        if self.trainer.backend == "local":
            return 1
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def data_ranks(self) -> int:
        """Return the ranks that get sequences of their section.

        Ranks that share each sequence, or each layer, get the same sequences.
        """
        return max(self.learner_ranks // self.actor_rollout_ref.actor.together, 1)

    # -- where it runs --

    @property
    def in_one_process(self) -> bool:
        """Return whether learner and engine are in the trainer's own process."""
        return self.trainer.backend == "local" and self.actor_rollout_ref.rollout.name == "hf"

    @property
    def full_precision(self) -> bool:
        """Return whether engine and learner compute in float32: they then agree to rounding."""
        models = self.actor_rollout_ref
        return {models.rollout.dtype, models.actor.fsdp_config.dtype} <= {*FULL_PRECISION}

    @property
    def one_copy(self) -> bool:
        """Return whether the engine reads the learner's own weights: one process, and float32."""
        return self.in_one_process and self.full_precision
