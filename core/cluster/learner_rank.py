"""One rank of a learner that several processes share: its part of policy, reference and critic, and their state.

The passes and the updates are those of ``core.learner.learner``; how a model is sharded, of ``core.cluster.fsdp``. How
the processes are started is not decided here; the process group exists when :class:`LearnerRank` is made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from core.checkpoint.provenance import ModelFingerprint
from core.cluster.fsdp import ProcessRanks, fill, gather, gathered, move_state, reshard, shard
from core.config import registry
from core.engines.weight_buckets import Packer, Staging, Weight
from core.learner.hf_export import export_hf, load_weights, weight_files, write_index
from core.learner.learner import Actor, Critic
from core.learner.lora import add_adapters, has_adapters, load_adapters, merged_weights, trained_weights
from core.learner.model_checks import logprob_noise, probe_ids, probe_log_probs
from core.learner.models import freeze_parts, load_critic, load_policy, load_tokenizer
from core.learner.passes import BasePolicy, Policy, pass_size
from core.learner.saving import (
    OPTIMIZER,
    OwnFiles,
    fingerprints,
    load_sharded_optimizer,
    load_whole_optimizer,
    save_model,
    save_optimizer,
)
from core.learner.traced_tokens import TracedRows
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.sections.actor import Sharing
    from core.config.sections.model import FSDPConfig


class LearnerRank:
    """This rank's part of policy, reference and critic, for the phases of a step on the rank's share of a batch.

    Rank 0 reads the weights and broadcasts them, so no other process ever holds a whole model. All ranks call the
    same methods in the same order. ``known`` are the tokenizer's ids (:func:`core.data.vocabulary.known_ids`).
    ``master_dtype`` is float32 except in tests.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        *,
        needs_ref: bool,
        needs_critic: bool,
        known: np.ndarray | None = None,
        master_dtype: torch.dtype = torch.float32,
    ):
        self.config, self.device, self.lead = config, device, dist.get_rank() == 0
        self.skeletons: dict[str, nn.Module] = {}
        part, critic = config.actor_rollout_ref, config.critic

        def policy(on_meta: bool) -> nn.Module:
            module = freeze_parts(load_policy(part.model, master_dtype, on_meta=on_meta), config)
            return add_adapters(module, part.model, config.trainer.seed)

        def value_model(on_meta: bool) -> nn.Module:
            module = load_critic(critic.model, config.trainer.seed, master_dtype, on_meta=on_meta)
            return add_adapters(module, critic.model, config.trainer.seed)

        source = policy(on_meta=False) if self.lead else None
        shared = {"temperature": part.rollout.temperature or 1.0, "device": device, "known": known}
        compiled = {"compiled": part.actor.use_torch_compile}
        of_actor, of_ref = (compiled | self.split(one) for one in (part.actor, part.ref))
        layer_size = part.actor.layer_ranks
        module = self.sharded("actor", policy(on_meta=True), source, part.actor.fsdp_config, layer_size)
        bypass = config.algorithm.rollout_correction.bypass_mode
        self.actor = Actor(module, part.actor, bypass=bypass, **shared, **of_actor)
        self.ref = self.critic = None
        if needs_ref and part.model.lora_rank:
            self.ref = BasePolicy(module, **shared, **of_ref)
        elif needs_ref:
            layer_size = part.ref.layer_ranks
            module = self.sharded("ref", policy(on_meta=True), source, part.ref.fsdp_config, layer_size)
            self.ref = Policy(module.requires_grad_(False), **shared, **of_ref)
        if needs_critic:
            source = value_model(on_meta=False) if self.lead else None
            fsdp, layer_size = critic.model.fsdp_config, critic.layer_ranks
            module = self.sharded("critic", value_model(on_meta=True), source, fsdp, layer_size)
            of_critic = {"compiled": critic.use_torch_compile} | self.split(critic)
            self.critic = Critic(module, critic, device=device, **of_critic)
        self.trained = {"actor": self.actor, **({"critic": self.critic} if self.critic else {})}
        self.parts = {**self.trained, **({"ref": self.ref} if self.ref else {})}
        self.fsdp = {"actor": part.actor.fsdp_config, "critic": critic.model.fsdp_config, "ref": part.ref.fsdp_config}
        if part.model.lora_rank:
            self.fsdp["ref"] = part.actor.fsdp_config  # the policy without its adapters

    def split(self, part: Sharing) -> dict[str, Any]:
        """Return how neighbours share a model's passes: those that share a layer next to each other."""
        mesh, tokens = None, part.ulysses_sequence_parallel_size
        if tokens > 1:
            shape = dist.get_world_size() // part.together, tokens, part.layer_ranks
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("rows", "sequence", "tensor"))["sequence"]
        return {"ranks": ProcessRanks(part.together), "mesh": mesh}

    def sharded(
        self, name: str, skeleton: nn.Module, source: nn.Module | None, config: FSDPConfig, layer_size: int
    ) -> nn.Module:
        """Shard the weightless ``skeleton`` and fill it; a copy is kept for names and exports."""
        self.skeletons[name] = copy.deepcopy(skeleton)
        if source is not None and getattr(source, "generation_config", None) is not None:
            self.skeletons[name].generation_config = source.generation_config
        module = shard(skeleton, config, self.device, layer_size)
        module.to_empty(device="cpu" if config.offload_policy else self.device)
        fill(module, source, self.device)
        if config.param_offload:
            module.to("cpu")
        return module

    @contextmanager
    def at_work(self, name: str, *, updates: bool = False) -> Iterator[None]:
        """Have a model on the device for the time of a phase, with the optimizer's state where the phase ``updates``.

        Both are brought there, and back, where ``param_offload`` and ``optimizer_offload`` keep them in host memory.
        """
        part, config = self.parts[name], self.fsdp[name]
        if config.param_offload:
            part.module.to(self.device)
        if config.optimizer_offload and updates:
            move_state(part.stepper.optimizer, self.device)
        try:
            yield
        finally:
            self.rest(name)

    def rest(self, name: str) -> None:
        """Bring to host memory what is kept there between the phases that need it."""
        part, config = self.parts[name], self.fsdp[name]
        if config.param_offload:
            part.module.to("cpu")
        if config.optimizer_offload and name in self.trained:
            move_state(part.stepper.optimizer, torch.device("cpu"))
        if self.device.type == "cuda" and (config.param_offload or config.optimizer_offload):
            torch.cuda.empty_cache()

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        """Return what :func:`core.learner.saving.fingerprints` does, of rank 0; others have nothing to add."""
        if not self.lead:
            return {}
        return fingerprints({name: self.skeletons[name] for name in self.trained}, self.config)

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        squares = registry.estimator(self.config.algorithm.adv_estimator).squares
        with self.at_work("actor"):
            log_probs = self.actor.log_probs(batch, pass_size(self.config.actor_rollout_ref.rollout), squares=squares)
            reshard(self.actor.module)
        return log_probs

    def compute_ref_log_prob(self, batch: TrainBatch) -> tuple[Tensor]:
        with self.at_work("ref"):
            log_probs = self.ref.log_probs(batch, pass_size(self.config.actor_rollout_ref.ref))[:1]
            reshard(self.ref.module)
        return log_probs

    def compute_values(self, batch: TrainBatch) -> tuple[Tensor]:
        with self.at_work("critic"):
            values = self.critic.values(batch)
            reshard(self.critic.module)
        return (values,)

    def update_actor(self, steps: list[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        with self.at_work("actor", updates=True):
            return self.actor.update(steps, lr_multiplier)

    def traced(self, rows: tuple[int, ...] | None) -> TracedRows:
        return self.actor.traced.of(rows)

    def update_critic(self, steps: list[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        with self.at_work("critic", updates=True):
            return self.critic.update(steps, lr_multiplier)

    def probe(self) -> tuple[tuple[int, ...], Any]:
        """Return a fixed text and the policy's log-probs of it, [n - 1] float32."""
        ids = probe_ids(self.actor.module.config.get_text_config().vocab_size)
        with self.at_work("actor"):
            log_probs = probe_log_probs(self.actor)
            reshard(self.actor.module)
        return ids, log_probs

    def logprob_noise(self, token_ids: Sequence[int]) -> float:
        """Return what rounding costs the policy on a text, in nats a token."""
        with self.at_work("actor"):
            nats = logprob_noise(self.actor, token_ids)
            reshard(self.actor.module)
        return nats

    def weights(self, dtype: torch.dtype) -> list[Weight]:
        """Return the policy's weights without their values, as an engine of this number format gets them."""
        names: dict[int | str, list[str]] = {}
        tensors: dict[int | str, Tensor] = {}
        for name, value in merged_weights(self.skeletons["actor"]):
            # What was merged is gone before the next comes, and its id may come again.
            key = id(value) if isinstance(value, nn.Parameter) else name
            names.setdefault(key, []).append(name)
            tensors[key] = value
        return [
            Weight(tuple(names[key]), tuple(value.shape), dtype if value.is_floating_point() else value.dtype)
            for key, value in tensors.items()
        ]

    def packer(self, weights: Sequence[Weight], limit: int, staging: Staging | None) -> Packer:
        """Return what gathers the policy's weights into buckets of ``limit`` bytes. All ranks use it alike."""
        first = {weight.names[0] for weight in weights}
        values = (value for name, value in merged_weights(self.actor.module) if name in first)
        return Packer(weights, values, lambda value, dtype: gathered(value, dtype, self.device), limit, staging)

    @torch.no_grad()
    def save(self, folder: str) -> dict[str, str]:
        """Write ``actor/`` and ``critic/``: a Hugging Face folder, and the optimizer in parts.

        All ranks see ``folder`` and must call it. Returns file in it -> SHA-256, of the files that this rank wrote and
        put on disk.
        """
        written: dict[str, str] = {}
        for name, part in self.trained.items():
            hashes = self.save_weights(name, part.module, Path(folder, name))
            state = get_optimizer_state_dict(part.module, part.stepper.optimizer)
            optimizer = save_optimizer(state, Path(folder, name, OPTIMIZER))
            hashes |= {f"{OPTIMIZER}/{file}": sha256 for file, sha256 in optimizer.items()}
            written |= {f"{name}/{file}": sha256 for file, sha256 in hashes.items()}
        return written

    def save_weights(self, name: str, module: nn.Module, folder: Path) -> dict[str, str]:
        """Write a model's weights: each file of a large model by one rank, in rotation."""
        skeleton = self.skeletons[name]
        tokenizer = load_tokenizer(self.config.actor_rollout_ref.model) if self.lead else None
        files = None if has_adapters(module) else weight_files(skeleton)
        if files is None:  # weights that are few, or that transformers converts on saving
            whole = gather(trained_weights(module).items() if has_adapters(module) else merged_weights(module))
            if self.lead:
                save_model(skeleton, tokenizer, folder, whole)
            dist.barrier()
            return {}
        own = OwnFiles(files, dist.get_rank(), dist.get_world_size())
        for weight, value in module.state_dict(keep_vars=True).items():
            if weight in own.file_of:
                own.keep(weight, gathered(value, value.dtype, self.device))
        if self.lead:
            export_hf(skeleton, tokenizer, folder, state_dict={})  # everything but weights
            write_index(skeleton, files, folder)
        dist.barrier()  # the folder is there
        return own.write(folder)

    def load(self, folder: str) -> None:
        """Read what any number of ranks, or the in-process backend, saved."""
        for name, part in self.trained.items():
            whole = self.read(name, Path(folder, name)) if self.lead else None
            fill(part.module, whole, self.device, everything=False)
            if Path(folder, name, OPTIMIZER).is_dir():
                load_sharded_optimizer(part.module, part.stepper.optimizer, Path(folder, name, OPTIMIZER))
            else:
                load_whole_optimizer(part.module, part.stepper.optimizer, Path(folder, name, "optimizer.pt"))
            self.rest(name)

    def read(self, name: str, folder: Path) -> nn.Module | dict[str, Tensor]:
        """Return a checkpoint's weights, whole."""
        if has_adapters(self.skeletons[name]):
            return load_adapters(list(trained_weights(self.skeletons[name])), folder)
        whole = copy.deepcopy(self.skeletons[name]).to_empty(device="cpu")
        whole.tie_weights()
        load_weights(whole, folder)
        return whole
