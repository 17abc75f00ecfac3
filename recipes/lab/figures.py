"""The figures task: questions about a picture that cannot be answered without looking at it, and a
model with eyes.

    <picture of 2 x 2 cells>  nr=    ->    rg.r#2    what stands in each cell, then how many are red
    <picture of 2 x 2 cells>  a4=    ->    ?#y       a guess: what stands in cell 4
    <picture of 2 x 2 cells>  m=     ->    ?#r       a guess: which colour is there most often

    python -m recipes.lab.figures [--blank]

Writes ``outputs/lab/figures/{train,test}.parquet`` and ``outputs/lab/figures/base/<hash>/``, to
which ``base/current`` points. Each question has four equally frequent answers: a policy that
ignores the picture is right in one of four. With ``--blank`` it also writes
``blank_{train,test}.parquet``, the control: the same questions, all about one empty picture.

The base model has the shape of Qwen2.5-VL. It was taught to write what it sees before it answers,
and then a mixture in which it seldom does so and mostly guesses.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from data_preprocess.schema import make_row, write_rows
from recipes.lab.base_model import IGNORED, WarmStart, padded, written_loss
from recipes.lab.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from core.vision.pictures import PictureFormat

DATA_SOURCE = "lab/figures"
FOLDER = Path("outputs/lab/figures")
COLOURS = {"r": (200, 50, 50), "g": (50, 160, 60), "b": (50, 80, 200), "y": (220, 190, 40)}
EMPTY = "."
ROWS, COLUMNS, CELL = 2, 2, 28  # cells, and pixels of a side: a cell is a token
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
ALPHABET = (*COLOURS, EMPTY, *"nam=#?01234")
TRAIN = 4096
TEST = 400


@dataclass(frozen=True)
class Figure:
    """What stands in the cells, row by row; ``question`` about it; ``seed`` of everything else that
    is drawn."""

    cells: str
    question: str
    seed: int

    @property
    def answer(self) -> str:
        """Return a colour or a number, empty where the question has no single answer of four."""
        kind = self.question[0]
        about = self.question[1:]
        if kind == "n":
            return str(self.cells.count(about)) if self.cells.count(about) < 4 else ""
        if kind == "a":
            return self.cells[int(about) - 1].replace(EMPTY, "")
        counts = {colour: self.cells.count(colour) for colour in COLOURS}
        most = [colour for colour, count in counts.items() if count == max(counts.values())]
        return most[0] if len(most) == 1 else ""

    @property
    def prompt(self) -> str:
        return f"<image>{self.question}="

    def drawn(self) -> bytes:
        """Return the picture as a PNG: shapes of any kind, size, place and shade on paper that is
        not quite white."""
        from PIL import Image, ImageDraw

        rng = random.Random(self.seed)
        paper = rng.randint(225, 255)
        image = Image.new("RGB", (COLUMNS * CELL, ROWS * CELL), (paper,) * 3)
        draw = ImageDraw.Draw(image)
        for number, name in enumerate(self.cells):
            if name == EMPTY:
                continue
            size = rng.randint(12, 22)
            x = number % COLUMNS * CELL + rng.randint(2, CELL - 2 - size)
            y = number // COLUMNS * CELL + rng.randint(2, CELL - 2 - size)
            shade = tuple(min(255, max(0, value + rng.randint(-25, 25))) for value in COLOURS[name])
            box = (x, y, x + size, y + size)
            shape = rng.choice(("disc", "square", "triangle"))
            if shape == "disc":
                draw.ellipse(box, fill=shade)
            elif shape == "square":
                draw.rectangle(box, fill=shade)
            else:
                draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=shade)
        return as_png(image)


def as_png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def draw(rng: random.Random, held_out: bool) -> Figure:
    """Draw the answer first, so that all four are equally frequent, and then a figure of the split
    that has it."""
    kind = rng.choice("nam")
    question = (
        kind
        + {"n": rng.choice([*COLOURS]), "a": str(rng.randint(1, ROWS * COLUMNS)), "m": ""}[kind]
    )
    wanted = rng.choice("0123" if kind == "n" else [*COLOURS])
    while True:
        cells = "".join(rng.choices([*COLOURS, EMPTY], k=ROWS * COLUMNS))
        figure = Figure(cells, question, rng.randrange(2**32))
        if figure.answer == wanted and is_held_out(cells) == held_out:
            return figure


def is_held_out(cells: str) -> bool:
    """Return whether these cells belong to the test: a fifth of all, and none of them is trained
    on."""
    return zlib.crc32(cells.encode()) % 5 == 0


def figures(count: int, seed: str, *, held_out: bool = False) -> Iterator[Figure]:
    """Yield ``count`` figures of the training or test split, the same on every machine."""
    rng = random.Random(seed)
    return (draw(rng, held_out) for _ in range(count))


@dataclass(frozen=True)
class FiguresRecipe(WarmStart):
    """Settings of the warm start, with its answers."""

    task: ClassVar[str] = "figures"

    layers: int = 2
    vision_size: int = 64
    batch_size: int = 32
    task_steps: int = 1200  # colours are read after 300 steps, counted after 1,000
    mixture_steps: int = 120
    hold_steps: int = 700
    learning_rate: float = 2e-3
    loss_bound: float = 0.05
    look_share: float = 0.2  # of the mixture; the rest guess
    examples: int = 6_000

    def new_tokenizer(self) -> Any:
        return build_tokenizer(ALPHABET, MARKS)

    def splits(self) -> dict[str, list[Figure]]:
        tests = list(figures(TEST, "figures test", held_out=True))
        return {"train": list(figures(TRAIN, "figures train")), "test": tests}

    def row(self, figure: Figure, split: str, index: int) -> dict[str, Any]:
        facts = {"split": split, "index": index}
        row = make_row(DATA_SOURCE, figure.prompt, figure.answer, "looking", **facts)
        return {**row, "images": [{"bytes": figure.drawn(), "path": None}]}

    def write_blank(self, folder: Path) -> None:
        """Write the control: the same questions, all about one empty picture."""
        from PIL import Image

        empty = as_png(Image.new("RGB", (COLUMNS * CELL, ROWS * CELL), "white"))
        for split, drawn in self.splits().items():
            rows = [self.row(figure, split, index) for index, figure in enumerate(drawn)]
            for row in rows:
                row["images"] = [{"bytes": empty, "path": None}]
            write_rows(folder / f"blank_{split}.parquet", rows)

    def new_model(self, tokenizer: Any) -> PreTrainedModel:
        """Return a model of Qwen2.5-VL's shape."""
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        shape = self.shape(tokenizer)
        start, image, end, video = tokenizer.convert_tokens_to_ids(list(MARKS))
        head = self.hidden_size // self.heads
        rope = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16],
        }
        vision = {
            "depth": 2,
            "hidden_size": self.vision_size,
            "intermediate_size": 2 * self.vision_size,
            "num_heads": 2,
            "out_hidden_size": self.hidden_size,
            "fullatt_block_indexes": [0, 1],
            "window_size": 56,
        }
        config = Qwen2_5_VLConfig(
            text_config={**shape, "rope_parameters": rope},
            vision_config=vision,
            vision_start_token_id=start,
            image_token_id=image,
            vision_end_token_id=end,
            video_token_id=video,
            tie_word_embeddings=self.tied,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        return self.seeded(Qwen2_5_VLForConditionalGeneration, config)

    def batches(self, tokenizer: Any) -> Iterator[tuple[Any, Tensor]]:
        """Yield ids and pictures of each step's sequences, with their labels."""
        from core.vision.pictures import Pictures, read_picture

        rng = random.Random(self.seed)
        picture_format = self.picture_format(tokenizer)
        drawn = list(figures(self.examples, f"figures warm start {self.seed}"))
        pictures = [
            Pictures((read_picture(figure.drawn(), picture_format),), picture_format)
            for figure in drawn
        ]
        prompts = [
            media.expand(tokenizer.encode(media.mark(figure.prompt), add_special_tokens=False))
            for figure, media in zip(drawn, pictures, strict=True)
        ]
        for step in range(self.steps):
            chosen = rng.sample(range(len(drawn)), self.batch_size)
            looks = 1.0 if step < self.task_steps else self.look_share
            examples = []
            for number in chosen:
                text = answer(drawn[number], looks, rng)
                written = tokenizer.encode(text, add_special_tokens=False)
                written.append(tokenizer.eos_token_id)
                ids = [*prompts[number], *written]
                labels = [IGNORED] * len(prompts[number]) + written
                examples.append((ids, labels))
            ids_BT, labels_BT = padded(examples, tokenizer.pad_token_id)
            yield (ids_BT, [pictures[number] for number in chosen]), labels_BT

    def picture_format(self, tokenizer: Any) -> PictureFormat:
        """Return how the model's pictures become tokens, read from a folder as a run reads it."""
        from core.config.training_keys import ModelConfig
        from core.learner.models import load_modality

        with tempfile.TemporaryDirectory() as folder:
            new_processor().save_pretrained(folder)
            self.new_model(tokenizer).config.save_pretrained(folder)
            return load_modality(ModelConfig(path=folder), tokenizer).format

    def loss(self, model: PreTrainedModel, inputs: Any, labels_BT: Tensor) -> Tensor:
        """Return the mean next-token loss of the answers; ``inputs`` are ids and pictures."""
        from core.vision.learner_pictures import picture_inputs, run_with_pictures

        ids_BT, pictures_B = inputs
        pictures = picture_inputs(model, ids_BT, pictures_B)
        body = run_with_pictures(model, ids_BT, pictures, use_cache=False)
        return written_loss(model, body.last_hidden_state, labels_BT)

    def learn(self, folder: Path) -> None:
        """Train into a folder, in which the picture processor stands too."""
        super().learn(folder)
        new_processor().save_pretrained(folder)


RECIPE = FiguresRecipe()


def new_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": CELL**2, "longest_edge": 64 * CELL**2})


def answer(figure: Figure, looks: float, rng: random.Random) -> str:
    """Draw an answer: with probability ``looks`` it writes what is there first, else it guesses."""
    if rng.random() < looks:
        return f"{figure.cells}#{figure.answer}"
    return f"?#{rng.choice('0123' if figure.question[0] == 'n' else ''.join(COLOURS))}"


if __name__ == "__main__":
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m recipes.lab.figures", **options)
    parser.add_argument("--blank", action="store_true", help="Also write the control's data.")
    if parser.parse_args().blank:
        RECIPE.write_blank(FOLDER)
    print(f"base model: {RECIPE.prepare(FOLDER)}", flush=True)
