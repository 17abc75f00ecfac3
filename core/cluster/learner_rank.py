"""This rank's part of the models that several processes share.

Passes and updates are those of :mod:`core.learner.step_models`. :mod:`core.cluster.fsdp` shards
models.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from core.cluster.fsdp import (
    ProcessRanks,
    fill,
    gather,
    gathered,
    move_state,
    rank_part,
    reshard,
    shard,
)
from core.config.schema import Config
from core.config.training_keys import Sharing
from core.engines.weight_buckets import Bucket, Staging, Weight, pack
from core.learner import saving
from core.learner.lora import has_adapters, load_adapters, merged_weights, trained_weights
from core.learner.models import load_tokenizer
from core.learner.passes import probe_ids, probe_log_probs
from core.learner.step_models import Models, fsdp_config


class ShardedModels:
    """This rank's parts of the models: a :class:`core.learner.step_models.Placement`.

    Rank 0 reads the weights and broadcasts them, so no other process ever holds a whole model.
    """

    def __init__(self, config: Config, device: torch.device):
        self.config = config
        self.device = device
        # Model name -> a copy of the model without values, for the names and shapes of its weights
        self.skeletons: dict[str, nn.Module] = {}

    def place(self, name: str, load: Callable[[bool], nn.Module], sharing: Sharing) -> nn.Module:
        """Shard a model without weights and fill it. A copy is kept for names and exports."""
        config = fsdp_config(self.config, name)
        source = load(False) if dist.get_rank() == 0 else None
        module = load(True)
        self.skeletons[name] = copy.deepcopy(module)
        if source is not None and getattr(source, "generation_config", None) is not None:
            self.skeletons[name].generation_config = source.generation_config
        shard(module, config, self.device, sharing.tensor_model_parallel_size)
        module.to_empty(device="cpu" if config.offload_policy else self.device)
        fill(module, source, self.device)
        if config.param_offload:
            module.to("cpu")
        return module

    def computing(self, name: str, sharing: Sharing) -> dict[str, Any]:
        """Return how ranks share a model's passes. Ranks that share a layer are neighbours."""
        mesh = None
        if sharing.ulysses_sequence_parallel_size > 1:
            axes = {
                "rows": dist.get_world_size() // sharing.together,
                "sequence": sharing.ulysses_sequence_parallel_size,
                "tensor": sharing.tensor_model_parallel_size,
            }
            sizes = tuple(axes.values())
            names = tuple(axes)
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)["sequence"]
        return {"device": self.device, "ranks": ProcessRanks(sharing.together), "mesh": mesh}

    @contextmanager
    def at_work(self, name: str, part: Any, *, updates: bool) -> Iterator[None]:
        """Have a model on the device during a phase, and its optimizer if the phase ``updates``.

        Both are brought there, and back, where ``param_offload`` and ``optimizer_offload`` keep
        them in host memory.
        """
        config = fsdp_config(self.config, name)
        if config.param_offload:
            part.module.to(self.device)
        if config.optimizer_offload and updates:
            move_state(part.stepper.optimizer, self.device)
        try:
            yield
            reshard(part.module)
        finally:
            if config.param_offload:
                part.module.to("cpu")
            if config.optimizer_offload and updates:
                move_state(part.stepper.optimizer, torch.device("cpu"))
            if config.param_offload or config.optimizer_offload:
                torch.cuda.empty_cache()


