"""Pictures of prompts: sizes and patches are the processor's, places are expanded once, bad ones
are named."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from core.data.prompts import PromptFiles, PromptStream, load_val_prompts
from core.errors import InputError
from core.learner.models import load_modality, load_tokenizer
from core.vision.pictures import (
    MARKER,
    TEXT,
    MediaError,
    patches,
    pixels,
    read_picture,
    stored_picture,
)
from tests.pictures import (
    KINDS,
    image_processor,
    modality,
    model_config,
    picture_format,
    png,
    save_vision_model,
)
from tests.pictures import vision_tokenizer as tokenizer
from tests.row_files import data_config, plain_row, write_parquet
from tests.tiny import tiny_tokenizer

FORMAT, READING = picture_format(), modality()


def stream_of(config, words, modality):
    return PromptStream(config, PromptFiles(config, words, modality), 1)


def row(index, *images, prompt=None, **more):
    content = f"{MARKER * len(images)}how many? {index}" if prompt is None else prompt
    cells = [
        image if image is None or isinstance(image, dict) else {"bytes": image, "path": None}
        for image in images
    ]
    return plain_row(index, prompt=[{"role": "user", "content": content}], images=cells, **more)


def refused(tmp_path, *rows, modality=READING, **data):
    path = write_parquet(tmp_path / "bad.parquet", list(rows))
    with pytest.raises(InputError) as error:
        stream_of(data_config(train_files=[path], **data), tokenizer(), modality)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_patches_are_those_of_the_models_own_processor(kind):
    for seed, (width, height) in enumerate([(70, 56), (33, 210), (400, 300), (9, 9)]):
        data = png(seed, width, height)
        found = image_processor(kind)(Image.open(io.BytesIO(data)), return_tensors="np")
        mine = read_picture(data, picture_format(kind))
        assert [*mine.grid] == found["image_grid_thw"][0].tolist()
        np.testing.assert_allclose(patches(mine), found["pixel_values"], atol=1e-6)
        assert mine.tokens == len(found["pixel_values"]) // 4


def test_other_modes_are_read_as_rgb_and_what_is_transparent_is_white():
    for mode in ("1", "L", "P", "LA", "CMYK"):
        data = png(mode=mode, format="JPEG" if mode == "CMYK" else "PNG")
        assert pixels(read_picture(data, FORMAT, decode=True)).shape == (56, 56, 3)
    file = io.BytesIO()
    Image.new("RGBA", (28, 28), (0, 0, 0, 0)).save(file, "PNG")
    assert (pixels(read_picture(file.getvalue(), FORMAT)) == 255).all()


@pytest.mark.parametrize("orientation", [None, 3, 6, 8])
@pytest.mark.parametrize("format", ["JPEG", "MPO"])
def test_photos_stand_upright_as_other_readers_have_them(orientation, format):
    """A camera stores them as its sensor lies; an MPO holds a preview too."""
    image = Image.fromarray(np.pad(np.full((28, 112, 3), 255, np.uint8), ((0, 28), (0, 0), (0, 0))))
    file, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    more = {"save_all": True, "append_images": [image]} if format == "MPO" else {}
    image.save(file, format, exif=exif, quality=95, **more)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue()))).convert("RGB")
    found = read_picture(file.getvalue(), FORMAT, decode=True)
    assert (found.width, found.height) == upright.size  # multiples of a token's side
    np.testing.assert_array_equal(pixels(found), np.asarray(upright))


@pytest.mark.parametrize(
    "field",
    [
        {"do_resize": False},
        {"do_normalize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"resample": 2},
    ],
)
def test_a_preprocessor_that_reads_pictures_otherwise_is_refused(tmp_path, field):
    model = model_config(save_vision_model(tmp_path, "qwen2_5_vl"))
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | field))
    with pytest.raises(InputError, match=f"preprocessor_config.json has {next(iter(field))}="):
        load_modality(model, load_tokenizer(model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bounds",
    [
        {"max_pixels": 50_000},
        {"min_pixels": 9_000},
        {"min_pixels": 5_000.0, "max_pixels": 6_000},
        {"max_pixels": 10, "resized_width": None},
        {"min_pixels": 10**5, "max_pixels": None},  # the model's own bounds come last
    ],
)
def test_bounds_of_one_picture_in_its_cell_act_before_those_of_the_model(tmp_path, kind, bounds):
    """First the resizing of qwen_vl_utils with its defaults, then the processor's."""
    files = [png(0, 70, 56), png(1, 400, 300)]
    factor = 2 * picture_format(kind).patch
    within = [{"bytes": data, "path": None, **bounds} for data in files]
    rows = [row(number, *cells, prompt=MARKER * 2) for number, cells in enumerate([within, files])]
    path = write_parquet(tmp_path / "a.parquet", rows)
    data = data_config(train_files=[path], max_prompt_length=2_000, shuffle=False)
    stream = stream_of(data, tokenizer(), modality(kind))
    bounded = stream.prompt(0).media.pictures
    least = bounds.get("min_pixels") or 4 * factor**2
    most = bounds.get("max_pixels") or 16_384 * factor**2
    for picture, file in zip(bounded, files, strict=True):
        image = Image.open(io.BytesIO(file))
        height, width = smart_resize(image.height, image.width, factor, least, most)
        expected = image_processor(kind)(image.resize((width, height)), return_tensors="np")
        assert [*picture.grid] == expected["image_grid_thw"][0].tolist()
        if picture.height == height and picture.width == width:  # resized once
            np.testing.assert_allclose(patches(picture), expected["pixel_values"], atol=1e-6)
    (file,) = stream.files.files
    assert file.example(0).prompt_hash != file.example(1).prompt_hash


