"""The part of a report that compares experiments: differences, what could have been found, letters, flipped questions.

The statistics are in :mod:`results.reporting.comparison`.
"""

from __future__ import annotations

import difflib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from core.errors import InputError
from results.reporting.answers import Flip, Row, answers, flips
from results.reporting.comparison import (
    Paired,
    holm,
    paired_comparison,
    question_p,
    welch_interval,
    welch_p,
)
from results.reporting.curves import Group
from results.reporting.numbers import change, percent
from results.reporting.pages import Block, Fold, Heading, Table, Text
from results.reporting.readme_tables import experiments
from results.reporting.run_reader import RecordedRun
from results.reporting.summaries import comparable, decoding, group_name

LEVEL = 0.05
SHOWN_FLIPS = 40  # questions that a table lists
SHOWN_CHARACTERS = 1_500  # of an answer


def name_of(group: Group) -> str:
    return group_name([run.name for run in group])


def with_baseline(groups: Sequence[Group], name: str | None) -> list[Group]:
    """Return the experiments with the named one first: by the name of an experiment, of a run, or of its folder.

    Raises:
        InputError: no experiment has the name.
    """
    if name is None:
        return list(groups)
    known: dict[str, int] = {}
    for at, group in enumerate(groups):
        for each in (name_of(group), *(run.name for run in group), *(str(run.folder) for run in group)):
            known.setdefault(each, at)
    if name.rstrip("/") not in known:
        shown = list(dict.fromkeys(name_of(group) for group in groups))
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.4) or shown
        raise InputError(f"--baseline {name}: no run on the command line has this name; near it: {', '.join(near)}")
    first = known[name.rstrip("/")]
    return [groups[first], *(group for at, group in enumerate(groups) if at != first)]


# --- what is compared ---


def question_means(group: Group) -> dict[str, dict[str, float]]:
    """Return ``data_source -> uid -> accuracy`` at each run's last validation, the mean of the seeds that have it."""
    pooled: dict[str, dict[str, list[float]]] = {}
    for run in group:
        for source, by_uid in run.accuracy_at(max(run.validation, default=-1)).items():
            for uid, accuracy in by_uid.items():
                pooled.setdefault(source, {}).setdefault(uid, []).append(accuracy)
    return {source: {uid: statistics.fmean(v) for uid, v in by_uid.items()} for source, by_uid in pooled.items()}


def seed_values(group: Group) -> dict[str, list[float]]:
    """Return ``data_source -> mean accuracy`` of each seed at the last validation."""
    found = experiments([comparable(run) for run in group])
    return {each.source: each.values("after") for each in found if each.metric.startswith("mean@")}


@dataclass(frozen=True)
class Side:
    """One experiment on one data source: the accuracy of each seed, and of each question over the seeds."""

    group: Group
    seeds: Sequence[float]
    questions: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """Side ``b`` minus side ``a`` on one data source."""

    source: str
    a: Side
    b: Side

    @property
    def name(self) -> str:
        return f"{name_of(self.b.group)} − {name_of(self.a.group)}"

    @cached_property
    def shared(self) -> list[str]:
        return sorted(self.a.questions.keys() & self.b.questions.keys())

    @cached_property
    def paired(self) -> Paired | None:
        return paired_comparison(self.a.questions, self.b.questions) if self.shared else None

    @cached_property
    def question_p(self) -> float | None:
        return question_p(self.a.questions, self.b.questions) if self.shared else None

    @cached_property
    def seed_p(self) -> float | None:
        return welch_p(self.a.seeds, self.b.seeds)

    @property
    def count(self) -> str:
        """The number of shared questions, or why there are none."""
        n, of_a, of_b = len(self.shared), len(self.a.questions), len(self.b.questions)
        if not of_a or not of_b:
            return "none recorded"
        if not n:
            return f"refused: none is shared, they answered {of_a} and {of_b} different questions"
        return str(n) if n == of_a == of_b else f"{n}, of {of_a} and {of_b}"


def sides(groups: Sequence[Group]) -> dict[str, list[Side]]:
    """Return ``data_source -> sides`` in the order of the experiments, where they were evaluated on it."""
    found: dict[str, list[Side]] = {}
    for group in groups:
        questions = question_means(group)
        for source, values in seed_values(group).items():
            found.setdefault(source, []).append(Side(group, values, questions.get(source, {})))
    return dict(sorted(found.items()))


# --- blocks ---


