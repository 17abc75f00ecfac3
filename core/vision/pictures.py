"""Pictures of prompts: from a file's bytes to what a vision tower reads, and their placeholders
among the ids.

Pillow brings a picture to the size at which the model reads it. Learner and engines start from
these pixels: Pillow's and torchvision's differ by up to 0.015 after resizing. The learner's side is
``learner_pictures.py``, vLLM's ``vllm_pictures.py``.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.config.registry import ENGINES, PICTURE_MODELS
from core.config.section import Problem
from core.errors import InputError
from core.model_shapes import MODELS, read_config

if TYPE_CHECKING:
    from torch import nn

    from core.config.schema import Config

MARKER = "<image>"  # in the text of a prompt: here stands the next picture
# Fields of config.json: the placeholder of a picture, between its begin and its end
NAMES = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
# Fields of a preprocessor with the values that patches() computes with; others are refused
READ_AS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "resample": 3,  # bicubic
}
CELL_BOUNDS = ("min_pixels", "max_pixels")  # of one picture, beside the bytes of its file
CELL_SIDES = ("resized_height", "resized_width")
ORIENTATION = 0x0112  # EXIF's tag
TURNED = range(5, 9)  # EXIF orientations that exchange width and height
# 16-bit and float ones have no fixed range
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


class MediaError(ValueError):
    """Pictures, or their places in a prompt, cannot be used."""

    def __init__(self, rule: str, fix: str, value: str = ""):
        super().__init__(f"{rule} ({value}); {fix}" if value else f"{rule}; {fix}")
        self.rule = rule
        self.fix = fix
        self.value = value


@dataclass(frozen=True)
class PictureFormat:
    """How a model reads pictures.

    A picture is cut into squares of ``patch`` pixels, of which ``merge`` by ``merge`` become one
    token; ``frames`` copies of it make up the time axis. Its sides are multiples of ``patch *
    merge``, its pixels between ``least`` and ``most``. ``mark`` stands for a picture in a text; its
    token ``token_id`` is repeated for each of the picture's.
    """

    token: str
    token_id: int
    mark: str
    patch: int
    merge: int
    frames: int
    least: int
    most: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, config: Any, path: str, tokenizer: Any) -> PictureFormat:
        """Return how the model of a folder or hub id with this config reads pictures.

        Raises InputError.
        """
        where = f"actor_rollout_ref.model.path={path}"
        token_ids = [getattr(config, name) for name in NAMES]
        tokens = tokenizer.convert_ids_to_tokens(token_ids)
        mark = "".join(map(str, tokens))
        if tokenizer(mark, add_special_tokens=False)["input_ids"] != token_ids:
            rule = f"the tokenizer lacks the placeholder of pictures ({', '.join(NAMES)})"
            raise InputError(f"{where}: {rule}; take the model's")
        processor = image_processor(path)
        others = [
            f"{name}={getattr(processor, name)}"
            for name, value in READ_AS.items()
            if getattr(processor, name) != value
        ]
        if others:
            raise InputError(
                f"{where}: its preprocessor_config.json has {', '.join(others)}, and pictures are "
                f"read with {READ_AS} alone; mend the file or take another model"
            )
        return cls(
            token=tokens[1],
            token_id=config.image_token_id,
            mark=mark,
            patch=processor.patch_size,
            merge=processor.merge_size,
            frames=processor.temporal_patch_size,
            least=processor.size["shortest_edge"],
            most=processor.size["longest_edge"],
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
        )


def image_processor(path: str) -> Any:
    """Load the image processor's Pillow form, which needs no torchvision. Raises InputError."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        return Qwen2VLImageProcessorPil.from_pretrained(path)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path}: has no usable configuration of its image processor ({why})"
        ) from error


