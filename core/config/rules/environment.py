"""Rules on what a run reads and writes: models, data, checkpoints, profiles."""

from __future__ import annotations

import re

from core.config import convert
from core.config.paths import is_local
from core.config.rules.rule import Rule

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def _strange_model(path: str | None) -> bool:
    return path is not None and not is_local(path) and HUB_ID.fullmatch(path) is None


def _model_rule(key: str) -> Rule:
    return Rule(
        key,
        lambda v: _strange_model(convert.get(v.config, key)) and not v.seen.add(key),
        "must be a hub id (org/name) or a folder that starts with /, . or ~",
        "write ./ in front of a relative folder",
    )


SURROUNDINGS = (
    Rule(
        "global_profiler.steps",
        lambda v: v.profiler.tool is not None and not v.profiler.steps,
        "names no step, so global_profiler.tool={profiler.tool} would profile nothing",
        "set global_profiler.steps=[3,4], say; the first step is slower than the others",
    ),
    Rule(
        "global_profiler.steps",
        lambda v: (
            v.profiler.tool is not None
            and v.trainer.total_training_steps is not None
            and any(step > v.trainer.total_training_steps for step in v.profiler.steps or ())
        ),
        "goes beyond trainer.total_training_steps={trainer.total_training_steps}",
        "name earlier steps",
    ),
    Rule(
        "global_profiler.tool",
        lambda v: v.profiler.tool == "nsys" and v.trainer.backend == "local",
        "is started around Ray's workers, and trainer.backend=local has none",
        "use torch, or start the whole command under nsys profile",
    ),
    *(_model_rule(f"actor_rollout_ref.model.{name}") for name in ("path", "tokenizer_path")),
    Rule(
        "critic.model.path",
        lambda v: v.critic.model.path != v.model.path and _strange_model(v.critic.model.path),
        "must be a hub id (org/name) or a folder that starts with /, . or ~",
        "write ./ in front of a relative folder, or leave it out for the policy's",
    ),
    Rule(
        "data.dataset_weights",
        lambda v: (
            v.data.curriculum is None
            and v.data.dataset_weights is not None
            and len(v.data.dataset_weights) != len(v.data.train_files)
        ),
        "must have one weight a file of data.train_files",
        "give a weight to each, or null for the number of rows",
    ),
    Rule(
        "data.dataset_weights",
        lambda v: v.data.curriculum is not None and v.data.dataset_weights is not None,
        "has no meaning with data.curriculum",
        "give each stage its weights: {{files: [...], weights: [...]}}",
    ),
    Rule(
        "data.curriculum",
        lambda v: v.data.curriculum is not None and not v.data.curriculum,
        "must have a stage",
        "give [{{files: [...], prompts: N}}, ...], or null",
    ),
    Rule(
        "data.train_max_samples",
        lambda v: v.data.curriculum is not None and v.data.train_max_samples != -1,
        "has no meaning with data.curriculum",
        "leave it at -1",
    ),
    Rule(
        "trainer.resume_from_path",
        lambda v: v.trainer.resume_mode == "resume_path" and not v.trainer.resume_from_path,
        "is needed with trainer.resume_mode=resume_path",
        "name a checkpoint: <run>/global_step_N",
    ),
)
