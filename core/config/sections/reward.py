"""The sections ``reward_model`` and ``custom_reward_function`` with rules on who grades: functions, models, a judge."""

from __future__ import annotations

from typing import Literal

from core.config import registry, when
from core.config.limits import Count, NonNegative, OffOrCount, Positive, Size
from core.config.registry import RewardManager
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import CODE, CONSENT, FrozenDict, Open, Section, bookkeeping, execution, files, key
from core.config.sections.model import FSDPConfig


class JudgeConfig(Section):
    """A generative model behind a URL, which grades answers in place of a classifier."""

    url: str | None = execution(None, "OpenAI-compatible server, http://host:8000/v1; null: reward_model.model scores")
    model: str | None = key(None, "name of the model there")
    api_key_env: str = bookkeeping("OPENAI_API_KEY", "environment variable of the server's key, if it needs one")
    template: str | None = files(
        None, "file of what the judge reads, with {question}, {response}, {reference}; null: judge_template.txt here"
    )
    pattern: str | None = key(None, "expression whose one group is the number; null: [[number]], or json_schema")
    json_schema: str | None = files(None, "JSON schema of a reply, whose property score is the number; null: pattern")
    lowest: float = key(0.0, "least number that is a verdict")
    highest: float = key(1.0, "largest number that is a verdict")
    votes: Count = key(1, "replies an answer, each with a seed of its own")
    combine: Literal["mean", "median"] = key("mean", "what becomes of several numbers", when.VOTES)
    temperature: NonNegative = key(0.0, "of the judge's sampling")
    seed: Size = key(0, "of the judge's sampling; a vote adds its number")
    max_tokens: Count = key(1024, "tokens of a reply; one that is cut off is no verdict")
    extra: Open = key(FrozenDict(), "further fields of a request; null takes one of the usual fields out")
    max_concurrent: Count = execution(32, "requests at a time")
    timeout_s: Positive = execution(120.0, "seconds for a try of a request")
    give_up_s: Positive = execution(600.0, "seconds in which a request that failed is tried again, with growing pauses")
    max_failures: Count = execution(100, "answers in a row without a verdict, after which the run ends")
    cache_dir: str | None = execution(None, "folder of kept replies; null: judge in the run folder")
    canaries: str | None = bookkeeping(
        None, "file of answers of known grade, as JSON lines; null: core/rewards/judge_canaries.jsonl", when.CANARIES
    )
    canary_every: Size = bookkeeping(32, "answers per canary graded beside them; 0: none")
    prompt_price: NonNegative = bookkeeping(0.0, "price of a million tokens that the judge reads, in any currency")
    completion_price: NonNegative = bookkeeping(0.0, "price of a million tokens that it writes")


class ScoringFSDPConfig(FSDPConfig):
    """How ranks of a pool share a reward model, whose weights do not move and do not train."""

    param_offload: bool = execution(False, "keep weights in host memory", when.NEVER_MOVED)
    optimizer_offload: bool = execution(False, "keep the optimizer's state in host memory", when.NEVER_MOVED)
    offload_policy: bool = execution(False, "keep weights in host memory always", when.OVER_RAY + when.POOL)
    reshard_after_forward: bool = execution(True, "drop gathered weights after a layer", when.OVER_RAY + when.POOL)
    forward_prefetch: bool = execution(False, "gather the next layer's weights early", when.OVER_RAY + when.POOL)
    fsdp_size: OffOrCount = execution(
        -1, "ranks that share one copy of the weights; -1: all", when.OVER_RAY + when.POOL
    )


class RewardModelModelConfig(Section):
    path: str = key("~/models/FsfairX-LLaMA3-RM-v0.1", "a sequence or token classifier with one label")
    input_tokenizer: str | None = key(
        "policy",
        "The policy's, whose text is put into the reward model's chat template; null: it reads the policy's token ids",
    )
    external_lib: str | None = key(
        None, "modules to import before the model loads", code=CODE, follows="actor_rollout_ref.model.external_lib"
    )
    trust_remote_code: bool = execution(False, "run Python code that comes with the model", code=CONSENT)
    fsdp_config: ScoringFSDPConfig = ScoringFSDPConfig(dtype="bfloat16")


