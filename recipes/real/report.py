"""Compare the answers of several stages to the same held-out prompts: scores, signs of degeneration, samples.

    python -m recipes.real.report outputs/real/answers/{released,sft,grpo}.jsonl --frozen outputs/real/model --run RUN

Each file of answers needs its scores beside it (``python -m core.evaluate score``, method guarded). A score alone does
not tell a text from a trick, so that the table also has the share of different words, of unfinished answers, and how
likely the answers are under the frozen model that training started from.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import InputError
from core.tracking.confidence_intervals import Estimate, question_interval
from results.reporting.numbers import percent

SAMPLES = 8
BATCH = 16  # answers in one forward pass of the frozen model


@dataclass(frozen=True)
class Stage:
    """The answers of one model, in the order of the prompts, with the parts of their scores."""

    name: str
    answers: tuple[Mapping[str, Any], ...]
    parts: Mapping[str, tuple[float, ...]]

    @classmethod
    def load(cls, path: Path) -> Stage:
        """Read answers and their scores. Raises InputError where one is missing or they do not belong together."""
        scores = path.with_suffix(".scores-guarded.jsonl")
        try:
            answers, rows = _lines(path), _lines(scores)
        except (OSError, json.JSONDecodeError) as error:
            fix = f"make it with python -m core.evaluate score {path} --name guarded"
            raise InputError([f"{path}: no answers with scores beside them ({error}); {fix}"]) from error
        if [row["uid"] for row in rows] != [answer["uid"] for answer in answers]:
            raise InputError([f"{scores}: holds other questions than {path}; score the answers again"])
        names = ("acc", "naive", "distinct", "truncated")
        return cls(path.stem, tuple(answers), {name: tuple(row[name][0] for row in rows) for name in names})

    def estimate(self, part: str) -> Estimate:
        return question_interval(self.parts[part])

    def mean(self, part: str) -> float:
        return math.fsum(self.parts[part]) / len(self.answers)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def log_likelihoods(model: str, answers: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Yield of each answer the mean of log p(token | prompt, tokens before) under the model, in nats a token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for start in range(0, len(answers), BATCH):
        batch = answers[start : start + BATCH]
        prompts = [tokenizer(answer["prompt"], add_special_tokens=False)["input_ids"] for answer in batch]
        sequences = [torch.tensor(p + a["response_ids"]) for p, a in zip(prompts, batch, strict=True)]
        ids_BT = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        with torch.inference_mode():
            logits_BTV = policy(input_ids=ids_BT, attention_mask=_mask(sequences, ids_BT.shape[1])).logits
        for row, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
            positions = slice(len(prompt) - 1, len(sequence) - 1)
            log_probs = logits_BTV[row, positions].log_softmax(-1)
            yield float(log_probs.gather(-1, sequence[len(prompt) :, None]).mean())


def _mask(sequences: Sequence[Any], width: int) -> Any:
    import torch

    return torch.stack([torch.arange(width) < len(sequence) for sequence in sequences]).long()


def table(stages: Sequence[Stage], likelihoods: Mapping[str, float]) -> str:
    """Return the stages as a table in Markdown."""
    lines = [
        "| model | guarded | naive | different words | unfinished | log-likelihood under the frozen model |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {stage.name} | {percent(stage.estimate('acc'))} | {percent(stage.estimate('naive'))} "
        f"| {stage.mean('distinct'):.2f} | {stage.mean('truncated'):.0%} | {likelihoods[stage.name]:.2f} nats a token |"
        for stage in stages
    ]
    return "\n".join(lines)


def samples(stages: Sequence[Stage], number: int) -> str:
    """Return answers of every stage to the same prompts, evenly spaced over the file; + marks a right one."""
    total = len(stages[0].answers)
    blocks = []
    for at in range(0, total, max(1, total // number))[:number]:
        question = stages[0].answers[at]["prompt"].split("user\n")[-1].split("<|im_end|>")[0]
        answers = [f"{'+' if s.parts['acc'][at] else '-'} {s.name}: {s.answers[at]['response']!r}" for s in stages]
        blocks.append("\n".join([question, *(f"  {answer}" for answer in answers)]))
    return "\n\n".join(blocks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.real.report", description=__doc__.partition("\n")[0])
    parser.add_argument("answers", type=Path, nargs="+", metavar="ANSWERS.jsonl", help="a file of each stage, in order")
    parser.add_argument("--frozen", required=True, help="the model as training found it, a folder or a hub id")
    parser.add_argument("--run", type=Path, help="the run folder; its curves are written to report.html there")
    parser.add_argument("--out", type=Path, help="the file to write (default: report.md beside the answers)")
    args = parser.parse_args()
    try:
        stages = [Stage.load(path) for path in args.answers]
        if len({tuple(answer["uid"] for answer in stage.answers) for stage in stages}) > 1:
            raise InputError([f"{args.answers[-1]}: answers other prompts than {args.answers[0]}; compare equal ones"])
        likelihoods = {}
        for stage in stages:
            values = list(log_likelihoods(args.frozen, stage.answers))
            likelihoods[stage.name] = math.fsum(values) / len(values)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    rows = table(stages, likelihoods)
    heading = f"{len(stages[0].answers)} held-out prompts, greedy answers, 95 % intervals (Wilson)"
    out = args.out or args.answers[0].parent / "report.md"
    text = f"# Checkable instructions\n\n{heading}.\n\n{rows}\n\n```\n{samples(stages, 40)}\n```\n"
    out.write_text(text, encoding="utf-8")
    print(f"{samples(stages, SAMPLES)}\n\n{heading}:\n{rows}\n\nforty prompts with their answers: {out}")
    if args.run:
        from results.reporting.run_reader import load_run
        from results.reporting.run_report import write_report

        print(f"curves: {write_report([load_run(args.run)], args.run)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
