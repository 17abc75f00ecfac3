"""Compare the answers of several stages to the same held-out prompts: scores, signs of
degeneration, samples.

    python -m recipes.real.report outputs/real/answers/{released,sft,grpo}.jsonl --frozen
    outputs/real/model --run RUN

Each file of answers needs its scores beside it (``python -m core.evaluate score ANSWERS --name
guarded``; other tasks call them strict). Files named ``NAME-seed1.jsonl``, ``NAME-seed2.jsonl``
share a line, with an interval over seeds. A score alone does not tell a text from a trick, so that
the table also has the lenient reading of scorers that have one, the share of different words, of
unfinished answers, and how likely the answers are under the frozen model that training started
from. A control (``recipes/real/controls.py``) is named as one where its answers were generated with
``--run``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.answers import read_manifest, trajectory_of
from core.errors import InputError
from core.tracking.validation import Estimate, question_interval
from recipes.real.controls import control_of
from results.reporting.accuracies import lenient, summary
from results.reporting.comparison import seed_interval
from results.reporting.numbers import percent

TITLES = {
    "real/instructions": "Checkable instructions",
    "real/passages": "Short answers from a given passage",
    "real/arithmetic": "Arithmetic in words",
    "real/search": "Questions over passages of Wikipedia, with searches",
}
SAMPLES = 8
BATCH = 16  # answers in one forward pass of the frozen model


@dataclass(frozen=True)
class Stage:
    """The answers of one model, in the order of the prompts, with the parts of their scores.

    ``parts`` has ``acc`` and ``truncated``, ``lenient`` where the scorer has such a reading, and
    what else the scorer gives of ``naive`` and ``distinct``. ``control`` is what the model is where
    it is a control.
    """

    name: str
    answers: tuple[Mapping[str, Any], ...]
    parts: Mapping[str, tuple[float, ...]]
    control: str | None = None

    @classmethod
    def load(cls, path: Path, label: str = "guarded") -> Stage:
        """Read answers and their scores. Raises InputError where one is missing or they do not
        belong together."""
        scores = path.with_suffix(f".scores-{label}.jsonl")
        try:
            answers, rows = _lines(path), _lines(scores)
        except (OSError, json.JSONDecodeError) as error:
            fix = f"make it with python -m core.evaluate score {path} --name {label}"
            raise InputError(
                [f"{path}: no answers with scores beside them ({error}); {fix}"]
            ) from error
        if [row["uid"] for row in rows] != [answer["uid"] for answer in answers]:
            raise InputError(
                [f"{scores}: holds other questions than {path}; score the answers again"]
            )
        given = read_manifest(scores, "scores")["rewards"]["reward_model.reward_kwargs"].get(
            "instructions", {}
        )
        if label == "guarded" and given.get("method", label) != label:
            fix = (
                "score the answers again with "
                "reward_model.reward_kwargs.instructions.method=guarded"
            )
            raise InputError(
                [f"{scores}: is called guarded and was scored by method={given['method']}; {fix}"]
            )
        names = [name for name in ("acc", "naive", "distinct", "truncated") if name in rows[0]]
        parts = {name: tuple(row[name][0] for row in rows) for name in names}
        if (other := lenient(summary(scores))) is not None:
            parts["lenient"] = tuple(record.values["acc"][0] for record in other.records)
        train_files = read_manifest(path, "answers")["config"]["data.train_files"]
        return cls(path.stem, tuple(answers), parts, control_of(train_files))

    def mean(self, part: str) -> float:
        return math.fsum(self.parts[part]) / len(self.answers)


def estimate(seeds: Sequence[Stage], part: str) -> Estimate:
    """Return a share with its interval: over seeds where there are several, else over prompts."""
    if len(seeds) > 1:
        return seed_interval([stage.mean(part) for stage in seeds])
    return question_interval(seeds[0].parts[part])


def mean(seeds: Sequence[Stage], part: str) -> float:
    return math.fsum(stage.mean(part) for stage in seeds) / len(seeds)


def by_seeds(stages: Sequence[Stage]) -> dict[str, list[Stage]]:
    """Return the stages by name, those that differ in their seed together."""
    groups: dict[str, list[Stage]] = {}
    for stage in stages:
        groups.setdefault(re.sub(r"-seed\d+$", "", stage.name), []).append(stage)
    return {name if len(group) > 1 else group[0].name: group for name, group in groups.items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def log_likelihoods(model: str, answers: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Yield of each answer the mean of log p(token | prompt, tokens before) under the model, in
    nats a token.

    The mean is over the tokens that the policy wrote: what a search returned does not count.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from core.learner.models import read_tokenizer

    tokenizer = read_tokenizer(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for start in range(0, len(answers), BATCH):
        batch = answers[start : start + BATCH]
        prompts = [
            tokenizer(answer["prompt"], add_special_tokens=False)["input_ids"] for answer in batch
        ]
        sequences = [
            torch.tensor(p + a["response_ids"]) for p, a in zip(prompts, batch, strict=True)
        ]
        ids_BT = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        with torch.inference_mode():
            logits_BTV = policy(
                input_ids=ids_BT, attention_mask=_mask(sequences, ids_BT.shape[1])
            ).logits
        for row, (prompt, sequence, answer) in enumerate(
            zip(prompts, sequences, batch, strict=True)
        ):
            positions = slice(len(prompt) - 1, len(sequence) - 1)
            log_probs = (
                logits_BTV[row, positions]
                .log_softmax(-1)
                .gather(-1, sequence[len(prompt) :, None])[:, 0]
            )
            yield float(log_probs[torch.tensor(trajectory_of(answer).response_mask)].mean())


def _mask(sequences: Sequence[Any], width: int) -> Any:
    import torch

    return torch.stack([torch.arange(width) < len(sequence) for sequence in sequences]).long()


Cell = Callable[[Sequence[Stage], str], str]
COLUMNS: tuple[tuple[str, str, Cell], ...] = (  # part of a score, heading, how it is written
    # The heading is the label of the scores
    ("acc", "", lambda seeds, part: percent(estimate(seeds, part))),
    ("lenient", "lenient", lambda seeds, part: percent(estimate(seeds, part))),
    ("naive", "naive", lambda seeds, part: percent(estimate(seeds, part))),
    ("distinct", "different words", lambda seeds, part: f"{mean(seeds, part):.2f}"),
    ("truncated", "unfinished", lambda seeds, part: f"{mean(seeds, part):.0%}"),
)


def table(stages: Sequence[Stage], likelihoods: Mapping[str, float], label: str = "guarded") -> str:
    """Return the stages as a table in Markdown, a line each or for all seeds, and below it which
    are controls.

    It has a column of ``likelihoods`` where there are any.
    """
    columns = [
        (part, heading or label, write)
        for part, heading, write in COLUMNS
        if part in stages[0].parts
    ]
    headings = ["model", "seeds", *(heading for _, heading, _ in columns)]
    headings += ["log-likelihood under the frozen model"] if likelihoods else []
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    groups = by_seeds(stages)
    for name, seeds in groups.items():
        cells = [name, str(len(seeds)), *(write(seeds, part) for part, _, write in columns)]
        if likelihoods:
            likelihood = math.fsum(likelihoods[stage.name] for stage in seeds) / len(seeds)
            cells.append(f"{likelihood:.2f} nats a token")
        lines.append(f"| {' | '.join(cells)} |")
    controls = [
        f"{name} is {seeds[0].control}." for name, seeds in groups.items() if seeds[0].control
    ]
    return "\n".join([*lines, *(["", *controls] if controls else [])])


def samples(stages: Sequence[Stage], number: int) -> str:
    """Return answers of every stage to the same prompts, evenly spaced over the file; + marks a
    right one.

    Of a long text that all prompts begin with only dots are left.
    """
    total = len(stages[0].answers)
    stages, blocks = [seeds[0] for seeds in by_seeds(stages).values()], []
    questions = [
        one["prompt"].split("user\n")[-1].split("<|im_end|>")[0].strip()
        for one in stages[0].answers
    ]
    shared = os.path.commonprefix(questions)
    left_out = shared.rfind(" ") if len(questions) > 1 and len(shared) > 200 else 0
    for at in range(0, total, max(1, total // number))[:number]:
        question = f"…{questions[at][left_out:]}" if left_out else questions[at]
        answers = [
            f"{'+' if s.parts['acc'][at] else '-'} {s.name}: {s.answers[at]['response']!r}"
            for s in stages
        ]
        blocks.append("\n".join([question, *(f"  {answer}" for answer in answers)]))
    return "\n\n".join(blocks)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.real.report", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "answers",
        type=Path,
        nargs="+",
        metavar="ANSWERS.jsonl",
        help="a file of each stage, in order",
    )
    parser.add_argument(
        "--frozen", help="the model that training found, a folder or a hub id: adds the likelihood"
    )
    parser.add_argument(
        "--scores", default="guarded", help="the label of the scores (default: %(default)s)"
    )
    parser.add_argument(
        "--run", type=Path, help="the run folder; its curves are written to report.html there"
    )
    parser.add_argument(
        "--out", type=Path, help="the file to write (default: report.md beside the answers)"
    )
    args = parser.parse_args()
    try:
        stages = [Stage.load(path, args.scores) for path in args.answers]
        if len({tuple(answer["uid"] for answer in stage.answers) for stage in stages}) > 1:
            raise InputError(
                [
                    f"{args.answers[-1]}: answers other prompts than {args.answers[0]}; "
                    f"compare equal ones"
                ]
            )
        likelihoods = {}
        for stage in stages if args.frozen else ():
            values = list(log_likelihoods(args.frozen, stage.answers))
            likelihoods[stage.name] = math.fsum(values) / len(values)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    rows = table(stages, likelihoods, args.scores)
    heading = (
        f"{len(stages[0].answers)} held-out prompts, greedy answers, 95 % intervals (of "
        f"prompts, or of seeds)"
    )
    out = args.out or args.answers[0].parent / "report.md"
    text = f"# {TITLES[stages[0].answers[0]['data_source']]}\n\n{heading}.\n\n{rows}\n\n```\n{samples(stages, 40)}\n```\n"
    out.write_text(text, encoding="utf-8")
    print(
        f"{samples(stages, SAMPLES)}\n\n{heading}:\n{rows}\n\nforty prompts with their answers: "
        f"{out}"
    )
    if args.run:
        from results.reporting.run_reader import load_run
        from results.reporting.run_report import write_report

        print(f"curves: {write_report([load_run(args.run)], args.run)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
