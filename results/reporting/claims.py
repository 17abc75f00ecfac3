"""Known signs beside laptop verdicts: results/claims.{md,html}, from the studies whose claims name their sources.

A claim with ``sources`` has a sign that two independent groups report of large models. The page says how often the
verdict of its registered study agrees with that sign. A function of the studies' files and run records alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.tracking.confidence_intervals import wilson
from core.tracking.run_manifest import ROOT
from results.reporting.pages import Bar, Block, Effects, Fold, Heading, Link, Table, Text, write_pages
from results.reporting.study import Claim, Records, Study, StudyError, load_study
from results.reporting.study_report import Verdict, judge, shown_effect, void_because

AGREES, DISAGREES, UNDECIDED = "agrees", "disagrees", "undecided"
MEANING = {"confirmed": AGREES, "refuted": DISAGREES}
SIGNS = {"greater": "higher", "less": "lower", "equal": "no difference"}
TITLE = "Signs known of large models, on a laptop"


@dataclass(frozen=True)
class Known:
    """A claim whose sign is known, and what its study found."""

    study: Study
    name: str
    claim: Claim
    verdict: Verdict
    effect: str  # as its study shows it
    outcome: str  # AGREES, DISAGREES or UNDECIDED
    why: str

    @property
    def bar(self) -> Bar | None:
        """Return the effect in smallest effects that count; above 0 is the known sign. None without an interval."""
        if self.verdict.effect is None or self.verdict.effect.estimate.low is None:
            return None
        one = self.verdict.effect.estimate
        low, value, high = (bound / self.claim.minimum for bound in (one.low, one.value, one.high))
        if self.claim.direction == "less":
            low, value, high = -high, -value, -low
        group = (AGREES, DISAGREES, UNDECIDED).index(self.outcome)
        return Bar(f"{self.name}  {self.claim.text}", value, low, high, group)


def known_claims(results: Path, folder: Path = ROOT / "recipes") -> list[Known]:
    """Return the claims that name sources, of all studies. Raises StudyError for one with fewer than two."""
    found = []
    for path in sorted(folder.glob("*/study*.yaml")):
        study = load_study(path)
        if lonely := [name for name, claim in study.claims.items() if len(claim.sources) == 1]:
            raise StudyError(f"{path}: claims.{lonely[0]}.sources has one source; a known sign has two or more")
        if any(claim.sources for claim in study.claims.values()):
            found += _of_study(study, results)
    return found


def _of_study(study: Study, results: Path) -> Iterator[Known]:
    verdicts = judge(study, Records(results / study.recipe / study.name).read(study))
    void = void_because(study, verdicts)
    for name, claim in study.claims.items():
        if claim.sources:
            verdict = verdicts[name]
            outcome = UNDECIDED if void else MEANING.get(verdict.word, UNDECIDED)
            effect = shown_effect(study, claim, verdict)
            yield Known(study, name, claim, verdict, effect, outcome, void or verdict.reason)


def headline(known: Sequence[Known]) -> str:
    count = {outcome: sum(one.outcome == outcome for one in known) for outcome in (AGREES, DISAGREES, UNDECIDED)}
    low, high = wilson(count[AGREES] / len(known), len(known))
    return (
        f"{count[AGREES]} of {len(known)} laptop verdicts agree with the sign that is known of large models: "
        f"{count[AGREES] / len(known):.0%}, {low:.0%} to {high:.0%}. Against it: "
        f"{count[DISAGREES]}. Undecided: {count[UNDECIDED]}."
    )


def every_claim(results: Path, folder: Path = ROOT / "recipes") -> Iterator[list[str]]:
    """Yield a row for each claim of each study: study, name, text, effect, verdict."""
    for path in sorted(folder.glob("*/study*.yaml")):
        study = load_study(path)
        verdicts = judge(study, Records(results / study.recipe / study.name).read(study))
        void = "none: the study is void" if void_because(study, verdicts) else ""
        for name, claim in study.claims.items():
            row = [f"{study.recipe}/{study.name}", name, claim.text, shown_effect(study, claim, verdicts[name])]
            yield [*row, void or verdicts[name].word]


def page(known: Sequence[Known], every: Sequence[Sequence[str]]) -> Iterator[Block]:
    yield Text(headline(known), strong=True)
    if bars := [one.bar for one in known if one.bar is not None]:
        x = "effect and 95 % interval, in smallest effects that count"
        yield Effects("Effects, with the known sign to the right", bars, (AGREES, DISAGREES, UNDECIDED), x)
    yield Table(
        ["claim", "says", "known sign", "effect here", "smallest that counts", "this verdict", "why"],
        [
            [one.name, one.claim.text, SIGNS[one.claim.direction], one.effect, _minimum(one), one.outcome, one.why]
            for one in known
        ],
    )
    yield Heading("Who reports the sign")
    yield Table(["claim", "sources"], [[one.name, source] for one in known for source in one.claim.sources])
    yield Heading("Every registered claim")
    yield Text("A study is void where one of its controls did not hold, and where it was withdrawn: its page says why.")
    yield Fold("Claims by study", [Table(["study", "claim", "says", "effect", "verdict"], every)])
    yield Heading("How to read this")
    yield Text(
        "*Agrees* is a claim that its study confirms and *disagrees* one that it refutes, by the rules on the "
        "study's page. All else is undecided, and so is every claim of a study one of whose controls did not hold. "
        "Where the known sign is no difference, an interval between -1 and 1 agrees. The share is of all claims. "
        "Its interval is Wilson's and takes claims for independent, which they are not: "
        "they share a task, a baseline and seeds. What agrees here may agree for another reason than in large models."
    )
    for study in {one.study.path: one.study for one in known}.values():
        name = f"{study.recipe}/{study.name}"
        yield Text(f"Registration `recipes/{name}.yaml`, SHA-256 `{study.registration}`; run by `{study.command}`.")
        yield Link(study.title, f"{name}.html")


def _minimum(one: Known) -> str:
    metric = one.study.metrics[one.claim.metric]
    points = 100 * one.claim.minimum
    return f"{points:g} point{'' if points == 1 else 's'}" if metric.percent else f"{one.claim.minimum:g}"


def write(results: Path) -> Path:
    """Write ``claims.md`` and ``claims.html`` and return the first."""
    return write_pages(results, "claims", TITLE, list(page(known_claims(results), list(every_claim(results)))))[0]
