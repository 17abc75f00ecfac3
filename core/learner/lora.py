"""LoRA (Hu et al. 2021, arXiv:2106.09685) inside a transformers model, through peft: the base is
frozen.

Adapters are put into the model in place, so whatever reads a model still finds its class, its body
and its head. Exports and engines with weights of their own get them merged; a checkpoint holds what
is trained, in peft's own files.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.errors import InputError

if TYPE_CHECKING:
    from core.config.training_keys import CriticModelConfig, ModelConfig

log = logging.getLogger(__name__)
ADAPTER = "default"  # peft's name of the one adapter there is
# Of a weight's name: in peft's files, and in the module
PREFIX, INSIDE = "base_model.model.", f".{ADAPTER}."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's files
VALUE_HEADS = ("score", "classifier")  # what transformers calls the head of a token classifier


def add_adapters(module: nn.Module, model: ModelConfig | CriticModelConfig, seed: int) -> nn.Module:
    """Put adapters into ``module`` where ``lora_rank`` > 0, and freeze the rest.

    The seed decides the adapters' first weights, which change nothing yet. A critic's new head
    trains whole.
    """
    if not model.lora_rank:
        return module
    from peft import LoraConfig, inject_adapter_in_model

    from core.learner.models import resolve_path

    head, base = module.get_output_embeddings(), resolve_path(model.path, weights=False)
    own_heads = [name for name in VALUE_HEADS if head is None and hasattr(module, name)]
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=_names(model.target_modules),
        exclude_modules=_names([*(model.exclude_modules or ()), *own_heads]) or None,
        task_type="CAUSAL_LM" if head is not None else "TOKEN_CLS",
        base_model_name_or_path=os.path.abspath(base) if os.path.exists(base) else base,
    )
    embeddings = module.get_input_embeddings()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module, ADAPTER)
    if head is not None and module.get_output_embeddings() is not head:
        raise InputError(
            "model.target_modules: the output head cannot have an adapter; leave lm_head out"
        )
    shared = head is not None and head.weight is embeddings.weight
    if shared and module.get_input_embeddings() is not embeddings:
        # Merged, the adapter would change the head too, which was trained without it
        rule = (
            "the embeddings are the output head too (tie_word_embeddings), and an adapter "
            "would be on one of them"
        )
        raise InputError(f"model.target_modules: {rule}; leave the embeddings out")
    for name in own_heads:
        module.get_submodule(name).requires_grad_(True)
    trained, parts = (
        sum(one.numel() for one in some)
        for some in (trained_weights(module).values(), module.parameters())
    )
    log.info(
        "adapters of rank %d: %s of %s parameters train",
        model.lora_rank,
        f"{trained:,}",
        f"{parts:,}",
    )
    return module


def _names(names: Any) -> Any:
    """Return names as peft tells them apart: a list holds ends, a text is all-linear or a pattern
    of whole names."""
    alone = len(names) == 1 and (names[0] == "all-linear" or re.search(r"[^\w.-]", names[0]))
    return names[0] if alone else list(names)


def has_adapters(module: nn.Module) -> bool:
    return hasattr(module, "peft_config")


def layers(module: nn.Module) -> dict[str, Any]:
    """Return name -> layer, of the layers with an adapter."""
    if not has_adapters(module):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}


@contextmanager
def base_only(module: nn.Module) -> Iterator[None]:
    """Switch the adapters off for a block: the model is as it was before training, without a second
    copy."""
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
    """Yield the weights of the model without adapters that computes the same, by its state dict's
    names.

    One layer is merged at a time; the others are the parameters themselves, so that tied ones are
    one.
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


def save_adapters(module: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write :func:`trained_weights` (whole tensors) and the configurations of adapters and
    model."""
    from safetensors.torch import save_file

    from core.learner.models import base_settings

    folder.mkdir(parents=True, exist_ok=True)
    with base_settings(module):
        module.config.save_pretrained(folder)
    config = copy.copy(module.peft_config[ADAPTER])
    for name, value in vars(config).items():
        # Whose order is another one in every process: files would differ
        if isinstance(value, set):
            setattr(config, name, sorted(value))
    config.save_pretrained(folder)
    # peft's names have no adapter in them
    stored = {
        PREFIX + name.replace(INSIDE, "."): value.detach().cpu().contiguous()
        for name, value in weights.items()
    }
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def load_adapters(trained: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return what :func:`save_adapters` wrote, by the names of ``trained``, as
    :func:`trained_weights` has them.

    Raises InputError for other names or shapes.
    """
    from safetensors.torch import load_file

    found = load_file(folder / WEIGHTS)
    wanted = {PREFIX + name.replace(INSIDE, "."): name for name in trained}
    there, here = (
        {key: value.shape for key, value in found.items()},
        {key: trained[wanted[key]].shape for key in wanted},
    )
    if there != here:
        odd = ", ".join(
            sorted(key for key in {*there, *here} if there.get(key) != here.get(key))[:5]
        )
        raise InputError(f"{folder / WEIGHTS} holds adapters of another shape: {odd}")
    return {wanted[name]: value for name, value in found.items()}


def merge_saved(folder: Path, saved: str | None, path: str | None = None) -> nn.Module:
    """Return the policy of a checkpoint that :func:`save_adapters` wrote: its base, with the
    adapters merged.

    ``path`` is where the base is now, if not where the run found it; ``saved`` its SHA-256 then
    (the checkpoint's manifest). Raises InputError where the weights there are others.
    """
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig

    from core.checkpoint.provenance import base_of
    from core.learner.models import auto_class, resolve_path, tied

    config = PeftConfig.from_pretrained(folder)
    # With it peft imports megatron_core
    if config.peft_type != "LORA" or getattr(config, "megatron_config", None):
        raise InputError(
            f"{folder}: its adapter_config.json is none that a run here writes, and "
            f"may name code to run"
        )
    path = resolve_path(path or config.base_model_name_or_path, "--base")
    found = base_of(path)
    if saved not in (None, found):
        rule = (
            f"{folder} holds adapters of another base, {config.base_model_name_or_path} of "
            f"SHA-256 {saved[:12]}"
        )
        raise InputError(f"--base={path} (weights of SHA-256 {found[:12]}): {rule}: give that one")
    shape = AutoConfig.from_pretrained(folder)
    base = tied(auto_class(shape).from_pretrained(path, config=shape, dtype=torch.float32))
    return PeftModel.from_pretrained(base, folder).merge_and_unload()
