"""Pictures of prompts: from a file's bytes to what a vision tower reads, and their placeholders among the ids.

Pillow brings a picture to the size at which the model reads it. Every reader, the learner and each engine, starts from
these pixels, so that an engine's own resizing has nothing left to do: Pillow's and torchvision's pixels differ by up to
0.015 after resizing. Which model reads pictures how is found in ``picture_modality.py``; what runs the vision tower is
``model_inputs.py``.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from core.modality import MediaError

MARKER = "<image>"  # in the text of a prompt: here stands the next picture
# Decoding takes 3 bytes a pixel, and the widest published processor reads 13 million: more is a mistake or a bomb.
MOST_PIXELS = 2**26
THUMBNAIL = 192  # pixels of the longer side, of what records and pages show: at most 30 KB as JPEG
SHOWN = 8  # thumbnails of a prompt at the most
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # 16-bit and float ones have no fixed range


@dataclass(frozen=True)
class PictureFormat:
    """How a model reads pictures, from its configuration and that of its image processor.

    A picture is cut into squares of ``patch`` pixels, of which ``merge`` by ``merge`` become one token; ``frames``
    copies of it make up the time axis that these models have. Its sides are multiples of ``patch * merge``, its pixels
    between ``least`` and ``most``. ``mark`` stands for a picture in the text of a prompt; its token ``token_id`` is
    repeated for each of the picture's tokens.
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


@dataclass(frozen=True)
class Picture:
    """A picture of a prompt: the file's bytes as the data has them, and the size in pixels at which it is read.

    It travels as it is stored, a tenth of its pixels or less, and is decoded where a model reads it.
    """

    data: bytes = field(repr=False)
    height: int
    width: int
    format: PictureFormat = field(repr=False)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return its patches along time, height and width."""
        return 1, self.height // self.format.patch, self.width // self.format.patch

    @property
    def tokens(self) -> int:
        """Count the placeholders that stand for it in a prompt."""
        return math.prod(self.grid) // self.format.merge**2


@dataclass(frozen=True)
class Pictures:
    """The pictures of a prompt in the order of their places: :class:`core.types.Media`. ``format`` is the model's."""

    pictures: tuple[Picture, ...]
    format: PictureFormat = field(repr=False)

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def tokens(self) -> int:
        """Count the placeholders that stand for them in a prompt."""
        return sum(picture.tokens for picture in self.pictures)

    def mark(self, prompt: str | Sequence[Mapping[str, Any]]) -> Any:
        """Return the prompt, a text or a chat, with the model's mark in each place of a picture.

        Raises MediaError where it has more or fewer places than pictures, or marks already.
        """
        texts = [prompt] if isinstance(prompt, str) else [message.get("content") or "" for message in prompt]
        if any(self.format.token in text for text in texts):
            rule = f"a prompt holds the model's own placeholder {self.format.token}"
            raise MediaError(rule, f"write {MARKER}: it is expanded here")
        places = sum(text.count(MARKER) for text in texts)
        if places != len(self):
            rule = f"a prompt has another number of places {MARKER} than of pictures"
            raise MediaError(rule, "one place a picture", f"{places} places, {len(self)} pictures")
        if isinstance(prompt, str):
            return prompt.replace(MARKER, self.format.mark)
        return [
            {**message, "content": message["content"].replace(MARKER, self.format.mark)}
            if message.get("content")
            else message
            for message in prompt
        ]

    def expand(self, ids: Sequence[int]) -> list[int]:
        """Return ids in which the placeholder of each picture is repeated for each of its tokens.

        Raises MediaError where there are more or fewer placeholders than pictures: a chat template left some out.
        """
        if not self.pictures:
            return list(ids)
        token, left = self.format.token_id, iter(self.pictures)
        if (count := list(ids).count(token)) != len(self):
            rule = "the chat template does not keep the places of pictures"
            raise MediaError(rule, "set another template", f"{count} placeholders, {len(self)} pictures")
        return [each for one in ids for each in ([token] * next(left).tokens if one == token else [one])]

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Return ids as they were before :meth:`expand`, with one placeholder a picture.

        Placeholders behind the last picture's are the policy's own tokens and stay. Raises ValueError where a run of
        them is not as long as its picture has tokens.
        """
        out, at, token = [], 0, self.format.token_id
        for picture in self.pictures:
            start = ids.index(token, at)
            end = start + picture.tokens
            if any(one != token for one in ids[start:end]) or end > len(ids):
                raise ValueError(f"a picture of {picture.tokens} tokens has a shorter run of placeholders at {start}")
            out += [*ids[at:start], token]
            at = end
        return [*out, *ids[at:]]

    def thumbnails(self) -> list[str]:
        """Return :func:`thumbnail` of the first pictures."""
        return [thumbnail(picture) for picture in self.pictures[:SHOWN]]

    def files(self) -> list[bytes]:
        """Return the files as the data has them."""
        return [picture.data for picture in self.pictures]


def stored_bytes(cell: Any) -> bytes:
    """Return the bytes of a picture as a parquet file has it: ``{bytes, path}`` of ``datasets``, or bytes alone.

    Raises MediaError where there are none.
    """
    data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, Mapping) else (cell, None)
    if data is None and isinstance(path, str):
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise MediaError(
                "a picture is missing",
                "store its bytes in the file, or give the right path",
                f"{path}: {error.strerror}",
            ) from error
    if not isinstance(data, bytes) or not data:
        raise MediaError("a picture is missing", "store its bytes in the file", type(cell).__name__)
    return data


def read_picture(data: bytes, format: PictureFormat, *, decode: bool = False) -> Picture:
    """Return the picture of a file's bytes, with the size at which the model reads it. ``decode`` tries all of it.

    Raises MediaError for what is no picture, is broken or too large, or has several frames or a mode without a form
    in RGB.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the bound below is the lower one
            image = Image.open(io.BytesIO(data))
        with image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise MediaError(f"a picture has more than {MOST_PIXELS} pixels", "shrink it", f"{width} x {height}")
            if getattr(image, "n_frames", 1) > 1:
                raise MediaError("a picture has several frames", "store one of them", f"{image.n_frames} frames")
            if image.mode not in MODES:
                raise MediaError("a picture is not 8-bit grey or colour", "convert it to RGB", f"mode {image.mode}")
            if decode:
                image.load()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError("a picture is broken", "mend the file or leave the row out", str(error)[:80]) from error
    return Picture(data, *read_size(height, width, format), format)


