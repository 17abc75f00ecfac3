"""LoRA (Hu et al. 2021, arXiv:2106.09685) inside a transformers model, through peft.

The base is frozen, and adapters are put into the model in place: whatever reads a model still finds
its class, its body and its head. Exports, and engines with weights of their own, get the adapters
merged into the base. A checkpoint holds what is trained, in peft's own files.
"""

import copy
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.config.training_keys import CriticModelConfig, ModelConfig
from core.errors import InputError
from core.files import full_disk_as_oserror

log = logging.getLogger(__name__)
ADAPTER = "default"  # peft's name of the only adapter
# peft's files
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
VALUE_HEADS = ("score", "classifier")  # transformers' names of the head of a token classifier


def add_adapters(
    module: nn.Module,
    model: ModelConfig | CriticModelConfig,
    seed: int,
    frozen: Sequence[str] = (),
) -> nn.Module:
    """Put adapters into ``module`` if ``lora_rank`` > 0, and freeze the rest.

    Layers that are named in ``frozen`` get none. The seed decides the adapters' first weights,
    which change nothing yet. A critic's new head trains whole. Raises InputError for names of no
    layers.
    """
    if not model.lora_rank:
        return module
    from peft import LoraConfig

    from core.learner.models import resolve_path

    base = resolve_path(model.path, weights=False)
    head = module.get_output_embeddings()
    embeddings = module.get_input_embeddings()
    value_heads = [name for name in VALUE_HEADS if head is None and hasattr(module, name)]
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=_as_peft(model.target_modules),
        exclude_modules=_excluded(model.exclude_modules or (), [*value_heads, *frozen]),
        task_type="CAUSAL_LM" if head is not None else "TOKEN_CLS",
        base_model_name_or_path=os.path.abspath(base) if os.path.exists(base) else base,
    )
    _inject(config, module, model, seed)
    if head is not None and module.get_output_embeddings() is not head:
        raise InputError(
            "model.target_modules: the output head cannot have an adapter; leave lm_head out"
        )
    is_tied = head is not None and head.weight is embeddings.weight
    if is_tied and module.get_input_embeddings() is not embeddings:
        # Merged, the adapter would change the head too, which was trained without it
        raise InputError(
            "model.target_modules: the embeddings are the output head too (tie_word_embeddings), "
            "and an adapter would be on one of them; leave the embeddings out"
        )
    for name in value_heads:
        module.get_submodule(name).requires_grad_(True)
    trained = sum(value.numel() for value in trained_weights(module).values())
    total = sum(value.numel() for value in module.parameters())
    log.info(
        "adapters of rank %d: %s of %s parameters train",
        model.lora_rank,
        f"{trained:,}",
        f"{total:,}",
    )
    return module


def _inject(
    config: Any, module: nn.Module, model: ModelConfig | CriticModelConfig, seed: int
) -> None:
    """Put the adapters of a peft configuration into the module. Raises InputError."""
    from peft import inject_adapter_in_model

    names = [name for name, _ in module.named_modules()]
    _check_names("exclude_modules", _as_peft(model.exclude_modules or ()), names)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, module, ADAPTER)
        except ValueError as error:  # peft's own ones are: nothing matches
            why = str(error).split(". ")[0]
            raise InputError(
                f"model.target_modules={list(model.target_modules)}: {why}; name layers of "
                f"{type(module).__name__}, or all-linear"
            ) from error
    _check_names("target_modules", _as_peft(model.target_modules), [*layers(module)])


def _check_names(key: str, entries: str | list[str], names: Sequence[str]) -> None:
    """Raise InputError for an entry of a list that is the end of none of these layers' names."""
    if isinstance(entries, str):  # a pattern
        return
    for entry in entries:
        if not any(f".{name}".endswith(f".{entry}") for name in names):
            raise InputError(
                f"model.{key}: {entry} is the end of no such layer's name; correct it (all-linear "
                f"and patterns stand alone)"
            )


def _excluded(names: Sequence[str], heads: Sequence[str]) -> str | list[str] | None:
    """Return the layers without adapters, for peft, which reads names in a list to the letter."""
    excluded = _as_peft(names)
    if isinstance(excluded, str):  # one pattern, matched against a layer's whole name
        return "|".join([f"(?:{excluded})", *heads])
    return [*excluded, *heads] or None


