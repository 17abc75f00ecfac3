"""The sections ``reward_model`` and ``custom_reward_function`` with rules on who grades: functions, models, a judge."""

from __future__ import annotations

from typing import Literal

from core.config import registry, when
from core.config.limits import Count, NonNegative, OffOrCount, Positive, Size
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
    pattern: str | None = key(None, "expression whose one group is the number; null: [[number]]")
    lowest: float = key(0.0, "least number that counts")
    highest: float = key(1.0, "largest number that counts")
    temperature: NonNegative = key(0.0, "of the judge's sampling")
    seed: Size = key(0, "of the judge's sampling")
    max_tokens: Count = key(1024, "tokens of a reply; one that is cut off has no number")
    extra: Open = key(FrozenDict(), "further fields of a request; null takes one of the usual fields out")
    max_concurrent: Count = execution(32, "requests at a time")
    timeout_s: Positive = execution(120.0, "seconds for a try of a request")
    give_up_s: Positive = execution(600.0, "seconds in which a request that failed is tried again, with growing pauses")
    max_failures: Count = execution(100, "answers in a row without a number, after which the run ends")
    cache_dir: str | None = execution(None, "folder of kept replies; null: judge in the run folder")


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
    reward_manager: Literal[*registry.REWARD_MANAGERS] = key(
        "naive", "who grades: this process (naive), graders (prime, dapo), graders with a function of lists (batch)"
    )
    num_workers: Count | None = execution(None, "grading processes; null: one a core, at most 4", when.GRADERS)
    timeout_s: Positive = execution(10.0, "seconds for an answer (batch: a call) with its tests", when.GRADERS)
    memory_limit_mb: Count | None = execution(1024, "MiB that a grader may map; null: no limit", when.GRADERS)
    num_examine: Size = bookkeeping(0, "answers of each data source that a training step prints")
    val_num_examine: Size = bookkeeping(1, "answers of each data source that a validation prints")
    reward_kwargs: Open = key(FrozenDict(), "scorer -> its options, as in {gsm8k: {method: flexible}}", code=CONSENT)
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
    def pass_size(self) -> str:
        """The key that bounds the model's passes, whose value may be lowered."""
        return "forward_max_token_len_per_gpu" if self.use_dynamic_bsz else "micro_batch_size_per_gpu"

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
    if c.reward.reward_manager == "batch" and not c.custom.path:
        yield (
            "reward_model.reward_manager",
            "calls a function of yours with lists of answers, and there is none; set "
            "custom_reward_function.path, or use prime",
        )
    if c.reward.memory_limit_mb is not None and c.reward.memory_limit_mb < 256:
        yield (
            "reward_model.memory_limit_mb",
            "is too little for a worker that has only started; at least 256; raise it, or null for no limit",
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
    if c.judge.lowest >= c.judge.highest:
        yield (
            "reward_model.judge.lowest",
            f"must be below reward_model.judge.highest={c.judge.highest}; give the range of the judge's numbers",
        )
