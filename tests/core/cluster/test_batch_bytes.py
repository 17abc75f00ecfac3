"""What a step sends to the learner ranks and gets back, and how many bytes that is, at the boundary of the calls.

:class:`Wire` stands in for Ray: it pickles every argument and reply as Ray does (protocol 5) and counts the bytes. An
object that is put once and given to several ranks counts once, as it does in Ray's object store.
"""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import ray
import torch

from core.cluster.processes import LearnerProcess
from core.cluster.ray_workers import RayWorkers
from core.learner.batching import make_batch, mini_batching
from core.types import Prompt, ScoredGroup, Stop, TrainBatch, Trajectory
from reward_scores.score import Score
from tests.core.ray_cluster import cluster_config, mixed_batch

GROUPS, SAMPLES, PROMPT, LONGEST, RANKS, TOGETHER = 64, 8, 24, 2048, 16, 8
# Of a real token, by phase, in both directions: what the pass reads or the loss needs, and what comes back.
TOKEN_BYTES = {
    "old_log_prob": {"input_ids": 4, "response_mask": 1, "log_prob": 4, "entropy": 4},
    "ref": {"input_ids": 4, "response_mask": 1, "log_prob": 4},
    "values": {"input_ids": 4, "response_mask": 1, "values": 4},
    "update_actor": {
        **{"input_ids": 4, "response_mask": 1, "loss_weight": 4, "advantages": 4, "old_log_probs": 4},
        **{"ref_log_prob": 4},
    },
    "update_critic": {"input_ids": 4, "response_mask": 1, "loss_weight": 4, "returns": 4, "values": 4},
}
BOUND = 1.2  # times the real tokens' own bytes


class Ref:
    """What ``ray.put`` returns: all processes that read it get the same memory."""

    def __init__(self, value):
        self.data = pickle.dumps(value, 5)
        self.value = pickle.loads(self.data)


