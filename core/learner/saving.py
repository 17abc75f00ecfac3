"""A model and its optimizer in a checkpoint's ``actor/`` and ``critic/``, whole or in the parts of several ranks.

``core/checkpoint`` writes the folder around them and everything else that a checkpoint holds.
"""

from __future__ import annotations

import errno
import io
import logging
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from core.checkpoint.provenance import ModelFingerprint, base_of
from core.checkpoint.run_state import load_tensors
from core.checkpoint.store import DamagedCheckpoint
from core.files import file_sha256, fsync, inside
from core.learner.hf_export import export_hf, full_disk_as_oserror, load_weights
from core.learner.learner import Actor, Critic
from core.learner.lora import add_adapters, has_adapters, load_adapters, save_adapters, trained_weights
from core.learner.models import load_critic, load_policy, located

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)

OPTIMIZER = "optimizer"  # folder of the sharded optimizer in a checkpoint's actor/ and critic/
DESCRIPTION = "description.pt"  # in that folder: which part of which tensor is where
DESCRIBED = (Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata)
DESCRIBED += (TensorProperties, _MEM_FORMAT_ENCODING, _StorageInfo, torch.serialization._get_layout)


class OwnFiles:
    """The weights of the files that a rank writes. A file of the whole model belongs to one rank, in rotation."""

    def __init__(self, files: Mapping[str, Sequence[str]], rank: int, ranks: int):
        self.file_of = {name: file for file, names in files.items() for name in names}
        self.weights: dict[str, dict[str, Tensor]] = {
            file: {} for number, file in enumerate(files) if number % ranks == rank
        }

    def keep(self, name: str, whole: Tensor) -> None:
        """Copy a weight to host memory where this rank writes it."""
        own = self.weights.get(self.file_of[name])
        if own is not None:
            own[name] = whole.detach().cpu().contiguous()

    def write(self, folder: Path) -> dict[str, str]:
        """Write the files and return file -> SHA-256. Raises OSError."""
        for file, weights in self.weights.items():
            save_tensors(weights, folder / file, metadata={"format": "pt"})
        return {file: on_disk(folder / file) for file in self.weights}


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors that share no memory as safetensors. Raises OSError."""
    with full_disk_as_oserror(path):
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path, metadata)


def on_disk(path: Path) -> str:
    """Put a file on disk and return its SHA-256."""
    fsync(path)
    return file_sha256(path)


def save_model(module: nn.Module, tokenizer: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a Hugging Face folder, or, of a model with adapters, what is trained alone in peft's format.

    ``weights`` stand in for the module's own, where those are elsewhere.
    """
    if not has_adapters(module):
        export_hf(module, tokenizer, folder, state_dict=weights)
        return
    save_adapters(module, weights or trained_weights(module), folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_model(module: nn.Module, folder: Path) -> None:
    """Load what :func:`save_model` wrote."""
    if not has_adapters(module):
        load_weights(module, folder)
        return
    trained = trained_weights(module)
    for name, value in load_adapters(list(trained), folder).items():
        trained[name].copy_(value)


def load_optimizer(part: Actor | Critic, folder: Path) -> None:
    """Load the optimizer of ``actor/`` or ``critic/``, whole or in the parts that several ranks wrote."""
    if (folder / "optimizer.pt").exists():
        part.stepper.optimizer.load_state_dict(load_tensors(folder / "optimizer.pt"))
        return
    load_sharded_optimizer(part.module, part.stepper.optimizer, folder / OPTIMIZER)


def save_optimizer(state: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write this rank's part of :func:`get_optimizer_state_dict` (torch.distributed.checkpoint), and hash it.

    Any number of ranks can read it. Returns file -> SHA-256 of the files of this rank.
    """
    try:
        dcp.save({"optimizer": state}, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:  # no Exception, and the disk's reason is inside
        raise _disk_error([reason for reason, _ in error.failures.values()], folder) from error
    if dist.get_rank() == 0:  # torch reads its description of the parts as a pickle, which may run code
        described = pickle.loads((folder / ".metadata").read_bytes())
        described.storage_meta = None  # ids of this save
        torch.save(described, folder / DESCRIPTION)
        (folder / ".metadata").unlink()
    return {path.name: on_disk(path) for path in folder.glob(f"__{dist.get_rank()}_*")}


class PlainReader(dcp.FileSystemReader):
    """A reader of the parts that :func:`save_optimizer` wrote, which runs no code that they hold."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, DESCRIPTION)
        try:
            with torch.serialization.safe_globals(list(DESCRIBED)):
                found = torch.load(path, weights_only=True)
            names = [one.relative_path for one in found.storage_data.values()]
        except (pickle.UnpicklingError, RuntimeError, AttributeError, EOFError) as error:
            raise DamagedCheckpoint(f"{path}: is no description of a sharded optimizer ({error})") from error
        for name in names:
            inside(Path(self.path), name, path)
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class PlainPlanner(dcp.DefaultLoadPlanner):
    """A planner that reads numbers and texts as tensors are read, with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # raises for anything else
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _disk_error(reasons: Sequence[BaseException], folder: Path) -> Exception:
    """Return the OSError among what ranks raised, or one for what torch's writer of zip files makes of it."""
    if (found := next((one for one in reasons if isinstance(one, OSError)), None)) is not None:
        return found
    text = str(reasons[0]).strip()
    if "unexpected pos" in text:  # it wrote fewer bytes than it was given, and keeps the reason to itself
        return OSError(errno.EIO, f"a file was cut short, as on a full disk ({text})", str(folder))
    return RuntimeError(text)


def load_sharded_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load what :func:`save_optimizer` wrote, on these ranks or, without a process group, in this process."""
    state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader, planner = PlainReader(folder), PlainPlanner()
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(module, optimizer, state["optimizer"])


def load_whole_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Shard the ``optimizer.pt`` of a checkpoint that the in-process backend wrote."""
    whole, names = load_tensors(path), list(trained_weights(module))
    state = {
        "state": {names[index]: value for index, value in whole["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in whole["param_groups"]],
    }
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(full_state_dict=True))


def planned_fingerprints(config: Config, *, critic: bool) -> dict[str, ModelFingerprint]:
    """Return what is known of the models that ``config`` names before any is loaded; see :func:`fingerprints`."""
    part, seed = config.actor_rollout_ref, config.trainer.seed
    made = {"actor": add_adapters(load_policy(part.model, on_meta=True), part.model, seed)}
    if critic:
        made["critic"] = add_adapters(load_critic(config.critic.model, seed, on_meta=True), config.critic.model, seed)
    return fingerprints(made, config, loaded=False)


def fingerprints(
    modules: Mapping[str, nn.Module], config: Config, *, loaded: bool = True
) -> dict[str, ModelFingerprint]:
    """Return architecture, shapes and base of each model (``actor``, ``critic``); the weights are those on disk now.

    Where the weights are not on this machine there is no base: a hub's before they are ``loaded``, and in a format that
    is not known. The base of adapters has to be known once it is loaded, since their checkpoint does not hold it.
    """
    paths = {"actor": config.actor_rollout_ref.model.path, "critic": config.critic.model.path}
    found = {}
    for name, module in modules.items():
        base = None
        try:
            base = base_of(located(paths[name]))
        except (OSError, ValueError) as error:
            if loaded and has_adapters(module):
                raise
            if loaded:
                log.warning("the weights that the %s starts from are not recorded: %s", name, error)
        found[name] = ModelFingerprint.of(module, base)
    return found