def read_size(height: int, width: int, format: PictureFormat) -> tuple[int, int]:
    """Return height and width at which a picture of this size is read. Raises MediaError for a strip."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        return smart_resize(height, width, format.patch * format.merge, format.least, format.most)
    except ValueError as error:
        fix = "cut it or leave the row out"
        raise MediaError("a picture is too long and narrow", fix, f"{width} x {height}: {error}") from error


@lru_cache(maxsize=256)  # the passes of a step read the same ones
def pixels(picture: Picture) -> np.ndarray:
    """Return [height, width, 3] uint8: the picture at its size; what is transparent is white."""
    from PIL import Image

    with Image.open(io.BytesIO(picture.data)) as image:
        if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB").resize((picture.width, picture.height), Image.Resampling.BICUBIC)
        pixels = np.asarray(image).copy()
    pixels.flags.writeable = False
    return pixels


def thumbnail(picture: Picture) -> str:
    """Return the picture as the model reads it, at most ``THUMBNAIL`` pixels a side, as a data URI for a page."""
    from PIL import Image

    image = Image.fromarray(pixels(picture))
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def patches(picture: Picture) -> np.ndarray:
    """Return what the vision tower reads, [patches, 3 * frames * patch * patch] float32, token by token.

    This is the arithmetic of Qwen2VLImageProcessor, without its resizing.
    """
    format, (_, rows, columns) = picture.format, picture.grid
    mean, std = (np.array(value, np.float32) for value in (format.mean, format.std))
    value_HWC = (pixels(picture).astype(np.float32) * np.float32(1 / 255) - mean) / std
    merge, patch = format.merge, format.patch
    cut = value_HWC.transpose(2, 0, 1).reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    cut = np.broadcast_to(cut, (*cut.shape[:5], format.frames, *cut.shape[6:]))
    return cut.reshape(rows * columns, -1)
