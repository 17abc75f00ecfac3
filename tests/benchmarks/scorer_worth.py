"""What a scorer is worth: the same answers under each of its variants.

    DATA_DIR=... python -m tests.benchmarks.scorer_worth        writes results/rewards/scorers.md

Gold answers of public data sets are put in many written forms (:mod:`tests.benchmarks.rewrites`): each is right, and in
the same form another gold answer is wrong. Reference solutions are graded as they stand, and so are real model outputs
where the data has them. Counts what each variant accepts, and lists answers on which variants disagree.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.rewards.grader_pool import Pool
from core.rewards.grading import Failure, InProcess, Job, Scorers
from reward_scores import gsm8k, math_dapo, math_reward, prime_math, scorer_for
from reward_scores.equivalence import equivalent
from tests.benchmarks import rewrites
from tests.gold_answers import aime_golds, gsm8k_golds, math_golds, math_solutions, qa_golds, qa_outputs

REPORT = Path("results/rewards/scorers.md")
TIMEOUT_S = 10.0
LISTED = 2  # disagreements of one kind that are shown
SHOWN_CHARS = 160


@dataclass(frozen=True)
class Case:
    form: str
    response: str
    ground_truth: Any
    right: bool | None  # None: nobody has judged it


@dataclass(frozen=True)
class Family:
    """Scorers and their variants that read the same kind of answer."""

    title: str
    about: str
    variants: Sequence[tuple[str, str]]  # data source, method
    cases: Sequence[Case]


def variants(source: str, methods: Sequence[str]) -> list[tuple[str, str]]:
    return [(source, method) for method in methods]


MATH_VARIANTS = (
    *variants("lighteval/MATH", tuple(math_reward.METHODS)),
    *variants("math_dapo", tuple(math_dapo.METHODS)),
    *variants("numina_olympiads", tuple(prime_math.METHODS)),
)


# --- cases ---


def written(golds: Sequence[str], forms: Sequence[rewrites.Rewrite], frames: Sequence[Any]) -> Iterator[Case]:
    """Every form of every gold in the first frame, the natural form in the others; beside each a wrong answer."""
    for gold, other in zip(golds, [*golds[1:], golds[0]], strict=True):
        wrong = other if not equivalent(gold, other) else None
        combinations = [(form, frames[0]) for form in forms] + [(forms[0], frame) for frame in frames[1:]]
        for form, frame in combinations:
            name = rewrites.first_line(form if frame is frames[0] else frame)
            for text, right in ((form(gold), True), (wrong and form(wrong), False)):
                if text is not None:
                    yield Case(name, frame(text), gold, right)


def families(golds: int) -> list[Family]:
    rng = random.Random(0)

    def some(found: Sequence[Any], share: float = 1.0) -> list[Any]:
        return rng.sample(list(found), min(len(found), int(golds * share)))

    solutions, answers, questions = gsm8k_golds(), math_golds() + sorted(set(aime_golds())), qa_golds()
    grade_school = [Case("a reference solution", text, gold, True) for text, gold in some(solutions)]
    grade_school += written(some(sorted({gold for _, gold in solutions})), rewrites.NUMBERS, rewrites.NUMBER_FRAMES)
    math = [Case("a reference solution", text, gold, True) for text, gold in some(math_solutions())]
    math += written(some(answers), rewrites.MATHEMATICS, rewrites.MATH_FRAMES)
    lined = list(written(some(answers), rewrites.MATHEMATICS, [rewrites.answer_line]))
    frames = [rewrites.tagged, rewrites.tagged_often]
    words = written([golds[0] for golds in some(questions)], rewrites.WORDS, frames)
    outputs = [Case("a model's output", rewrites.tagged(text), gold, None) for text, gold in qa_outputs()]
    qa = [Case(c.form, c.response, {"target": [c.ground_truth]}, c.right) for c in (*words, *outputs)]
    return [
        Family("Grade-school numbers", "GSM8K", variants("openai/gsm8k", gsm8k.METHODS), grade_school),
        Family("Mathematics, in a box", "MATH, AIME", MATH_VARIANTS, math),
        Family("Mathematics, on an answer line", "the same", variants("math_dapo", tuple(math_dapo.METHODS)), lined),
        Family("Short answers", "NQ, TriviaQA, PopQA, HotpotQA, ...", variants("nq", ("em", "subem", "robust")), qa),
    ]


# --- grading ---


def grade(family: Family) -> dict[tuple[str, str], list[str]]:
    """Variant -> ``yes``, ``no``, or the failure's status, for each case."""

    async def everything(manager: Any, source: str) -> list[str]:
        jobs = (Job(source, case.response, case.ground_truth, {}) for case in family.cases)
        results = await asyncio.gather(*map(manager.run, jobs))
        return [one.status.value if isinstance(one, Failure) else "yes" if one.acc == 1.0 else "no" for one in results]

    verdicts = {}
    for source, method in family.variants:
        scorer, scorers = scorer_for(source), Scorers({scorer_for(source).name: {"method": method}})
        needed = scorer.libraries(method=method)
        manager = Pool(scorers, num_workers=1, timeout_s=TIMEOUT_S) if needed else InProcess(scorers)
        if needed:
            manager.preload(needed)
        start = time.perf_counter()
        verdicts[source, method] = asyncio.run(everything(manager, source))
        manager.close()
        print(f"{family.title}: {scorer.name} {method}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return verdicts


# --- the report ---


def report(results: Sequence[tuple[Family, Mapping[tuple[str, str], list[str]]]], golds: int) -> str:
    lines = [
        "# What a scorer is worth",
        "",
        "Written by `python -m tests.benchmarks.scorer_worth`: do not edit. The same answers under each variant of the "
        f"scorers: at most {golds} gold answers of a kind, drawn with seed 0, in the written forms of "
        "`tests/benchmarks/rewrites.py`. A form keeps the answer's value, so that a refusal is the scorer's mistake; "
        "a wrong answer is another gold one in the same form, so that accepting it is one too. Shares of the right "
        "answers accepted, in percent; where wrong ones were accepted, their number follows in brackets.",
        "",
        "`published` and its like are what the papers' numbers were made with; a variant is chosen by "
        "`reward_model.reward_kwargs`, as in `{math_reward: {method: robust}}`.",
    ]
    for family, verdicts in results:
        lines += ["", f"## {family.title}", "", f"{len(family.cases)} answers ({family.about})."]
        lines += ["", *table(family, verdicts), "", *disagreements(family, verdicts)]
    return "\n".join(lines) + "\n"


def name_of(variant: tuple[str, str]) -> str:
    return f"{scorer_for(variant[0]).name} {variant[1]}"


def table(family: Family, verdicts: Mapping[tuple[str, str], list[str]]) -> list[str]:
    forms = list(dict.fromkeys(case.form for case in family.cases))
    rows = [f"| form | right | wrong | {' | '.join(map(name_of, verdicts))} |"]
    rows.append("|---|---:|---:|" + "---:|" * len(verdicts))
    for form in [*forms, None]:
        at = [i for i, case in enumerate(family.cases) if form in (None, case.form) and case.right is not None]
        if not at:
            continue
        right, wrong = ([i for i in at if family.cases[i].right is kind] for kind in (True, False))
        cells = [cell([found[i] for i in right], [found[i] for i in wrong]) for found in verdicts.values()]
        rows.append(f"| {form or '**all**'} | {len(right)} | {len(wrong)} | {' | '.join(cells)} |")
    for form in forms:
        open_cases = [i for i, case in enumerate(family.cases) if case.form == form and case.right is None]
        if open_cases:
            cells = [cell([found[i] for i in open_cases], ()) for found in verdicts.values()]
            rows.append(f"| {form} ({len(open_cases)}, not judged by a person) | | | {' | '.join(cells)} |")
    failed = {name_of(v): Counter(one for one in found if one not in ("yes", "no")) for v, found in verdicts.items()}
    rows += ["", *(f"{name}: {dict(counts)} of {len(family.cases)}." for name, counts in failed.items() if counts)]
    return rows if any(failed.values()) else rows[:-1]


def cell(right: Sequence[str], wrong: Sequence[str]) -> str:
    accepted = sum(one == "yes" for one in wrong)
    share = f"{100 * sum(one == 'yes' for one in right) / len(right):.1f}" if right else ""
    return f"{share} ({accepted})" if accepted else share


def disagreements(family: Family, verdicts: Mapping[tuple[str, str], list[str]]) -> list[str]:
    """Answers that some variants accept and others do not: how many, and the first ones of each kind."""
    kinds: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for at, case in enumerate(family.cases):
        accepting = tuple(name_of(variant) for variant, found in verdicts.items() if found[at] == "yes")
        if 0 < len(accepting) < len(verdicts):
            kinds[case.form, accepting].append(at)
    total = sum(map(len, kinds.values()))
    lines = [f"The variants disagree on {total} of {len(family.cases)} answers. The first {LISTED} of each kind:", ""]
    lines += ["| form | answers | accepted by | gold | response |", "|---|---:|---|---|---|"]
    for (form, accepting), found in sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0])):
        for at in found[:LISTED]:
            case = family.cases[at]
            label = {True: "right", False: "wrong", None: "?"}[case.right]
            cells = (quoted(str(case.ground_truth)), quoted(case.response))
            lines.append(f"| {form} | {len(found)} | {', '.join(accepting)} | {cells[0]} ({label}) | {cells[1]} |")
    return lines


def quoted(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    half = SHOWN_CHARS // 2
    return f"`{text if len(text) <= SHOWN_CHARS else f'{text[:half]} ... {text[-half:]}'}`"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golds", type=int, default=150, help="gold answers of a kind")
    parser.add_argument("--output", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    if "DATA_DIR" not in os.environ:
        print("set DATA_DIR to the folder of the data sets", file=sys.stderr)
        return 2
    text = report([(family, grade(family)) for family in families(options.golds)], options.golds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
