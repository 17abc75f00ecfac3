"""Accuracies of scored answers: by data source and as the mean over them, each with a 95 %
interval.

    python -m results.reporting.accuracies ANSWERS.scores-NAME.jsonl ... [--k 1 8]

It prints a table, and of several files the difference of each from the first by question with a
verdict, as python -m results.report does; the numbers are written as JSON beside each file. The
estimates are :mod:`core.tracking.validation`'s: an evaluation and a validation of a run give equal
numbers.

Scores are made by the strict reading of a scorer, as a rule that of published numbers: one form of
answer, compared as text. Several scorers have a lenient one, ``method=robust``, which reads other
forms and compares values. What lies between the two is how the model writes, not what it knows.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.answers import read_manifest, refuse_unscored
from core.dry_run import is_dry_run
from core.errors import InputError, printable
from core.evaluate import score
from core.files import file_sha256, write_atomic
from core.tracking.json_lines import read_jsonl
from core.tracking.validation import (
    Estimate,
    ValRecord,
    are_shares,
    failed_share,
    merge_by_question,
    validation_metrics,
    variable_estimates,
)
from results.reporting.comparison import accuracy_by_question, holm, question_p
from results.reporting.comparison_report import Compared, Side, summed_up
from results.reporting.numbers import shown
from results.reporting.pages import Table, markdown_table

MACRO = "macro average"
LENIENT = "robust"  # the method of a scorer that has a lenient reading
KWARGS = "reward_model.reward_kwargs"
# Settings in which two models may differ: weights, their chat template, answers a question
OF_A_MODEL = ("model", "prompts", "actor_rollout_ref.rollout.val_kwargs.n")


@dataclass(frozen=True)
class Summary:
    """One file of scores. ``sources[source][metric]`` is an estimate over the source's
    questions."""

    path: Path
    manifest: Mapping[str, Any]
    records: list[ValRecord]
    sources: Mapping[str, Mapping[str, Estimate]]

    @property
    def macro(self) -> dict[str, Estimate]:
        """The metrics that all sources have, as means over the sources: each weighs the same, as in
        papers."""
        first, *others = self.sources.values()
        shared = [metric for metric in first if all(metric in one for one in others)]
        return {
            metric: macro_average([one[metric] for one in self.sources.values()])
            for metric in shared
        }

    def of(self, source: str) -> list[ValRecord]:
        return [record for record in self.records if record.data_source == source]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def scored(self) -> frozenset[str]:
        """The sources whose scorer gives more than right and wrong."""
        return frozenset(
            source
            for source in self.sources
            if not are_shares(value for each in self.of(source) for value in each.values["acc"])
        )

    @property
    def dense(self) -> frozenset[str]:
        """The sources whose rewards are not their accuracies."""
        return frozenset(
            each.data_source
            for each in self.records
            if each.values.get("reward", each.values["acc"]) != each.values["acc"]
        )

    @property
    def questions(self) -> frozenset[tuple[str, str]]:
        return frozenset((record.data_source, record.uid) for record in self.records)

    def to_json(self) -> dict[str, Any]:
        names = ("model", "scorer", "settings", "answers", "answers_sha256")
        return {
            **{name: self.manifest[name] for name in names},
            "sources": {source: _plain(metrics) for source, metrics in self.sources.items()},
            "macro_average": _plain(self.macro),
            "metrics": validation_metrics(self.records),
        }

    @property
    def decoding(self) -> str:
        """How the answers were sampled, in a few words."""
        prefix = "actor_rollout_ref.rollout.val_kwargs."
        chosen = {
            key.removeprefix(prefix): value
            for key, value in self.manifest["settings"].items()
            if prefix in key
        }
        if not chosen["do_sample"]:
            return "greedy"
        cut = f", top-p {chosen['top_p']:g}" if chosen["top_p"] < 1 else ""
        cut += f", top-k {chosen['top_k']}" if chosen["top_k"] != -1 else ""
        return f"T={chosen['temperature']:g}{cut}"


def macro_average(sets: Sequence[Estimate]) -> Estimate:
    """Return the mean of the sets' values, with an interval of which the variances of the sets'
    means add up.

    A small set (Bamboogle: 125 questions) has its full share of the interval. There is none where a
    set has none.
    """
    mean = math.fsum(one.value for one in sets) / len(sets)
    n = sum(one.n for one in sets)
    if any(one.low is None or one.high is None for one in sets):
        return Estimate(mean, None, None, n)
    half = math.hypot(*((one.high - one.low) / 2 for one in sets)) / len(sets)
    low, high = mean - half, mean + half
    if all(one.low >= 0 and one.high <= 1 for one in sets):
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, low, high, n)


def summary(path: Path, sizes: Sequence[int] | None = None) -> Summary:
    """Read a file of scores. ``sizes`` are the k of ``pass@k``; by default powers of two and all
    samples.

    Raises InputError for another file, a damaged one, and a k above the samples of a question.
    """
    manifest = read_manifest(path, "scores")
    try:
        records = [ValRecord.from_json(row) for row in read_jsonl(path)]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is damaged ({error}); score the answers again") from error
    if len(records) != manifest["questions"]:
        raise InputError(
            f"{path}: holds {len(records)} of {manifest['questions']} questions; "
            f"score the answers again"
        )
    refuse_unscored(path, records)
    sources = {}
    for source, rows in merge_by_question(records).items():
        n = min(len(row.values["acc"]) for row in rows)
        if beyond := [k for k in sizes or () if not 1 <= k <= n]:
            rule = f"must lie between 1 and the {n} samples of a question of {source}"
            raise InputError(
                f"--k={beyond[0]}: {rule} in {path}; lower it, or generate more (val_kwargs.n)"
            )
        sources[source] = variable_estimates("acc", rows, n, sizes)
    return Summary(path, manifest, records, sources)


def report(paths: Sequence[Path], sizes: Sequence[int] | None = None) -> str:
    """Write ``<scores>.report.json`` beside each file and return their table in Markdown.

    Raises InputError, and writes nothing, where the files answered different questions.
    """
    summaries = [summary(path, sizes) for path in paths]
    first = summaries[0]
    for other in summaries[1:]:
        if missing := len(first.questions ^ other.questions):
            raise InputError(
                f"{other.path}: {missing} questions are in it or in {first.path} alone, of "
                f"{len(first.questions)} and "
                f"{len(other.questions)}; compare scores of the same questions, or report one "
                f"file at a time"
            )
    for one in summaries:
        text = json.dumps(one.to_json(), indent=1, ensure_ascii=False)
        write_atomic(report_path(one.path), text + "\n")
    apart = [one for one in summaries[1:] if why_not_compared(first, one)]
    pairs = _compared([one for one in summaries if one not in apart])
    lines = [
        table(summaries),
        *(f"{first.name}, {one.name}: {why_not_compared(first, one)}" for one in apart),
        *(each.sentence for each in pairs),
    ]
    return "\n".join([*lines, summed_up(first.name, pairs)] if len(pairs) > 1 else lines)


def why_not_compared(a: Summary, b: Summary) -> str:
    """Return why a difference of two files would not be one of their models; '' where it would be,
    and where the answers are of one model, decoded or scored in two ways."""
    ours, theirs = a.manifest["settings"], b.manifest["settings"]
    if ours["model"] == theirs["model"]:
        return ""
    if a.decoding != b.decoding:
        return f"not compared: decoded differently ({a.decoding}; {b.decoding})"
    for name in ("scorers", "rewards"):
        if a.manifest[name] != b.manifest[name]:
            changed = f"{a.manifest[name]}; {b.manifest[name]}"
            return f"not compared: scored differently ({changed})"
    other = [key for key in ours if key not in OF_A_MODEL and ours[key] != theirs.get(key)]
    changed = ", ".join(f"{key}={ours[key]}, {theirs.get(key)}" for key in other)
    return f"not compared: answered under other settings ({changed})" if other else ""


def _compared(summaries: Sequence[Summary]) -> list[Compared]:
    """Compare every file with the first by question, on each data source; p is Holm's over all."""
    pairs = []
    for variable in ("acc", "reward"):
        by_file = [accuracy_by_question(each.records, variable) for each in summaries]
        for other, by_source in zip(summaries[1:], by_file[1:], strict=True):
            for source in by_source:
                if variable == "acc" or source in summaries[0].dense | other.dense:
                    a = Side([summaries[0]], [], by_file[0][source])
                    pairs.append((source, variable, a, Side([other], [], by_source[source])))
    raw = {i: question_p(a.questions, b.questions) for i, (*_, a, b) in enumerate(pairs)}
    p = holm(raw)
    return [Compared(*pair, raw[i], None, p[i]) for i, pair in enumerate(pairs)]


