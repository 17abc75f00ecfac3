"""The pages ``results/real/<task>.md``: published runs of the real model, a page a task.

A run stands there if its validations are committed: everything on a page is read from the folders
of ``results/``. ``python -m results.report --index`` writes the pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from results.reporting.answers import Row, answers
from results.reporting.comparison_report import verdicts
from results.reporting.pages import (
    Block,
    Heading,
    Table,
    Text,
    markdown,
    with_block,
    without_constants,
)
from results.reporting.readme_tables import Experiment, experiments
from results.reporting.run_reader import NOT_RECORDED, RecordedRun, load_run
from results.reporting.summaries import read_summaries

TITLES = {
    "real/arithmetic": "Arithmetic in words",
    "real/instructions": "Checkable instructions",
    "real/passages": "Short answers from a given passage",
    "real/search": "Questions over passages of Wikipedia, with searches",
}
IN_README, BLOCK = "real/instructions", "real"  # the task of the README, and its block there
PROMPTS = 10
PROMPT_CHARACTERS = 400  # of a prompt, its end: a passage is long, the question stands behind it
HEADER = (
    "run of the first seed",
    "seeds",
    "start",
    "after",
    "steps",
    "learning rate",
    "precision",
    "hardware",
    "minutes",
)
PARTS = {
    "naive": "constraints kept",
    "distinct": "different words",
}  # of a score, where it has them
HOW_TO_READ = """SmolLM2-135M-Instruct, dequantised Q4_1, after fine-tuning ([recipes/real]\
(../../recipes/real/README.md)). Greedy answers to {questions} held-out prompts, in percent, at a \
run's first and last validation. 95 % intervals: over seeds (Student) where there are several, \
else over prompts (Wilson). All seeds of a line start from the same weights, so an interval over \
seeds leaves out what another fine-tuning would change. Runs from different starts are not \
compared. A run's folder has its settings and its command."""


@dataclass(frozen=True)
class Start:
    """The experiments of a task that began from the same weights, GRPO's own first."""

    weights: str  # the first digits of their SHA-256
    experiments: Sequence[Experiment]
    runs: Sequence[Sequence[RecordedRun]]  # of each experiment

    @cached_property
    def sentences(self) -> list[str]:
        """How each experiment compares with the first."""
        return verdicts(self.runs) if len(self.runs) > 1 else []


def generated(results: Path) -> Iterator[tuple[Path, str]]:
    """Yield each task's page, and the README with what the recipes came to on instructions."""
    by_task: dict[str, list[Experiment]] = {}
    for experiment in experiments(read_summaries(results)):
        if experiment.source in TITLES:
            by_task.setdefault(experiment.source, []).append(experiment)
    readme = results.resolve().parent / "README.md"
    for source, found in sorted(by_task.items()):
        starts = starts_of(results, found)
        yield results / f"{source}.md", page(source, starts)
        if source == IN_README and readme.exists():
            shown = recipes_lines(starts[0])
            yield readme, with_block(readme.read_text(encoding="utf-8"), BLOCK, shown)


def starts_of(results: Path, found: Sequence[Experiment]) -> list[Start]:
    """Return the starts, that of most runs first."""
    by_weights: dict[str, list[Experiment]] = {}
    for each in sorted(found, key=lambda each: (not each.name.startswith("grpo/"), each.name)):
        weights = (each.runs[0].get("base") or NOT_RECORDED)[:12]
        by_weights.setdefault(weights, []).append(each)
    starts = []
    for weights, same in by_weights.items():
        runs = [[load_run(results / run["recipe"] / run["run"]) for run in e.runs] for e in same]
        starts.append(Start(weights, same, runs))
    return sorted(starts, key=lambda start: -sum(map(len, start.runs)))


def recipes_lines(start: Start) -> str:
    """Return how the recipes compare on the real model, without the controls."""
    left_out = ("against ", *(each.name for each in start.experiments if each.is_control))
    return "\n".join(f"- {text}" for text in start.sentences if not text.startswith(left_out))


def page(source: str, starts: Sequence[Start]) -> str:
    """Return a page: what the runs came to, and answers to some prompts before and after."""
    first = starts[0].runs[0][0]
    questions = starts[0].experiments[0].results[0]["questions"]
    blocks: list[Block] = [Text(HOW_TO_READ.format(questions=questions))]
    for start in starts:
        blocks.append(Heading(f"From the weights {start.weights}"))
        blocks.append(without_constants(table(source, start)))
        if start.sentences:
            blocks.append(Text("\n".join(f"- {sentence}" for sentence in start.sentences)))
    blocks += [
        Heading("Prompts with their answers"),
        Text(
            f"Of {first.name}, before and after. Prompts whose answer became right or wrong are "
            "preferred; + marks a right answer."
        ),
        Table(("prompt", "before", "after"), samples(first, source), prose=True),
    ]
    return markdown(TITLES[source], blocks)


def table(source: str, start: Start) -> Table:
    """Return a line for each experiment, with the parts of a score that its scorer gives."""
    lines, parts = [], {}
    for each, runs in zip(start.experiments, start.runs, strict=True):
        lines.append(line(each, runs))
        for name, heading in PARTS.items():
            series = [run.series(f"val-aux/{source}/{name}/mean@1")[1] for run in runs]
            last = f"{100 * statistics.fmean(s[-1] for s in series):.1f}" if all(series) else ""
            parts.setdefault(heading, []).append(last)
    given = {heading: cells for heading, cells in parts.items() if any(cells)}
    rows = [[*cells, *of_run] for cells, *of_run in zip(lines, *given.values(), strict=True)]
    return Table((*HEADER, *given), rows)


def line(experiment: Experiment, runs: Sequence[RecordedRun]) -> list[str]:
    """Return the experiment's cells under HEADER."""
    first, config = experiment.runs[0], runs[0].config
    minutes = [run["seconds"] / 60 for run in experiment.runs]
    return [
        f"[{first['name']}](../{first['name']}/)",
        str(len(experiment.runs)),
        experiment.text("before"),
        experiment.text("after"),
        "–".join(str(step) for step in sorted({run["steps"] for run in experiment.runs})),
        f"{config['actor_rollout_ref.actor.optim.lr']:g}",
        str(config["actor_rollout_ref.actor.fsdp_config.dtype"]),
        first["hardware"],
        f"{sum(minutes) / len(minutes):.0f}",
    ]


def samples(run: RecordedRun, source: str) -> list[list[str]]:
    """Return some prompts, each with the first and the last answer to it."""
    steps = sorted({row["step"] for row in run.samples})
    before, after = (answers(run, step, source) for step in (steps[0], steps[-1]))
    kept = [uid for uid in after if uid in before]
    chosen = kept[:: max(1, len(kept) // PROMPTS)][:PROMPTS]
    return [[prompt_of(after[uid]), marked(before[uid]), marked(after[uid])] for uid in chosen]


def prompt_of(row: Row) -> str:
    """Return what the user wrote, without the marks of the chat."""
    text = row["input"].rpartition("user\n")[2].partition("<|im_end|>")[0].strip()
    return text if len(text) <= PROMPT_CHARACTERS else f"… {text[-PROMPT_CHARACTERS:]}"


def marked(row: Row) -> str:
    return f"{'+' if row['acc'] == 1 else '-'} {row['output'].strip()}"
