"""On-policy distillation: a teacher scores each token that the student wrote (arXiv:2306.13649,
arXiv:2306.08543).

The reverse KL of student and teacher, sampled on the student's answers, is the reward of each
token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from core.algorithm.sequences import masked_mean
from core.data.parquet import Example
from core.data.vocabulary import check_same_ids
from core.errors import InputError
from core.learner.models import load_tokenizer
from core.ray_trainer import RayPPOTrainer
from core.types import Prompt, ScoredGroup, StepMetrics, TrainBatch
from recipes.opd.functions import TOKEN_REWARDS


class RayOPDTrainer(RayPPOTrainer):
    """The core trainer with teachers whose log-probs are advantages."""

    groups_P: Sequence[ScoredGroup] = ()  # of the step, in the order of its batch

    def needs_old_log_probs(self, batch: TrainBatch) -> bool:
        """Return True, unless the engine's log-probs serve as the student's."""
        return not self.config.algorithm.rollout_correction.bypass_mode

    def load_data(self) -> None:
        """Load the data, and refuse a teacher whose token ids mean other tokens.

        Raises InputError, also where the first example of a data source names no teacher.
        """
        super().load_data()
        for frozen in self.config.frozen_models.values():
            teacher = load_tokenizer(frozen.model)
            check_same_ids(self.tokenizer, teacher, f"{frozen.key}={frozen.model.path}")
        for example in self.stream.files.first.values():
            self.teacher_of(example)
        self.check_privileged_prompts()

    def check_privileged_prompts(self) -> None:
        """Raise InputError if a pass has no room for an answer behind the teacher's prompt."""
        actor, files = self.config.actor_rollout_ref.actor, self.stream.files
        if self.config.distillation.privileged_prompt is None or not actor.use_dynamic_bsz:
            return
        prompts = (files.prompt(index, 0) for index in range(len(files)))
        longest = max(len(self.privileged_ids(prompt)) for prompt in prompts)
        needed = longest + self.config.data.max_response_length
        budget = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
        if needed > budget:
            key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
            raise InputError(
                f"{key}={actor.ppo_max_token_len_per_gpu}: behind the longest privileged prompt, "
                f"of {longest} tokens, an answer may end at {needed}; raise it to that, or shorten "
                f"distillation.privileged_prompt"
            )

    def teacher_of(self, example: Example | Prompt) -> str:
        """Return the role of an example's teacher. Raises InputError: it names none."""
        keys = self.config.distillation
        if not keys.teachers:
            return "teacher"
        columns = {**example.extra_info, "data_source": example.data_source}
        name = columns.get(keys.teacher_column)
        if name not in keys.teachers:
            raise InputError(
                f"distillation.teacher_column={keys.teacher_column}: an example of "
                f"{example.data_source} has {name!r} there, which distillation.teachers does not "
                f"name; add its teacher"
            )
        return f"teacher of {name}"

    def make_batch(self, groups_P: Sequence[ScoredGroup]) -> TrainBatch:
        """Return the groups as a batch, and keep them: they name their teachers."""
        self.groups_P = groups_P
        return super().make_batch(groups_P)

    def compute_advantages(self, batch: TrainBatch, metrics: StepMetrics) -> TrainBatch:
        """Set ``advantages`` to the estimator's times ``reward_weight`` plus each token's reward
        times ``coef``."""
        keys = self.config.distillation
        batch = super().compute_advantages(batch, metrics)
        with metrics.time("teacher"):
            teacher_N = self.teacher_log_probs(batch)
        student_N = batch.old_log_probs if batch.has("old_log_probs") else batch.rollout_log_probs
        mask = batch.response_mask
        metrics.add({"distillation/reverse_kl": float(masked_mean(student_N - teacher_N, mask))})
        reward_N = TOKEN_REWARDS[keys.token_reward](student_N, teacher_N, mask)
        return batch.adding(advantages=keys.reward_weight * batch.advantages + keys.coef * reward_N)

    def teacher_log_probs(self, batch: TrainBatch) -> Tensor:
        """Return the log-probs of each example's teacher, [N], under the prompt that it sees."""
        seen = batch
        if self.config.distillation.privileged_prompt is not None:
            seen = super().make_batch([self.with_privileged_prompt(g) for g in self.groups_P])
        roles = [self.teacher_of(group.prompt) for group in self.groups_P]
        seen_N = torch.zeros(seen.tokens)
        for role in sorted(set(roles)):
            is_pupil_P = torch.tensor([each == role for each in roles])
            rows = is_pupil_P[seen.group].nonzero()[:, 0]
            log_prob_N = self.workers.compute_ref_log_prob(seen.rows(rows), role)
            seen.put_into(seen_N, rows, log_prob_N)
        # The same answers in the same order, behind prompts of other lengths
        return torch.zeros(batch.tokens).masked_scatter(
            batch.response_mask, seen_N[seen.response_mask]
        )

    def with_privileged_prompt(self, group: ScoredGroup) -> ScoredGroup:
        """Return the group with its answers behind the teacher's prompt."""
        prompt_ids = self.privileged_ids(group.prompt)
        answers = [dataclasses.replace(t, prompt_ids=prompt_ids) for t in group.trajectories]
        return dataclasses.replace(group, trajectories=tuple(answers))

    def privileged_ids(self, prompt: Prompt) -> list[int]:
        """Return the teacher's prompt: the last message is ``privileged_prompt``.

        Without a chat template it is the whole prompt.
        """
        *before, last = prompt.messages
        template = self.config.distillation.privileged_prompt
        text = template.replace("{question}", last["content"])
        text = text.replace("{ground_truth}", str(prompt.ground_truth))
        encoder = self.stream.files.encoder
        chat = [*before, {**last, "content": text}]
        return encoder.encode(chat if encoder.has_template else text)
