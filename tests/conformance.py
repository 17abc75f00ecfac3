"""How the functions here compare with published ones: ``python -m tests.conformance`` writes
results/conformance.md.

Every golden vector in ``GOLDEN_DIR`` (default tests/golden) of a function that is here is run. For
each file the report gives the number of vectors that pass, the largest deviation, and every
departure with its reason; files of functions that are not here are named. Exits 1 if a vector
fails.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
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
    "policy_clip_cov": "published, it draws tokens within a micro-batch; here among those of an "
    "optimizer step, by the "
    "old log-probs (tests/core/algorithm/test_losses.py)",
    "policy_kl_cov": "published, it ranks the tokens of a micro-batch; here as clip_cov",
    "policy_geo_mean": "counts empty rows in its mean, and has a sequence weight of its own for "
    "rollout correction",
}
BEYOND_VECTORS = (
    "Estimators: an answer that could not be scored enters no mean, variance or count and has "
    "advantage 0; the only "
    "scored answer of a larger group has advantage 0 too, where a group of one by design keeps "
    "its reward.",
    "Estimators: advantages and returns are 0 outside the response; gae's published ones are left "
    "over there.",
    "Schedules: the trainer takes the multiplier at index step + 1, so that the first step moves "
    "the weights.",
    "gspo and sapo average per sequence; here the entropy bonus and the KL loss beside them do so "
    "too, since one "
    "weight a token serves the whole objective.",
)
HEAD = """# Conformance with published implementations

Written by `python -m tests.conformance`: do not edit. Inputs and outputs of public implementations,
replayed. A deviation is `|ours - published| / max(1, |published|)`, the largest of the file, in float64 and
in float32; scorers have to agree exactly.

{passed} of {total} vectors pass: {agree} agree, {departing} are listed departures.

| vectors | passed | of | float64 | float32 | departures |
|---|---:|---:|---:|---:|---:|"""


@dataclass
class FileResult:
    """What the vectors of one file came to. ``departures`` counts the vectors for each reason."""

    file: str
    vectors: int = 0
    deviation: dict[str, float] = field(default_factory=dict)
    departures: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> int:
        return self.vectors - len(self.failures)

    def algorithm(self, case) -> Iterable[str]:
        """Compare a vector of the algorithm; return the reasons of its departures."""
        for precision in ("f64", "f32"):
            outcome = check(ADAPTERS[self.file](case, precision), case.want(precision))
            self.deviation[precision] = max(self.deviation.get(precision, 0.0), outcome.deviation)
            yield from outcome.departures.values()

    def scorer(self, case) -> Iterable[str]:
        """Compare a vector of a scorer."""
        reason = departure(self.file, case)
        if reason:
            return [reason]
        wanted = case["expected"]
        try:
            answer = ANSWERS[self.file]({**case["inputs"], **case.get("params", {})})
        except ERRORS:
            assert set(wanted) == {"error"}, "an exception that was not published"
            return []
        assert {name: answer.get(name) for name in wanted} == wanted, (
            f"{answer} instead of {wanted}"
        )
        return []


def run_file(file: str) -> FileResult:
    """Run all vectors of a file."""
    result = FileResult(file)
    cases, compare = (
        (load(file), result.algorithm) if file in ADAPTERS else (raw_cases(file), result.scorer)
    )
    for case in cases:
        result.vectors += 1
        try:
            result.departures.update(set(compare(case)))
        except Exception as error:
            # A report goes on: the failure is counted, shown, and ends in exit code 1
            name = case.name if file in ADAPTERS else case["name"]
            result.failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return result


def run_all() -> tuple[list[FileResult], list[str]]:
    """Return the results of the files that have a function here, and the names of those that do
    not."""
    here = [file for file in golden_files() if file in ADAPTERS or file in ANSWERS]
    return [*map(run_file, here)], [
        file for file in golden_files() if file not in (*here, *ELSEWHERE)
    ]


def _bound(deviation: float | None) -> str:
    """Return the power of ten that the deviation stays under; machines differ below that."""
    if deviation is None:
        return ""
    return "0" if deviation == 0 else f"< 1e{math.floor(math.log10(deviation)) + 1}"


def render(results: list[FileResult], missing: list[str]) -> str:
    total, passed = sum(r.vectors for r in results), sum(r.passed for r in results)
    departing = sum(sum(r.departures.values()) for r in results)
    lines = [HEAD.format(total=total, passed=passed, agree=passed - departing, departing=departing)]
    for r in results:
        f64, f32 = (_bound(r.deviation.get(precision)) for precision in ("f64", "f32"))
        lines.append(
            f"| {r.file} | {r.passed} | {r.vectors} | {f64} | {f32} | "
            f"{sum(r.departures.values()) or ''} |"
        )
    lines += [
        "",
        "## Departures",
        "",
        "Where this repository returns another value than the published one, and why.",
    ]
    lines += [""]
    lines += [
        f"- **{r.file}**, {count} of {r.vectors}: {reason}"
        for r in results
        for reason, count in sorted(r.departures.items())
    ]
    lines += ["", "In what no vector shows:", "", *(f"- {reason}" for reason in BEYOND_VECTORS)]
    lines += ["", "## Compared elsewhere, or not here", ""]
    lines += [f"- {file}: {where}" for file, where in {**ELSEWHERE, **NOT_HERE}.items()]
    lines += [f"- {file}: no function here" for file in missing if file not in NOT_HERE]
    failures = [f"- **{r.file}** {failure}" for r in results for failure in r.failures]
    return "\n".join([*lines, *(["", "## Failures", "", *failures] if failures else [])]) + "\n"


def main() -> int:
    results, missing = run_all()
    DEFAULT_OUT.write_text(render(results, missing), encoding="utf-8")
    failed = [failure for r in results for failure in r.failures]
    total = sum(r.vectors for r in results)
    print(
        f"{total - len(failed)} of {total} vectors of {golden_dir()} pass: {DEFAULT_OUT}",
        *failed,
        sep="\n",
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
