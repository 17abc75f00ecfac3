"""The part of a report that compares experiments: every one with the first, and the questions that
flipped.

The statistics are in :mod:`results.reporting.comparison`.
"""

from __future__ import annotations

import difflib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.errors import InputError
from core.tracking.validation import Estimate
from results.reporting.answers import Flip, Row, answers, flips
from results.reporting.comparison import (
    holm,
    paired_comparison,
    question_p,
    welch_interval,
    welch_p,
)
from results.reporting.curves import Group
from results.reporting.numbers import change, shown
from results.reporting.pages import Block, Fold, Heading, Table, Text
from results.reporting.readme_tables import experiments
from results.reporting.run_reader import RecordedRun
from results.reporting.summaries import comparable, decoding, group_name

LEVEL = 0.05
SHOWN_FLIPS = 40  # questions that a table lists
SHOWN_CHARACTERS = 1_500  # of an answer


def name_of(group: Sequence[Any]) -> str:
    return group_name([run.name for run in group])


def with_baseline(groups: Sequence[Group], name: str | None) -> list[Group]:
    """Return the experiments with the named one first: by the name of an experiment, of a run, or
    of its folder.

    Raises:
        InputError: no experiment has the name.
    """
    if name is None:
        return list(groups)
    known: dict[str, int] = {}
    for at, group in enumerate(groups):
        for each in (
            name_of(group),
            *(run.name for run in group),
            *(str(run.folder) for run in group),
        ):
            known.setdefault(each, at)
    if name.rstrip("/") not in known:
        shown = list(dict.fromkeys(name_of(group) for group in groups))
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.4) or shown
        raise InputError(
            f"--baseline {name}: no run on the command line has this name; near it: "
            f"{', '.join(near)}"
        )
    first = known[name.rstrip("/")]
    return [groups[first], *(group for at, group in enumerate(groups) if at != first)]


# --- experiments ---


@dataclass(frozen=True)
class Side:
    """One experiment on one data source: the accuracy of each seed, and of each question over the
    seeds."""

    group: Sequence[Any]  # runs, or a file of scores: what has a name and scored sources
    seeds: Sequence[float]
    questions: Mapping[str, float]


def sides(groups: Sequence[Group], variable: str = "acc") -> dict[str, list[Side]]:
    """Return ``data_source -> sides`` in the order of the experiments, at the last validation of
    each run. Where ``variable`` is reward, the sources are those whose rewards say more than
    accuracies."""
    dense = {source for group in groups for run in group for source in run.dense}
    found: dict[str, list[Side]] = {}
    for group in groups:
        questions = _by_question(group, variable)
        for source, seeds in _by_seed(group, variable).items():
            if variable == "acc" or source in dense:
                side = Side(group, seeds, questions.get(source, {}))
                found.setdefault(source, []).append(side)
    return dict(sorted(found.items()))


def _by_seed(group: Group, variable: str) -> dict[str, list[float]]:
    """Return the means of each data source at the last validation, one for each seed."""
    if variable == "acc":
        return {
            each.source: each.values("after")
            for each in experiments([comparable(run) for run in group])
            if each.metric.startswith("mean@")
        }
    found: dict[str, list[float]] = {}
    for run in group:
        for source, points in run.points(variable).items():
            found.setdefault(source, []).append(points[-1].estimate.value)
    return {source: seeds for source, seeds in found.items() if len(seeds) == len(group)}


def _by_question(group: Group, variable: str) -> dict[str, dict[str, float]]:
    """Return ``data_source -> uid -> mean over the seeds`` at the last validation of each run."""
    pooled: dict[str, dict[str, list[float]]] = {}
    for run in group:
        last = run.accuracy_at(max(run.validation, default=-1), variable)
        for source, by_uid in last.items():
            for uid, value in by_uid.items():
                pooled.setdefault(source, {}).setdefault(uid, []).append(value)
    return {
        source: {uid: statistics.fmean(values) for uid, values in by_uid.items()}
        for source, by_uid in pooled.items()
    }


