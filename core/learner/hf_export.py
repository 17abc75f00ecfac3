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
PROBE = "Ab c\n 1+2=3;  é"


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
            _warn_of_another_tokenizer(tokenizer, folder)


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


def _warn_of_another_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Warn where AutoTokenizer puts a splitting rule of its own in place of the saved one, as for qwen2.

    Whoever loads the folder would then feed the model tokens that it was not trained on.
    """
    from transformers import AutoTokenizer

    if getattr(tokenizer, "_auto_class", None) is not None:
        return  # brings its own code, which is not run without being asked for
    loaded = AutoTokenizer.from_pretrained(folder)
    there, here = (one(PROBE, add_special_tokens=False)["input_ids"] for one in (loaded, tokenizer))
    if there != here:
        log.warning(
            "%s: AutoTokenizer reads the saved tokenizer as %s, which turns %r into %s instead of %s. Load it with %s, "
            "or use a model type whose tokenizer this is",
            *(folder, type(loaded).__name__, PROBE, there, here, type(tokenizer).__name__),
        )


def storable_generation_config(config: Any) -> Any:
    """Return ``config``, or a mended copy of one that transformers loads and then refuses to save.

    Some published ones have a temperature beside ``do_sample=False``: a run must not die of that at its first
    checkpoint.
    """
    from transformers import GenerationConfig

    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sampling = copy.deepcopy(config)
    sampling.do_sample = True
    for candidate in (config, sampling):
        try:
            candidate.validate(strict=True)
        except ValueError as error:
            log.info("generation_config of the model is not valid: %s", error)
        else:
            return candidate
    return GenerationConfig(**ids)


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