class RewardModuleConfig(Section):
    path: str | None = files(None, "file or module of a reward manager of your own", when.OWN_MANAGER, code=CODE)
    name: str | None = key(None, "class of that manager", when.IMPORTED, code=CODE)


class SandboxConfig(Section):
    """Where programs that are answers run, if not on a Sandbox Fusion server."""

    allow_unisolated: bool = execution(False, "run programs also where nothing isolates them", code=CONSENT)
    timeout_s: Positive = execution(10.0, "seconds for a test; in graders, an answer's share of reward_model.timeout_s")
    memory_limit_mb: Count = key(1024, "MiB that a program may map")


class SandboxFusionConfig(Section):
    url: str | None = execution(None, "a server's address, with /run_code; null: a sandbox on this machine")
    max_concurrent: Count = execution(64, "requests at a time", when.SERVER)
    memory_limit_mb: Count = key(1024, "MiB that a program may use there", when.SERVER)
    give_up_s: Positive = execution(120.0, "seconds for which a server that is away is tried again", when.SERVER)
    api_key_env: str | None = execution(None, "environment variable of the server's key, if it needs one", when.SERVER)


class CustomRewardFunctionConfig(Section):
    path: str | None = files(None, "file or module of your own scorer; null: the table of reward_scores", code=CODE)
    name: str = key("compute_score", "the function in that file", when.OWN_FUNCTION, code=CODE)
    reward_kwargs: Open = key(FrozenDict(), "arguments of that function", when.OWN_FUNCTION)


class RewardModelConfig(Section):
    source: Literal["register", "importlib"] = key(
        "register",
        "the managers here and those that module.path registers, or your own as module.name of module.path (importlib)",
    )
    module: RewardModuleConfig = RewardModuleConfig()
    reward_manager: RewardManager = key(
        "naive",
        "who grades: this process (naive), graders (prime, dapo), a function of lists (batch), a class of module.path",
        when.REGISTERED,
    )
    num_workers: Count | None = execution(None, "grading processes; null: one a core, at most 4", when.GRADERS)
    timeout_s: Positive = execution(10.0, "seconds for an answer (batch: a step's call) with its tests", when.GRADERS)
    memory_limit_mb: Count | None = execution(1024, "MiB that a grader may map; null: no limit", when.GRADERS)
    num_examine: Size = bookkeeping(0, "answers of each data source that a training step prints")
    val_num_examine: Size = bookkeeping(1, "answers of each data source that a validation prints")
    reward_kwargs: Open = key(FrozenDict(), "scorer -> its options, as in {gsm8k: {method: flexible}}", code=CONSENT)
    solution_str: Literal["policy", "response"] = key(
        "policy",
        "what a function of yours gets as solution_str: what the policy wrote, or the whole response with tools'",
        when.OWN_CODE,
    )
    on_error: Literal["zero", "mask", "raise"] = key("zero", "what becomes of an answer whose scorer failed")
    sandbox: SandboxConfig = SandboxConfig()
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()
    enable: bool = key(False, 'a model scores the examples whose reward_model.style is "model"')
    weight: float = key(0.0, "what the model's number counts beside a rule's score, in the other examples")
    model: RewardModelModelConfig = key(RewardModelModelConfig(), used_if=when.CLASSIFIER)
    enable_resource_pool: bool = execution(False, "over Ray, nodes whose ranks share the model", when.CLASSIFIER)
    nnodes: Size = execution(0, "nodes of that pool", when.CLASSIFIER + when.POOL)
    n_gpus_per_node: Size = execution(0, "ranks on each of them, a GPU each", when.CLASSIFIER + when.POOL)
    judge: JudgeConfig = key(JudgeConfig(), used_if=when.JUDGED)
    max_length: Count | None = key(
        None, "tokens that the model sees; null: the longest prompt and answer", when.CLASSIFIER
    )
    micro_batch_size_per_gpu: Count | None = execution(
        None, "answers of a pass; null: filled by tokens", when.CLASSIFIER + when.NOT_PACKED
    )
    use_dynamic_bsz: bool | None = execution(
        None, "fill passes by tokens; null: where no micro-batch size is given", when.CLASSIFIER
    )
    forward_max_token_len_per_gpu: Count | None = execution(
        None, "tokens of a pass", when.CLASSIFIER + when.PACKED, follows="critic.ppo_max_token_len_per_gpu"
    )

    @property
    def uses_model(self) -> bool:
        """Whether a model scores examples of its own, and counts beside rules in the others."""
        return self.enable

    @property
    def pass_size(self) -> str:
        """The key that bounds the model's passes, whose value may be lowered."""
        return "forward_max_token_len_per_gpu" if self.use_dynamic_bsz else "micro_batch_size_per_gpu"

    @property
    def model_weight(self) -> float:
        """What the model's number counts beside a rule's."""
        return self.weight

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