class Learner:
    """A learner rank without a model: its passes find the token ids, its update nothing. ``asked`` has the batches."""

    def __init__(self):
        self.asked: list = []

    def compute_log_probs(self, batch: TrainBatch) -> tuple[torch.Tensor, ...]:
        self.asked.append(batch)
        return batch.input_ids.float(), -batch.input_ids.float()

    def compute_ref_log_prob(self, batch: TrainBatch) -> tuple[torch.Tensor]:
        return self.compute_log_probs(batch)[:1]

    def compute_values(self, batch: TrainBatch) -> tuple[torch.Tensor]:
        return self.compute_log_probs(batch)[:1]

    def update_actor(self, steps: list[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        self.asked.append(steps)
        return {"loss": 1.0}

    update_critic = update_actor


class Wire:
    """Satisfies :class:`core.cluster.ray_watch.Watch` for learner ranks, and counts the bytes of each phase."""

    def __init__(self, ranks: int):
        self.bytes: Counter[str] = Counter()
        self.put_bytes = 0
        self.processes = []
        for _ in range(ranks):
            process = object.__new__(LearnerProcess)
            process.learner = Learner()
            self.processes.append(process)

    def put(self, value) -> Ref:
        ref = Ref(value)
        self.put_bytes += len(ref.data)
        return ref

    def call(self, phase: str, method: str, arguments: dict[str, tuple]) -> list:
        self.bytes[phase] += self.put_bytes
        self.put_bytes, replies = 0, []
        for process, given in zip(self.processes, arguments.values(), strict=True):
            sent = [one if isinstance(one, Ref) else Ref(one) for one in given]
            reply = pickle.dumps(getattr(process, method)(*(one.value for one in sent)), 5)
            own = sum(len(one.data) for one in sent if one not in given)
            self.bytes[phase] += own + len(reply)
            replies.append(pickle.loads(reply))
        return replies


def long_tailed_batch(seed: int = 0) -> TrainBatch:
    """Answers of very different lengths, as reasoning models write them; every field is set."""
    rng, groups = np.random.default_rng(seed), []
    for ordinal in range(GROUPS):
        prompt = rng.integers(4, 60, PROMPT)
        lengths = np.clip(rng.lognormal(5.5, 1.0, SAMPLES), 1, LONGEST).astype(int)
        answers = [rng.integers(4, 60, length) for length in lengths]
        trajectories = tuple(
            Trajectory(prompt, one, [True] * len(one), [-0.5] * len(one), (), Stop.EOS, 0, 1) for one in answers
        )
        scores = tuple(Score(float(rng.random() < 0.5)) for _ in answers)
        groups.append(ScoredGroup(Prompt(ordinal, "", tuple(prompt), (), "", ""), trajectories, scores))
    batch = make_batch(groups, 0)
    fields = ("old_log_probs", "ref_log_prob", "values", "advantages", "returns")
    noise = torch.randn(batch.tokens, generator=torch.Generator().manual_seed(seed)) * batch.response_mask
    return batch.adding(**dict.fromkeys(fields, noise))


@pytest.fixture
def make_workers(tmp_path, monkeypatch):
    """The phases over ranks that have no process behind them."""

    def make(*overrides: str, ranks: int = RANKS, together: int = TOGETHER) -> RayWorkers:
        parallel = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        config = cluster_config(
            tmp_path,
            *(f"{part}.ulysses_sequence_parallel_size={together}" for part in parallel),
            *(f"{part}.model.use_remove_padding=True" for part in ("actor_rollout_ref", "critic")),
            *(f"{part}.ppo_max_token_len_per_gpu=4096" for part in ("actor_rollout_ref.actor", "critic")),
            f"data.train_batch_size={GROUPS}",
            f"data.max_response_length={LONGEST}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS // 4}",
            *overrides,
            ranks=ranks,
        )
        made = object.__new__(RayWorkers)
        made.config, made.ranks, made.device, made.watch = config, ranks, torch.device("cpu"), Wire(ranks)
        actor, length = config.actor_rollout_ref.actor, config.data.max_response_length
        made.actor_mini_batches = mini_batching(actor, length, actor.policy_loss.loss_mode)
        made.critic_mini_batches = mini_batching(config.critic, length)
        monkeypatch.setattr(ray, "put", made.watch.put)
        return made

    return make


@pytest.mark.parametrize("phase", TOKEN_BYTES)
def test_what_crosses_is_little_more_than_the_real_tokens(make_workers, phase):
    batch, workers = long_tailed_batch(), make_workers()
    workers.compute_log_probs(batch)
    workers.compute_ref_log_prob(batch)
    workers.compute_values(batch)
    workers.update_critic(batch, 1.0)
    workers.update_actor(batch, 1.0)
    own = batch.tokens * sum(TOKEN_BYTES[phase].values())
    assert batch.tokens * 4 < len(batch) * int(batch.lengths.max()), "the batch is not long-tailed"
    assert 0.5 * own < workers.watch.bytes[phase] <= BOUND * own


@pytest.mark.parametrize("shared", ["sequences", "layers"])
def test_neighbours_that_split_sequences_or_layers_get_the_same_rows(make_workers, shared):
    """Four ranks in two groups: rows are shared out over the groups, and put together again from one of each."""
    part, over = "actor_rollout_ref.actor", ["critic.ulysses_sequence_parallel_size=1"]
    if shared == "layers":
        over += [f"{part}.ulysses_sequence_parallel_size=1", f"{part}.tensor_model_parallel_size=2"]
    batch, workers = mixed_batch(), make_workers(*over, ranks=4, together=2)
    written = batch.input_ids * batch.response_mask
    log_probs, entropies = workers.compute_log_probs(batch)
    assert torch.equal(log_probs, written.float()) and torch.equal(entropies, -written.float())
    assert torch.equal(workers.compute_values(batch), written.float())
    assert workers.update_actor(batch, 1.0) == {"loss": 1.0}
    passes, values, update = zip(*(process.learner.asked for process in workers.watch.processes), strict=True)
    for first, second, third, fourth in (passes, [steps[0] for steps in update]):
        assert first is second and third is fourth and len(first) + len(third) == len(batch)
    assert sum(map(len, values)) == len(batch)  # the critic's ranks share nothing
    assert float(sum(steps[0].loss_weight.sum() for steps in update[::2])) == pytest.approx(1.0)


KL, PLAIN = "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.use_kl_loss=False"
ALWAYS = {"input_ids", "response_mask", "group", "loss_weight"}
