"""The recorder of tokens (``trainer.trace``): what a few groups of some steps were, token by token, as they trained.

A recorded step is ``<run>/trace/step_<n>.npz``: one zip archive of ``meta.json`` and of flat arrays, which
:mod:`results.reporting.trace_reader` reads without torch or a tokenizer: the texts of the tokens are recorded too.
Everything is taken from where training reads it, the batch's tensors, and beside it from the trajectories, so that a
fault between the two can be seen. ``perf/trace_cpu_s`` is what it costs: CPU seconds of the driver.
"""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from core.config.paths import recipe_of, run_folder
from core.files import replacing
from core.tracking.tracker import attempt
from core.types import ScoredGroup, StepMetrics, TrainBatch, Trajectory

if TYPE_CHECKING:
    from core.config.schema import Config

FORMAT = 1
FOLDER = "trace"
UPDATED = ("log_prob", "ratio", "entropy", "clip", "loss", "loss_weight")  # what an update keeps of numbered rows
# Fields of the batch that are recorded where they are set. Half precision would lose what two log-probs differ by.
LOG_PROBS, ESTIMATES = ("rollout_log_probs", "old_log_probs", "ref_log_prob"), ("values", "returns", "advantages")
NUMBERS = (*LOG_PROBS, *ESTIMATES, "rollout_is_weights")
FIELDS = {"response_mask": np.bool_, "loss_mask": np.bool_, **dict.fromkeys(NUMBERS, np.float32)}


@dataclass(frozen=True)
class Chosen:
    """A group to record: why it was chosen, and its rows in the batch."""

    group: ScoredGroup
    why: str
    rows: range