@dataclass(frozen=True)
class Compared:
    """Two experiments on one data source, with p by question and over seeds (None where there is
    none). ``variable`` is acc, or reward where a scorer's rewards say more."""

    source: str
    variable: str
    a: Side
    b: Side
    by_question: float | None
    over_seeds: float | None
    corrected: float | None = None  # the p that decides, after a correction for all comparisons

    @property
    def is_score(self) -> bool:
        scored = any(self.source in run.scored for side in (self.a, self.b) for run in side.group)
        return scored or self.variable == "reward"

    @property
    def what(self) -> str:
        return self.source if self.variable == "acc" else f"{self.source} (reward)"

    @property
    def paired(self) -> Estimate | None:
        if not _shared(self.a, self.b):
            return None
        return paired_comparison(self.a.questions, self.b.questions).difference

    @property
    def rests_on_questions(self) -> bool:
        """Whether the interval is that over questions: there are no several seeds, or few seeds
        agree so well that theirs is the narrower one."""
        if self.over_seeds is None or self.paired is None:
            return self.paired is not None
        if self.paired.low is None:  # one shared question has no interval
            return False
        seeds = welch_interval(self.a.seeds, self.b.seeds)
        return self.paired.high - self.paired.low > seeds.high - seeds.low

    @property
    def difference(self) -> Estimate:
        """``b`` minus ``a``: the wider of the intervals over seeds and over questions, else that
        which there is, else of the two means."""
        if self.rests_on_questions:
            return self.paired
        return welch_interval(self.a.seeds, self.b.seeds)

    @property
    def p(self) -> float | None:
        """The p of the verdict."""
        return self.raw_p if self.corrected is None else self.corrected

    @property
    def raw_p(self) -> float | None:
        """The p that decides: over several seeds the larger one, so that it is none by chance."""
        known = [p for p in (self.over_seeds, self.by_question) if p is not None]
        if self.over_seeds is None:
            return self.by_question
        return max(known) if self.rests_on_questions else self.over_seeds

    @property
    def outcome(self) -> str:
        """Return in a word which is better: better, worse, or '' if no difference was shown."""
        if self.p is None or self.p >= LEVEL:
            return ""
        return "better" if self.difference.value > 0 else "worse"

    @property
    def verdict(self) -> str:
        if self.p is None:
            return "none possible"
        over = "" if self.over_seeds is None else " over seeds"
        if not self.outcome:
            return f"no difference was shown{over}"
        return f"{self.outcome}{over or ' on these questions; another seed may not be'}"

    @property
    def sentence(self) -> str:
        p = self.p
        if p is None:
            names = f"{name_of(self.b.group)} and {name_of(self.a.group)}"
            return f"{names} are not compared on {self.what}: they share no question"
        unit = "" if self.is_score else " points"
        verdict = f"{name_of(self.b.group)} is {self.verdict}" if self.outcome else self.verdict
        low, high = self.difference.low, self.difference.high
        if self.over_seeds is None and low is not None and (p >= LEVEL) is (low * high > 0):
            verdict += f": {self._why_apart}"
        over = f"{len(_shared(self.a, self.b))} shared questions"
        if self.over_seeds is not None:
            seeds = f"{len(self.a.seeds)} and {len(self.b.seeds)} seeds"
            over = f"{seeds}, interval over {over}" if self.rests_on_questions else seeds
        p_text = f"p {_p(p)}" if p < 0.001 else f"p = {_p(p)}"
        return (
            f"{_name(self.a, self.b)} on {self.what}: "
            f"{shown(self.difference, self.is_score, '+')}{unit} ({over}, {p_text}): {verdict}"
        )

    @property
    def _why_apart(self) -> str:
        """Return why p and interval, which is an approximation, do not agree."""
        if self.raw_p < LEVEL <= self.p:
            return "p is corrected for the number of comparisons, the interval is not"
        if self.p < LEVEL:
            return "the exact test decides, the interval is an approximation"
        return "too few questions differ for the exact test"


def compared(groups: Sequence[Group]) -> list[Compared]:
    """Compare every experiment that may be with the first one, on each data source; p is Holm's
    over all of them."""
    pairs = [
        (source, variable, same[0], other)
        for group in groups[1:]
        if not why_not_compared(groups[0], group)
        for variable in ("acc", "reward")
        for source, same in sides([groups[0], group], variable).items()
        if same[0].group is groups[0]
        for other in same[1:]
    ]
    raw = [
        Compared(
            *(source, variable, a, b),
            question_p(a.questions, b.questions) if _shared(a, b) else None,
            welch_p(a.seeds, b.seeds),
        )
        for source, variable, a, b in pairs
    ]
    # One family: the p that decides a row is over seeds in one and over questions in another
    corrected = holm({i: each.raw_p for i, each in enumerate(raw) if each.raw_p is not None})
    return [replace(each, corrected=corrected.get(i)) for i, each in enumerate(raw)]


