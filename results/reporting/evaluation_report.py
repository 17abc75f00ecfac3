"""The report of an evaluation: accuracies under the strict and the lenient reading of its scorer.

The strict reading is the one that the scores were made with, as a rule that of published numbers: one form of answer,
compared as text. Several scorers have a lenient one, ``method=robust``, which reads other forms of the answer and
compares values. What lies between the two is how the model writes, not what it knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from core.data.parquet import sha256_of
from core.errors import InputError
from results.reporting.accuracies import Summary, summary
from results.reporting.comparison import accuracy_by_question, paired_comparison
from results.reporting.numbers import change, percent
from results.reporting.pages import Block, Heading, Table, Text, write_pages
from reward_scores import scorer_for

LENIENT = "robust"  # the method of a scorer that has a lenient reading
KWARGS = "reward_model.reward_kwargs"


def write_evaluation(paths: Sequence[Path], out: Path | None) -> tuple[Path, str]:
    """Write the page of files of scores into ``out``, by default the first one's folder; return it and its first lines.

    Of several, each is compared with the first by the questions that both have.

    Raises:
        InputError: a file is damaged, or the answers that it was made from are gone or others.
    """
    pairs = [(one := summary(path), lenient(one)) for path in paths]
    title = ", ".join(_title(strict) for strict, _ in pairs)
    first, *others = [strict for strict, _ in pairs]
    differences = [found for one in others for found in _against(first, one)]
    blocks: list[Block] = []
    if differences:
        header = ["evaluated on", "model", f"against {_title(first)}, by question"]
        blocks += [Heading("Beside each other"), Table(header, [list(row) for row in differences])]
    for strict, other in pairs:
        blocks += [Heading(_title(strict))] if len(pairs) > 1 else []
        blocks += _blocks(strict, other)
    page = write_pages(out or paths[0].parent, "evaluation", title, blocks)[1]
    lines = [
        f"{_model(strict)}: {percent(found['mean@' + str(_samples(strict, source))])} % on {source}"
        for strict, _ in pairs
        for source, found in strict.sources.items()
    ]
    lines += [
        f"{model}, against {_title(first)}, by question: {difference} on {source}"
        for source, model, difference in differences
    ]
    return page, "\n".join(lines)


def _against(first: Summary, other: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield data source, the other model and its difference from the first, by the questions that both answered."""
    ours, theirs = accuracy_by_question(first.records), accuracy_by_question(other.records)
    for source in [name for name in ours if name in theirs]:
        if ours[source].keys() & theirs[source].keys():
            yield source, _title(other), change(paired_comparison(ours[source], theirs[source]))


def _title(one: Summary) -> str:
    return f"{_model(one)}, scored by {one.manifest['scorer']}"


def _model(one: Summary) -> str:
    model = one.manifest["model"]
    return f"{model['run']}, step {model['step']}" if "run" in model else Path(model["path"]).name


def _samples(one: Summary, source: str) -> int:
    return min(len(record.values["acc"]) for record in one.of(source))


# --- the lenient reading ---


def lenient_settings(strict: Summary) -> list[str]:
    """Return the overrides that make the file's scorers lenient; none where they have no lenient reading, or are it."""
    rewards: Mapping[str, object] = strict.manifest["rewards"]
    if rewards.get("custom_reward_function.path"):
        return []
    used = rewards.get(KWARGS) or {}
    found = []
    for name in strict.manifest["scorers"]:
        methods = getattr(importlib.import_module(f"reward_scores.{name}"), "METHODS", ())
        if LENIENT in methods and (used.get(name) or {}).get("method") != LENIENT:
            found.append(f"{KWARGS}.{name}.method={LENIENT}")
    return found


def lenient(strict: Summary) -> Summary | None:
    """Return the same answers' scores under the lenient reading, made now where they are absent; None without one."""
    settings = lenient_settings(strict)
    if not settings:
        return None
    from core.evaluate import score  # it loads torch

    answers = strict.path.with_name(strict.manifest["answers"])
    label = f"{strict.manifest['scorer']}-lenient"
    path = strict.path.with_name(f"{answers.stem}.scores-{label}.jsonl")
    if not answers.exists() or sha256_of(answers) != strict.manifest["answers_sha256"]:
        raise InputError(f"{strict.path}: {answers} is gone or another file; score its answers again")
    if path.exists() and (made := summary(path)).manifest["answers_sha256"] == strict.manifest["answers_sha256"]:
        return made
    names = strict.manifest["scorers"]
    forced = names[0] if len(names) == 1 and any(not _scores(names[0], source) for source in strict.sources) else None
    return summary(score(answers, settings, forced, label)[0])


def _scores(name: str, source: str) -> bool:
    try:
        return scorer_for(source).name == name
    except ValueError:
        return False


# --- the page ---


def _blocks(strict: Summary, other: Summary | None) -> Iterator[Block]:
    yield _accuracies(strict, other)
    samples = {_samples(strict, source) for source in strict.sources}
    yield Text(
        f"Percent with 95 % intervals over questions; {strict.decoding}, {max(samples)} answers a question. The strict "
        "reading is that of the scores; the lenient one is the scorer's `robust`, which reads other forms of the same "
        "answer and compares values."
        + ("" if other else " Of these scorers none has a lenient reading, or the scores are it.")
    )
    yield Heading("Where it comes from")
    manifest = strict.manifest
    rows = [
        ["model", str(manifest["model"]["path"])],
        ["scorers", "+".join(manifest["scorers"])],
        ["answers", f"{manifest['answers']} (SHA-256 {manifest['answers_sha256'][:12]})"],
        ["questions", str(manifest["questions"])],
    ]
    yield Table(["", ""], rows)


def _accuracies(strict: Summary, other: Summary | None) -> Table:
    """Return a line a data source and metric: both readings beside each other, and their difference by question."""
    readings = [accuracy_by_question(one.records) for one in (strict, other) if one is not None]
    rows = []
    for source, metrics in strict.sources.items():
        for metric, estimate in metrics.items():
            row = [source, metric, str(estimate.n), percent(estimate)]
            if other is not None:
                both = [found[source] for found in readings]
                by_question = change(paired_comparison(*both)) if metric.startswith("mean@") else ""
                row += [percent(other.sources[source][metric]), by_question]
            rows.append(row)
    header = ["evaluated on", "metric", "questions", "strict"]
    return Table([*header, *(["lenient", "lenient against strict, by question"] if other else [])], rows)