class TraceRecorder:
    """Decides which steps and groups are recorded, and writes them."""

    def __init__(self, config: Config, tokenizer: Any, total_steps: int):
        self.config, self.options, self.tokenizer = config, config.trainer.trace, tokenizer
        self.folder, self.total_steps = run_folder(config) / FOLDER, total_steps
        self.texts: dict[int, str | dict[str, str]] = {}  # of the tokens seen so far

    def is_due(self, step: int) -> bool:
        """Return whether the step is to be recorded."""
        freq = self.options.freq
        regular = freq > 0 and (step % freq == 0 or step in (1, self.total_steps))
        return regular or step in (self.options.steps or ())

    def begin(self, batch: TrainBatch, step: int) -> TrainBatch:
        """Return the batch with its rows numbered where the step is to be recorded: the update then keeps values."""
        if not self.is_due(step):
            return batch
        return batch.adding(trace_row=batch.group.new_tensor([*range(1, len(batch) + 1)]))

    def record(
        self, groups: Sequence[ScoredGroup], batch: TrainBatch, metrics: StepMetrics, workers: Any
    ) -> dict[str, float]:
        """Write the step where it is due and return what that cost, as metrics."""
        if not self.is_due(metrics.step):
            return {}
        start, chosen = time.thread_time(), self._chosen(groups)
        traced = workers.traced([row for one in chosen for row in one.rows])
        path = self.folder / f"step_{metrics.step:06d}.npz"

        def write() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                meta, arrays = self._content(metrics.step, chosen, batch, traced)
                with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    text = json.dumps(meta, ensure_ascii=False, default=str).encode(errors="replace")
                    archive.writestr("meta.json", text)
                    for name, value in arrays.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                            np.lib.format.write_array(part, value, allow_pickle=False)

        written = attempt(path, write)
        cost = {"perf/trace_cpu_s": time.thread_time() - start}
        return {**cost, "perf/trace_mb": path.stat().st_size / 2**20} if written else {**cost, "perf/trace_dropped": 1}

    def _chosen(self, groups: Sequence[ScoredGroup]) -> list[Chosen]:
        """Return the groups to record: the one of the lowest mean score, and some whose questions recur.

        They are chosen by hash, so that other steps and runs record the same where they can.
        """
        indices = range(len(groups))
        reasons = {min(indices, key=lambda i: sum(s.value for s in groups[i].scores) / len(groups[i])): "worst"}
        by_hash = sorted(indices, key=lambda i: hashlib.sha256(groups[i].prompt.uid.encode()).hexdigest())
        for index in by_hash[: self.options.groups]:
            reasons.setdefault(index, "question")
        starts = np.concatenate([[0], np.cumsum([len(group) for group in groups])])
        return [Chosen(groups[i], why, range(starts[i], starts[i + 1])) for i, why in reasons.items()]

    def _content(
        self, step: int, chosen: Sequence[Chosen], batch: TrainBatch, traced: Mapping[int, Any]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what is recorded of the groups: the description, and arrays over all their tokens."""
        recorded = [row for one in chosen for row in one.rows]
        rows = batch.only(("response_mask", "input_ids", *FIELDS)).rows(recorded)
        trajectories = [t for one in chosen for t in one.group.trajectories]
        arrays = {
            "lengths": rows.lengths.numpy().astype(np.int32),
            "prompts": np.array([len(t.prompt_ids) for t in trajectories], np.int32),
            "ids": rows.input_ids.numpy(),
            "sampled": _flat(trajectories, "response_mask", np.bool_),
            "engine": _flat(trajectories, "logprobs", np.float32),
            **{name: rows.stored[name].numpy().astype(kind) for name, kind in FIELDS.items() if name in rows.stored},
            **_of_update(recorded, rows, traced),
        }
        known, actor = np.unique(arrays["ids"]).tolist(), self.config.actor_rollout_ref.actor
        meta = {
            "format": FORMAT,
            "step": step,
            "recipe": recipe_of(self.config, self.folder.parent),
            "run": self.folder.parent.name,
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            "clip": [1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high],
            "tokens": dict(zip(map(str, known), self._texts(known), strict=True)),
            "groups": [_described(one, batch) for one in chosen],
        }
        return meta, arrays

    def _texts(self, ids: Sequence[int]) -> list[str | dict[str, str]]:
        """Return the text of each id, or its bytes where they are no text alone; each is decoded once in a run."""
        if new := [one for one in ids if one not in self.texts]:
            names = self.tokenizer.convert_ids_to_tokens(new)
            alone = self.tokenizer.batch_decode([[one] for one in new], clean_up_tokenization_spaces=False)
            self.texts |= {one: shown(text, name) for one, text, name in zip(new, alone, names, strict=True)}
        return [self.texts[one] for one in ids]


def _described(chosen: Chosen, batch: TrainBatch) -> dict[str, Any]:
    """Return what ``meta.json`` has of a group."""
    prompt, group = chosen.group.prompt, chosen.group
    trajectories = [
        {
            **{"stop": t.stop.value, "turns": t.turns, "tool_calls": t.tool_calls, "version": t.policy_version},
            **{"score": score.value, "parts": dict(score.parts), "status": score.status.value},
            **{"masked": score.masked, "pred": score.pred},
            **{"reward": float(batch.reward[row]), "counted": bool(batch.in_group_stats[row])},
            "roles": [[segment.role, len(segment.text)] for segment in t.segments],
        }
        for t, score, row in zip(group.trajectories, group.scores, chosen.rows, strict=True)
    ]
    return {
        **{name: getattr(prompt, name) for name in ("uid", "ordinal", "data_source", "ground_truth")},
        "question": prompt.messages[-1].get("content", "") if prompt.messages else "",
        "chosen": chosen.why,
        "trajectories": trajectories,
    }


def shown(text: str, name: str | None) -> str | dict[str, str]:
    """Return a token's text, or ``{"bytes": hexadecimal}`` for one that is no valid UTF-8 alone."""
    if name is None:
        return {"bytes": "", "name": "no such token"}
    if "\ufffd" not in text:
        return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text
    if name.startswith("<0x") and name.endswith(">"):
        return {"bytes": name[3:-1].lower()}
    known = _byte_of()
    if all(character in known for character in name):
        return {"bytes": bytes(known[character] for character in name).hex()}
    return {"bytes": "", "name": name}


def _byte_of() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(odd)}


def _flat(trajectories: Iterable[Trajectory], name: str, dtype: type) -> np.ndarray:
    """Return a field of the responses over all tokens, 0 at the prompts: what the engine and the loop recorded."""
    parts = [part for t in trajectories for part in (np.zeros(len(t.prompt_ids), dtype), getattr(t, name))]
    return np.concatenate(parts).astype(dtype)


def _of_update(rows: Sequence[int], batch: TrainBatch, traced: Mapping[int, Any]) -> dict[str, np.ndarray]:
    """Return what the update computed over all tokens of these rows, NaN where it computed nothing."""
    names = [name for name in UPDATED if any(name in values for values in traced.values())]
    updated = {name: np.full(batch.tokens, np.nan, np.float32) for name in names}
    policy_N, end = batch.response_mask.bool().numpy(), 0
    for row, length in zip(rows, batch.lengths.tolist(), strict=True):
        span, end = slice(end, end + length), end + length
        for name, value in traced.get(row, {}).items():
            updated[name][span][policy_N[span]] = value
    return updated