def report_path(scores: Path) -> Path:
    return scores.with_suffix(".report.json")


def table(summaries: Sequence[Summary]) -> str:
    """Return a line a file and metric: percent, 95 % interval and questions of each source and of
    their mean."""
    sources = list(dict.fromkeys(source for one in summaries for source in one.sources))
    several = len(sources) > 1
    header = ["model", "scorer", "decoding", "metric", *sources, *([MACRO] if several else [])]
    rows = []
    for one in summaries:
        step = one.manifest["model"].get("step")
        model = (
            one.manifest["model"]["path"]
            if step is None
            else f"{one.manifest['model']['run']}, step {step}"
        )
        for metric in dict.fromkeys(
            metric for metrics in one.sources.values() for metric in metrics
        ):
            cells = [_cell(one.sources[source].get(metric), one.of(source)) for source in sources]
            cells += [_cell(one.macro.get(metric), one.records)] * several
            rows.append([model, one.manifest["scorer"], one.decoding, metric, *cells])
    return markdown_table(Table(header, rows))


# --- the lenient reading ---


def lenient(strict: Summary) -> Summary | None:
    """Return the same answers' scores under the lenient reading, made now where they are absent;
    None without one.

    Raises InputError where the answers are gone or others.
    """
    settings = _lenient_settings(strict)
    if not settings:
        return None
    answers = strict.path.with_name(strict.manifest["answers"])
    label = f"{strict.manifest['scorer']}-lenient"
    path = strict.path.with_name(f"{answers.stem}.scores-{label}.jsonl")
    if not answers.exists() or file_sha256(answers) != strict.manifest["answers_sha256"]:
        raise InputError(
            f"{strict.path}: {answers} is gone or another file; score its answers again"
        )
    if (
        path.exists()
        and (made := summary(path)).manifest["answers_sha256"] == strict.manifest["answers_sha256"]
    ):
        return made
    return summary(score(answers, settings, label)[0])


