"""The phases of a step that was kept, computed again by the trainer's own methods, each from its recorded beginning.

A phase that begins from what was recorded shows its own faults only: with a wrong mask the phase ``batch`` differs, and
the phases after it, which begin from the recorded mask, do not.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.extensions.capsules.capsule_recorder import (
    UNREPEATED,
    UPDATED,
    changed_fields,
    trained_tensors,
    update_tensors,
)
from core.extensions.capsules.differences import (
    TOLERANCE,
    Closeness,
    Difference,
    Where,
    absent,
    compare,
    compare_metrics,
    compare_pieces,
)
from core.extensions.capsules.stored_step import StoredStep
from core.learner.batching import make_batch, mini_batching
from core.learner.traced_tokens import numbered
from core.replay import PHASES
from core.tracking.metrics import data_metrics
from core.types import BATCH_FIELDS, StepMetrics, TrainBatch

if TYPE_CHECKING:
    from core.ray_trainer import RayPPOTrainer

WITHOUT_WEIGHTS = ("batch", "advantages")


@dataclass(frozen=True)
class Outcome:
    """The batch after a phase, and the phase's metrics in the order in which they were computed."""

    batch: TrainBatch
    metrics: Mapping[str, float] = field(default_factory=dict)


def batch_phase(run: RayPPOTrainer, stored: StoredStep) -> Outcome:
    """Return the batch of the step's groups."""
    batch = make_batch(stored.groups, stored.facts["batch"]["pad_id"], run.needs.state_masking)
    return Outcome(numbered(batch))


def log_probs_phase(run: RayPPOTrainer, stored: StoredStep, batch: TrainBatch) -> Outcome:
    """Compute old log-probs, those of the reference, values and importance weights."""
    metrics = StepMetrics(stored.step)
    batch = run.apply_rollout_correction(run.compute_log_probs(batch, metrics), metrics)
    return Outcome(batch, repeatable(metrics))


def advantages_phase(run: RayPPOTrainer, stored: StoredStep, batch: TrainBatch) -> Outcome:
    """Compute advantages and returns, and the metrics of the step's data."""
    metrics = StepMetrics(stored.step)
    after = run.compute_advantages(batch, metrics)
    metrics.add(data_metrics(stored.groups, after))
    return Outcome(after, repeatable(metrics))


def update_phase(run: RayPPOTrainer, stored: StoredStep, batch: TrainBatch) -> Outcome:
    """Take the optimizer steps; the trainer's workers then have the weights after the step."""
    metrics = StepMetrics(stored.step)
    run.update(batch, metrics)
    return Outcome(batch, repeatable(metrics))


def repeatable(metrics: StepMetrics) -> dict[str, float]:
    """Return the metrics that do not measure time."""
    return {name: value for name, value in metrics.values.items() if not name.startswith(UNREPEATED)}


def differences(run: RayPPOTrainer, stored: StoredStep, phases: Iterable[str], rule: Closeness) -> Iterator[Difference]:
    """Compute the phases again and yield what is not as recorded, in the order in which it is computed."""
    computed: set[str] = set()
    if "batch" in phases:
        yield from _fields("batch", TrainBatch(stored.tensors["lengths"], {}), batch_phase(run, stored), stored, rule)
    for phase, compute, earlier in (
        ("log_probs", log_probs_phase, ()),
        ("advantages", advantages_phase, ("log_probs",)),
    ):
        if phase in phases:
            before = stored.batch(*earlier)
            outcome = compute(run, stored, before)
            computed |= outcome.metrics.keys()
            yield from _fields(phase, before, outcome, stored, rule)
    if "advantages" in phases:
        after = {f"kl_controller/{name}": value for name, value in run.kl_controller.state_dict().items()}
        recorded = {f"kl_controller/{name}": value for name, value in stored.facts["kl_controller"]["after"].items()}
        yield from compare_metrics("advantages", recorded, after, rule)
    if "update" in phases:
        outcome = update_phase(run, stored, stored.batch("log_probs", "advantages"))
        computed |= outcome.metrics.keys()
        yield from _update(run, outcome, stored, rule)
    if {*PHASES} <= {*phases}:
        for name in sorted(stored.facts["metrics"].keys() - computed):
            yield absent("step", name, recorded=True)


