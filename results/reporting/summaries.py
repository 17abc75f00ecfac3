"""What a run came to: its accuracy before and after, its summary, and which runs are one
experiment.

Runs that share an experiment differ in their seeds only. A validation is reported at the last step
that has one, never at the best.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from results.reporting.comparison import Paired, paired_comparison
from results.reporting.run_reader import Point, RecordedRun, scrub, settings_of

Item = TypeVar("Item")
Summary = Mapping[str, Any]  # of a run: what summary.json holds, and what tells its experiment


def decoding(config: Mapping[str, Any]) -> str:
    """Return in words how validation answers were decoded."""
    val = {
        k.rpartition(".")[2]: v
        for k, v in config.items()
        if k.startswith("actor_rollout_ref.rollout.val_kwargs.")
    }
    if not val.get("do_sample") or not val.get("temperature"):
        how = "greedy"
    else:
        how = f"sampled, T={val['temperature']:g}"
        how += f", top-p {val['top_p']:g}" if val.get("top_p") not in (None, 1) else ""
        how += f", top-k {val['top_k']}" if val.get("top_k") not in (None, -1) else ""
        how += f", {val.get('n') or 1} a question"
    return f"{how}, at most {config.get('data.max_response_length')} tokens"


@dataclass(frozen=True)
class Outcome:
    """One accuracy of one data source at the first and at the last validation of a run."""

    source: str
    before: Point
    after: Point
    change: Paired | None  # of mean accuracy, where both validations kept their records

    @property
    def validated_twice(self) -> bool:
        return self.after.step > self.before.step


def outcomes(run: RecordedRun) -> list[Outcome]:
    """Return the outcome of every data source and kind of accuracy, ``mean@k`` first."""
    found = []
    for source, points in run.points().items():
        for name in dict.fromkeys(point.name for point in points):
            same = [point for point in points if point.name == name]
            before, after = same[0], same[-1]
            # The first evaluation lacks it: maj@k where an answer had no vote
            if before.step > points[0].step:
                continue
            a, b = (run.accuracy_at(point.step).get(source, {}) for point in (before, after))
            paired = name.startswith("mean@") and after.step > before.step and a.keys() & b.keys()
            found.append(
                Outcome(source, before, after, paired_comparison(a, b) if paired else None)
            )
    return sorted(found, key=lambda outcome: not outcome.before.name.startswith("mean@"))


# --- experiments ---


def grouped(
    items: Sequence[Item], about: Callable[[Item], tuple[str, str | None, Any]]
) -> list[list[Item]]:
    """Return the items by experiment, in order of appearance, each sorted by seed.

    ``about`` returns an item's settings, base model and seed. An item whose base is not recorded
    belongs to the others of its settings, as long as those have one base. The second item of a seed
    opens another experiment: the same seed again, after a change of the code say, is not another
    draw.
    """
    bases: dict[str, set[str]] = {}
    for settings, base, _ in map(about, items):
        bases.setdefault(settings, set()).update([base] if base is not None else [])
    found: dict[Any, list[Item]] = {}
    seen: Counter[Any] = Counter()
    for item in items:
        settings, base, seed = about(item)
        if base is None and len(bases[settings]) == 1:
            (base,) = bases[settings]
        found.setdefault((settings, base, seen[settings, base, seed]), []).append(item)
        seen[settings, base, seed] += 1
    return [
        sorted(each, key=lambda item: (str(type(about(item)[2])), about(item)[2]))
        for each in found.values()
    ]


def group_runs(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    return grouped(runs, lambda run: (run.experiment, run.base, run.seed))


def grouped_summaries(summaries: Sequence[Summary]) -> list[list[Summary]]:
    return grouped(summaries, lambda one: (one["experiment"], one.get("base"), one["seed"]))


def group_name(names: Sequence[str]) -> str:
    """Return ``grpo/lab`` for ``grpo/lab_s1, grpo/lab_s2``; a single run keeps its name."""
    if len(names) == 1:
        return names[0]
    return re.sub(r"([-_.](seed|s)?[-_.]?)?\d+$", "", names[0]) or names[0]


# --- summaries ---


def read_summaries(results: Path) -> list[Summary]:
    """Return the published summaries, with what tells experiments apart."""
    paths = sorted(results.glob("*/*/summary.json"))
    return [
        comparable(settings_of(path.parent), json.loads(path.read_text(encoding="utf-8")))
        for path in paths
    ]


def comparable(run: RecordedRun, summary: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the run's summary (made, or as recorded) with what tells its experiment, which is not
    recorded."""
    found = summarise(run) if summary is None else dict(summary)
    return {
        **found,
        "experiment": run.experiment,
        "base": run.base,
        "scored": run.scored,
        "name": run.name,
    }


def summarise(run: RecordedRun) -> dict[str, Any]:
    """Return the run's summary, from which the tables of ``results/`` are made."""
    results = [
        {
            "data_source": outcome.source,
            "metric": outcome.after.name,
            "questions": outcome.after.estimate.n or "uncounted",
            "before": asdict(outcome.before) if outcome.validated_twice else None,
            "after": asdict(outcome.after),
            "change": asdict(outcome.change) if outcome.change else None,
            "curve": [
                [p.step, p.estimate.value]
                for p in run.points()[outcome.source]
                if p.name == outcome.after.name
            ],
        }
        for outcome in outcomes(run)
    ]
    failed = run.series("reward/val_failed_rate")[1][-1:]
    return {
        "run": run.manifest["run"],
        "recipe": run.manifest["recipe"],
        "seed": run.seed,
        "status": run.status,
        "model": run.config.get("actor_rollout_ref.model.path"),
        "decoding": decoding(run.config),
        "estimator": run.config.get("algorithm.adv_estimator"),
        "loss": run.config.get("actor_rollout_ref.actor.policy_loss.loss_mode"),
        "command": scrub(run.session["command"]),
        "steps": run.last_step,
        "seconds": round(run.seconds, 1),
        "hardware": hardware_of(run.session),
        **{name: run.manifest[name] for name in ("last_healthy_step",) if name in run.manifest},
        "commit": commit_of(run.session),
        **({"val_failed_rate": failed[0]} if any(failed) else {}),
        "results": results,
    }


def hardware_of(session: Mapping[str, Any]) -> str:
    """Return in words what a process ran on."""
    gpus = session["hardware"]["gpus"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else processor_of(session["hardware"])


def processor_of(machine: Mapping[str, Any]) -> str:
    """Return cores, CPU and its vector instructions, where these are recorded.

    One name of a CPU has stood for machines of which some multiply bfloat16 a hundred times faster
    than others.
    """
    instructions = [machine["instructions"]] if machine.get("instructions") else []
    return ", ".join([f"{machine.get('cores')} cores", str(machine.get("cpu")), *instructions])


def commit_of(session: Mapping[str, Any]) -> str:
    """Return the commit that a process ran, and whether its tree had changes."""
    git = session["git"]
    return (
        f"{git['commit'][:10]}{' with changes' if git['dirty'] else ''}"
        if git["commit"]
        else "unknown"
    )