def comparison(groups: Sequence[Group]) -> Iterator[Block]:
    """Yield every experiment against the first one: by question, and over seeds where both have several."""
    by_source = sides(groups)
    found = [
        Comparison(source, same[0], other)
        for other_group in groups[1:]
        for source, same in by_source.items()
        if same[0].group is groups[0]
        for other in same[1:]
        if other.group is other_group
    ]
    yield Heading("Comparison")
    if not found:
        yield Text(f"No data source was evaluated by {name_of(groups[0])} and by another experiment.")
        return
    p_questions = holm({i: c.question_p for i, c in enumerate(found) if c.question_p is not None})
    p_seeds = holm({i: c.seed_p for i, c in enumerate(found) if c.seed_p is not None})
    rows = []
    for i, each in enumerate(found):
        welch = welch_interval(each.a.seeds, each.b.seeds) if min(len(each.a.seeds), len(each.b.seeds)) > 1 else None
        cells = [each.name, each.source, each.count, change(each.paired) if each.paired else ""]
        p = p_questions.get(i), p_seeds.get(i)
        cells += [_p(p[0]), percent(welch, sign="+") if welch else "", _p(p[1]), _verdict(*p)]
        rows.append(cells)
    header = [
        "difference",
        "evaluated on",
        "shared questions",
        "by question, paired",
        "p",
        "over seeds, Welch",
        "p",
        "verdict",
    ]
    yield Table(header, rows)
    yield Text(
        "Accuracy in points with 95 % intervals. The paired interval is over questions for these very policies; what "
        "another seed would give is the interval over seeds, which needs at least two seeds on both sides. A verdict "
        f"is p < {LEVEL} after Holm's correction over the rows, over seeds where there are several. By question p is "
        "McNemar's exact test, or a randomization test where few questions differ."
    )
    yield from _cautions(groups)
    for each in found:
        yield from flipped(each)


def _p(value: float | None) -> str:
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _verdict(by_question: float | None, over_seeds: float | None) -> str:
    if over_seeds is not None:
        return "differs over seeds" if over_seeds < LEVEL else "not told apart over seeds"
    if by_question is None:
        return "none possible"
    return "these policies differ, another seed may not" if by_question < LEVEL else "not told apart by question"


def _cautions(groups: Sequence[Group]) -> Iterator[Block]:
    if len({decoding(group[0].config) for group in groups}) > 1:
        yield Text("The runs decoded differently in validation: the difference is not one of the policies alone.")
    if len({files for group in groups if (files := _validation_files(group))}) > 1:
        yield Text(
            "The validation files differ (sha256 in the manifests): equal uids may stand for other questions there."
        )


def _validation_files(group: Group) -> frozenset[str]:
    names = {str(path) for run in group for path in run.config.get("data.val_files") or ()}
    return frozenset(d["sha256"] for run in group for d in run.manifest.get("data", ()) if d["path"] in names)


# --- questions ---


def flipped(each: Comparison) -> Iterator[Block]:
    """Yield the questions on which the sides differ, with both answers where both runs kept their texts."""
    found = flips({uid: each.a.questions[uid] for uid in each.shared}, each.b.questions)
    if not found:
        return
    uids = [flip.uid for flip in found]
    a, b = (_last_answers(side.group, each.source, uids) for side in (each.a, each.b))
    names = name_of(each.a.group), name_of(each.b.group)
    yield flip_table(f"{each.name}, {each.source}", found, names, (a, b))


def flipped_in_run(run: RecordedRun) -> Iterator[Block]:
    """Yield the questions that changed between the first and the last validation of one run."""
    first, last = min(run.validation, default=0), max(run.validation, default=0)
    if first == last:
        return
    for source, after in run.accuracy_at(last).items():
        if found := flips(run.accuracy_at(first).get(source, {}), after):
            uids = [flip.uid for flip in found]
            texts = answers(run, first, source, uids), answers(run, last, source, uids)
            yield flip_table(f"{run.name}, {source}", found, (f"step {first}", f"step {last}"), texts)


def _last_answers(group: Group, source: str, uids: Sequence[str]) -> dict[str, Row]:
    """Return the kept answers of the last validation; of several seeds, the first that kept a question's."""
    found: dict[str, Row] = {}
    for run in group:
        found = {**answers(run, max(run.validation), source, uids), **found} if run.validation else found
    return found


def flip_table(
    title: str, found: Sequence[Flip], names: tuple[str, str], texts: tuple[Mapping[str, Row], Mapping[str, Row]]
) -> Block:
    """Return a folded table of the flips, those with both texts first; worse and better ones alternate."""
    worse, better = ([flip for flip in found if (flip.b > flip.a) is rose] for rose in (False, True))
    mixed = [flip for pair in itertools.zip_longest(worse, better) for flip in pair if flip]
    mixed.sort(key=lambda flip: -sum(flip.uid in text for text in texts))
    rows = []
    for flip in mixed[:SHOWN_FLIPS]:
        kept = [text.get(flip.uid) for text in texts]
        row = next((row for row in kept if row), {})
        question = f"{flip.uid}\n{str(row.get('input', ''))[-600:]}".strip()
        sides = [_side(value, row) for value, row in zip((flip.a, flip.b), kept, strict=True)]
        rows.append([question, str(row.get("gts", "")), *sides])
    shown = f", {len(rows)} shown" if len(rows) < len(found) else ""
    heading = f"Questions that flipped: {title} ({len(better)} up, {len(worse)} down{shown})"
    return Fold(heading, [Table(["question", "expected", *names], rows, prose=True)])


def _side(accuracy: float, row: Row | None) -> str:
    text = "" if row is None else str(row["output"])
    half = SHOWN_CHARACTERS // 2
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} […] {text[-half:]}"
    return f"{shown}\n(accuracy {accuracy:.3g})".strip()