def _fields(
    phase: str, before: TrainBatch, outcome: Outcome, stored: StoredStep, rule: Closeness
) -> Iterator[Difference]:
    """Yield the fields of a batch that a phase set otherwise, then its metrics."""
    recorded = stored.of(phase)
    replayed = dict(outcome.batch.stored) if phase == "batch" else changed_fields(before, outcome.batch)
    if phase == "batch":
        pair = before.lengths, outcome.batch.lengths
        if differences := [*compare(phase, "lengths", *pair, rule, lambda at: f"of trajectory {at}")]:
            yield from differences  # no token has its place
            return
    for name in BATCH_FIELDS:
        if name not in recorded and name not in replayed:
            continue
        # A field that a phase left as it was on one side alone is compared with what it was.
        there, here = recorded.get(name, before.stored.get(name)), replayed.get(name, before.stored.get(name))
        yield from compare(phase, name, there, here, rule, place(outcome.batch, name, stored))
    yield from compare_metrics(phase, stored.facts["metrics"], dict(outcome.metrics), rule)


def place(batch: TrainBatch, name: str, stored: StoredStep) -> Where:
    """Return what names the place of a flat index in a field of the batch."""
    groups = [index for index, group in enumerate(stored.groups) for _ in range(len(group))]
    ends = batch.lengths.cumsum(0)

    def where(at: int) -> str:
        if BATCH_FIELDS[name].axes == "B":
            return f"of trajectory {at} (group {groups[at]})"
        row = int(torch.searchsorted(ends, at, right=True))
        token = at - int(ends[row] - batch.lengths[row])
        return f"at token {token} of trajectory {row} (group {groups[row]})"

    return where


# ---------------------------------------------------------------- the update


def _update(run: RayPPOTrainer, outcome: Outcome, stored: StoredStep, rule: Closeness) -> Iterator[Difference]:
    """Yield what the update computed otherwise: rates, tokens before any weight moved, gradients, the rest.

    So a loss that is right for each token and added up wrongly shows in the norm of a gradient, and not in what it did
    to later tokens.
    """
    recorded, replayed = stored.of("update"), update_tensors(outcome.batch, run.workers)
    by_row = _rows(recorded), _rows(replayed)
    first = _first_rows(run, outcome.batch)
    rates = {name: value for name, value in outcome.metrics.items() if name.endswith("/lr")}
    others = {name: value for name, value in outcome.metrics.items() if name not in rates}
    yield from compare_metrics("update", stored.facts["metrics"], rates, rule)
    yield from _norms("critic", recorded, replayed, rule)  # the critic is updated first
    yield from _tokens(*by_row, lambda row: row in first, stored, rule)
    yield from _norms("actor", recorded, replayed, rule)
    yield from compare_metrics("update", stored.facts["metrics"], others, rule)
    yield from _tokens(*by_row, lambda row: row not in first, stored, rule)
    yield from _state(run, stored, rule)


def _norms(
    model: str, recorded: Mapping[str, Tensor], replayed: Mapping[str, Tensor], rule: Closeness
) -> Iterator[Difference]:
    pair = (of.get(f"{model}_norms", torch.zeros(0, dtype=torch.float64)) for of in (recorded, replayed))
    yield from compare("update", f"{model}/gradient norm", *pair, rule, lambda at: f"of optimizer step {at}")


def _first_rows(run: RayPPOTrainer, batch: TrainBatch) -> set[int]:
    """Return the rows of the policy's first optimizer step, if no later epoch has replaced what it computed."""
    actor, length = run.config.actor_rollout_ref.actor, run.config.data.max_response_length
    if actor.ppo_epochs > 1:
        return set()
    mini_batches = mini_batching(actor, length, actor.policy_loss.loss_mode)(batch)
    return {int(number) - 1 for first in itertools.islice(mini_batches, 1) for number in first.require("trace_row")}


