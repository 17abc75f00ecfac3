"""The pages ``results/real/<task>.md``: published runs of the real model, a page a task.

A run stands there if its validations are committed: everything on a page is read from the folders
of ``results/``. ``python -m results.report --index`` writes the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from results.reporting.answers import Row, answers
from results.reporting.pages import Block, Heading, Table, Text, markdown
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
    "start's weights",
)
HOW_TO_READ = """SmolLM2-135M-Instruct, dequantised Q4_1, after fine-tuning ([recipes/real]\
(../../recipes/real/README.md)). Greedy answers to {questions} held-out prompts, in percent, at a \
run's first and last validation. 95 % intervals: over seeds (Student) where there are several, \
else over prompts (Wilson). All seeds of a line start from the same weights, so an interval over \
seeds leaves out what another fine-tuning would change. Lines whose start's weights differ are no \
comparison. A run's folder has its settings and its command."""


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
    ordered = sorted(found, key=lambda each: (str(each.runs[0].get("base")), each.name))
    questions = ordered[0].results[0]["questions"]
    blocks: list[Block] = [
        Text(HOW_TO_READ.format(questions=questions)),
        Table(HEADER, [line(results, each) for each in ordered]),
    ]
    most_seeds = max(ordered, key=lambda each: len(each.runs))
    run = load_run(folder(results, most_seeds))
    blocks += [
        Heading("Prompts with their answers"),
        Text(
            f"Of {run.name}, before and after. Prompts whose answer became right or wrong are "
            "preferred; + marks a right answer."
        ),
        Table(("prompt", "before", "after"), samples(run, source), prose=True),
    ]
    return markdown(TITLES[source], blocks)


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
        (first.get("base") or NOT_RECORDED)[:12],
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
