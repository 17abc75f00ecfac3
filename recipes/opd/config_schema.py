"""The keys of on-policy distillation: the teacher, and how its log-probs become advantages."""

from __future__ import annotations

from typing import Literal

from core.config.schema import Config, FrozenModel
from core.config.section import (
    Condition,
    DType,
    NonNegative,
    Open,
    Positive,
    Section,
    execution,
    key,
)
from core.config.training_keys import ModelConfig

PAPER = "on-policy distillation"


class TeacherConfig(Section):
    """A causal language model with the policy's tokenizer, which never trains."""

    path: str = key("~/models/teacher", "the teacher: hub id (org/name), folder (/, ./) or URL")
    dtype: DType | None = key(
        None, "number format of its passes", follows="actor_rollout_ref.actor.fsdp_config.dtype"
    )
    temperature: Positive | None = key(
        None, "divides its logits", follows="actor_rollout_ref.rollout.temperature"
    )
    trust_remote_code: bool = execution(False, "run Python code that comes with the teacher")


SEVERAL = Condition(lambda config, own: bool(own.teachers), "needs distillation.teachers")


class DistillationConfig(Section):
    coef: NonNegative = key(1.0, "weight of a token's reward")
    token_reward: Literal["log_ratio", "sign", "shuffled", "unlikely"] = key(
        "log_ratio", "log p(teacher) - log p(student), or what it is compared with (functions.py)"
    )
    reward_weight: NonNegative = key(
        0.0, "weight of the estimator's advantage beside it; 0: the teacher alone teaches"
    )
    teacher: TeacherConfig = TeacherConfig()
    teachers: Open = key(
        {}, "in place of teacher.path: paths of several teachers, by the name in teacher_column"
    )
    teacher_column: str = key(
        "data_source",
        "what names an example's teacher: data_source, or a key of extra_info",
        SEVERAL,
    )
    privileged_prompt: str | None = key(
        None,
        "the question as the teacher sees it, with {question} and {ground_truth} in their places; "
        "null: as the student sees it",
    )


class OPDConfig(Config):
    """The core's configuration with the keys of on-policy distillation."""

    distillation: DistillationConfig = DistillationConfig()

    @property
    def frozen_models(self) -> dict[str, FrozenModel]:
        """Return the teachers, as models that the learner loads beside the reference."""
        teacher = self.distillation.teacher
        paths = {
            f"teacher of {name}": (f"distillation.teachers.{name}", str(path))
            for name, path in self.distillation.teachers.items()
        } or {"teacher": ("distillation.teacher.path", teacher.path)}
        # The rollout's may be 0 where a run only validates
        temperature = teacher.temperature or 1.0
        return {
            role: FrozenModel(path_key, self.teacher_model(path), teacher.dtype, temperature)
            for role, (path_key, path) in paths.items()
        }

    def teacher_model(self, path: str) -> ModelConfig:
        """Return the policy's model section with a teacher's path."""
        return self.actor_rollout_ref.model.replace(
            path=path,
            tokenizer_path=None,
            override_config={},
            lora_rank=0,
            trust_remote_code=self.distillation.teacher.trust_remote_code,
        )


SCHEMA = OPDConfig
