"""What a pass of a vision-language model needs beyond ids: features of pictures, their places, positions on three axes.

The families are those of ``core.config.registry.PICTURE_MODELS``; their modules agree on the names that are used here.
A picture that stands in several sequences of a pass goes through the vision tower once. Placeholders that the policy
wrote are ordinary tokens, as they are to an engine that decodes them: only a prompt's stand for pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import InputError
from core.vision.pictures import Picture, Pictures, patches


@dataclass(frozen=True)
class PictureInputs:
    """The pictures of the sequences in a pass.

    Shapes (S as the pass has its ids, [B, T] or packed [1, N]):
        position  [3, *S] int64  along time, height and width
        place     S       bool   a placeholder of ``pictures``, which stand in the order of their places
    """

    position: Tensor
    place: Tensor
    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, module: nn.Module, ids_BT: Tensor, media_B: Sequence[Pictures | None]) -> PictureInputs:
        """Return the inputs of sequences that are padded on the right."""
        pictures = tuple(picture for media in media_B if media for picture in media.pictures)
        counts = ids_BT.new_tensor([media.tokens if media else 0 for media in media_B])
        place_BT = ids_BT == pictures[0].format.token_id
        place_BT &= place_BT.cumsum(1) <= counts[:, None]
        if not torch.equal(place_BT.sum(1), counts):
            raise ValueError("a sequence has fewer placeholders than its pictures have tokens")
        grid = torch.tensor([picture.grid for picture in pictures], device=ids_BT.device)
        position, _ = module.base_model.get_rope_index(ids_BT, place_BT.int(), image_grid_thw=grid)
        return cls(position, place_BT, pictures)

    def packed(self, mask_BT: Tensor) -> PictureInputs:
        """Return the same for the sequences one after another, without what the mask leaves out."""
        return PictureInputs(self.position[:, mask_BT][:, None], self.place[mask_BT][None], self.pictures)

    def position_offset(self, last_B: Tensor) -> Tensor:
        """Return [B]: positions behind index ``last_B`` less the number of tokens before them."""
        rows = torch.arange(len(last_B), device=last_B.device)
        return self.position.amax(0).cummax(1).values[rows, last_B] - last_B


def freeze_vision_tower(module: nn.Module) -> None:
    """Freeze the part that reads pictures, its merger included. Raises InputError for a model without one."""
    tower = getattr(module.base_model, "visual", None)
    if tower is None:
        key = "actor_rollout_ref.actor.freeze_vision_tower=True"
        raise InputError(f"{key}: {type(module).__name__} reads text alone and has no vision tower; leave it out")
    tower.requires_grad_(False)


def run_with_unused_tower(module: nn.Module, input_ids: Tensor, **inputs: Any) -> Any:
    """Return what the model's body returns of text, after a pass of the vision tower for nothing."""
    zero = _zero_of_tower(module)
    output = module.base_model(input_ids=input_ids, **inputs)
    output.last_hidden_state = output.last_hidden_state + zero
    return output


def run_with_pictures(module: nn.Module, input_ids: Tensor, media: PictureInputs, **inputs: Any) -> Any:
    """Return what the model's body returns of sequences with pictures."""
    body, distinct = module.base_model, list(dict.fromkeys(media.pictures))
    pixels = torch.cat([torch.from_numpy(patches(picture)) for picture in distinct]).to(input_ids.device)
    grid = torch.tensor([picture.grid for picture in distinct], device=input_ids.device)
    features = body.get_image_features(pixels, grid, return_dict=True)
    number = {picture: index for index, picture in enumerate(distinct)}
    order = [number[picture] for picture in media.pictures]
    features.pooler_output = [features.pooler_output[index] for index in order]
    if (deep := getattr(features, "deepstack_features", None)) is not None:
        features.deepstack_features = [[layer[index] for index in order] for layer in deep]
    with _given(body, features, media.place):
        inputs = {**inputs, "position_ids": media.position}
        return body(input_ids=input_ids, pixel_values=pixels, image_grid_thw=grid, **inputs)


def _zero_of_tower(module: nn.Module) -> Tensor:
    """Return 0, computed by the vision tower from one grey token, so that its gradients are 0 and not missing."""
    body, vision = module.base_model, module.config.vision_config
    merge, size = vision.spatial_merge_size, vision.patch_size**2 * vision.temporal_patch_size * 3
    pixels = torch.zeros(merge**2, size, device=next(module.parameters()).device)
    features = body.get_image_features(
        pixels, torch.tensor([[1, merge, merge]], device=pixels.device), return_dict=True
    )
    parts = [*features.pooler_output, *(one for layer in getattr(features, "deepstack_features", ()) for one in layer)]
    return 0 * sum(part.sum() for part in parts)


@contextmanager
def _given(body: nn.Module, features: Any, place: Tensor) -> Iterator[None]:
    """Have ``body`` take these features and places for a call, instead of what it would find in its own ids.

    It would count the policy's own placeholders among the pictures' and refuse them, and it hands the lengths of packed
    sequences to the vision tower's attention as if they were those of the pictures.
    """
    masks = place[..., None], torch.zeros_like(place[..., None])
    body.get_image_features = lambda *args, **kwargs: features
    body.get_placeholder_mask = lambda *args, **kwargs: masks
    try:
        yield
    finally:
        del body.get_image_features, body.get_placeholder_mask