rules = RuleBook()


@rules.problem
def who_grades(c: View) -> Broken:
    if c.reward.source == "register" and c.reward.reward_manager == "batch" and not c.custom.path:
        yield (
            "reward_model.reward_manager",
            "calls a function of yours with lists of answers, and there is none; set "
            "custom_reward_function.path, or use prime",
        )
    if c.own_manager and c.reward.source == "register" and not c.reward.module.path:
        yield (
            "reward_model.reward_manager",
            f"must be one of {', '.join(registry.REWARD_MANAGERS)}, or a name that a module of yours "
            "registers; choose one, or name the "
            f'module with the class under @register("{c.reward.reward_manager}"), reward_model.module.path=my.py',
        )
    for name in ("path", "name"):
        if c.reward.source == "importlib" and (not getattr(c.reward.module, name)):
            yield (
                f"reward_model.module.{name}",
                "is needed with reward_model.source=importlib; name the manager's class and its file or module, or "
                "use reward_model.source=register",
            )
    if c.reward.memory_limit_mb is not None and c.reward.memory_limit_mb < 256:
        yield (
            "reward_model.memory_limit_mb",
            "is too little for a worker that has only started; at least 256; raise it, or null for no limit",
        )


@rules.warning
def what_a_function_reads(c: View) -> Broken:
    if (
        c.users_function
        and (not c.gives("reward_model.solution_str"))
        and (
            c.rollout.agent_loop not in (None, "single_turn_agent")
            or c.rollout.multi_turn.tool_config_path  # rows may name the tool agent
        )
    ):
        yield (
            "reward_model.solution_str",
            "a reward function of yours gets what the policy wrote and not what tools or retrieval wrote between "
            'it, unlike verl\'s (extra_info["rollout"]["segments"] has both); set '
            "reward_model.solution_str=response for the whole response, or =policy to say that this is meant",
        )


OF_A_CLASSIFIER = (
    *("reward_model.model.*", "reward_model.max_length", "reward_model.micro_batch_size_per_gpu"),
    *("reward_model.use_dynamic_bsz", "reward_model.forward_max_token_len_per_gpu"),
    *("reward_model.enable_resource_pool", "reward_model.nnodes", "reward_model.n_gpus_per_node"),
)