@dataclass(frozen=True)
class Picture:
    """A picture of a prompt, with the size in pixels at which a model reads it."""

    data: bytes = field(repr=False)  # the file, which is decoded where a model reads it
    height: int
    width: int
    format: PictureFormat = field(repr=False)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches along time, height and width."""
        return 1, self.height // self.format.patch, self.width // self.format.patch

    @property
    def tokens(self) -> int:
        """Placeholders that stand for the picture in a prompt."""
        return math.prod(self.grid) // self.format.merge**2


@dataclass(frozen=True)
class Pictures:
    """The pictures of a prompt in the order of their places. ``format`` is the model's."""

    pictures: tuple[Picture, ...]
    format: PictureFormat = field(repr=False)

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def tokens(self) -> int:
        """Placeholders that stand for the pictures in a prompt."""
        return sum(picture.tokens for picture in self.pictures)

    def mark(self, prompt: str | Sequence[Mapping[str, Any]]) -> Any:
        """Return the prompt, a text or a chat, with the model's mark in each picture's place.

        Raises MediaError.
        """
        messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
        marked = []
        places = 0
        for message in messages:
            text = message.get("content") or ""
            places += text.count(MARKER)
            marked_text = text.replace(MARKER, self.format.mark)
            marked.append({**message, "content": marked_text} if text else message)
        if places != len(self):
            rule = f"a prompt has another number of places {MARKER} than of pictures"
            raise MediaError(rule, "one place a picture", f"{places} places, {len(self)} pictures")
        return marked[0]["content"] if isinstance(prompt, str) else marked

    def expand(self, ids: Sequence[int]) -> list[int]:
        """Return the ids with one placeholder for each token of a picture. Raises MediaError."""
        placeholder = self.format.token_id
        count = list(ids).count(placeholder)
        if count != len(self):
            raise MediaError(
                "the chat template does not keep the places of pictures, or the text holds "
                "placeholders",
                f"write {MARKER} alone",
                f"{count} placeholders, {len(self)} pictures",
            )
        expanded = []
        pictures = iter(self.pictures)
        for token_id in ids:
            repeats = next(pictures).tokens if token_id == placeholder else 1
            expanded += [token_id] * repeats
        return expanded

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Return a prompt's ids with one placeholder a picture, as a person reads them."""
        placeholder = self.format.token_id
        collapsed = []
        for token_id in ids:
            if token_id != placeholder or collapsed[-1:] != [placeholder]:
                collapsed.append(token_id)
        return collapsed


class StoredPicture(NamedTuple):
    """A picture's file, and the least and most pixels of its cell; empty if it has neither."""

    data: bytes
    bounds: tuple[float | None, ...] = ()


def stored_picture(cell: Any) -> StoredPicture:
    """Return the picture of a parquet cell: a mapping as of ``datasets``, or bytes.

    Raises MediaError.
    """
    fields = cell if isinstance(cell, Mapping) else {"bytes": cell}
    sides = [name for name in CELL_SIDES if fields.get(name) is not None]
    if sides:
        rule = "a picture has sides of its own, which are not supported"
        fix = "resize the picture in the file, or write max_pixels"
        raise MediaError(rule, fix, ", ".join(sides))
    bounds = tuple(fields.get(name) for name in CELL_BOUNDS)
    values = [value for value in bounds if value is not None]
    are_numbers = all(isinstance(value, int | float) and 1 <= value < math.inf for value in values)
    if not are_numbers or values != sorted(values):
        fix = "write numbers of 1 or more, min_pixels at most max_pixels"
        raise MediaError(f"a picture has unusable {' or '.join(CELL_BOUNDS)}", fix, str(values))
    data = fields.get("bytes")
    if not isinstance(data, bytes) or not data:
        raise MediaError("a picture is missing", "store its bytes in the file", type(cell).__name__)
    return StoredPicture(data, bounds if values else ())


def read_picture(
    data: bytes, format: PictureFormat, bounds: Sequence[float | None] = (), *, decode: bool = False
) -> Picture:
    """Return the picture of a file's bytes, with the size at which the model reads it.

    ``bounds`` of its cell come before the model's, with the defaults of qwen_vl_utils: 4 and 16,384
    tokens. ``decode`` reads the file to its end.

    Raises MediaError for what is no picture, broken, a strip, has several frames or a mode without
    a form in RGB.
    """
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        with Image.open(io.BytesIO(data)) as image:
            # A phone's MPO holds a photo and its preview
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                frames = f"{image.n_frames} frames"
                raise MediaError("a picture has several frames", "store one of them", frames)
            if image.mode not in MODES:
                rule = "a picture is not 8-bit grey or colour"
                raise MediaError(rule, "convert it to RGB", f"mode {image.mode}")
            if decode:
                image.load()
            sides = (image.height, image.width)
            if image.getexif().get(ORIENTATION) in TURNED:
                sides = sides[::-1]
            factor = format.patch * format.merge
            if bounds:
                least, most = bounds
                least = least or 4 * factor**2
                most = most or 16_384 * factor**2
                sides = smart_resize(*sides, factor, least, most)
            size = smart_resize(*sides, factor, format.least, format.most)
    except MediaError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        fix = "mend the file or leave the row out"
        raise MediaError("a picture cannot be read", fix, str(error)[:80]) from error
    return Picture(data, *size, format)


