"""A recipe's trainer as it was before a step that was kept: configuration, KL controller, weights, optimizers.

There is no engine, no data and no scorer: the answers with their scores are in the capsule.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from core.cluster.local_workers import LocalWorkers
from core.config import Config, convert
from core.config.plugins import load_object
from core.errors import InputError
from core.extensions.capsules.capsule_recorder import ALIGNED, OPTIMIZER
from core.extensions.capsules.stored_step import StoredStep
from core.learner.models import load_tokenizer
from core.learner.saving import load_model, load_optimizer_tensors, modules_of
from core.learner.step_needs import StepNeeds
from core.session import prepare_torch

if TYPE_CHECKING:
    from core.ray_trainer import RayPPOTrainer

POLICY, CRITIC = "actor_rollout_ref.model.path", "critic.model.path"


def device_of(stored: StoredStep) -> str:
    """Return the kind of device that the step is computed on: the recorded one, if there is one here."""
    return stored.facts["machine"]["device"] if torch.cuda.is_available() else "cpu"


def rebuilt(stored: StoredStep, config: Config, *, weights: bool) -> RayPPOTrainer:
    """Return the trainer before the step, under ``config``; without ``weights`` no model is loaded.

    Sets the threads of torch to the recorded ones. Raises InputError where the step lacks what ``config`` needs.
    """
    own = {"trainer.cpu_threads": stored.facts["machine"]["threads"], "trainer.device": device_of(stored)}
    own |= {**({"reward_model.enable": False} if config.reward_model.uses_model else {}), **_paths(stored)}
    requested, config = config, convert.replaced(config, own)
    run = load_object(stored.facts["trainer"])(config)
    run.session.total_steps, run.session.step = stored.facts["total_steps"], stored.step - 1
    run.kl_controller = run.kl_controller.with_state(stored.facts["kl_controller"]["before"])
    device = prepare_torch(config.trainer)
    if weights:
        _check_models(run, stored)
        needs = {"needs_ref": run.needs.ref, "needs_critic": run.needs.critic}
        tokenizer = None  # where the model's folder is gone; ids that it does not know have no probability
        with suppress(InputError):
            tokenizer = load_tokenizer(requested.actor_rollout_ref.model)
        run.workers = LocalWorkers(config, tokenizer, device, needs_engine=False, **needs)
        _load(run.workers, stored)
        _align(run.workers, stored.facts["alignment"])
    return run


def _paths(stored: StoredStep) -> dict[str, str]:
    """Return where models are loaded from: the capsule. The reference is a copy of what is read for the policy."""
    stored_models = stored.facts["weights"]["kept"]
    names = {
        POLICY: "ref" if "ref" in stored_models else "actor",
        **({CRITIC: "critic"} if "critic" in stored_models else {}),
    }
    return {key: str(stored.folder.resolve() / name) for key, name in names.items()}


def _check_models(run: RayPPOTrainer, stored: StoredStep) -> None:
    """Check that the recorded step had the models that this one needs. Raises InputError."""
    recorded = StepNeeds.of(stored.config)
    for model, needed in (
        ("reference policy", run.needs.ref and not recorded.ref),
        ("critic", run.needs.critic and not recorded.critic),
    ):
        if needed:
            rule = f"this needs a {model}, and the step had none"
            raise InputError(f"{stored.folder}: {rule}; try it in a run of its own")
    if run.needs.baseline and any(group.baseline is None for group in stored.groups):
        raise InputError(f"{stored.folder}: this needs a greedy answer to each prompt, and the step has none")


def _load(workers: LocalWorkers, stored: StoredStep) -> None:
    """Load weights and optimizers."""
    from safetensors.torch import load_file

    for name in set(stored.facts["weights"]["kept"]) - {"ref"}:
        folder = stored.folder / name
        load_model(workers.trained[name].module, folder)
        if (folder / OPTIMIZER).exists():
            load_optimizer_tensors(workers.trained[name], load_file(folder / OPTIMIZER))


def _align(workers: LocalWorkers, alignment: Mapping[str, int]) -> None:
    """Move each weight to an address that is aligned as in the run, see ``capsule_recorder.alignment_of``."""
    for model, module in modules_of(workers).items():
        for name, weight in module.named_parameters():
            room = torch.empty(weight.nbytes + 2 * ALIGNED, dtype=torch.uint8, device=weight.device)
            start = (alignment.get(f"{model}/{name}", 0) - room.data_ptr()) % ALIGNED
            moved = room[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
            weight.data = moved.copy_(weight.data)
