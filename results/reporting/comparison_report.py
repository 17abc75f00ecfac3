"""The part of a report that compares experiments: every one with the first, and the questions that flipped.

The statistics are in :mod:`results.reporting.comparison`.
"""

from __future__ import annotations

import difflib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from core.errors import InputError
from results.reporting.answers import Flip, Row, answers, flips
from results.reporting.comparison import holm, paired_comparison, question_p, welch_interval, welch_p
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


# --- experiments ---


@dataclass(frozen=True)
class Side:
    """One experiment on one data source: the accuracy of each seed, and of each question over the seeds."""

    group: Group
    seeds: Sequence[float]
    questions: Mapping[str, float]


def sides(groups: Sequence[Group]) -> dict[str, list[Side]]:
    """Return ``data_source -> sides`` in the order of the experiments, at the last validation of each run."""
    found: dict[str, list[Side]] = {}
    for group in groups:
        pooled: dict[str, dict[str, list[float]]] = {}
        for run in group:
            for source, by_uid in run.accuracy_at(max(run.validation, default=-1)).items():
                for uid, accuracy in by_uid.items():
                    pooled.setdefault(source, {}).setdefault(uid, []).append(accuracy)
        for each in experiments([comparable(run) for run in group]):
            if each.metric.startswith("mean@"):
                questions = {uid: statistics.fmean(of) for uid, of in pooled.get(each.source, {}).items()}
                found.setdefault(each.source, []).append(Side(group, each.values("after"), questions))
    return dict(sorted(found.items()))


def comparison(groups: Sequence[Group]) -> Iterator[Block]:
    """Yield every experiment against the first one: by question, and over seeds where both have several."""
    pairs = [
        (source, same[0], other)
        for group in groups[1:]
        for source, same in sides(groups).items()
        if same[0].group is groups[0]
        for other in same[1:]
        if other.group is group
    ]
    yield Heading("Comparison")
    if not pairs:
        yield Text(f"No data source was evaluated by {name_of(groups[0])} and by another experiment.")
        return
    by_question = {i: question_p(a.questions, b.questions) for i, (_, a, b) in enumerate(pairs) if _shared(a, b)}
    over_seeds = {i: p for i, (_, a, b) in enumerate(pairs) if (p := welch_p(a.seeds, b.seeds)) is not None}
    by_question, over_seeds = holm(by_question), holm(over_seeds)
    rows = []
    for i, (source, a, b) in enumerate(pairs):
        p = by_question.get(i), over_seeds.get(i)
        paired = change(paired_comparison(a.questions, b.questions)) if _shared(a, b) else ""
        welch = percent(welch_interval(a.seeds, b.seeds), "+") if min(len(a.seeds), len(b.seeds)) > 1 else ""
        rows.append([_name(a, b), source, _count(a, b), paired, _p(p[0]), welch, _p(p[1]), _verdict(*p)])
    header = ["difference", "evaluated on", "shared questions", "by question, paired", "p"]
    yield Table([*header, "over seeds, Welch", "p", "verdict"], rows)
    yield Text(
        "Accuracy in points with 95 % intervals. The paired interval is over questions for these very policies; what "
        "another seed would give is the interval over seeds, which needs at least two seeds on both sides. A verdict "
        f"is p < {LEVEL} after Holm's correction over the rows, over seeds where there are several. By question p is "
        "McNemar's exact test, or a randomization test where few questions differ."
    )
    yield from _cautions(groups)
    for source, a, b in pairs:
        yield from _flipped(source, a, b)


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


def _flipped(source: str, a: Side, b: Side) -> Iterator[Block]:
    """Yield the questions on which the sides differ, with both answers where both runs kept their texts."""
    found = flips({uid: a.questions[uid] for uid in _shared(a, b)}, b.questions)
    if found:
        texts = [_last_answers(side.group, source, found) for side in (a, b)]
        yield flip_table(f"{_name(a, b)}, {source}", found, (name_of(a.group), name_of(b.group)), texts)


def _last_answers(group: Group, source: str, found: Sequence[Flip]) -> dict[str, Row]:
    """Return the kept answers of the last validation; of several seeds, the first that kept a question's."""
    rows: dict[str, Row] = {}
    for run in group:
        if run.validation:
            rows = {**answers(run, max(run.validation), source, [flip.uid for flip in found]), **rows}
    return rows


def flipped_in_run(run: RecordedRun) -> Iterator[Block]:
    """Yield the questions that changed between the first and the last validation of one run."""
    first, last = min(run.validation, default=0), max(run.validation, default=0)
    for source, after in run.accuracy_at(last).items() if first < last else ():
        if found := flips(run.accuracy_at(first).get(source, {}), after):
            texts = [answers(run, step, source, [flip.uid for flip in found]) for step in (first, last)]
            yield flip_table(f"{run.name}, {source}", found, (f"step {first}", f"step {last}"), texts)


def flip_table(title: str, found: Sequence[Flip], names: tuple[str, str], texts: Sequence[Mapping[str, Row]]) -> Block:
    """Return a folded table of the flips, those with both texts first; worse and better ones alternate."""
    worse, better = ([flip for flip in found if (flip.b > flip.a) is rose] for rose in (False, True))
    mixed = [flip for pair in itertools.zip_longest(worse, better) for flip in pair if flip]
    mixed.sort(key=lambda flip: -sum(flip.uid in text for text in texts))
    rows = []
    for flip in mixed[:SHOWN_FLIPS]:
        kept = [text.get(flip.uid) for text in texts]
        row = next((row for row in kept if row), {})
        question = f"{flip.uid}\n{str(row.get('input', ''))[-600:]}".strip()
        shown = [_answer(value, row) for value, row in zip((flip.a, flip.b), kept, strict=True)]
        rows.append([question, str(row.get("gts", "")), *shown])
    listed = f", {len(rows)} shown" if len(rows) < len(found) else ""
    heading = f"Questions that flipped: {title} ({len(better)} up, {len(worse)} down{listed})"
    return Fold(heading, [Table(["question", "expected", *names], rows, prose=True)])


def _answer(accuracy: float, row: Row | None) -> str:
    text, half = "" if row is None else str(row["output"]), SHOWN_CHARACTERS // 2
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} […] {text[-half:]}"
    return f"{shown}\n(accuracy {accuracy:.3g})".strip()
