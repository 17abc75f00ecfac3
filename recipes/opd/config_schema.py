"""The keys of on-policy distillation: the teacher, and how its log-probs become advantages."""

from __future__ import annotations

from core.config.schema import Config, FrozenModel
from core.config.section import DType, NonNegative, Positive, Section, execution, key

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


class DistillationConfig(Section):
    coef: NonNegative = key(1.0, "weight of a token's reward log p(teacher) - log p(student)")
    reward_weight: NonNegative = key(
        0.0, "weight of the estimator's advantage beside it; 0: the teacher alone teaches"
    )
    teacher: TeacherConfig = TeacherConfig()


class OPDConfig(Config):
    """The core's configuration with the keys of on-policy distillation."""

    distillation: DistillationConfig = DistillationConfig()

    @property
    def frozen_models(self) -> dict[str, FrozenModel]:
        """Return the teacher, as a model that the learner loads beside the reference."""
        teacher = self.distillation.teacher
        changes = {
            "path": teacher.path,
            "tokenizer_path": None,
            "override_config": {},
            "lora_rank": 0,
        }
        model = self.actor_rollout_ref.model.replace(
            **changes, trust_remote_code=teacher.trust_remote_code
        )
        # The rollout's may be 0 where a run only validates
        temperature = teacher.temperature or 1.0
        return {
            "teacher": FrozenModel("distillation.teacher.path", model, teacher.dtype, temperature)
        }


SCHEMA = OPDConfig