class LearnerRank:
    """This rank's part of the models, what engines get of them, and their checkpoints.

    The process group exists before, and all ranks call the same methods in the same order.
    """

    def __init__(self, config: Config, device: torch.device, **learner: Any):
        self.config = config
        self.device = device
        self.lead = dist.get_rank() == 0
        sharded = ShardedModels(config, device)
        self.skeletons = sharded.skeletons
        self.models = Models(config, device, placement=sharded, **learner)

    # -- weights for engines ---------------------------------------------------------------------

    def probe(self) -> tuple[tuple[int, ...], Any]:
        """Return a fixed text and the policy's log-probs of it, [n - 1] float32."""
        ids = probe_ids(self.models.actor.module.config.get_text_config().vocab_size)
        with self.models.at_work("actor"):
            return ids, probe_log_probs(self.models.actor)

    def weights(self, dtype: torch.dtype) -> list[Weight]:
        """Return the policy's weights without values, as an engine of this dtype gets them."""
        weights: dict[int | str, Weight] = {}
        for name, value in merged_weights(self.skeletons["actor"]):
            # A merged weight is gone before the next comes, and its id may come again
            key = id(value) if isinstance(value, nn.Parameter) else name
            names = (*weights[key].names, name) if key in weights else (name,)
            weight_dtype = dtype if value.is_floating_point() else value.dtype
            weights[key] = Weight(names, tuple(value.shape), weight_dtype)
        return [*weights.values()]

    def buckets(
        self, weights: Sequence[Weight], limit: int, staging: Staging | None
    ) -> Iterator[Bucket]:
        """Gather the policy's weights into buckets of ``limit`` bytes, on all ranks at once."""
        dtypes = {weight.names[0]: weight.dtype for weight in weights}

        def whole_weights() -> Iterator[Tensor]:
            for name, value in merged_weights(self.models.actor.module):
                if name in dtypes:
                    yield gathered(value, dtypes[name], self.device)

        return pack(weights, whole_weights(), limit, staging)

    # -- checkpoints -----------------------------------------------------------------------------

    @torch.no_grad()
    def save(self, folder: str) -> dict[str, str]:
        """Write ``actor/`` and ``critic/``: a Hugging Face folder, and the optimizer in parts.

        All ranks see ``folder`` and must call it. Returns file -> SHA-256 of what this rank wrote
        and put on disk.
        """
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        written = {}
        for name, part in self.models.trained.items():
            hashes = self.save_weights(name, part.module, Path(folder, name))
            written |= {f"{name}/{file}": sha256 for file, sha256 in hashes.items()}
            states = {}  # of the optimizer: all tensors of a weight, by one rank in rotation
            for number, tensors in enumerate(saving.optimizer_tensors(part)):
                for stored, value in tensors.items():
                    whole = gathered(value, value.dtype, self.device)
                    if number % ranks == rank:
                        states[stored] = whole.cpu()
            path = f"{name}/{saving.OPTIMIZER}"
            files = {f"{rank + 1:05}-of-{ranks:05}.safetensors": states}
            hashes = saving.save_files(files, Path(folder, path))
            written |= {f"{path}/{file}": sha256 for file, sha256 in hashes.items()}
        return written

    def save_weights(self, name: str, module: nn.Module, folder: Path) -> dict[str, str]:
        """Write a model's weights: each file of a large model by one rank, in rotation."""
        skeleton = self.skeletons[name]
        adapters = has_adapters(module)
        tokenizer = load_tokenizer(self.config.actor_rollout_ref.model) if self.lead else None
        files = None if adapters else saving.weight_files(skeleton)
        if files is None:  # weights that are few, or that transformers converts on saving
            weights = trained_weights(module).items() if adapters else merged_weights(module)
            whole = gather(weights)
            if self.lead:
                saving.save_model(skeleton, tokenizer, folder, whole)
            dist.barrier()
            return {}
        file_of = {weight: file for file, names in files.items() for weight in names}
        of_rank = {file: {} for file in list(files)[dist.get_rank() :: dist.get_world_size()]}
        for weight, value in module.state_dict(keep_vars=True).items():
            if weight in file_of:
                whole = gathered(value, value.dtype, self.device)  # all ranks must call it
                if file_of[weight] in of_rank:
                    of_rank[file_of[weight]][weight] = whole.cpu()
        if self.lead:
            saving.export_hf(skeleton, tokenizer, folder, state_dict={})  # all but the weights
            saving.write_index(skeleton, files, folder)
        dist.barrier()  # the folder is there
        return saving.save_files(of_rank, folder)

    def load(self, folder: str) -> None:
        """Read what any number of ranks, or the in-process backend, saved."""
        for name, part in self.models.trained.items():
            saved = Path(folder, name)
            skeleton = self.skeletons[name]
            whole = None
            if self.lead and has_adapters(skeleton):
                whole = load_adapters(trained_weights(skeleton), saved)
            elif self.lead:
                whole = copy.deepcopy(skeleton).to_empty(device="cpu")
                whole.tie_weights()
                saving.load_weights(whole, saved)
            offloads = fsdp_config(self.config, name).offload_policy
            device = torch.device("cpu") if offloads else self.device
            with self.models.at_work(name, updates=True):
                fill(part.module, whole, self.device, everything=False)
                saving.load_optimizer(part, saved, functools.partial(rank_part, device=device))