@lru_cache(maxsize=256)  # the passes of a step read the same ones
def pixels(picture: Picture) -> np.ndarray:
    """Return [height, width, 3] uint8: the picture at its size; what is transparent is white."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(picture.data)) as image:
        image = ImageOps.exif_transpose(image)  # upright, as transformers and vLLM read photos
        if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB").resize(
            (picture.width, picture.height), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(image).copy()
    pixels.flags.writeable = False
    return pixels


def patches(picture: Picture) -> np.ndarray:
    """Return what the vision tower reads, token by token: [patches, 3 * frames * patch * patch].

    The arithmetic, in float32, is that of Qwen2VLImageProcessor without its resizing.
    """
    format = picture.format
    merge = format.merge
    patch = format.patch
    _, rows, columns = picture.grid
    mean = np.array(format.mean, np.float32)
    std = np.array(format.std, np.float32)
    value_HWC = (pixels(picture).astype(np.float32) * np.float32(1 / 255) - mean) / std
    cut = value_HWC.transpose(2, 0, 1).reshape(
        3, rows // merge, merge, patch, columns // merge, merge, patch
    )
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    cut = np.broadcast_to(cut, (*cut.shape[:5], format.frames, *cut.shape[6:]))
    return cut.reshape(rows * columns, -1)


# -- how a model reads prompts ---------------------------------------------------------------------


@dataclass(frozen=True)
class Modality:
    """A model of text alone, or of text and pictures."""

    reads_media: bool = False
    format: PictureFormat | None = None  # needed only where prompts are made

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads the model."""
        return "AutoModelForImageTextToText" if self.reads_media else "AutoModelForCausalLM"

    def read_media(
        self, stored: Sequence[StoredPicture], *, decode: bool = False
    ) -> Pictures | None:
        """Return the pictures of a prompt from their files. Raises MediaError."""
        if self.reads_media:
            pictures = (
                read_picture(data, self.format, bounds, decode=decode) for data, bounds in stored
            )
            return Pictures(tuple(pictures), self.format)
        if stored:
            fix = "train a model that reads them, or leave the column out (data.image_key)"
            raise MediaError("an example has media, and the model reads text alone", fix)
        return None

    def load_processor(self, module: nn.Module, path: str) -> None:
        """Set ``module.processor``, which checkpoints and exports hold too."""
        if self.reads_media:
            module.processor = image_processor(path)


TEXT = Modality()


def modality_of(config: Any) -> Modality:
    """Return the modality of models with this configuration of transformers."""
    return Modality(True) if getattr(config, "model_type", None) in PICTURE_MODELS else TEXT


def problems(config: Config) -> Iterator[Problem]:
    """Yield the keys that do not go together with the model, if it reads pictures."""
    roles = config.actor_rollout_ref
    if not known_to_read_pictures(roles.model.path):
        return
    rule = "does not go with a model that reads pictures"
    fix = "leave it out, or give a model of text alone"
    if config.trainer.backend == "ray":
        for name in ("ulysses_sequence_parallel_size", "tensor_model_parallel_size"):
            ranks = max(getattr(roles.actor, name), getattr(roles.ref, name))
            if ranks > 1:
                yield Problem(f"actor_rollout_ref.actor.{name}", ranks, rule, fix)
    if config.has_critic:
        yield Problem("algorithm.adv_estimator", config.algorithm.adv_estimator, rule, fix)
    if config.reward_model.enable:
        yield Problem("reward_model.enable", True, rule, fix)
    if config.needs_engine and not ENGINES[roles.rollout.name].reads_media:
        yield Problem("actor_rollout_ref.rollout.name", roles.rollout.name, rule, fix)
    if not config.generates:
        yield Problem("actor_rollout_ref.model.path", roles.model.path, rule, fix)


def known_to_read_pictures(path: str) -> bool:
    """Return whether a model reads pictures, by its folder or by the table of hub ids."""
    try:
        saved = read_config(path)
    except InputError:  # a damaged folder: loading it reports that
        return False
    if saved is not None:
        return saved.get("model_type") in PICTURE_MODELS
    return path in MODELS and MODELS[path].tower > 0
