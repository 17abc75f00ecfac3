"""The pages ``results/real/<task>.md``: published runs of the real model, a page a task.

A run stands there if its validations are committed: everything on a page is read from the folders
of ``results/``. ``python -m results.report --index`` writes the pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from results.reporting.answers import Row, answers
from results.reporting.comparison_report import verdicts
from results.reporting.pages import Block, Heading, Table, Text, markdown, without_constants
from results.reporting.readme_tables import Experiment, experiments
from results.reporting.run_reader import NOT_RECORDED, RecordedRun, load_run, settings_of
from results.reporting.summaries import read_summaries

TITLES = {
    "real/arithmetic": "Arithmetic in words",
    "real/instructions": "Checkable instructions",
    "real/passages": "Short answers from a given passage",
    "real/search": "Questions over passages of Wikipedia, with searches",
}
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


def pages(results: Path) -> dict[Path, str]:
    """Return the text of each task's page by its path."""
    by_task: dict[str, list[Experiment]] = {}
    for experiment in experiments(read_summaries(results)):
        if experiment.source in TITLES:
            by_task.setdefault(experiment.source, []).append(experiment)
    return {
        results / f"{source}.md": page(results, source, found)
        for source, found in sorted(by_task.items())
    }


def page(results: Path, source: str, found: Sequence[Experiment]) -> str:
    """Return a page: what the runs came to, and answers to some prompts before and after."""
    ordered = sorted(found, key=lambda each: (each.name.partition("/")[0] != "grpo", each.name))
    questions = ordered[0].results[0]["questions"]
    blocks: list[Block] = [Text(HOW_TO_READ.format(questions=questions))]
    by_start: dict[str, list[Experiment]] = {}
    for each in ordered:
        by_start.setdefault(each.runs[0].get("base") or NOT_RECORDED, []).append(each)
    largest_first = sorted(by_start.items(), key=lambda item: -len(item[1]))
    for base, same in largest_first:
        blocks += of_one_start(results, source, base, same)
    run = load_run(folder(results, largest_first[0][1][0]))
    blocks += [
        Heading("Prompts with their answers"),
        Text(
            f"Of {run.name}, before and after. Prompts whose answer became right or wrong are "
            "preferred; + marks a right answer."
        ),
        Table(("prompt", "before", "after"), samples(run, source), prose=True),
    ]
    return markdown(TITLES[source], blocks)


def of_one_start(
    results: Path, source: str, base: str, same: Sequence[Experiment]
) -> Iterator[Block]:
    """Yield the runs from one start: their table, and how each compares with the first."""
    groups = [[load_run(results / run["recipe"] / run["run"]) for run in e.runs] for e in same]
    lines, parts = [], {}
    for each, runs in zip(same, groups, strict=True):
        lines.append(line(results, each))
        for name, heading in PARTS.items():
            series = [run.series(f"val-aux/{source}/{name}/mean@1")[1] for run in runs]
            last = [f"{100 * statistics.fmean(s[-1] for s in series):.1f}"] if all(series) else [""]
            parts.setdefault(heading, []).extend(last)
    kept = {heading: cells for heading, cells in parts.items() if any(cells)}
    rows = [[*cells, *of_run] for cells, *of_run in zip(lines, *kept.values(), strict=True)]
    yield Heading(f"From the weights {base[:12]}")
    yield without_constants(Table((*HEADER, *kept), rows))
    if len(groups) > 1:
        yield Text("\n".join(f"- {sentence}" for sentence in verdicts(groups)))


def folder(results: Path, experiment: Experiment) -> Path:
    """Return the folder of the experiment's first run."""
    first = experiment.runs[0]
    return results / first["recipe"] / first["run"]


def line(results: Path, experiment: Experiment) -> list[str]:
    """Return the experiment's line of the table."""
    first = experiment.runs[0]
    config = settings_of(folder(results, experiment)).config
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
