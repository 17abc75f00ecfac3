"""The loop: collect, log-probs, advantages, update, sync. Recipes override its hooks, never ``fit``.

The hooks are phases that take and return values: :meth:`RayPPOTrainer.generate`,
:meth:`~RayPPOTrainer.shape_reward`, :meth:`~RayPPOTrainer.keep_group` and
:meth:`~RayPPOTrainer.compute_advantages`. What surrounds the loop (starting, stopping, saving,
validating) is in :class:`core.session.Run`, which this class extends.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from core.algorithm import advantages
from core.algorithm.kl import kl_in_reward
from core.algorithm.means import Means
from core.algorithm.rollout_correction import add_mismatch, correct
from core.algorithm.schedules import multiplier
from core.checkpoint.kill_points import kill_point
from core.data.seeds import sampling_seed
from core.engines import SampleRequest, SamplingParams
from core.learner.batching import make_batch, token_rewards
from core.rollout.agent_loop import Limits
from core.rollout.background import Background
from core.rollout.collect import CollectLimits, collect, collect_ahead
from core.session import Run
from core.tracking.metrics import RAW_SCORE
from core.types import Prompt, ScoredGroup, StepMetrics, TrainBatch, Trajectory
from reward_scores.score import Score

GREEDY = -1  # the sample index of a greedy baseline answer


class RayPPOTrainer(Run):
    """PPO and GRPO as they are, and the base of every other recipe.

    ``RayPPOTrainer(config).init_workers()`` checks the data, loads the models and finds the checkpoint
    to go on from; ``.fit()`` trains.
    """

    def fit(self) -> None:
        """Trains to the last step. Each turn of the loop makes one policy version."""
        with self.running():
            self.workers.sync_weights(self.step)
            self.validate_before_training()
            while not self.finished():
                metrics = StepMetrics(self.step + 1)
                with self.profiled(metrics.step), metrics.time("step"):
                    groups_P = self.collect(metrics)
                    with self.collecting_ahead(metrics):
                        batch = make_batch(groups_P, self.tokenizer.pad_token_id, self.state_masking)
                        batch = self.compute_log_probs(batch, metrics)
                        with metrics.time("adv"):
                            batch = self.compute_advantages(batch, metrics)
                        self.update(batch, metrics)
                    with metrics.time("update_weights"):
                        metrics.add(self.workers.sync_weights(metrics.step))
                self.complete_step(groups_P, batch, metrics)

    # -- hooks: a recipe overrides these ---------------------------------------------------------

    async def generate(self, prompt: Prompt, sample_index: int, sampling: SamplingParams) -> Trajectory:
        """One trajectory. Base: an episode of the configured agent loop, or else a single turn of the engine."""
        if self.agent_loop is not None:
            length = self.config.data.max_response_length
            return await self.play(self.episode(prompt, sample_index, sampling, Limits(length, turn=length)))
        seed = sampling_seed(self.config.trainer.seed, prompt.ordinal, sample_index)
        return await self.workers.engine.sample(SampleRequest(prompt.token_ids, sampling, seed))

    def shape_reward(self, score: Score, trajectory: Trajectory) -> Score:
        """The score that trains; validation never calls it. Base: the scorer's."""
        return score

    def keep_group(self, group: ScoredGroup) -> bool:
        """Whether a step may train on the group; validation never calls it. Base: always."""
        return True

    def compute_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Sets ``advantages`` and ``returns`` by ``algorithm.adv_estimator``, after a KL penalty in the reward."""
        algorithm = self.config.algorithm
        rewards_BT = token_rewards(batch)
        if algorithm.use_kl_in_reward:
            rewards_BT, self.kl_controller, penalty = kl_in_reward(
                rewards_BT, batch, self.kl_controller, algorithm.kl_penalty
            )
            metrics.add(penalty)
            batch = batch.adding(reward=rewards_BT.sum(dim=1))
        advantages_BT, returns_BT = advantages.compute(rewards_BT, batch, algorithm)
        return batch.adding(advantages=advantages_BT, returns=returns_BT)

    # -- phases ----------------------------------------------------------------------------------

    def collect(self, metrics: StepMetrics) -> tuple[ScoredGroup, ...]:
        """The step's groups: the lowest ordinals that pass ``keep_group``. Sets the next step's start."""
        with metrics.time("gen"):
            self.collected = self.runner.run(
                collect(
                    self.roll_group,
                    self.keep_group,
                    self.fresh_collect_state(),
                    self.collect_limits(),
                    raise_on_exhausted=self.config.algorithm.filter_groups.on_exhausted == "raise",
                    stop_requested=self.stop_requested,
                    ahead=self.looks_ahead(metrics.step),
                )
            )
        self.collect_state = self.collected.state
        metrics.add(self.collected.metrics)
        return self.collected.groups

    def collect_limits(self) -> CollectLimits:
        data, filters = self.config.data, self.config.algorithm.filter_groups
        in_flight = data.gen_batch_size or data.train_batch_size
        return CollectLimits(data.train_batch_size, in_flight, (filters.max_num_gen_batches or 2**40) * in_flight)

    def looks_ahead(self, step: int) -> bool:
        """Whether the next step's first prompts are answered by the policy that this step updates."""
        return self.config.trainer.max_staleness > 0 and step < self.total_steps

    @contextmanager
    def collecting_ahead(self, metrics: StepMetrics) -> Iterator[None]:
        """With ``trainer.max_staleness=1``, has the next step's first prompts answered while the block runs.

        Where engine and learner cannot work at the same time (in one process, on one GPU) they are answered before
        it, with the same outcome. The state to go on from is complete, with them, when the block ends.
        """
        work = None
        if self.looks_ahead(metrics.step):
            work = collect_ahead(self.roll_group, self.keep_group, self.collected, self.collect_limits())
        else:  # what else was judged is timing's doing
            self.collect_state = dataclasses.replace(self.collect_state, carried={})
        if work is not None and not self.workers.overlaps:
            with metrics.time("gen_ahead"):
                self.collect_state, work = self.runner.run(work), None
        metrics.add({f"timing_s/{name}": seconds for name, seconds in self.clock.take().items()})
        if work is None:
            yield
            return
        background = Background(self.runner, work)
        try:
            yield
            with metrics.time("wait_ahead"):
                self.collect_state = background.result()
            hidden = sum(self.clock.take().values()) - metrics.values["timing_s/wait_ahead"]
            metrics.add({"timing_s/hidden_ahead": max(0.0, hidden)})
        finally:
            background.close()

    async def roll_group(self, ordinal: int) -> ScoredGroup:
        """Generates, scores and shapes one group; each answer is scored while others still decode."""
        prompt, rollout = self.stream.prompt(ordinal), self.config.actor_rollout_ref.rollout

        async def roll(index: int, sampling: SamplingParams) -> tuple[Trajectory, Score]:
            trajectory, score = await self.generate_and_score(prompt, index, sampling)
            return trajectory, self.shape_reward(score, trajectory)

        rolls = [roll(index, self.train_sampling) for index in range(rollout.n)]
        if self.needs.baseline:
            rolls.append(roll(GREEDY, dataclasses.replace(self.train_sampling, temperature=0.0)))
        trajectories, scores = zip(*await asyncio.gather(*rolls), strict=True)
        kill_point("rollout", self.step + 1)
        n = rollout.n
        return ScoredGroup(prompt, trajectories[:n], scores[:n], scores[n] if self.needs.baseline else None)

    async def generate_and_score(
        self, prompt: Prompt, index: int, sampling: SamplingParams
    ) -> tuple[Trajectory, Score]:
        """A trajectory and the scorer's verdict, which keeps its own value as a part: shaping may change the value."""
        with self.clock.busy("decode"):
            trajectory = await self.generate(prompt, index, sampling)
        with self.clock.busy("reward"):
            score = await self.reward.score(prompt, trajectory)
        return trajectory, dataclasses.replace(score, parts={**score.parts, RAW_SCORE: score.value})

    async def evaluate(self) -> list[ScoredGroup]:
        """The validation prompts, answered and scored; nothing shapes or filters."""
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n

        async def group(prompt: Prompt) -> ScoredGroup:
            rolls = (self.generate_and_score(prompt, index, self.val_sampling) for index in range(n))
            trajectories, scores = zip(*await asyncio.gather(*rolls), strict=True)
            return ScoredGroup(prompt, trajectories, scores)

        return await asyncio.gather(*map(group, self.val_prompts))

    def compute_log_probs(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Sets ``old_log_probs``, ``ref_log_prob`` and ``values``, each only where something reads it.

        With one optimizer step a batch the ratio is one by definition: the update's own pass then gives the
        old log-probs, and the pass here is saved, unless the samples' importance weights are made of it.
        """
        if self.needs.old_log_probs(batch):
            with metrics.time("old_log_prob"):
                log_prob_BT, entropy_BT = self.workers.compute_log_probs(batch)
            batch = batch.adding(old_log_probs=log_prob_BT)
            entropy, mismatch = Means(), Means()
            entropy.tokens({"entropy": entropy_BT}, batch.response_mask)
            add_mismatch(mismatch, log_prob_BT, batch)
            metrics.add({**entropy.result("actor"), **mismatch.result("rollout_corr")})
            batch, corrected = correct(batch, self.config.algorithm.rollout_correction)
            metrics.add(corrected)
        if self.needs.ref:
            with metrics.time("ref"):
                batch = batch.adding(ref_log_prob=self.workers.compute_ref_log_prob(batch))
        if self.needs.critic:
            with metrics.time("values"):
                batch = batch.adding(values=self.workers.compute_values(batch))
        return batch

    def update(self, batch: TrainBatch, metrics: StepMetrics) -> None:
        """The critic's optimizer steps, then the policy's once ``trainer.critic_warmup`` is over."""
        step, config = metrics.step, self.config
        if self.needs.critic:
            rate = multiplier(config.critic.optim, step - 1, self.total_steps)
            with metrics.time("update_critic"):
                metrics.add(self.workers.update_critic(batch, rate))
        kill_point("update", step)
        if step > config.trainer.critic_warmup:
            rate = multiplier(config.actor_rollout_ref.actor.optim, step - 1, self.total_steps)
            with metrics.time("update_actor"):
                metrics.add(self.workers.update_actor(batch, rate))
        kill_point("sync", step)
