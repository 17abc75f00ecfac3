"""A recipe's trainer as it was before a step that was kept: configuration, KL controller, weights, optimizers.

There is no engine, no data and no scorer: the answers with their scores are in the capsule.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.checkpoint.manifest import verify
from core.cluster.local_workers import LocalWorkers
from core.config import Config, convert
from core.config.plugins import load_object
from core.errors import InputError
from core.extensions.capsules.capsule_recorder import ALIGNED, OPTIMIZER, model_tensors, sha256_of_tensor, state_of
from core.extensions.capsules.stored_step import StoredStep
from core.learner.models import load_tokenizer
from core.learner.saving import load_model, load_optimizer_tensors
from core.session import prepare_torch

if TYPE_CHECKING:
    from core.config.sections.model import ModelConfig
    from core.ray_trainer import RayPPOTrainer

POLICY, CRITIC = "actor_rollout_ref.model.path", "critic.model.path"


def device_of(stored: StoredStep) -> str:
    """Return the kind of device that the step is computed on: the recorded one, if there is one here."""
    return stored.facts["machine"]["device"] if torch.cuda.is_available() else "cpu"


def rebuilt(stored: StoredStep, config: Config, *, weights: bool) -> RayPPOTrainer:
    """Return the trainer before the step, under ``config``; without ``weights`` no model is loaded.

    Sets the threads of torch to the recorded ones. Raises InputError where the weights are gone or are others.
    """
    own = {"trainer.cpu_threads": stored.facts["machine"]["threads"], "trainer.device": device_of(stored)}
    own |= {**({"reward_model.enable": False} if config.reward_model.uses_model else {}), **_paths(stored)}
    given, config = config, convert.replaced(config, own)
    run = load_object(stored.facts["trainer"])(config)
    run.session.total_steps, run.session.step = stored.facts["total_steps"], stored.step - 1
    run.kl_controller = run.kl_controller.with_state(stored.facts["kl_controller"]["before"])
    device = prepare_torch(config.trainer)
    if weights:
        _check_models(run, stored)
        checkpoint = _checkpoint(stored)
        needs = {"needs_ref": run.needs.ref, "needs_critic": run.needs.critic}
        tokenizer = _tokenizer(given.actor_rollout_ref.model)
        run.workers = LocalWorkers(config, tokenizer, device, needs_engine=False, **needs)
        _load(run.workers, stored, checkpoint)
        _align(run.workers, stored.facts["alignment"])
    return run


def _tokenizer(model: ModelConfig) -> Any:
    """Return the policy's tokenizer, whose unknown ids have no probability; None where the model's folder is gone."""
    try:
        return load_tokenizer(model)
    except InputError:
        return None


def _paths(stored: StoredStep) -> dict[str, str]:
    """Return where models are loaded from, if the capsule has them. The reference is a copy of what is read there."""
    kept = stored.facts["weights"]["kept"]
    found = {POLICY: "ref" if "ref" in kept else "actor", **({CRITIC: "critic"} if "critic" in kept else {})}
    return {key: str(stored.folder.resolve() / name) for key, name in found.items()} if kept else {}


def _check_models(run: RayPPOTrainer, stored: StoredStep) -> None:
    """Check that the capsule knows the models that the step needs. Raises InputError."""
    known = {name.partition("/")[0] for name in stored.facts["before"]}
    for name, needed in (("ref", run.needs.ref), ("critic", run.needs.critic)):
        if needed and name not in known:
            what = "reference policy" if name == "ref" else "critic"
            raise InputError(f"{stored.folder}: this needs a {what}, and the step had none; try it in a run of its own")
    if run.needs.baseline and any(group.baseline is None for group in stored.groups):
        raise InputError(f"{stored.folder}: this needs a greedy answer to each prompt, and the step has none")


def _checkpoint(stored: StoredStep) -> Path | None:
    """Return the checkpoint that has the weights, verified, or None where capsule or base models have them."""
    where, fix = stored.facts["weights"], "--phase batch and --phase advantages need no weights"
    if where["kept"] or (stored.step == 1 and where["checkpoint"] is None):
        return None
    if where["checkpoint"] is None:
        rule = "holds no weights (they did not fit into trainer.capsule_max_mb), and no checkpoint was due before it"
        raise InputError(f"{stored.folder}: {rule}; {fix}")
    folder = stored.run_dir / where["checkpoint"]
    if not folder.is_dir():
        rule = f"its weights are in the checkpoint {folder}, which is gone (trainer.max_actor_ckpt_to_keep)"
        raise InputError(f"{stored.folder}: {rule}; restore it, or raise trainer.capsule_max_mb in the next run; {fix}")
    return verify(folder).folder


def _load(workers: LocalWorkers, stored: StoredStep, checkpoint: Path | None) -> None:
    """Load weights and optimizers, and compare them with the recorded hashes. Raises InputError."""
    from safetensors.torch import load_file

    if checkpoint is not None:
        workers.load(checkpoint)
    for name in set(stored.facts["weights"]["kept"]) - {"ref"}:
        folder = stored.folder / name
        load_model(workers.trained[name].module, folder)
        if (folder / OPTIMIZER).exists():
            load_optimizer_tensors(workers.trained[name], load_file(folder / OPTIMIZER))
    found = {name: sha256_of_tensor(value) for name, value in model_tensors(state_of(workers))}
    loaded = {name.partition("/")[0] for name in found}
    for name, wanted in stored.facts["before"].items():
        if name.partition("/")[0] in loaded and found.get(name) != wanted:
            source = checkpoint or (stored.folder if stored.facts["weights"]["kept"] else "the base model")
            raise InputError(
                f"{source}: {name} is not what step {stored.step} began from; the weights are of another run"
            )


def _align(workers: LocalWorkers, alignment: Mapping[str, int]) -> None:
    """Move each weight to an address that is aligned as in the run, see ``capsule_recorder.alignment_of``."""
    models = {**workers.trained, **({"ref": workers.ref} if workers.ref is not None else {})}
    for model, part in models.items():
        for name, one in part.module.named_parameters():
            room = torch.empty(one.nbytes + 2 * ALIGNED, dtype=torch.uint8, device=one.device)
            start = (alignment.get(f"{model}/{name}", 0) - room.data_ptr()) % ALIGNED
            moved = room[start : start + one.nbytes].view(one.dtype).view(one.shape)
            one.data = moved.copy_(one.data)
