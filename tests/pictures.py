"""Vision-language models small enough for unit tests, their folders, and pictures drawn by seed."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from core.config.training_keys import ModelConfig
from core.vision.pictures import Modality, Picture, PictureFormat, Pictures, read_picture
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the marks of pictures: 100 to 103."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


def vision_config(kind: str, tower_range: float = 0.1, **text: Any) -> Any:
    """Vision: hidden 32, 2 layers. Text: hidden 64, 2 layers, 2 heads of dimension 32 (vLLM on a
    CPU needs 32)."""
    patch = 16 if kind == "qwen3_vl" else 14
    vision = dict(
        depth=2,
        num_heads=2,
        patch_size=patch,
        temporal_patch_size=2,
        spatial_merge_size=2,
        in_channels=3,
    )
    if kind == "qwen2_vl":
        vision |= dict(embed_dim=32, hidden_size=64, mlp_ratio=2)
    else:
        vision |= dict(hidden_size=32, intermediate_size=64, out_hidden_size=64)
    if kind == "qwen2_5_vl":
        vision |= dict(fullatt_block_indexes=[1], window_size=56)
    if kind == "qwen3_vl":
        vision |= dict(deepstack_visual_indexes=[0], num_position_embeddings=64)
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    rope |= {"mrope_interleaved": True} if kind == "qwen3_vl" else {}
    shape = dict(
        vocab_size=VOCAB_SIZE + len(MARKS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
    )
    shape |= dict(
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    shape |= dict(rope_parameters=rope, bos_token_id=3, eos_token_id=1, pad_token_id=0)
    shape |= {"head_dim": 32} if kind == "qwen3_vl" else {}
    ids = dict(
        vision_start_token_id=100, image_token_id=101, vision_end_token_id=102, video_token_id=103
    )
    tied = dict(tie_word_embeddings=False)
    parts = dict(
        text_config={**shape, **tied, **text},
        vision_config={**vision, "initializer_range": tower_range},
    )
    return AutoConfig.for_model(kind, **parts, **ids, **tied)


def vision_model(kind: str = "qwen2_5_vl", seed: int = 0, **text: Any) -> Any:
    """A random model in fp32 and eval mode; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(
            vision_config(kind, **text), dtype=torch.float32
        )
    return model.eval()


def image_processor(kind: str = "qwen2_5_vl") -> Qwen2VLImageProcessorPil:
    options = (
        dict(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3) if kind == "qwen3_vl" else {}
    )
    factor = 2 * options.get("patch_size", 14)
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": factor**2, "longest_edge": 16 * factor**2}, **options
    )


def save_vision_model(folder: Path, kind: str = "qwen2_5_vl", seed: int = 0, **text: Any) -> Path:
    vision_model(kind, seed, **text).save_pretrained(folder)
    vision_tokenizer().save_pretrained(folder)
    image_processor(kind).save_pretrained(folder)
    return folder


@cache
def picture_format(kind: str = "qwen2_5_vl") -> PictureFormat:
    processor = image_processor(kind)
    sizes = (
        processor.patch_size,
        2,
        2,
        processor.size["shortest_edge"],
        processor.size["longest_edge"],
    )
    colours = tuple(processor.image_mean), tuple(processor.image_std)
    return PictureFormat("<|image_pad|>", 101, "".join(MARKS[:3]), *sizes, *colours)


def png(
    seed: int = 0, width: int = 70, height: int = 56, mode: str = "RGB", format: str = "PNG"
) -> bytes:
    """The file of a picture of random colours."""
    colours = np.random.default_rng(seed).integers(
        0, 256, (height // 7 + 1, width // 7 + 1, 3), np.uint8
    )
    image = Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST).convert(mode)
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def picture(seed: int = 0, kind: str = "qwen2_5_vl", **size: int) -> Picture:
    return read_picture(png(seed, **size), picture_format(kind))


def pictures(*each: Picture, kind: str = "qwen2_5_vl") -> Pictures:
    """The pictures of a prompt."""
    return Pictures(each, each[0].format if each else picture_format(kind))


def modality(kind: str = "qwen2_5_vl") -> Modality:
    return Modality(True, picture_format(kind))


def model_config(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), enable_gradient_checkpointing=False, **options)
