"""Models that score, of the section ``reward_model``: a judge behind a URL, and a classifier, with their rules."""

from __future__ import annotations

from typing import Literal

from core.config import limits
from core.config.frozen import FrozenDict
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Open, Section
from core.config.sections.model import FSDPConfig


class JudgeConfig(Section):
    """A generative model behind a URL, which grades answers in place of a classifier."""

    url: str | None = None  # OpenAI-compatible server, as http://localhost:8000/v1; None: reward_model.model scores
    model: str | None = None  # name of the model there
    api_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the server's key, if it needs one
    # file of what the judge reads, with {question}, {response}, {reference}; None: judge_template.txt here
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
    # file of answers of known grade, as JSON lines; None: core/rewards/judge/judge_canaries.jsonl
    canaries: str | None = None
    canary_every: limits.Size = 32  # answers per canary graded beside them; 0: none
    prompt_price: limits.NonNegative = 0.0  # price of a million tokens that the judge reads, in any currency
    completion_price: limits.NonNegative = 0.0  # price of a million tokens that it writes


class RewardModelModelConfig(Section):
    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"  # a sequence or token classifier with one label
    # The policy's, whose text is put into the reward model's chat template; None: it reads the policy's token ids
    input_tokenizer: str | None = "policy"
    external_lib: str | None = None  # modules to import before the model loads; None: the policy's
    trust_remote_code: bool = False  # run Python code that comes with the model
    fsdp_config: FSDPConfig = FSDPConfig(dtype="bfloat16")


rules = RuleBook()
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


@rules.unused
def no_reward_model(c: View) -> Unused:
    if not c.reward.enable:
        yield OF_A_CLASSIFIER, "reward_model.enable is off"
    if c.reward.judged:
        yield OF_A_CLASSIFIER, "reward_model.judge.url scores, and no reward model is loaded"


@rules.unused
def passes_and_pools(c: View) -> Unused:
    if c.reward.use_dynamic_bsz:
        yield (("reward_model.micro_batch_size_per_gpu",), "use_dynamic_bsz packs passes by tokens")
    if not c.reward.use_dynamic_bsz:
        yield (("reward_model.forward_max_token_len_per_gpu",), "use_dynamic_bsz is off")
    yield (
        ("reward_model.model.fsdp_config.param_offload", "reward_model.model.fsdp_config.optimizer_offload"),
        "the reward model scores while answers are generated, and stays where it is",
    )
    if not c.reward.enable_resource_pool:
        yield (
            (
                *("reward_model.nnodes", "reward_model.n_gpus_per_node", "reward_model.model.fsdp_config.fsdp_size"),
                "reward_model.model.fsdp_config.offload_policy",
                "reward_model.model.fsdp_config.reshard_after_forward",
                "reward_model.model.fsdp_config.forward_prefetch",
            ),
            "one process holds the reward model (reward_model.enable_resource_pool is off)",
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
            "is a database, which cannot be written to a URL; leave it out; the replies are then kept in the run "
            "folder, and sent with it where that is a URL",
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


@rules.unused
def no_judge(c: View) -> Unused:
    if not c.reward.judged:
        yield (("reward_model.judge.*", "trainer.health.judge_agreement.*"), "reward_model.judge.url is not set")
    if c.judge.votes == 1:
        yield (("reward_model.judge.combine",), "reward_model.judge.votes is 1")
    if not c.judge.canary_every:
        yield (
            ("reward_model.judge.canaries", "trainer.health.judge_agreement.*"),
            "reward_model.judge.canary_every is 0",
        )