def _rows(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return row -> field -> its policy tokens, in the order in which rows were computed."""
    rows, start = {}, 0
    for row, count in zip(tensors["rows"].tolist(), tensors["counts"].tolist(), strict=True):
        rows[row] = {name: tensors[name][start : start + count] for name in UPDATED if name in tensors}
        start += count
    return rows


def _tokens(recorded: dict, replayed: dict, chosen, stored: StoredStep, rule: Closeness) -> Iterator[Difference]:
    """Yield the first difference of each field over the chosen rows, the field that is computed first before others."""
    rows = [row for row in [*recorded, *(row for row in replayed if row not in recorded)] if chosen(row)]
    for row in rows:
        if (row in recorded) != (row in replayed):
            text = "is trained on now, and was not" if row in replayed else "was trained on, and is not now"
            yield Difference("update", f"trajectory {row}", text)
            return
    for name in UPDATED:
        there, here = ([of[row][name] for row in rows if name in of[row]] for of in (recorded, replayed))
        if not there and not here:
            continue
        starts = [0, *itertools.accumulate(len(recorded[row]["log_prob"]) for row in rows)]

        def where(at: int, starts: list[int] = starts) -> str:
            index = bisect.bisect_right(starts, at) - 1
            return f"at the policy's token {at - starts[index]} of trajectory {rows[index]}"

        pair = (torch.cat(of) if of else None for of in (there, here))
        yield from compare("update", f"actor/{name}", *pair, rule, where)


def _state(run: RayPPOTrainer, stored: StoredStep, rule: Closeness) -> Iterator[Difference]:
    """Yield the moments and weights that differ after the update."""
    recorded: dict[str, dict[str, Tensor]] = {}
    for name, value in stored.of("after").items():
        tensor, _, part = name.rpartition("/")
        recorded.setdefault(tensor, {})[part] = value
    largest: dict[tuple[str, str], float] = defaultdict(float)  # of each moment, in each model
    for name, parts in recorded.items():
        largest[kind(name)] = max(largest[kind(name)], float(parts["sample"].abs().max()))
    now = trained_tensors(run.workers)
    in_order = sorted([*now, *(name for name in recorded if name not in now)], key=lambda name: name[0] != "c")
    for name in in_order:  # the critic is updated first
        if name not in recorded or name not in now:
            yield absent("update", name, recorded=name in recorded)
            continue
        scale = _scale(name, run, recorded, largest)
        yield from compare_pieces("update", name, recorded[name], now[name], rule, scale)


def _scale(
    name: str,
    run: RayPPOTrainer,
    recorded: Mapping[str, Mapping[str, Tensor]],
    largest: Mapping[tuple[str, str], float],
) -> Tensor:
    """Return what the tolerance of a tensor's sampled numbers is relative to, as :class:`Closeness` says."""
    model, part = kind(name)
    if "/optimizer/" in name:  # an error of a gradient counts twice in its square
        return torch.tensor(largest[model, part] * (2 if part == "exp_avg_sq" else 1))
    plain = recorded[name]["sample"].abs().clamp(min=1)
    moment = recorded.get(f"{model}/optimizer/{name.partition('/')[2]}/exp_avg")
    if moment is None:
        return plain
    trained = run.config.critic if model == "critic" else run.config.actor_rollout_ref.actor
    still = moment["sample"].abs() <= TOLERANCE * largest[model, "exp_avg"]
    return torch.where(still, 2 * trained.optim.lr / TOLERANCE, plain)


def kind(name: str) -> tuple[str, str]:
    """Return the model of a tensor, and which of an optimizer's moments it is."""
    return name.partition("/")[0], name.rpartition("/")[2]
