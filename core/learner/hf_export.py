"""Model weights as Hugging Face folders: the ``actor/`` of every checkpoint is one, and so is an export."""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import InputError

log = logging.getLogger(__name__)

ADAPTERS = "adapter_config.json"  # in a model folder that holds adapters alone, without their base
FILE_SIZE = "5GB"  # of weights, at most


def export_hf(model: Any, tokenizer: Any, folder: Path, *, state_dict: Any = None) -> None:
    """Write ``model`` (a transformers model) and its tokenizer so that ``from_pretrained(folder)`` gives equal logits.

    ``state_dict`` stands in for the model's own weights, where those are elsewhere.

    Raises OSError, also for a full disk that safetensors reports as an error of its own.
    """
    from core.learner.models import quiet

    config = getattr(model, "generation_config", None)
    with quiet(), full_disk_as_oserror(folder):
        try:
            if config is not None:
                model.generation_config = storable_generation_config(config)
            model.save_pretrained(folder, state_dict=state_dict)
        finally:
            if config is not None:
                model.generation_config = config
        if (processor := getattr(model, "processor", None)) is not None:
            processor.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


@contextmanager
def full_disk_as_oserror(path: Path) -> Iterator[None]:
    """Raise what safetensors reports as an error of its own, such as a full disk, as the OSError that it is."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:  # "... (os error 28)" for a full disk
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), str(error), str(path)) if number else error from error


def weight_files(model: Any) -> dict[str, list[str]] | None:
    """Return file name -> names of the weights in it, in the order of the state dict, as transformers divides them.

    ``model`` may be on the meta device. None for a model whose weights transformers renames or converts on saving.
    """
    import torch
    from huggingface_hub import split_state_dict_into_shards_factory
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    kept = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    if list(revert_weight_conversion(model, dict(kept))) != list(kept):
        return None
    split = split_state_dict_into_shards_factory(
        kept,
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
    size = sum(state[name].nbytes for names in files.values() for name in names)
    index = {
        "metadata": {"total_size": size},
        "weight_map": {name: file for file, own in files.items() for name in own},
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def storable_generation_config(config: Any) -> Any:
    """Return ``config``, or its ids alone where transformers loads it and then refuses to save it.

    Some published ones have a temperature beside ``do_sample=False``: a run must not die of that at its first
    checkpoint.
    """
    from transformers import GenerationConfig

    try:
        config.validate(strict=True)
    except ValueError as error:
        log.info("generation_config of the model is not valid: %s", error)
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        return GenerationConfig(**{name: getattr(config, name, None) for name in ids})
    return config


def load_weights(model: Any, folder: Path) -> None:
    """Put the weights in ``folder``, which :func:`export_hf` wrote, into ``model``, bit for bit.

    Goes through ``from_pretrained``, the one reader that handles sharded files, tied weights and the renamings that
    transformers applies on saving; needs memory for a second copy meanwhile.

    Raises InputError for a parameter that is missing, left over, or of another shape.
    """
    import torch

    from core.learner.models import quiet

    if (folder / ADAPTERS).exists():  # transformers would load the base that they name, from wherever they name it
        raise InputError(f"{folder} holds weights of another model: adapters, and this run has none")
    widest = functools.reduce(torch.promote_types, {value.dtype for value in model.parameters()})
    with quiet():
        try:
            loaded, info = type(model).from_pretrained(
                folder, config=copy.deepcopy(model.config), dtype=widest, output_loading_info=True
            )
        except RuntimeError as error:
            raise InputError(f"{folder} holds weights of another model: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            raise InputError(f"{folder} holds weights of another model: {what} {sorted(info[what])[:5]}")
    model.load_state_dict(loaded.state_dict())
