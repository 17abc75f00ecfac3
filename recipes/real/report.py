"""Compare the answers of several models to the same held-out prompts: scores, likelihoods, samples.

    python -m recipes.real.report outputs/real/answers/{released,sft,grpo}.jsonl
        --frozen outputs/real/model --run RUN

Each file of answers needs its scores beside it (``python -m core.evaluate score ANSWERS --name
guarded``; other tasks call them strict). A score alone does not tell a text from a trick: the table
also has the lenient reading of scorers that have one, the share of different words, the share of
unfinished answers, and how likely the answers are under the frozen model that training started
from. A control (``recipes/real/controls.py``) is named as one if its answers were generated with
``--run``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.answers import read_manifest, trajectory_of
from core.errors import InputError
from core.tracking.validation import question_interval
from recipes.real.controls import control_of
from results.reporting.accuracies import lenient, summary
from results.reporting.numbers import percent
from results.reporting.pages import Table, markdown_table
from results.reporting.real_pages import TITLES

SAMPLES = 8
SAMPLES_IN_FILE = 40
BATCH = 16  # answers in one forward pass of the frozen model
HEADINGS = {  # of the parts of a score; the heading of acc is the label of the scores
    "lenient": "lenient",
    "naive": "naive",
    "distinct": "different words",
    "truncated": "unfinished",
}


@dataclass(frozen=True)
class AnsweredModel:
    """The answers of one model, in the order of the prompts, with the parts of their scores.

    ``parts`` has ``acc`` and ``truncated``, ``lenient`` if the scorer has such a reading, and what
    the scorer gives of ``naive`` and ``distinct``. ``control`` says which control the model is.
    """

    name: str
    answers: tuple[Mapping[str, Any], ...]
    parts: Mapping[str, tuple[float, ...]]
    control: str | None = None

    @classmethod
    def load(cls, path: Path, label: str = "guarded") -> AnsweredModel:
        """Read answers and their scores. Raises InputError if they do not belong together."""
        scores = path.with_suffix(f".scores-{label}.jsonl")
        try:
            answers = _lines(path)
            rows = _lines(scores)
        except (OSError, json.JSONDecodeError) as error:
            fix = f"make it with python -m core.evaluate score {path} --name {label}"
            raise InputError(
                [f"{path}: no answers with scores beside them ({error}); {fix}"]
            ) from error
        if [row["uid"] for row in rows] != [answer["uid"] for answer in answers]:
            raise InputError(
                [f"{scores}: holds other questions than {path}; score the answers again"]
            )
        rewards = read_manifest(scores, "scores")["rewards"]
        options = rewards["reward_model.reward_kwargs"].get("instructions", {})
        if label == "guarded" and options.get("method", label) != label:
            fix = "reward_model.reward_kwargs.instructions.method=guarded"
            raise InputError(
                [
                    f"{scores}: is called guarded and was scored by method={options['method']}; "
                    f"score the answers again with {fix}"
                ]
            )
        names = [name for name in ("acc", "naive", "distinct", "truncated") if name in rows[0]]
        parts = {name: tuple(row[name][0] for row in rows) for name in names}
        lenient_summary = lenient(summary(scores))
        if lenient_summary is not None:
            records = lenient_summary.records
            parts["lenient"] = tuple(record.values["acc"][0] for record in records)
        train_files = read_manifest(path, "answers")["config"]["data.train_files"]
        return cls(path.stem, tuple(answers), parts, control_of(train_files))

    def cell(self, part: str) -> str:
        """Return a part's mean over the prompts, with its interval if it is an accuracy."""
        values = self.parts[part]
        mean = math.fsum(values) / len(values)
        if part == "distinct":
            return f"{mean:.2f}"
        return f"{mean:.0%}" if part == "truncated" else percent(question_interval(values))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def log_likelihoods(path: str, answers: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Yield the mean log p(token | prompt, tokens before) of each answer, in nats a token.

    The mean is over the tokens that the policy wrote: what a search returned does not count.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from core.learner.models import read_tokenizer

    tokenizer = read_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for start in range(0, len(answers), BATCH):
        batch = answers[start : start + BATCH]
        prompts = [tokenizer.encode(answer["prompt"], add_special_tokens=False) for answer in batch]
        sequences = [
            torch.tensor(prompt + answer["response_ids"])
            for prompt, answer in zip(prompts, batch, strict=True)
        ]
        ids_BT = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        lengths_B = torch.tensor([len(sequence) for sequence in sequences])
        mask_BT = (torch.arange(ids_BT.shape[1]) < lengths_B[:, None]).long()
        with torch.inference_mode():
            logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits
        for at, (prompt, sequence, answer) in enumerate(
            zip(prompts, sequences, batch, strict=True)
        ):
            log_probs_TV = logits_BTV[at, len(prompt) - 1 : len(sequence) - 1].log_softmax(-1)
            log_probs_T = log_probs_TV.gather(-1, sequence[len(prompt) :, None])[:, 0]
            written_T = torch.tensor(trajectory_of(answer).response_mask)
            yield float(log_probs_T[written_T].mean())


def table(models: Sequence[AnsweredModel], likelihoods: Mapping[str, float], label: str) -> str:
    """Return a line for each model, and below the table which of them are controls."""
    parts = [part for part in ("acc", *HEADINGS) if part in models[0].parts]
    header = ["model", *(HEADINGS.get(part, label) for part in parts)]
    header += ["log-likelihood under the frozen model"] if likelihoods else []
    rows = []
    for model in models:
        cells = [model.name, *(model.cell(part) for part in parts)]
        if likelihoods:
            cells.append(f"{likelihoods[model.name]:.2f} nats a token")
        rows.append(cells)
    controls = [f"{model.name} is {model.control}." for model in models if model.control]
    return "\n".join([markdown_table(Table(header, rows)), *(["", *controls] if controls else [])])


def samples(models: Sequence[AnsweredModel], number: int) -> str:
    """Return every model's answers to evenly spaced prompts; + marks a right one.

    If all prompts begin with the same long text, dots stand for it.
    """
    total = len(models[0].answers)
    questions = [
        answer["prompt"].split("user\n")[-1].split("<|im_end|>")[0].strip()
        for answer in models[0].answers
    ]
    shared = os.path.commonprefix(questions)
    left_out = shared.rfind(" ") if len(questions) > 1 and len(shared) > 200 else 0
    blocks = []
    for at in range(0, total, max(1, total // number))[:number]:
        lines = [f"…{questions[at][left_out:]}" if left_out else questions[at]]
        for model in models:
            mark = "+" if model.parts["acc"][at] else "-"
            lines.append(f"  {mark} {model.name}: {model.answers[at]['response']!r}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.real.report", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "answers", type=Path, nargs="+", metavar="ANSWERS.jsonl", help="A file of each model."
    )
    parser.add_argument("--frozen", help="The model that training found: adds the likelihood.")
    parser.add_argument(
        "--scores", default="guarded", help="The label of the scores (default: %(default)s)."
    )
    parser.add_argument("--run", type=Path, help="The run folder: its curves go to report.html.")
    args = parser.parse_args()
    try:
        models = [AnsweredModel.load(path, args.scores) for path in args.answers]
        if len({tuple(answer["uid"] for answer in model.answers) for model in models}) > 1:
            first = args.answers[0]
            last = args.answers[-1]
            raise InputError([f"{last}: answers other prompts than {first}; compare equal ones"])
        likelihoods = {}
        for model in models if args.frozen else ():
            values = list(log_likelihoods(args.frozen, model.answers))
            likelihoods[model.name] = math.fsum(values) / len(values)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    title = TITLES[models[0].answers[0]["data_source"]]
    count = len(models[0].answers)
    heading = f"{count} held-out prompts, greedy answers, 95 % intervals over prompts"
    rows = table(models, likelihoods, args.scores)
    page = args.answers[0].parent / "report.md"
    fenced = f"```\n{samples(models, SAMPLES_IN_FILE)}\n```"
    page.write_text(f"# {title}\n\n{heading}.\n\n{rows}\n\n{fenced}\n", encoding="utf-8")
    print(f"{samples(models, SAMPLES)}\n\n{heading}:\n{rows}\n\nprompts with their answers: {page}")
    if args.run:
        from results.reporting.run_reader import load_run
        from results.reporting.run_report import write_report

        print(f"curves: {write_report([load_run(args.run)], args.run)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
