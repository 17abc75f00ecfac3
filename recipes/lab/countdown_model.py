"""The base model of the countdown lab: warmed up on answers that search well, badly, not at all or without end.

    python -m recipes.lab.countdown_model

Writes ``outputs/lab/countdown/{train,test}.parquet`` and ``outputs/lab/countdown/base/<hash>/``, to which
``base/current`` points. The model can try signs and follow running totals; it does not reliably try on until the
target is reached, tries signs in no useful order, and now and then never ends.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.lab import countdown
from recipes.lab.base_model import IGNORED, BaseModelError, new_model
from recipes.lab.once import built_once
from recipes.lab.tokenizer import build_tokenizer
from recipes.lab.warm_start import learned

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

FOLDER = Path("outputs/lab/countdown")
CODE = ("countdown.py", "countdown_model.py", "tokenizer.py")


@dataclass(frozen=True)
class CountdownRecipe:
    """Everything that decides the weights, up to rounding. Shares are of the training answers; the rest guess."""

    hidden_size: int = 96
    intermediate_size: int = 192
    layers: int = 2
    heads: int = 4
    batch_size: int = 128
    steps: int = 800  # after 350 running totals are often wrong, and an answer without a try pays as much as a search
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    search_share: float = 0.45  # tries signs, none twice, until the target is reached
    hasty_share: float = 0.2  # tries once or twice and answers the last try, right or wrong
    endless_share: float = 0.1  # tries the same signs over and over
    longest: int = 36  # tokens of a training answer: all four attempts, and the answer
    loss_bound: float = 0.25  # nats a token at the end; more means that it did not learn to add
    seed: int = 1
    test_numbers: int = 150  # choices of numbers that are kept out
    data_seed: int = 1

    @property
    def digest(self) -> str:
        """Return a hash of the numbers above and of the code that uses them, without comments and layout."""
        code = [ast.dump(ast.parse((Path(__file__).parent / name).read_text("utf-8"))) for name in CODE]
        said = json.dumps([dataclasses.asdict(self), code], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    def learning_rate_at(self, step: int) -> float:
        """Return the step's rate: a warm-up, constant for half of the steps, then linear to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * min(1.0, 2 * (self.steps - step) / self.steps)


def warm_answer(question: countdown.Countdown, recipe: CountdownRecipe, rng: random.Random) -> tuple[str, bool]:
    """Draw an answer to learn from, and whether it ends: an endless one is cut at the length of the training rows."""
    kind, order = rng.random(), rng.sample(countdown.PATTERNS, len(countdown.PATTERNS))
    if kind < recipe.search_share:
        tries = order[: next(i for i, signs in enumerate(order) if signs in question.solutions) + 1]
    elif kind < recipe.search_share + recipe.hasty_share:
        tries = order[: rng.choice((1, 2))]
    elif kind < recipe.search_share + recipe.hasty_share + recipe.endless_share:
        return "".join(map(question.attempt, [*order[:1]] * 8)), False
    else:
        return question.answer(order[0]), True
    return "".join(map(question.attempt, tries)) + question.answer(tries[-1]), True


def batch(
    questions: list[countdown.Countdown], recipe: CountdownRecipe, tokenizer, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Return input ids and labels of drawn questions and answers; labels are IGNORED on prompts and padding.

    Shapes:
        returns  [B, T] int64 twice
    """
    import torch

    answers = [warm_answer(question, recipe, rng) for question in questions]
    texts = tokenizer([q.prompt + a for q, (a, _) in zip(questions, answers, strict=True)], add_special_tokens=False)
    width = countdown.PROMPT_CHARS + recipe.longest
    ids = torch.full((len(questions), width), tokenizer.pad_token_id)
    labels = torch.full((len(questions), width), IGNORED)
    for at, (tokens, (_, ends)) in enumerate(zip(texts["input_ids"], answers, strict=True)):
        row = torch.tensor([*tokens, *([tokenizer.eos_token_id] if ends else [])][:width])
        ids[at, : len(row)] = row
        labels[at, countdown.PROMPT_CHARS : len(row)] = row[countdown.PROMPT_CHARS :]
    return ids, labels


def train(recipe: CountdownRecipe, losses: list[float]) -> PreTrainedModel:
    """Train on the answers' next-token loss, and append each step's loss (nats a token) to ``losses``."""
    import torch
    import torch.nn.functional as F

    tokenizer = build_tokenizer(countdown.ALPHABET, countdown.TAGS)
    model, rng = new_model(recipe, tokenizer), random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    questions = countdown.splits(recipe.test_numbers, recipe.data_seed)["train"]
    for step in range(recipe.steps):
        ids, labels = batch(rng.choices(questions, k=recipe.batch_size), recipe, tokenizer, rng)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.step()
        losses.append(loss.item())
    return model.eval()


def build(root: Path, recipe: CountdownRecipe | None = None) -> Path:
    """Return the folder of the trained model, ``root/<digest>``, to which ``root/current`` then points.

    Raises:
        BaseModelError: the warm start did not reach its bound.
    """
    recipe = recipe or CountdownRecipe()
    return built_once(root, recipe.digest, lambda folder: learned(recipe, lambda one: _build(one, folder)))


def _build(recipe: CountdownRecipe, folder: Path) -> None:
    import torch
    import transformers

    losses: list[float] = []
    started = time.perf_counter()
    model = train(recipe, losses)
    if (last := statistics.fmean(losses[-20:])) > recipe.loss_bound:
        raise BaseModelError(f"the base model did not learn: loss {last:.3f}, expected at most {recipe.loss_bound}")
    transformers.utils.logging.disable_progress_bar()  # a progress bar over one small file is noise
    model.save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    build_tokenizer(countdown.ALPHABET, countdown.TAGS).save_pretrained(folder)
    record = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - started, 1),
        "threads": torch.get_num_threads(),
        "losses": [round(loss, 4) for loss in losses],
    }
    (folder / "warm_start.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def prepare(folder: Path = FOLDER, recipe: CountdownRecipe | None = None) -> Path:
    """Make what is missing in ``folder`` and return the base model's folder."""
    recipe = recipe or CountdownRecipe()
    for split, questions in countdown.splits(recipe.test_numbers, recipe.data_seed).items():
        countdown.write_parquet(questions, split, folder / f"{split}.parquet")
    return build(folder / "base", recipe)


if __name__ == "__main__":
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    argparse.ArgumentParser(prog="python -m recipes.lab.countdown_model", **options).parse_args()
    print(f"base model: {prepare()}", flush=True)
