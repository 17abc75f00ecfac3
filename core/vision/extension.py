"""Pictures in prompts: the column ``data.image_key`` and models that read it.

``picture_modality.py`` is what the kernel runs such a model through; ``images.py`` has the pictures of a prompt,
``model_inputs.py`` what a pass takes of them, ``vllm_pictures.py`` what vLLM does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.config.extensions import Extension
from core.config.section import Section

if TYPE_CHECKING:
    from core.config.schema import Config

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # values of model_type whose pictures are read here


class DataKeys(Section):
    image_key: str = "images"  # column that holds the pictures of a prompt, one for each <image> in it


class ActorKeys(Section):
    freeze_vision_tower: bool = False  # the part of the model that reads pictures does not train


def used(config: Config) -> bool:
    return config.actor_rollout_ref.actor.freeze_vision_tower


HERE = "core.vision"
EXTENSION = Extension(
    name="vision",
    keys={"data": DataKeys, "actor_rollout_ref.actor": ActorKeys},
    tables={
        "modalities": dict.fromkeys(KINDS, f"{HERE}.picture_modality:PictureModality"),
        "media_columns": {"image_key": f"{HERE}.images:stored_bytes"},
        "carried": {name: f"{HERE}.images:{name}" for name in ("Pictures", "Picture", "PictureFormat")},
    },
    functions={
        "freeze": f"{HERE}.model_inputs:freeze_vision_tower",
        "keep_thumbnails": f"{HERE}.thumbnails:keep_thumbnails",
        "model_problems": f"{HERE}.picture_rules:problems",
    },
    used=used,
)
