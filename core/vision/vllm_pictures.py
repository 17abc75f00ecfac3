"""Pictures for vLLM: patches as the learner reads them, so that vLLM's own image processor never
sees a picture.

vLLM imports that processor's torchvision form, for sizes alone; where torchvision is missing the
Pillow form stands in.
"""

import hashlib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.processing_utils import ProcessingKwargs
from vllm.inputs.engine import mm_input
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from core.vision.pictures import Pictures, patches

FAMILY = "transformers.models.qwen2_vl"
MODELS = {  # model_type -> vLLM's module, its model and its ProcessingInfo
    "qwen2_vl": ("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VLProcessingInfo"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessingInfo"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3VLProcessingInfo"),
}


def prepare(skeleton: nn.Module) -> dict[str, Any]:
    """Make vLLM able to load a model that reads pictures; return the engine arguments that this
    needs.

    The classes are registered by themselves: vLLM would look at them by name in a bare process,
    without the stand-in.
    """
    module, model, info = MODELS[skeleton.config.model_type]
    if find_spec("torchvision") is None:
        twin = import_module(f"{FAMILY}.image_processing_pil_qwen2_vl")
        name = f"{FAMILY}.image_processing_qwen2_vl"
        stand_in = ModuleType(name)
        stand_in.Qwen2VLImageProcessor = twin.Qwen2VLImageProcessorPil
        stand_in.smart_resize = twin.smart_resize
        sys.modules.setdefault(name, stand_in)
    model_module = import_module(f"vllm.model_executor.models.{module}")
    ModelRegistry.register_model(model, getattr(model_module, model))
    named = {"image_processor": skeleton.processor, "video_processor": skeleton.processor}
    processor = SimpleNamespace(valid_processor_kwargs=ProcessingKwargs, **named)
    getattr(model_module, info).get_hf_processor = lambda self, **kwargs: processor
    return {
        "limit_mm_per_prompt": {"video": 0},
        # Pixels come normalised, the same numbers that the learner reads
        "mm_device_do_normalize": False,
        # Which makes dummy pictures of the largest size by vLLM's own processor
        "skip_mm_profiling": True,
        # That processor never gets a prompt, but does not come about without one
        "skip_tokenizer_init": False,
    }


def engine_input(token_ids: Sequence[int], media: Pictures) -> Any:
    """Return what vLLM's ``add_request`` takes for ids whose placeholders are expanded."""
    ids = list(token_ids)
    pictures = media.pictures
    grid = torch.tensor([picture.grid for picture in pictures])
    pixels = torch.cat([torch.from_numpy(patches(picture)) for picture in pictures])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    names = []
    places = []
    at = 0
    for picture in pictures:
        at = ids.index(picture.format.token_id, at)
        places.append(PlaceholderRange(offset=at, length=picture.tokens))
        at += picture.tokens
        # What tells pictures apart in vLLM's caches: the file and how it is read
        read = f"{picture.height} {picture.width} {picture.format}".encode()
        names.append(hashlib.blake2b(picture.data + read, digest_size=16).hexdigest())
    return mm_input(
        prompt_token_ids=ids,
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(
            {"pixel_values": pixels, "image_grid_thw": grid}, fields
        ),
        mm_hashes={"image": names},
        mm_placeholders={"image": places},
    )
