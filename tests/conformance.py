"""How the functions here compare with published ones: ``python -m tests.conformance`` writes results/conformance.md.

Every golden vector in ``GOLDEN_DIR`` (default tests/golden) of a function that is here is run. For each file the
report gives the number of vectors that pass, the largest deviation, and every departure with its reason; files of
functions that are not here are named. Exits 1 if a vector fails.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests import golden_adapters, golden_variants
from tests.golden_io import check, golden_dir, golden_files, load
from tests.golden_scorers import ANSWERS, ERRORS, departure, raw_cases

ADAPTERS = {**golden_adapters.ADAPTERS, **golden_variants.ADAPTERS}
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "results" / "conformance.md"
# Files whose vectors are compared by tests of another form.
ELSEWHERE = {
    "bootstrap": "tests/core/tracking/test_validation.py",
    "val_metrics": "tests/core/tracking/test_validation.py",
}
NOT_HERE = {
    "policy_clip_cov": "published, it draws tokens within a micro-batch; here among those of an optimizer step, by the "
    "old log-probs (tests/core/algorithm/test_losses.py)",
    "policy_kl_cov": "published, it ranks the tokens of a micro-batch; here as clip_cov",
    "policy_geo_mean": "counts empty rows in its mean, and has a sequence weight of its own for rollout correction",
}
BEYOND_VECTORS = (
    "Estimators: an answer that could not be scored enters no mean, variance or count and has advantage 0; the only "
    "scored answer of a larger group has advantage 0 too, where a group of one by design keeps its reward.",
    "Estimators: advantages and returns are 0 outside the response; gae's published ones are left over there.",
    "Schedules: the trainer takes the multiplier at index step + 1, so that the first step moves the weights.",
    "gspo and sapo average per sequence; here the entropy bonus and the KL loss beside them do so too, since one "
    "weight a token serves the whole objective.",
)


@dataclass
class FileResult:
    """What the vectors of one file came to. ``departures`` counts the vectors for each reason."""

    file: str
    vectors: int = 0
    passed: int = 0
    deviation: dict[str, float] = field(default_factory=dict)
    departures: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def record(self, name: str, compare: Callable[[], Iterable[str]]) -> None:
        """Runs one vector; ``compare`` raises where it fails, and returns the reasons of its departures."""
        self.vectors += 1
        try:
            self.departures.update(set(compare()))
        except Exception as error:  # a report goes on: the failure is counted, shown, and ends in exit code 1
            self.failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            self.passed += 1


def run_algorithm(file: str) -> FileResult:
    result = FileResult(file)
    for case in load(file):

        def compare(case=case) -> Iterable[str]:
            reasons: list[str] = []
            for precision in ("f64", "f32"):
                outcome = check(ADAPTERS[file](case, precision), case.want(precision))
                result.deviation[precision] = max(result.deviation.get(precision, 0.0), outcome.deviation)
                reasons += outcome.departures.values()
            return reasons

        result.record(case.name, compare)
    return result


def run_scorer(file: str) -> FileResult:
    result = FileResult(file)
    for case in raw_cases(file):
        result.record(case["name"], lambda case=case: _compare_answer(file, case))
    return result


def _compare_answer(file: str, case: dict) -> Iterable[str]:
    reason = departure(file, case)
    if reason:
        return [reason]
    inputs, wanted = {**case["inputs"], **case.get("params", {})}, case["expected"]
    try:
        answer = ANSWERS[file](inputs)
    except ERRORS:
        assert set(wanted) == {"error"}, "an exception that was not published"
        return []
    assert {name: answer.get(name) for name in wanted} == wanted, f"{answer} instead of {wanted}"
    return []


def run_all() -> tuple[list[FileResult], list[str]]:
    """Results of the files that have a function here, and the names of those that do not."""
    results, missing = [], []
    for file in golden_files():
        if file in ADAPTERS:
            results.append(run_algorithm(file))
        elif file in ANSWERS:
            results.append(run_scorer(file))
        elif file not in ELSEWHERE:
            missing.append(file)
    return results, missing


def _bound(deviation: float | None) -> str:
    """The power of ten that the deviation stays under; machines differ below that."""
    if deviation is None:
        return ""
    return "0" if deviation == 0 else f"< 1e{math.floor(math.log10(deviation)) + 1}"


def render(results: list[FileResult], missing: list[str]) -> str:
    total, passed = sum(r.vectors for r in results), sum(r.passed for r in results)
    departing = sum(sum(r.departures.values()) for r in results)
    lines = [
        "# Conformance with published implementations",
        "",
        "Written by `python -m tests.conformance`: do not edit. Inputs and outputs of public implementations,",
        "replayed. A deviation is `|ours - published| / max(1, |published|)`, the largest of the file, in float64 and",
        "in float32; scorers have to agree exactly.",
        "",
        f"{passed} of {total} vectors pass: {passed - departing} agree, {departing} are listed departures.",
        "",
        "| vectors | passed | of | float64 | float32 | departures |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        f64, f32 = (_bound(r.deviation.get(precision)) for precision in ("f64", "f32"))
        lines.append(f"| {r.file} | {r.passed} | {r.vectors} | {f64} | {f32} | {sum(r.departures.values()) or ''} |")
    lines += [
        "",
        "## Departures",
        "",
        "Where this repository returns another value than the published one, and why.",
        "",
    ]
    lines += [
        f"- **{r.file}**, {count} of {r.vectors}: {reason}"
        for r in results
        for reason, count in sorted(r.departures.items())
    ]
    lines += ["", "In what no vector shows:", "", *(f"- {reason}" for reason in BEYOND_VECTORS)]
    lines += ["", "## Compared elsewhere, or not here", ""]
    lines += [f"- {file}: {where}" for file, where in ELSEWHERE.items() if file in golden_files()]
    lines += [f"- {file}: {reason}" for file, reason in NOT_HERE.items()]
    lines += [f"- {file}: no function here" for file in missing if file not in NOT_HERE]
    failures = [f"- **{r.file}** {failure}" for r in results for failure in r.failures]
    if failures:
        lines += ["", "## Failures", "", *failures]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    out = parser.parse_args().out
    results, missing = run_all()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(results, missing), encoding="utf-8")
    failed = [failure for r in results for failure in r.failures]
    print(
        f"{sum(r.passed for r in results)} of {sum(r.vectors for r in results)} vectors of {golden_dir()} pass: {out}"
    )
    print(*failed, sep="\n", end="\n" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
