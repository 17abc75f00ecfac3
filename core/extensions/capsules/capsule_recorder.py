"""The recorder of steps that can be computed again (``trainer.capsule_steps``): a capsule holds all that a step needs.

A capsule is the folder ``<run>/capsules/step_<n>``: what the step began from (groups, weights, optimizers, the KL
controller) and what each phase made of it. ``capsule.json`` describes it and has the hash of every other file; tensors
are safetensors. It appears as a whole, by one rename, or not at all. :mod:`core.replay` reads it and computes the
step again; how answers came about is not in it, since engines and scorers are its beginning.

Of the weights after the update a capsule keeps checksums of pieces and one number of each piece: that tells which
tensor differs and where, at a hundredth of the size.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.checkpoint.provenance import package_versions
from core.checkpoint.run_state import StateEncoder
from core.config import convert
from core.config.paths import run_folder
from core.errors import InputError
from core.files.durable_files import PARTIAL, file_sha256, fsync, write_durably
from core.tracking.recorders import TRACED, Moment, RecordedRun, Recorder
from core.tracking.records import drop_steps_after
from core.tracking.run_manifest import cpu_kind, git_state
from core.types import ScoredGroup, StepMetrics, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

    from core.algorithm.kl import KLController
    from core.config.schema import Config

log = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "capsules"
FACTS, TENSORS, OPTIMIZER = "capsule.json", "step.safetensors", "optimizer.safetensors"
PACKAGES = ("torch", "transformers", "numpy")  # whose version decides how a step is rounded
PIECES = 64  # of a tensor after the update, each with a checksum and its first number
UPDATED = ("loss_weight", *(name for name in TRACED if name != "loss_weight"))  # of the update, as it is computed
UNREPEATED = ("timing_s/", "perf/", "rollout_corr/probe_diff")  # metrics of time, and of the engine


def recorder(run: RecordedRun) -> CapsuleRecorder:
    return CapsuleRecorder(run.config, run.trainer, run.total_steps)


def drop_after(run_dir: Path, step: int) -> None:
    drop_steps_after(run_dir / FOLDER, step)


# ---------------------------------------------------------------- tensors of models


def trained_tensors(workers: Any) -> dict[str, Tensor]:
    """Return model/tensor -> tensor of the models that are trained, in the order of :func:`state_of`."""
    from core.learner.saving import state_of

    state = state_of(workers)
    return {f"{model}/{name}": value for model in workers.trained for name, value in state[model].items()}


ALIGNED = 64  # bytes, to which torch aligns what it allocates itself


def alignment_of(workers: Any) -> dict[str, int]:
    """Return model/weight -> its address modulo 64 bytes, where that is not 0.

    Weights that are read from a file lie as they lay there, and a product with a vector is rounded accordingly: the
    values of a critic differed in the last bit where its head was not aligned as in the run.
    """
    from core.learner.saving import modules_of

    offsets = {
        f"{model}/{name}": weight.data_ptr() % ALIGNED
        for model, module in modules_of(workers).items()
        for name, weight in module.named_parameters()
    }
    return {name: offset for name, offset in offsets.items() if offset}


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def pieces(count: int) -> list[int]:
    """Return the start index of each piece of a tensor of ``count`` numbers."""
    return [index * count // min(count, PIECES) for index in range(min(count, PIECES))]


def digest(tensor: Tensor) -> dict[str, Tensor]:
    """Return the first number and the CRC-32 of each piece of a tensor: ``sample`` and ``crc``, [pieces]."""
    import torch

    starts, data, size = pieces(tensor.numel()), _bytes(tensor), tensor.element_size()
    ends = [*starts[1:], tensor.numel()][: len(starts)]
    sums = [zlib.crc32(data[start * size : end * size]) for start, end in zip(starts, ends, strict=True)]
    sample = tensor.detach().reshape(-1)[starts].float().cpu()
    return {"sample": sample, "crc": torch.tensor(sums, dtype=torch.int64)}


# ---------------------------------------------------------------- what was computed


def changed_fields(before: TrainBatch, after: TrainBatch) -> dict[str, Tensor]:
    """Return the fields that a phase set, or set anew; a phase takes none away."""
    import torch

    def same(name: str, value: Tensor) -> bool:
        old = before.stored.get(name)
        return old is value or (old is not None and old.dtype == value.dtype and torch.equal(old, value))

    return {name: value for name, value in after.stored.items() if not same(name, value)}


def update_tensors(batch: TrainBatch, workers: Any) -> dict[str, Tensor]:
    """Return what the policy's update computed of its tokens: ``rows`` and ``counts`` [R], and each field, [tokens].

    Rows are in the order in which they were computed; those that could not move a weight may be absent.
    ``<model>_norms`` are the norms of the gradients, [optimizer steps].
    """
    import torch

    rows = workers.traced(range(len(batch))).rows
    names = [name for name in UPDATED if any(name in values for values in rows.values())]
    counts = [len(values["log_prob"]) for values in rows.values()]
    tensors = {"rows": torch.tensor([*rows], dtype=torch.int64), "counts": torch.tensor(counts, dtype=torch.int64)}
    for name in names:
        parts = [
            values.get(name, np.full(n, np.nan, np.float32)) for values, n in zip(rows.values(), counts, strict=True)
        ]
        tensors[name] = torch.from_numpy(np.concatenate(parts))
    for name, part in workers.trained.items():
        tensors[f"{name}_norms"] = torch.tensor(part.stepper.norms, dtype=torch.float64)
    return tensors


@dataclass
class Begun:
    """A step whose capsule is being filled."""

    step: int
    groups: Sequence[ScoredGroup]
    batch: TrainBatch  # after the last phase that was kept
    kl: KLController
    weights: Mapping[str, Mapping[str, Tensor]]  # copies, from before the update
    alignment: Mapping[str, int]
    known: frozenset[str]  # metrics from before the first phase
    seconds: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict)


class CapsuleRecorder(Recorder):
    """Keeps the steps that ``trainer.capsule_steps`` names.

    :meth:`begin`, :meth:`after` and :meth:`record` are called in every step. What fails here never ends the run.
    """

    def __init__(self, config: Config, trainer: type, total_steps: int):
        self.config, self.total_steps = config, total_steps
        self.trainer = f"{trainer.__module__}:{trainer.__qualname__}"
        self.run_dir = run_folder(config)
        self.steps = frozenset(config.trainer.capsule_steps or ())
        self.begun: Begun | None = None

    def begin(self, batch: TrainBatch, now: Moment) -> TrainBatch:
        """Copy the weights where the step is to be kept, and return the batch with its rows numbered for the update."""
        metrics, workers = now.metrics, now.workers
        self.begun = None
        if metrics.step not in self.steps:
            return batch
        from core.learner.saving import host_copy, state_of
        from core.learner.traced_tokens import numbered

        start = time.perf_counter()
        batch = numbered(batch)
        weights = {name: host_copy(tensors) for name, tensors in state_of(workers).items()}
        known, alignment = frozenset(metrics.values), alignment_of(workers)
        self.begun = Begun(metrics.step, now.groups, batch, now.kl, weights, alignment, known)
        self.begun.tensors |= {f"batch/{name}": value for name, value in batch.stored.items()}
        self.begun.tensors["lengths"] = batch.lengths
        self.begun.seconds = time.perf_counter() - start
        return batch

    def after(self, phase: str, batch: TrainBatch, metrics: StepMetrics) -> None:
        """Keep what a phase made of the batch; :meth:`record` keeps what the update made."""
        if self.begun is not None and phase != "update":
            fields = changed_fields(self.begun.batch, batch)
            self.begun.tensors |= {f"{phase}/{name}": value for name, value in fields.items()}
            self.begun.batch = batch

    def record(self, batch: TrainBatch, now: Moment) -> dict[str, float]:
        """Write the capsule of the step, if there is to be one, and return what it cost, as metrics."""
        workers = now.workers
        begun, self.begun = self.begun, None
        if begun is None:
            return {}
        start = time.perf_counter()
        begun.tensors |= {f"update/{name}": value for name, value in update_tensors(batch, workers).items()}
        for name, value in trained_tensors(workers).items():
            begun.tensors |= {f"after/{name}/{part}": sums for part, sums in digest(value).items()}
        size = 0
        try:
            size = self._write(begun, now.kl, now.metrics, workers)
        except (InputError, OSError) as error:
            log.warning("the capsule of step %d is not kept: %s", begun.step, error)
        return {"perf/capsule_s": begun.seconds + time.perf_counter() - start, "perf/capsule_mb": size / 2**20}

    # -- the folder ------------------------------------------------------------------------------

    def _write(self, begun: Begun, kl: KLController, metrics: StepMetrics, workers: Any) -> int:
        """Write the folder under another name and rename it. Return its bytes. Raises InputError if it is too large."""
        import torch

        from core.learner.saving import save_tensors

        encoder = StateEncoder()
        groups = [encoder.encode(group, f"groups[{index}]") for index, group in enumerate(begun.groups)]
        policy, reference = begun.weights["actor"], begun.weights.get("ref", {})
        # In the first step the reference is the policy and is stored once
        same = all(torch.equal(value, policy[name]) for name, value in reference.items())
        models = [name for name in begun.weights if name != "ref" or not same]
        facts = {**self._facts(begun, kl, metrics, workers), "groups": groups, "weights": {"kept": models}}
        buffers = {f"groups/{name}": torch.from_numpy(value) for name, value in encoder.buffers().items()}
        tensors = begun.tensors | buffers
        stored = [*tensors.values(), *(value for name in models for value in begun.weights[name].values())]
        size = (sum(value.nbytes for value in stored) + len(json.dumps(facts, default=str))) / 2**20
        share = self.config.trainer.capsule_max_mb / len(self.steps)
        if size > share:
            rule = f"it takes {size:.2f} MB, and {share:.2f} are its share of trainer.capsule_max_mb"
            raise InputError(f"{rule}; set it to at least {math.ceil(size * len(self.steps))}")
        final = self.run_dir / FOLDER / f"step_{begun.step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            save_tensors({name: value.clone() for name, value in tensors.items()}, partial / TENSORS)  # some are views
            for name in models:
                self._save_model(name, begun.weights[name], workers, partial / name)
            return _publish(partial, final, facts)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _facts(self, begun: Begun, kl: KLController, metrics: StepMetrics, workers: Any) -> dict[str, Any]:
        import torch

        new = {name: value for name, value in metrics.values.items() if name not in begun.known}
        git = git_state()
        device = next(workers.trained["actor"].module.parameters()).device.type
        return {
            "format": FORMAT,
            "step": begun.step,
            "total_steps": self.total_steps,
            "trainer": self.trainer,
            "config": convert.as_recorded(self.config),
            "machine": {"cpu": cpu_kind(), "threads": torch.get_num_threads(), "device": device},
            "versions": package_versions(PACKAGES),
            "code": {name: git[name] for name in ("commit", "dirty")},
            "batch": {"pad_id": begun.batch.pad_id},
            "kl_controller": {"before": begun.kl.state_dict(), "after": kl.state_dict()},
            "metrics": {name: value for name, value in new.items() if not name.startswith(UNREPEATED)},
            "alignment": dict(begun.alignment),
        }

    def _save_model(self, name: str, tensors: Mapping[str, Tensor], workers: Any, folder: Path) -> None:
        from core.learner.saving import modules_of, save_model, save_tensors

        weights = {tensor: value for tensor, value in tensors.items() if "/" not in tensor}
        save_model(modules_of(workers)[name], None, folder, weights)
        moments = {tensor.removeprefix("optimizer/"): value for tensor, value in tensors.items() if "/" in tensor}
        if moments:
            save_tensors(moments, folder / OPTIMIZER)


def _publish(partial: Path, final: Path, facts: Mapping[str, Any]) -> int:
    """Describe and hash what was written, put it on disk and give it its name. Return its bytes."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    hashes = {str(path.relative_to(partial)): file_sha256(path) for path in files}
    write_durably(partial / FACTS, json.dumps({**facts, "files": hashes}))
    for path in [*partial.rglob("*"), partial]:
        fsync(path)
    partial.rename(final)  # none is there: a resumed run has removed those of later steps
    fsync(final.parent)
    return sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