def _as_peft(names: Sequence[str]) -> str | list[str]:
    """Return names for peft: a text is all-linear or a pattern, a list has ends of names."""
    if len(names) == 1 and (names[0] == "all-linear" or re.search(r"[^\w.-]", names[0])):
        return names[0]
    return list(names)


def has_adapters(module: nn.Module) -> bool:
    return hasattr(module, "peft_config")


def layers(module: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by name."""
    if not has_adapters(module):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}


@contextmanager
def base_only(module: nn.Module) -> Iterator[None]:
    """Switch the adapters off for a block: the model is as it was before training."""
    adapted = layers(module).values()
    for layer in adapted:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapted:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the model without adapters that computes the same, by their names.

    One layer is merged at a time. The others are the parameters themselves: tied ones are one
    object.
    """
    adapted = layers(module)
    for name, value in module.state_dict(keep_vars=True).items():
        owner, is_base, leaf = name.rpartition(".base_layer.")
        if is_base and leaf == "weight":
            value = value + adapted[owner].get_delta_weight(ADAPTER).to(value.dtype)
        if ".lora_" not in name:
            yield f"{owner}.{leaf}" if is_base else name, value


def trained_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return what is trained, by name: the adapters, and a critic's head."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def _name_in_file(name: str) -> str:
    """Return peft's name of a trained weight, which has no adapter in it."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def save_adapters(module: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write trained weights, whole, and the configurations of adapters and model."""
    from safetensors.torch import save_file

    from core.learner.models import base_settings

    folder.mkdir(parents=True, exist_ok=True)
    with base_settings(module):
        module.config.save_pretrained(folder)
    config = copy.copy(module.peft_config[ADAPTER])
    for name, value in vars(config).items():
        if isinstance(value, set):
            # The order of a set is another one in every process, and so would be the file
            setattr(config, name, sorted(value))
    config.save_pretrained(folder)
    stored = {
        _name_in_file(name): value.detach().cpu().contiguous() for name, value in weights.items()
    }
    with full_disk_as_oserror(folder / WEIGHTS):
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def load_adapters(trained: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return what :func:`save_adapters` wrote, by the names of the ``trained`` weights.

    Raises InputError for other names or shapes.
    """
    from safetensors.torch import load_file

    stored = load_file(folder / WEIGHTS)
    shapes_in_file = {name: value.shape for name, value in stored.items()}
    shapes = {_name_in_file(name): value.shape for name, value in trained.items()}
    if shapes_in_file != shapes:
        names = {*shapes_in_file, *shapes}
        wrong = sorted(name for name in names if shapes_in_file.get(name) != shapes.get(name))
        raise InputError(
            f"{folder / WEIGHTS} holds adapters of another shape: {', '.join(wrong[:5])}"
        )
    return {name: stored[_name_in_file(name)] for name in trained}


def merge_saved(folder: Path, saved: str | None, path: str | None = None) -> nn.Module:
    """Return a checkpoint's policy: its base, with the adapters of :func:`save_adapters` merged.

    ``path`` is where the base is now, if not where the run found it; ``saved`` is its SHA-256 in
    the checkpoint's manifest. Raises InputError if the weights there are others.
    """
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig

    from core.checkpoint.provenance import base_of
    from core.learner.models import auto_class, resolve_path, tied

    config = PeftConfig.from_pretrained(folder)
    # With a megatron_config peft imports megatron_core
    if config.peft_type != "LORA" or getattr(config, "megatron_config", None):
        raise InputError(
            f"{folder}: its adapter_config.json is none that a run here writes, and may name code "
            "to run"
        )
    path = resolve_path(path or config.base_model_name_or_path, "--base")
    sha256 = base_of(path)
    if saved not in (None, sha256):
        raise InputError(
            f"--base={path} (weights of SHA-256 {sha256[:12]}): {folder} holds adapters of another "
            f"base, {config.base_model_name_or_path} of SHA-256 {saved[:12]}: give that one"
        )
    shape = AutoConfig.from_pretrained(folder)
    base = tied(auto_class(shape).from_pretrained(path, config=shape, dtype=torch.float32))
    return PeftModel.from_pretrained(base, folder).merge_and_unload()
