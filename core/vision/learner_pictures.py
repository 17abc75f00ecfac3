"""What a pass with pictures needs beyond ids: features, their places, positions on three axes.

A picture that stands in several sequences of a pass goes through the vision tower once.
Placeholders that the policy wrote are ordinary tokens: only a prompt's stand for pictures. That is
why features are put into the embeddings here: transformers would count the policy's placeholders
too and refuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import InputError
from core.vision.pictures import Picture, Pictures, patches


@dataclass(frozen=True)
class PictureInputs:
    """The pictures in a pass. ``S`` is the shape of its ids: [B, T], or packed [1, N]."""

    position: Tensor  # [3, *S] int64: along time, height and width
    place: Tensor  # S bool: a placeholder of a picture
    pictures: tuple[Picture, ...]  # in the order of their places

    def packed(self, mask_BT: Tensor) -> PictureInputs:
        """Return the same for the sequences one after another, without what the mask leaves out."""
        return PictureInputs(
            self.position[:, mask_BT][:, None], self.place[mask_BT][None], self.pictures
        )

    def position_offset(self, last_B: Tensor) -> Tensor:
        """Return [B]: positions behind index ``last_B`` less the number of tokens before them."""
        rows = torch.arange(len(last_B), device=last_B.device)
        return self.position.amax(0).cummax(1).values[rows, last_B] - last_B


def freeze_vision_tower(module: nn.Module) -> list[str]:
    """Freeze the part that reads pictures, its merger included; return the names of its layers.

    Raises InputError for a model without one.
    """
    tower = getattr(module.base_model, "visual", None)
    if tower is None:
        key = "actor_rollout_ref.actor.freeze_vision_tower=True"
        raise InputError(
            f"{key}: {type(module).__name__} reads text alone and has no vision tower; leave it out"
        )
    tower.requires_grad_(False)
    inside = {id(part) for part in tower.modules()}
    return [name for name, part in module.named_modules() if id(part) in inside]


def picture_inputs(
    module: nn.Module, ids_BT: Tensor, media_B: Sequence[Pictures | None]
) -> PictureInputs | None:
    """Return the picture inputs of a pass over sequences padded on the right, or None."""
    pictures = tuple(picture for media in media_B if media for picture in media.pictures)
    if not pictures:
        return None
    counts = ids_BT.new_tensor([media.tokens if media else 0 for media in media_B])
    place_BT = ids_BT == pictures[0].format.token_id
    place_BT &= place_BT.cumsum(1) <= counts[:, None]
    if not torch.equal(place_BT.sum(1), counts):
        raise ValueError("a sequence has fewer placeholders than its pictures have tokens")
    grid = torch.tensor([picture.grid for picture in pictures], device=ids_BT.device)
    position, _ = module.base_model.get_rope_index(ids_BT, place_BT.int(), image_grid_thw=grid)
    return PictureInputs(position, place_BT, pictures)


def run_with_pictures(
    module: nn.Module, input_ids: Tensor, media: PictureInputs, **inputs: Any
) -> Any:
    """Return what the model's body returns of sequences with pictures."""
    body = module.base_model
    distinct = list(dict.fromkeys(media.pictures))
    pixels = torch.cat([torch.from_numpy(patches(picture)) for picture in distinct])
    grids = [picture.grid for picture in distinct]
    features_by_layer = _features(body, pixels.to(input_ids.device), grids)
    index = {picture: number for number, picture in enumerate(distinct)}
    first, *deeper = (
        torch.cat([features[index[picture]] for picture in media.pictures])
        for features in features_by_layer
    )
    embeds = body.get_input_embeddings()(input_ids)
    embeds = embeds.masked_scatter(media.place[..., None], first.to(embeds.dtype))
    if deeper:
        inputs |= {"visual_pos_masks": media.place, "deepstack_visual_embeds": deeper}
    return body.language_model(inputs_embeds=embeds, **{**inputs, "position_ids": media.position})


def run_with_unused_tower(module: nn.Module, input_ids: Tensor, **inputs: Any) -> Any:
    """Return what the body returns of text, after a pass of the tower over one grey token.

    The tower's gradients are then 0, and not missing.
    """
    vision = module.config.vision_config
    merge = vision.spatial_merge_size
    patch_size = vision.patch_size**2 * vision.temporal_patch_size * 3
    grey = torch.zeros(merge**2, patch_size, device=input_ids.device)
    features_by_layer = _features(module.base_model, grey, [(1, merge, merge)])
    total = sum(picture.sum() for features in features_by_layer for picture in features)
    output = module.base_model(input_ids=input_ids, **inputs)
    output.last_hidden_state = output.last_hidden_state + 0 * total
    return output


def _features(
    body: nn.Module, pixels: Tensor, grids: Sequence[tuple[int, int, int]]
) -> list[Sequence[Tensor]]:
    """Return the features of each picture, and then those for deeper layers, if there are any."""
    features = body.get_image_features(
        pixels, torch.tensor(grids, device=pixels.device), return_dict=True
    )
    return [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
