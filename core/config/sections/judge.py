"""The section ``reward_model.judge``, a generative model behind a URL, with its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from core.config import limits
from core.config.frozen import FrozenDict
from core.config.rulebook import Broken, RuleBook, Unused
from core.config.section import Open, Section

if TYPE_CHECKING:
    from core.config.view import View


class JudgeConfig(Section):
    """A generative model behind a URL, which grades answers in place of a classifier."""

    url: str | None = None  # OpenAI-compatible server, as http://localhost:8000/v1; None: reward_model.model scores
    model: str | None = None  # name of the model there
    api_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the server's key, if it needs one
    # file of what the judge reads, with {question}, {response}, {reference}; None: judge_template.txt of the extension
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
    # file of answers of known grade, as JSON lines; None: judge_canaries.jsonl of the extension
    canaries: str | None = None
    canary_every: limits.Size = 32  # a canary is graded beside one answer of so many; 0: none is
    prompt_price: limits.NonNegative = 0.0  # price of a million tokens that the judge reads, in any currency
    completion_price: limits.NonNegative = 0.0  # price of a million tokens that it writes


rules = RuleBook()


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