def why_not_compared(a: Group, b: Group) -> str:
    """Return why a difference of two experiments would not be one of their policies; '' where it
    would be."""
    reasons = []
    if _scorer(a) != _scorer(b):
        reasons.append(f"scored by different functions ({_scorer(a)}; {_scorer(b)})")
    ours, theirs = decoding(a[0].config), decoding(b[0].config)
    if ours != theirs:
        reasons.append(f"decoded differently ({ours}; {theirs})")
    files, files_too = _validation_files(a), _validation_files(b)
    if files and files_too and files != files_too:
        reasons.append(
            "evaluated on different files (SHA-256 in the manifests), where one uid "
            "may be two questions"
        )
    for run in (*a, *b):
        validated = max(getattr(run, "validation", None) or [run_step(run)])
        if validated == 0 < run_step(run):
            reasons.append(
                f"{run.name} was validated before its training alone: set trainer.test_freq, or "
                "evaluate its checkpoint with core.evaluate"
            )
    every = [*a, *b]
    if len(set(map(run_step, every))) > 1:
        reasons += [f"{run.name} ended early ({run.status})" for run in every if ended_early(run)]
    return "; ".join(reasons)


def run_step(run: Any) -> int:
    """Return the last step of a run; 0 for a file of scores."""
    return getattr(run, "last_step", 0)


def ended_early(run: Any) -> bool:
    """Return whether a run has not come to its end; a file of scores has."""
    total = getattr(run, "manifest", {}).get("total_steps")
    return total is not None and 0 < run_step(run) < total


def _scorer(group: Group) -> str:
    """Return in words what scored: a user's function with its hash, or this repository's scorers
    with their options."""
    config, names = (
        group[0].config,
        (
            "custom_reward_function.",
            "reward_model.reward_kwargs",
            "reward_model.scorers",
            "reward_model.enable",
        ),
    )
    path = config.get("custom_reward_function.path")
    sha = ", ".join(each[:12] for each in group[0].hashes_of(path)) if path else ""
    function = f"{path}:{config.get('custom_reward_function.name')}" if path else "by data source"
    options = {
        k: v for k, v in config.items() if k.startswith(names) and v not in (None, {}, False)
    }
    for name in ("path", "name"):
        options.pop(f"custom_reward_function.{name}", None)
    told = [f"{key}={value}" for key, value in sorted(options.items())]
    return ", ".join([function, *([f"SHA-256 {sha}"] if sha else []), *told])


def verdicts(groups: Sequence[Group]) -> list[str]:
    """Return a line a comparison with the first experiment, and of several a last one that sums
    them up. Experiments on other data sources share one line."""
    first = name_of(groups[0])
    pairs = compared(groups)
    sources = set(sides(groups[:1]))
    others: list[str] = []  # on other data sources
    refused: dict[str, str] = {}  # the others that are not compared, with the reason
    for group in groups[1:]:
        if any(each.b.group is group for each in pairs):
            continue
        if not sources & set(sides([group])):
            others.append(name_of(group))
        else:
            refused[name_of(group)] = why_not_compared(groups[0], group)
    lines = [f"{name} and {first} are not compared: {why}" for name, why in refused.items()]
    if others:
        lines.append(
            f"{', '.join(others)}: listed beside {first}, not compared with it: "
            "no data source was evaluated by both"
        )
    lines += [each.sentence for each in pairs]
    if len(groups) > 2 and pairs:  # else the only sentence is the last line
        lines.append(summed_up(first, pairs, [*refused, *others]))
    return lines


def summed_up(first: str, pairs: Sequence[Compared], rest: Sequence[str] = ()) -> str:
    """Return the verdicts against the first experiment in one sentence."""
    parts = []
    for outcome in ("better", "worse", ""):
        names = [
            name_of(each.b.group) + ("" if each.what == pairs[0].what else f" on {each.what}")
            for each in pairs
            if each.outcome == outcome
        ]
        if names:
            parts.append(f"{outcome or 'no difference was shown'}: {', '.join(names)}")
    if rest:
        parts.append(f"not compared: {', '.join(dict.fromkeys(rest))}")
    return f"against {first} on {pairs[0].what}: {'; '.join(parts)}"


def comparison(groups: Sequence[Group]) -> Iterator[Block]:
    """Yield every experiment against the first one: by question, and over seeds where both have
    several."""
    pairs = compared(groups)
    yield Heading("Comparison")
    if not pairs:
        yield Text("\n".join(verdicts(groups)))
        return
    rows = []
    for each in pairs:
        a, b, is_score = each.a, each.b, each.is_score
        paired = (
            change(paired_comparison(a.questions, b.questions), is_score) if _shared(a, b) else ""
        )
        several = min(len(a.seeds), len(b.seeds)) > 1
        welch = shown(welch_interval(a.seeds, b.seeds), is_score, "+") if several else ""
        p = [_p(each.by_question), _p(each.over_seeds)]
        rows.append([_name(a, b), each.what, _count(a, b), paired, p[0], welch, p[1], each.verdict])
    header = ["difference", "evaluated on", "shared questions", "by question, paired", "p"]
    yield Table([*header, "over seeds, Welch", "p", "verdict"], rows)
    yield Text(
        "Accuracy in points, other scores as they are, with 95 % intervals. The paired interval "
        "is over questions for these very policies; what another seed would give is the interval "
        "over seeds, which needs at least two seeds on both sides. A verdict "
        f"is p < {LEVEL} after Holm's correction over the rows, over seeds where there are "
        "several; where the interval over questions is wider, both p have to be. By question p is "
        "McNemar's exact test, or a randomization test where few questions differ."
    )
    for each in pairs:
        if each.variable == "acc":
            yield from _flipped(each.source, each.a, each.b)


