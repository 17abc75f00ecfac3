"""The learner of a published script on all of its ranks, without a GPU, beside the plan's figures.

One process is rank 0 of a group that exchanges nothing, and every tensor of the model is fake: it
has a size and no numbers. The real learner (``core.cluster.fsdp``, ``core.learner``) makes a pass
for log-probs and the passes of one update, each full: as many sequences of full length as the
script's limit allows. ``tests.scale.meter`` counts bytes that are alive and collectives. Layers are
alike, so two small models are counted and a line through them gives the script's. Not counted: a
GPU's allocator, NCCL's buffers, and the weights of an engine beside the learner.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from core.cluster.learner_rank import LearnerRank
from core.config.schema import Config
from core.learner.models import compute_dtype
from core.plan import LOG_PROBS, UPDATE, Plan, pass_tokens, width
from results.reporting.run_scripts import Script
from tests.scale.fake_learner import config_of, fake_rank, first_step, full_batch
from tests.scale.meter import GPU, HOST

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("recipes/dapo/run_qwen2.5_32b.sh", "recipes/grpo/run_qwen2.5_7b_gsm8k.sh")
LAYERS = (3, 4)  # two lack the gathering of the next layer beside the reduction of the last
BOUND = 0.10
SYNC = "weight sync"


@dataclass(frozen=True)
class Line:
    """A figure that was counted beside the one that a formula gives: bytes, or calls of a
    collective."""

    what: str
    counted: float
    formula: float

    @property
    def deviation(self) -> float:
        return self.formula / self.counted - 1


def count(script: Script, plan: Plan, layers: int) -> Counter[str]:
    """Count the phases of the script's learner with so many layers: bytes and calls, by name."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(script, plan.shape, layers, Path(folder))
        together = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        with fake_rank(config) as (rank, meter):
            place = HOST if meter.offloads else GPU
            found["weights"] = meter.now[place]
            first_step(rank, meter)
            found["optimizer"] = meter.now[place] - found["weights"]
            resident = meter.now[GPU]
            batch = full_batch(config, max(1, _tokens(plan) * together // plan.longest))
            for phase, act in (
                (LOG_PROBS, lambda: rank.models.compute_log_probs(batch)),
                (UPDATE, lambda: rank.models.update_actor([batch], 1.0)),
                (SYNC, lambda: sync(rank, config)),
            ):
                meter.reset()
                act()
                found[phase] = meter.peak[GPU] - resident
                found |= Counter(
                    {f"{phase}, {kind}, calls": number for kind, number in meter.calls.items()}
                )
                found |= Counter({f"{phase}, {kind}": size for kind, size in meter.sent.items()})
    return found


def sync(rank: LearnerRank, config: Config) -> None:
    """Gather the weights for the engines, bucket by bucket; the staging memory of a bucket is not
    counted."""
    rollout = config.actor_rollout_ref.rollout
    weights = rank.weights(compute_dtype(rollout.dtype) or torch.float32)
    for _ in rank.buckets(weights, rollout.update_weights_bucket_megabytes * 2**20, None):
        pass


def _tokens(plan: Plan) -> int:
    return pass_tokens(plan.config, plan.config.actor_rollout_ref.actor)


def collectives(plan: Plan) -> Iterator[tuple[str, float, float]]:
    """Yield (name, calls, bytes) of a phase's collectives by their formulas.

    Weights are gathered in each pass forward, and backward again; gradients are reduced in float32.
    Attention exchanges queries, keys, values and its result, forward, recomputed, and backward.
    """
    actor = plan.config.actor_rollout_ref.actor
    shape, size, together = (
        plan.shape,
        width(actor.fsdp_config.dtype),
        actor.ulysses_sequence_parallel_size,
    )
    checkpointing = plan.config.actor_rollout_ref.model.enable_gradient_checkpointing
    units = shape.layers + 1  # embedding, last norm and head are one
    yield f"{UPDATE}, reduce-scatter", units, 4.0 * shape.parameters
    for phase, gathers, exchanges in ((LOG_PROBS, 1, 1), (UPDATE, 2, 2 + checkpointing)):
        yield f"{phase}, all-gather", gathers * units, gathers * size * shape.parameters
        if together > 1:
            kv_size = shape.kv_size * max(1, together // shape.kv_heads)
            exchanged = 2 * (shape.q_size + kv_size) * size * _tokens(plan)
            yield (
                f"{phase}, all-to-all",
                4 * exchanges * shape.layers,
                exchanges * shape.layers * exchanged,
            )
    # Seven matrices, two norms, biases of three
    weights = (9 + 3 * shape.bias) * shape.layers + 3 - shape.tied
    gathered = width(plan.config.actor_rollout_ref.rollout.dtype) * float(shape.parameters)
    yield f"{SYNC}, gather of a weight", weights, gathered


def world(script: Script) -> list[Line]:
    """Return the plan's figures of a script, and those of formulas where it has none, beside the
    counted ones."""
    plan = Plan(script.config, "H100")
    few, more = (count(script, plan, layers) for layers in LAYERS)
    share = (plan.shape.layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    counted = {name: few[name] + share * (more[name] - few[name]) for name in few}
    policys = [part for part in plan.parts if part.role == "policy"]
    formulas = dict(
        zip(("weights", "optimizer"), (part.bytes for part in policys if part.state), strict=True)
    )
    for phase in (LOG_PROBS, UPDATE):
        formulas[phase] = sum(
            part.bytes for part in policys if not part.state and phase in part.phases
        )
    # A sync's peak is twice the largest weight, because DTensor copies what it gathered.
    formulas[SYNC] = (
        2
        * width(plan.config.actor_rollout_ref.rollout.dtype)
        * plan.shape.vocab
        * plan.shape.hidden
    )
    for name, calls, size in collectives(plan):
        formulas |= {name: size, f"{name}, calls": calls}
    return [Line(name, counted[name], formula) for name, formula in formulas.items()]