@pytest.mark.parametrize(
    "cell",
    [
        {"max_pixels": 0},
        {"max_pixels": "3136"},
        {"min_pixels": float("nan")},
        {"min_pixels": 6_272, "max_pixels": 3_136},
        {"resized_height": 56},
        {"resized_width": 56, "resized_height": 56},
    ],
)
def test_settings_of_one_picture_that_cannot_be_used_are_not_read_past(cell):
    plain = {"bytes": b"x", "path": None, "max_pixels": None, "caption": "a cat"}
    assert stored_picture(plain) == (b"x", ())
    with pytest.raises(MediaError) as error:
        stored_picture({"bytes": b"x", **cell})
    assert next(iter(cell)) in str(error.value)


def broken(kind: str) -> Any:
    file = io.BytesIO()
    if kind == "cut":
        return png()[:-60]
    if kind == "frames":
        frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "blue")]
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    elif kind == "16 bit":
        Image.fromarray(np.zeros((28, 28), np.uint16)).save(file, "PNG")
    elif kind == "missing":
        return {"bytes": None, "path": "x.png"}
    elif kind == "strip":
        Image.new("L", (2_810, 14)).save(file, "PNG")
    return file.getvalue() or b"no picture"


@pytest.mark.parametrize(
    "kind, words",
    [
        ("nothing", "a picture cannot be read in 1 row (1: "),
        ("cut", "a picture cannot be read in 1 row (1: "),
        ("missing", "a picture is missing in 1 row"),
        ("frames", "a picture has several frames in 1 row (1: 2 frames)"),
        ("16 bit", "a picture is not 8-bit grey or colour in 1 row (1: mode I;16)"),
        ("strip", "a picture cannot be read in 1 row (1: absolute aspect ratio"),
    ],
)
def test_a_bad_picture_is_named_with_its_row_before_a_model_loads(tmp_path, kind, words):
    assert words in refused(tmp_path, row(0, png()), row(1, broken(kind)))


@pytest.mark.parametrize(
    ("images", "prompt", "told"),
    [
        (2, f"{MARKER} one place", "another number of places <image> than of pictures in 1 row "
                                   "(0: 1 places, 2"),
        (0, MARKER, "1 places, 0 pictures"),
        (1, f"{MARKER} <|image_pad|>", "or the text holds placeholders in 1 row (0: 2 "
                                       "placeholders, 1 pictures)"),
    ],
)  # fmt: skip
def test_places_and_pictures_are_counted(tmp_path, images, prompt, told):
    asked = row(0, *(png(n) for n in range(images)), prompt=prompt)
    assert told in refused(tmp_path, asked, *([] if images else [row(1, png())]))


def test_a_text_model_with_pictures_and_the_reverse(tmp_path):
    assert "the model reads text alone in 1 row (0)" in refused(
        tmp_path, row(0, png()), modality=TEXT
    )
    path = write_parquet(
        tmp_path / "none.parquet",
        [{**plain_row(0), "images": None}, {**plain_row(1), "images": []}],
    )
    assert len(stream_of(data_config(train_files=[path]), tiny_tokenizer(), TEXT)) == 2


def test_a_prompt_with_pictures_is_never_cut(tmp_path):
    rows = [row(0, png()), row(1, png(1, 112, 112))]  # 4 and 16 tokens
    short = dict(max_prompt_length=40)
    assert "in 1 row (1: 49 tokens)" in refused(tmp_path, *rows, truncation="left", **short)
    path = write_parquet(tmp_path / "a.parquet", rows)
    config = data_config(train_files=[path], filter_overlong_prompts=True, **short)
    assert len(stream_of(config, tokenizer(), READING)) == 1


def test_a_prompt_has_a_placeholder_for_each_token_of_its_pictures(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", [row(0, png(), png(1, 112, 56), prompt=f"a{MARKER}b{MARKER}c")]
    )
    (prompt,) = load_val_prompts(PromptFiles(data_config(val_files=[path]), tokenizer(), READING))
    text = tokenizer().decode(prompt.token_ids)
    marks = ["<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>" for count in (4, 8)]
    assert f"user: a{marks[0]}b{marks[1]}c" in text
    assert [picture.tokens for picture in prompt.media.pictures] == [4, 8]
    shown = prompt.media.collapse(list(prompt.token_ids))
    assert shown.count(101) == 2 and prompt.media.expand(shown) == list(prompt.token_ids)
    with pytest.raises(MediaError, match="chat template"):
        prompt.media.expand([5, 6])
    assert prompt.messages[0]["content"] == f"a{MARKER}b{MARKER}c"


def test_equal_questions_about_other_pictures_are_other_questions(tmp_path):
    rows = [row(0, png(seed), prompt=f"{MARKER}?", extra_info={"note": "x"}) for seed in (0, 1, 0)]
    path = write_parquet(tmp_path / "a.parquet", rows)
    stream = stream_of(data_config(train_files=[path]), tokenizer(), READING)
    uids = [stream.files.prompt(index, index).uid for index in range(3)]
    assert uids[0] == uids[2] != uids[1]


@pytest.mark.parametrize("kind", KINDS)
def test_how_a_model_reads_pictures_is_found_in_its_folder(tmp_path, kind):
    model = model_config(save_vision_model(tmp_path / kind, kind))
    assert load_modality(model, load_tokenizer(model)) == modality(kind)
    with pytest.raises(InputError, match="the tokenizer lacks the placeholder"):
        load_modality(model, tiny_tokenizer())
    (tmp_path / kind / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="configuration of its image processor"):
        load_modality(model, load_tokenizer(model))
