"""A model and its optimizer in a checkpoint's ``actor/`` and ``critic/``, whole or in files of
several ranks.

Weights are a Hugging Face folder, so that an export is a copy of it; of a model with adapters what
is trained, as peft.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.checkpoint.store import DamagedCheckpoint
from core.errors import InputError
from core.files import file_sha256, fsync
from core.learner.lora import CONFIG as ADAPTERS
from core.learner.lora import has_adapters, load_adapters, save_adapters, trained_weights
from core.learner.models import WEIGHT_FILES, base_settings, quiet

if TYPE_CHECKING:
    from core.learner.learner import Actor, Critic

log = logging.getLogger(__name__)

FILE_SIZE = "5GB"  # of weights, at most
# Of a base, beside weights: written anew, large, or no part of a model
OTHER_FILES = (
    "config.json",
    "adapter_*",
    "*.index.json",
    "*.onnx*",
    "*.ckpt*",
    "*.tar*",
    "*.zip",
    "*.npz",
    ".*",
)
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
)
TOKENIZER_FILES += ("chat_template*", "*.model", "*.tiktoken", "tekken.json")
# Folder of the optimizer's files in a checkpoint's actor/ and critic/, where ranks wrote it
OPTIMIZER = "optimizer"


# -- weights ---------------------------------------------------------------------------------------


def save_model(
    module: nn.Module, tokenizer: Any, folder: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a Hugging Face folder, or, of a model with adapters, what is trained alone in peft's
    format.

    ``weights`` stand in for the module's own, where those are elsewhere.
    """
    if not has_adapters(module):
        export_hf(module, tokenizer, folder, state_dict=weights)
        return
    save_adapters(module, weights or trained_weights(module), folder)
    write_base_files(module, tokenizer, folder)


@torch.no_grad()
def load_model(module: nn.Module, folder: Path) -> None:
    """Load what :func:`save_model` wrote. Raises InputError for weights of another model."""
    if not has_adapters(module):
        load_weights(module, folder)
        return
    trained = trained_weights(module)
    for name, value in load_adapters(trained, folder).items():
        trained[name].copy_(value)


def export_hf(model: Any, tokenizer: Any, folder: Path, *, state_dict: Any = None) -> None:
    """Write ``model`` (a transformers model) and its tokenizer so that ``from_pretrained(folder)``
    gives equal logits.

    ``state_dict`` stands in for the model's own weights, where those are elsewhere. Raises OSError.
    """
    from transformers import GenerationConfig

    own = getattr(model, "generation_config", None)
    with quiet(), full_disk_as_oserror(folder):
        try:
            if own is not None:
                own.validate(strict=True)
        except ValueError as error:
            # Of published models too, which load and must not end a run when it saves
            log.info(
                "generation_config of the model is not valid, and its ids alone are saved: %s",
                error,
            )
            ids = {
                name: getattr(own, name, None)
                for name in ("bos_token_id", "eos_token_id", "pad_token_id")
            }
            model.generation_config = GenerationConfig(**ids)
        with base_settings(model):
            model.save_pretrained(folder, state_dict=state_dict)
        write_base_files(model, tokenizer, folder)


