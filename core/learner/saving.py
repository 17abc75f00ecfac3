"""A model and its optimizer in a checkpoint's ``actor/`` and ``critic/``.

Weights are a Hugging Face folder, so that an export is a copy of it. Of a model with adapters only
what is trained is there, in peft's format. One process or several ranks may have written the files.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.checkpoint.store import DamagedCheckpoint
from core.errors import InputError
from core.files import file_sha256, fsync, full_disk_as_oserror
from core.learner.lora import CONFIG as ADAPTERS
from core.learner.lora import has_adapters, load_adapters, save_adapters, trained_weights
from core.learner.models import WEIGHT_FILES, base_settings, quiet

if TYPE_CHECKING:
    from core.learner.learner import Actor, Critic

log = logging.getLogger(__name__)

FILE_SIZE = "5GB"  # the largest file of weights
# Files of a base that are not copied: written anew, large, or no part of a model
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
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
# Folder of the optimizer's files in a checkpoint's actor/ and critic/
OPTIMIZER = "optimizer"


# -- weights ---------------------------------------------------------------------------------------


def save_model(
    module: nn.Module, tokenizer: Any, folder: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a Hugging Face folder or, if the model has adapters, what is trained in peft's format.

    ``weights`` are used in place of the module's own.
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
    """Write a transformers model and its tokenizer: ``from_pretrained(folder)`` gives equal logits.

    ``state_dict`` is used in place of the model's own weights. Raises OSError.
    """
    from transformers import GenerationConfig

    generation_config = getattr(model, "generation_config", None)
    with quiet(), full_disk_as_oserror(folder):
        try:
            if generation_config is not None:
                generation_config.validate(strict=True)
        except ValueError as error:
            # Published models have such ones too: they load, and must not end a run when it saves
            log.info("generation_config is not valid, and only its ids are saved: %s", error)
            model.generation_config = GenerationConfig(
                bos_token_id=generation_config.bos_token_id,
                eos_token_id=generation_config.eos_token_id,
                pad_token_id=generation_config.pad_token_id,
            )
        with base_settings(model):
            model.save_pretrained(folder, state_dict=state_dict)
        write_base_files(model, tokenizer, folder)


def write_base_files(module: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Copy the files of a model's base, except for weights and config.json, byte for byte.

    The tokenizer's files come from the tokenizer's folder. transformers writes what was built in
    code.
    """
    files = _small_files(module.config.name_or_path)
    processor = getattr(module, "processor", None)
    if processor is not None and "preprocessor_config.json" not in files:
        processor.save_pretrained(folder)
    if tokenizer is not None:
        files = {name: file for name, file in files.items() if not _is_tokenizer_file(name)}
        of_tokenizer = _small_files(tokenizer.name_or_path)
        of_tokenizer = {n: file for n, file in of_tokenizer.items() if _is_tokenizer_file(n)}
        if of_tokenizer:
            files |= of_tokenizer
        else:
            tokenizer.save_pretrained(folder)
    for name, file in files.items():
        shutil.copyfile(file, folder / name)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and template != tokenizer.init_kwargs.get("chat_template"):
        # The run's configuration has set it
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _small_files(path: str) -> dict[str, Path]:
    """Return the files of a folder, or of this machine's copy of a hub id, without its weights."""
    folder = Path(path)
    if path and not folder.is_dir():
        from huggingface_hub import snapshot_download

        with suppress(OSError, ValueError):  # not on this machine, or no hub id
            folder = Path(snapshot_download(path, local_files_only=True))
    if not (path and folder.is_dir()):
        return {}
    patterns = (*WEIGHT_FILES, *OTHER_FILES)
    return {
        file.name: file
        for file in sorted(folder.iterdir())
        if file.is_file() and not any(fnmatch(file.name, pattern) for pattern in patterns)
    }


def _is_tokenizer_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def load_weights(model: Any, folder: Path) -> None:
    """Copy the weights that :func:`export_hf` wrote into ``model``, bit for bit.

    ``from_pretrained`` reads them into a second copy. Raises InputError for another model's.
    """
    problem = f"{folder} holds weights of another model"
    if (folder / ADAPTERS).exists():
        # transformers would load the base that they name, from wherever they name it
        raise InputError(f"{problem}: adapters, and this run has none")
    widest = functools.reduce(torch.promote_types, {value.dtype for value in model.parameters()})
    with quiet():
        try:
            loaded, info = type(model).from_pretrained(
                folder, config=copy.deepcopy(model.config), dtype=widest, output_loading_info=True
            )
        except RuntimeError as error:
            raise InputError(f"{problem}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise InputError(f"{problem}: {kind} {sorted(info[kind])[:5]}")
    model.load_state_dict(loaded.state_dict())


def weight_files(model: Any) -> dict[str, list[str]] | None:
    """Return file name -> names of the weights in it, as transformers divides a model's weights.

    ``model`` may be on the meta device. Returns None if transformers renames or converts its
    weights on saving.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    saved = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    if list(revert_weight_conversion(model, dict(saved))) != list(saved):
        return None
    split = split_state_dict_into_shards_factory(
        saved,
        get_storage_size=lambda value: value.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_SIZE,
    )
    return split.filename_to_tensors


def write_index(model: Any, files: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Write which of several files holds each weight; one file needs no index."""
    if len(files) == 1:
        return
    state = model.state_dict()
    weight_map = {name: file for file, names in files.items() for name in names}
    total_size = sum(state[name].nbytes for name in weight_map)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def save_files(files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> dict[str, str]:
    """Put ``files`` (name of the file -> name -> tensor) on disk. Return file name -> SHA-256.

    No two tensors may share memory. Raises OSError.
    """
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


# -- the optimizer ---------------------------------------------------------------------------------


def optimizer_tensors(model: Actor | Critic) -> Iterator[dict[str, Tensor]]:
    """Yield what the optimizer holds of each trained weight, by the names in the file."""
    for name, parameter in trained_weights(model.module).items():
        state = model.stepper.optimizer.state.get(parameter, {})
        yield {f"{name}:{key}": value for key, value in state.items()}


def save_optimizer(model: Actor | Critic, folder: Path) -> None:
    """Write the optimizer of a model that is whole in this process."""
    tensors: dict[str, Tensor] = {}
    for of_weight in optimizer_tensors(model):
        tensors |= of_weight
    save_files({"00001-of-00001.safetensors": tensors}, folder)


def load_optimizer(
    model: Actor | Critic,
    folder: Path,
    place: Callable[[nn.Parameter, Tensor], Tensor] | None = None,
) -> None:
    """Load the optimizer of ``actor/`` or ``critic/``, whether one process or several wrote it.

    ``place`` returns this rank's part of a parameter's whole tensor; None: all of it. Raises
    DamagedCheckpoint.
    """
    from safetensors.torch import load_file

    trained = trained_weights(model.module)
    state = model.stepper.optimizer.state
    files = sorted((folder / OPTIMIZER).glob("*.safetensors"))
    if not files:
        raise DamagedCheckpoint(f"{folder}: has no optimizer that this version reads")
    state.clear()
    for file in files:
        for stored_name, value in load_file(file).items():
            name, _, key = stored_name.rpartition(":")
            if name not in trained:
                raise DamagedCheckpoint(
                    f"{folder}: holds the optimizer of another model, with {name}"
                )
            parameter = trained[name]
            if place is None:
                state[parameter][key] = value.to(parameter.device)
            else:
                state[parameter][key] = place(parameter, value)
