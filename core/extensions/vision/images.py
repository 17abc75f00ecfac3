"""Pictures of prompts: from a file's bytes to what a vision tower reads, and their placeholders among the ids.

Pillow brings a picture to the size at which the model reads it. Every reader, the learner and each engine, starts from
these pixels, so that an engine's own resizing has nothing left to do: Pillow's and torchvision's pixels differ by up to
0.015 after resizing. Which model reads pictures how is found in ``core/learner/models.py``; what runs the vision tower
is ``core/extensions/vision/model_inputs.py``.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from core.types import Picture, PictureFormat

PICTURE_KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # values of model_type whose pictures are read here

MARKER = "<image>"  # in the text of a prompt: here stands the next picture
# Decoding takes 3 bytes a pixel, and the widest published processor reads 13 million: more is a mistake or a bomb.
MOST_PIXELS = 2**26
THUMBNAIL = 192  # pixels of the longer side, of what records and pages show: at most 30 KB as JPEG
SHOWN = 8  # thumbnails of a prompt at the most
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # 16-bit and float ones have no fixed range


class PictureError(ValueError):
    """A picture, or its place in a prompt, cannot be used. ``rule`` and ``fix`` are the same for all such examples."""

    def __init__(self, rule: str, fix: str, value: str = ""):
        super().__init__(f"{rule} ({value}); {fix}" if value else f"{rule}; {fix}")
        self.rule, self.fix, self.value = rule, fix, value


def stored_bytes(cell: Any) -> bytes:
    """Return the bytes of a picture as a parquet file has it: ``{bytes, path}`` of ``datasets``, or bytes alone.

    Raises PictureError where there are none.
    """
    data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, Mapping) else (cell, None)
    if data is None and isinstance(path, str):
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise PictureError(
                "a picture is missing",
                "store its bytes in the file, or give the right path",
                f"{path}: {error.strerror}",
            ) from error
    if not isinstance(data, bytes) or not data:
        raise PictureError("a picture is missing", "store its bytes in the file", type(cell).__name__)
    return data


def read_picture(data: bytes, format: PictureFormat, *, decode: bool = False) -> Picture:
    """Return the picture of a file's bytes, with the size at which the model reads it. ``decode`` tries all of it.

    Raises PictureError for what is no picture, is broken or too large, or has several frames or a mode without a form
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
                raise PictureError(f"a picture has more than {MOST_PIXELS} pixels", "shrink it", f"{width} x {height}")
            if getattr(image, "n_frames", 1) > 1:
                raise PictureError("a picture has several frames", "store one of them", f"{image.n_frames} frames")
            if image.mode not in MODES:
                raise PictureError("a picture is not 8-bit grey or colour", "convert it to RGB", f"mode {image.mode}")
            if decode:
                image.load()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, PictureError):
            raise
        raise PictureError("a picture is broken", "mend the file or leave the row out", str(error)[:80]) from error
    return Picture(data, *read_size(height, width, format), format)


def read_size(height: int, width: int, format: PictureFormat) -> tuple[int, int]:
    """Return height and width at which a picture of this size is read. Raises PictureError for a strip."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        return smart_resize(height, width, format.patch * format.merge, format.least, format.most)
    except ValueError as error:
        fix = "cut it or leave the row out"
        raise PictureError("a picture is too long and narrow", fix, f"{width} x {height}: {error}") from error


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
        found = np.asarray(image).copy()
    found.flags.writeable = False
    return found


def thumbnail(picture: Picture) -> str:
    """Return the picture as the model reads it, at most ``THUMBNAIL`` pixels a side, as a data URI for a page."""
    from PIL import Image

    image = Image.fromarray(pixels(picture))
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def thumbnails(pictures: Sequence[Picture]) -> list[str]:
    """Return :func:`thumbnail` of the first pictures of a prompt."""
    return [thumbnail(picture) for picture in pictures[:SHOWN]]


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


def shown(prompt: str | Sequence[Mapping[str, Any]], count: int, format: PictureFormat) -> Any:
    """Return the prompt, a text or a chat, with the model's mark in each place of a picture.

    Raises PictureError where it has more or fewer places than ``count``, or marks already.
    """
    texts = [prompt] if isinstance(prompt, str) else [message.get("content") or "" for message in prompt]
    if any(format.token in text for text in texts):
        raise PictureError(
            f"a prompt holds the model's own placeholder {format.token}", f"write {MARKER}: it is expanded here"
        )
    places = sum(text.count(MARKER) for text in texts)
    if places != count:
        rule = f"a prompt has another number of places {MARKER} than of pictures"
        raise PictureError(rule, "one place a picture", f"{places} places, {count} pictures")
    if isinstance(prompt, str):
        return prompt.replace(MARKER, format.mark)
    return [
        {**message, "content": message["content"].replace(MARKER, format.mark)} if message.get("content") else message
        for message in prompt
    ]


def expand(ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Return ids in which the placeholder of each picture is repeated for each of its tokens.

    Raises PictureError where there are more or fewer placeholders than pictures: a chat template left some out.
    """
    if not pictures:
        return list(ids)
    token, left = pictures[0].format.token_id, iter(pictures)
    if (found := list(ids).count(token)) != len(pictures):
        rule = "the chat template does not keep the places of pictures"
        raise PictureError(rule, "set another template", f"{found} placeholders, {len(pictures)} pictures")
    return [each for one in ids for each in ([token] * next(left).tokens if one == token else [one])]


def collapse(ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Return ids as they were before :func:`expand`: for an engine that expands placeholders itself.

    Placeholders behind the last picture's are the policy's own tokens and stay. Raises ValueError where a run of them
    is not as long as its picture has tokens.
    """
    out, at = [], 0
    for picture in pictures:
        start = ids.index(picture.format.token_id, at)
        end = start + picture.tokens
        if any(one != picture.format.token_id for one in ids[start:end]) or end > len(ids):
            raise ValueError(f"a picture of {picture.tokens} tokens has a shorter run of placeholders at {start}")
        out += [*ids[at:start], picture.format.token_id]
        at = end
    return [*out, *ids[at:]]