def _lenient_settings(strict: Summary) -> list[str]:
    """Return the overrides that make the file's scorers lenient; none where they have no lenient
    reading, or are it."""
    rewards: Mapping[str, Any] = strict.manifest["rewards"]
    if rewards.get("custom_reward_function.path"):
        return []
    found = []
    for name in strict.manifest["scorers"]:
        methods = getattr(importlib.import_module(f"reward_scores.{name}"), "METHODS", ())
        if (
            LENIENT in methods
            and ((rewards.get(KWARGS) or {}).get(name) or {}).get("method") != LENIENT
        ):
            found.append(f"{KWARGS}.{name}.method={LENIENT}")
    return found


# --- the table ---


def _cell(estimate: Estimate | None, records: Sequence[ValRecord]) -> str:
    """Return an estimate with its questions, and with the share that the scorer failed on."""
    if estimate is None:
        return "none"
    is_score = not are_shares(value for record in records for value in record.values["acc"])
    failed = failed_share(records)
    counted = f"n={estimate.n}" + (f", the scorer failed on {failed:.1%}" if failed else "")
    return f"{'score ' if is_score else ''}{shown(estimate, is_score)} ({counted})"


def _plain(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {metric: dataclasses.asdict(estimate) for metric, estimate in estimates.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m results.reporting.accuracies", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "scores", nargs="+", type=Path, help="The files that core.evaluate score wrote."
    )
    parser.add_argument(
        "--k", nargs="+", type=int, help="The k of pass@k (default: powers of two and all samples)."
    )
    args = parser.parse_args(arguments)
    if is_dry_run():
        print("\n".join(["dry run", *(f"written: {report_path(path)}" for path in args.scores)]))
        return 0
    try:
        print(printable(report(args.scores, args.k)))
    except (InputError, OSError) as error:
        print(printable(f"results.reporting.accuracies: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