def write_base_files(module: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write what belongs to a model beside weights and config.json, byte for byte as its base has
    it.

    The tokenizer's files come from the tokenizer's folder. What was built in code, transformers
    writes.
    """
    files, processor = _small_files(module.config.name_or_path), getattr(module, "processor", None)
    if processor is not None and "preprocessor_config.json" not in files:
        processor.save_pretrained(folder)
    if tokenizer is not None:
        files = {name: file for name, file in files.items() if not _is_tokenizer_file(name)}
        from_folder = _small_files(tokenizer.name_or_path)
        from_folder = {name: file for name, file in from_folder.items() if _is_tokenizer_file(name)}
        if from_folder:
            files |= from_folder
        else:
            tokenizer.save_pretrained(folder)
    for name, file in files.items():
        shutil.copyfile(file, folder / name)
    template = getattr(tokenizer, "chat_template", None)
    # The configured one
    if isinstance(template, str) and template != tokenizer.init_kwargs.get("chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _small_files(path: str) -> dict[str, Path]:
    """Return name -> file of a model's folder, or of what this machine has of a hub id, without its
    weights."""
    folder = Path(path)
    if path and not folder.is_dir():
        from huggingface_hub import snapshot_download

        with suppress(OSError, ValueError):  # not on this machine, or no hub id
            folder = Path(snapshot_download(path, local_files_only=True))
    if not (path and folder.is_dir()):
        return {}
    skipped = (*WEIGHT_FILES, *OTHER_FILES)
    files = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
    return {
        name: file
        for name, file in files.items()
        if not any(fnmatch(name, each) for each in skipped)
    }


def _is_tokenizer_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def load_weights(model: Any, folder: Path) -> None:
    """Put the weights in ``folder``, which :func:`export_hf` wrote, into ``model``, bit for bit.

    ``from_pretrained`` reads them into a second copy. Raises InputError for another model's.
    """
    # Transformers would load the base that they name, from wherever they name it
    if (folder / ADAPTERS).exists():
        raise InputError(
            f"{folder} holds weights of another model: adapters, and this run has none"
        )
    widest = functools.reduce(torch.promote_types, {value.dtype for value in model.parameters()})
    options = {"config": copy.deepcopy(model.config), "dtype": widest, "output_loading_info": True}
    with quiet():
        try:
            loaded, info = type(model).from_pretrained(folder, **options)
        except RuntimeError as error:
            raise InputError(f"{folder} holds weights of another model: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            raise InputError(
                f"{folder} holds weights of another model: {what} {sorted(info[what])[:5]}"
            )
    model.load_state_dict(loaded.state_dict())


def weight_files(model: Any) -> dict[str, list[str]] | None:
    """Return file name -> names of the weights in it, in the order of the state dict, as
    transformers divides them.

    ``model`` may be on the meta device. None for a model whose weights transformers renames or
    converts on saving.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    kept = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    if list(revert_weight_conversion(model, dict(kept))) != list(kept):
        return None
    options = {"filename_pattern": "model{suffix}.safetensors", "max_shard_size": FILE_SIZE}
    return split_state_dict_into_shards_factory(
        kept, get_storage_size=lambda value: value.nbytes, **options
    ).filename_to_tensors


def write_index(model: Any, files: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Write which of several files holds each weight; one file needs no index."""
    if len(files) == 1:
        return
    state = model.state_dict()
    size = sum(state[name].nbytes for names in files.values() for name in names)
    weight_map = {name: file for file, own in files.items() for name in own}
    text = json.dumps(
        {"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2, sort_keys=True
    )
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def save_files(files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> dict[str, str]:
    """Put tensors that share no memory on disk, as file -> name -> tensor. Return file -> SHA-256.
    Raises OSError."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for file, tensors in files.items():
        with full_disk_as_oserror(folder / file):
            whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
            save_file(whole, folder / file, {"format": "pt"})
        fsync(folder / file)
        hashes[file] = file_sha256(folder / file)
    return hashes


@contextmanager
def full_disk_as_oserror(path: Path) -> Iterator[None]:
    """Raise what safetensors reports as an error of its own, such as a full disk, as the OSError
    that it is."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:  # "... (os error 28)" for a full disk
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), str(error), str(path)) if number else error from error


# -- the optimizer ---------------------------------------------------------------------------------


def optimizer_tensors(part: Actor | Critic) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """Yield each trained weight with what the optimizer holds of it, by the names under which it is
    stored."""
    for name, parameter in trained_weights(part.module).items():
        state = part.stepper.optimizer.state.get(parameter, {})
        yield name, [(f"{name}:{key}", value) for key, value in state.items()]


def save_optimizer(part: Actor | Critic, folder: Path) -> None:
    """Write the optimizer of a model that is whole in this process, as one of several ranks writes
    its part."""
    save_files(
        {
            "00001-of-00001.safetensors": dict(
                chain.from_iterable(t for _, t in optimizer_tensors(part))
            )
        },
        folder,
    )


def load_optimizer(
    part: Actor | Critic,
    folder: Path,
    place: Callable[[nn.Parameter, Tensor], Tensor] | None = None,
) -> None:
    """Load the optimizer of ``actor/`` or ``critic/``, which one process or any number of ranks
    wrote.

    ``place`` returns this rank's part of a parameter's whole tensor; None: all of it. Raises
    DamagedCheckpoint.
    """
    from safetensors.torch import load_file

    trained, state = trained_weights(part.module), part.stepper.optimizer.state
    files = sorted((folder / OPTIMIZER).glob("*.safetensors"))
    if not files:
        raise DamagedCheckpoint(f"{folder}: has no optimizer that this version reads")
    state.clear()
    for stored, value in chain.from_iterable(load_file(file).items() for file in files):
        name, _, key = stored.rpartition(":")
        if name not in trained:
            raise DamagedCheckpoint(f"{folder}: holds the optimizer of another model, with {name}")
        parameter = trained[name]
        state[parameter][key] = (
            value.to(parameter.device) if place is None else place(parameter, value)
        )