@rules.problem
def the_reward_model(c: View) -> Broken:
    if c.reward.weight and not c.reward.enable:
        yield (
            "reward_model.weight",
            "there is no model whose number could be added; set reward_model.enable=True and "
            "reward_model.model.path (or reward_model.judge.url), or leave it out",
        )
    if c.reward.enable and c.reward.model.input_tokenizer not in (None, "policy", c.model.path, c.model.tokenizer_path):
        yield (
            "reward_model.model.input_tokenizer",
            "is the tokenizer of what the policy wrote; the reward model's own comes with "
            "reward_model.model.path; leave it out, or null where both read the same token ids",
        )
    if c.reward.enable and c.reward.use_dynamic_bsz is False and not c.reward.micro_batch_size_per_gpu:
        yield (
            "reward_model.micro_batch_size_per_gpu",
            "is needed with reward_model.use_dynamic_bsz=False; give a number of answers a pass, or leave "
            "use_dynamic_bsz out: passes are then packed by tokens",
        )
    if c.reward.enable and c.reward.use_dynamic_bsz and c.reward.forward_max_token_len_per_gpu < c.reward.max_length:
        yield (
            "reward_model.forward_max_token_len_per_gpu",
            f"must hold an answer of reward_model.max_length={c.reward.max_length} tokens; raise it, or lower "
            "reward_model.max_length",
        )
    pooled, copy_ranks = c.reward.loads_model and c.reward.enable_resource_pool, c.reward.model.fsdp_config.fsdp_size
    if pooled and c.trainer.backend == "local":
        yield (
            "reward_model.enable_resource_pool",
            "needs a cluster: trainer.backend=local has the reward model in its one process; set "
            "trainer.backend=ray, or leave it out",
        )
    for name in ("nnodes", "n_gpus_per_node"):
        if pooled and not getattr(c.reward, name):
            yield (
                f"reward_model.{name}",
                "is needed with reward_model.enable_resource_pool=True; give the nodes of the reward model's pool, "
                "and the GPUs of each of them",
            )
    if pooled and copy_ranks > 0 and c.reward.ranks % copy_ranks:
        yield (
            "reward_model.model.fsdp_config.fsdp_size",
            f"must divide the {c.reward.ranks} ranks (reward_model.nnodes * reward_model.n_gpus_per_node); change "
            "one of them; -1 shares one copy of the weights between all",
        )


@rules.problem
def the_judge(c: View) -> Broken:
    if c.judge.url is not None and not c.reward.enable:
        yield (
            "reward_model.judge.url",
            "would judge nothing with reward_model.enable=False; set reward_model.enable=True, or leave the URL out",
        )
    if c.judge.url is not None and (not c.judge.url.startswith(("http://", "https://"))):
        yield (
            "reward_model.judge.url",
            "must begin with http:// or https://; give the address that clients of OpenAI's interface use, as "
            "http://localhost:8000/v1",
        )
    if c.judge.url is not None and not c.judge.model:
        yield (
            "reward_model.judge.model",
            "is needed with reward_model.judge.url; name the model as the server lists it (GET /models)",
        )
    if c.reward.judged and c.is_url(c.judge.cache_dir):
        yield (
            "reward_model.judge.cache_dir",
            "is a database, which cannot be written to a URL; name a local folder",
        )
    if c.reward.judged and c.reward.on_error == "zero":
        yield (
            "reward_model.on_error",
            "would score an answer 0 because a server was away; set reward_model.on_error=mask, which takes such "
            "an answer out of its group and the loss, or raise",
        )
    if c.judge.pattern is not None and c.judge.json_schema is not None:
        yield (
            "reward_model.judge.pattern",
            "reads a reply in one way, and reward_model.judge.json_schema in another; leave one of them out",
        )
    if c.judge.lowest >= c.judge.highest:
        yield (
            "reward_model.judge.lowest",
            f"must be below reward_model.judge.highest={c.judge.highest}; give the range of the judge's numbers",
        )
    if c.reward.judged and c.judge.template and c.judge.canary_every and not c.judge.canaries:
        yield (
            "reward_model.judge.canaries",
            "is needed with a template of your own: the canaries that come with the usual one may not suit it; "
            "name a file of JSON lines {question, response, reference, right}, or set canary_every=0 for none",
        )


@rules.warning
def votes(c: View) -> Broken:
    if c.reward.judged and c.judge.votes > 1 and c.judge.temperature == 0:
        yield (
            "reward_model.judge.votes",
            "greedy votes differ by the marks around the texts alone; set reward_model.judge.temperature above "
            "0, or votes=1",
        )