def _shared(a: Side, b: Side) -> list[str]:
    return sorted(a.questions.keys() & b.questions.keys())


def _name(a: Side, b: Side) -> str:
    return f"{name_of(b.group)} − {name_of(a.group)}"


def _count(a: Side, b: Side) -> str:
    """Return the number of shared questions, or why there are none."""
    n, of_a, of_b = len(_shared(a, b)), len(a.questions), len(b.questions)
    if not of_a or not of_b:
        return "none recorded"
    if not n:
        return f"refused: none is shared, they answered {of_a} and {of_b} different questions"
    return str(n) if n == of_a == of_b else f"{n}, of {of_a} and {of_b}"


def _p(value: float | None) -> str:
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _validation_files(group: Group) -> frozenset[str]:
    found: set[str] = set()
    for run in group:
        for path in run.config.get("data.val_files") or ():
            found.update(run.hashes_of(path))
    return frozenset(found)


# --- questions ---


def _flipped(source: str, a: Side, b: Side) -> Iterator[Block]:
    """Yield the questions on which the sides differ, with both answers where both runs kept their
    texts."""
    found = flips({uid: a.questions[uid] for uid in _shared(a, b)}, b.questions)
    if found:
        texts = [_last_answers(side.group, source, found) for side in (a, b)]
        yield flip_table(
            f"{_name(a, b)}, {source}", found, (name_of(a.group), name_of(b.group)), texts
        )


def _last_answers(group: Group, source: str, found: Sequence[Flip]) -> dict[str, Row]:
    """Return the kept answers of the last validation; of several seeds, the first that kept a
    question's."""
    rows: dict[str, Row] = {}
    for run in group:
        if run.validation:
            rows = {
                **answers(run, max(run.validation), source, [flip.uid for flip in found]),
                **rows,
            }
    return rows


def flipped_in_run(run: RecordedRun) -> Iterator[Block]:
    """Yield the questions that changed between the first and the last validation of one run."""
    first, last = min(run.validation, default=0), max(run.validation, default=0)
    for source, after in run.accuracy_at(last).items() if first < last else ():
        if found := flips(run.accuracy_at(first).get(source, {}), after):
            texts = [
                answers(run, step, source, [flip.uid for flip in found]) for step in (first, last)
            ]
            yield flip_table(
                f"{run.name}, {source}", found, (f"step {first}", f"step {last}"), texts
            )


def flip_table(
    title: str, found: Sequence[Flip], names: tuple[str, str], texts: Sequence[Mapping[str, Row]]
) -> Block:
    """Return a folded table of the flips, those with both texts first; worse and better ones
    alternate."""
    worse, better = (
        [flip for flip in found if (flip.b > flip.a) is rose] for rose in (False, True)
    )
    mixed = [flip for pair in itertools.zip_longest(worse, better) for flip in pair if flip]
    mixed.sort(key=lambda flip: -sum(flip.uid in text for text in texts))
    rows = []
    for flip in mixed[:SHOWN_FLIPS]:
        kept = [text.get(flip.uid) for text in texts]
        row = next((row for row in kept if row), {})
        question = f"{flip.uid}\n{str(row.get('input', ''))[-600:]}".strip()
        shown = [_answer(value, row) for value, row in zip((flip.a, flip.b), kept, strict=True)]
        rows.append([question, shortened(str(row.get("gts", ""))), *shown])
    listed = f", {len(rows)} shown" if len(rows) < len(found) else ""
    heading = f"Questions that flipped: {title} ({len(better)} up, {len(worse)} down{listed})"
    return Fold(heading, [Table(["question", "expected", *names], rows, prose=True)])


def _answer(accuracy: float, row: Row | None) -> str:
    text = "" if row is None else shortened(str(row["output"]))
    return f"{text}\n(accuracy {accuracy:.3g})".strip()


def shortened(text: str) -> str:
    """Return a text, or its beginning and its end."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} […] {text[-half:]}"
