"""The tiny base model of the lab: a Qwen2-shaped transformer, warmed up by supervised learning.

First it learns to write chains; then a mixture of answers teaches it to write one only now and
then, and mostly to guess. Reinforcement learning starts from there. The weights of the default
:class:`BaseRecipe` are committed (``hops_base/``), so that every machine starts from the same ones;
other recipes are trained where they are asked for.

    python -m recipes.lab.base_model        trains the committed weights anew: a minute and a half
    on two cores
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import statistics
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.tracking.loggers import progress
from recipes.lab import hops, warm_start
from recipes.lab.tokenizer import build_tokenizer
from recipes.lab.warm_start import IGNORED, BaseModelError, built_once

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CODE = ("hops.py", "tokenizer.py", "base_model.py", "warm_start.py")
COMMITTED = Path(__file__).with_name("hops_base")
# Of COMMITTED/model.safetensors
WEIGHTS_SHA256 = "9092f4e3083ace084fbbff87e76f6e7a8b134c579d79c819032dbbb93e9d1b39"
RESPONSE_CHARS = max(hops.HOPS) + 4  # path, "#", letter, end of sequence


@dataclass(frozen=True)
class BaseRecipe:
    """Everything that decides the weights, up to rounding."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 2
    heads: int = 4
    batch_size: int = 128
    chain_steps: int = 250
    mixture_steps: int = 80
    hold_steps: int = 180  # learning rate constant until here, then linear to zero
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    chain_share: float = 0.1  # of the mixture
    junk_share: float = 0.1  # of the mixture; the rest are guesses
    # Nats a token at the end of the chains; more means they were not learned
    chain_loss_bound: float = 0.15
    seed: int = 1
    test_questions: int = 500  # these are kept out of the warm start
    data_seed: int = 1

    @property
    def steps(self) -> int:
        return self.chain_steps + self.mixture_steps

    @property
    def digest(self) -> str:
        """Return a hash of the numbers above and of the code that uses them, without comments and
        layout."""
        return warm_start.digest(self, [Path(__file__).parent / name for name in CODE])

    def learning_rate_at(self, step: int) -> float:
        """Return a step's rate: a warm-up, constant while chains are learned, then linear to zero
        over the mixture."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = min(1.0, (self.steps - step) / (self.steps - self.hold_steps))
        return self.learning_rate * warm * left


def mixture_answer(question: hops.Hops, recipe: BaseRecipe, rng: random.Random) -> str:
    """Draw a chain, digits that answer nothing, or a guess: ``#`` and any letter of the cycle."""
    kind = rng.random()
    if kind < recipe.chain_share:
        return question.chain
    if kind < recipe.chain_share + recipe.junk_share:
        return "".join(rng.choices(string.digits, k=rng.randint(1, max(hops.HOPS))))
    return hops.direct(rng.choice(question.cycle))


def encode(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor]:
    """Return input ids and labels of (prompt, answer) pairs, the end of the sequence appended.

    Shapes:
        returns  [B, T] int64 twice; labels are IGNORED on the prompt and on padding
    """
    import torch

    width = hops.PROMPT_CHARS + RESPONSE_CHARS
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), IGNORED)
    texts = tokenizer([prompt + answer for prompt, answer in pairs], add_special_tokens=False)[
        "input_ids"
    ]
    for at, ((prompt, _), tokens) in enumerate(zip(pairs, texts, strict=True)):
        row = torch.tensor([*tokens, tokenizer.eos_token_id])
        ids[at, : len(row)] = row
        labels[at, len(prompt) : len(row)] = row[len(prompt) :]
    return ids, labels


def new_model(recipe: BaseRecipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return warm_start.new_model(recipe, tokenizer, positions=256, tied=False)


def answer_loss(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the labelled tokens of -log p(token | tokens before it), in nats.

    Shapes:
        ids, labels  [B, T] int64, as :func:`encode` returns them
    """
    import torch.nn.functional as F

    # Only the answers' positions and the one before them go through the head: the prompt has no
    # labels.
    logits_BRV = model(input_ids=ids, logits_to_keep=RESPONSE_CHARS + 1).logits[:, :-1]
    return F.cross_entropy(
        logits_BRV.flatten(0, 1), labels[:, -RESPONSE_CHARS:].flatten(), ignore_index=IGNORED
    )


def batches(
    recipe: BaseRecipe, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every step's input ids and labels: chains, then the mixture. No held-out question is
    among them."""
    rng = random.Random(recipe.seed)
    tests = {question.key for question in hops.held_out(recipe.test_questions, recipe.data_seed)}
    questions = hops.draw_many(
        recipe.steps * recipe.batch_size, f"hops warm start {recipe.seed}", tests
    )
    for step in range(recipe.steps):
        drawn = [next(questions) for _ in range(recipe.batch_size)]
        chains = step < recipe.chain_steps
        yield encode(
            [(q.prompt, q.chain if chains else mixture_answer(q, recipe, rng)) for q in drawn],
            tokenizer,
        )


def train(
    recipe: BaseRecipe, tokenizer: PreTrainedTokenizerFast, on_step: Callable[[int, float], None]
) -> PreTrainedModel:
    """Train on the answers' next-token loss, in nats, and call ``on_step(step, loss)`` after each
    step."""
    model = new_model(recipe, tokenizer)
    for step, loss in enumerate(
        warm_start.fitted(model, recipe, batches(recipe, tokenizer), answer_loss)
    ):
        on_step(step, loss)
    return model.eval()


def build(root: Path, recipe: BaseRecipe | None = None) -> Path:
    """Return the folder of the trained model, ``root/<digest>``, to which ``root/current`` then
    points.

    Where that folder is missing the committed weights are copied, and those of another recipe are
    trained.

    Raises:
        BaseModelError: the committed weights are damaged, or training did not teach the model to
        write chains.
    """
    recipe = recipe or BaseRecipe()
    make = copy_committed if recipe == BaseRecipe() else lambda folder: learn(recipe, folder)
    return built_once(root, recipe.digest, make)


def copy_committed(folder: Path) -> None:
    """Copy the committed weights. Raises BaseModelError where the file is not the one that was
    committed."""
    weights = COMMITTED / "model.safetensors"
    if hashlib.sha256(weights.read_bytes()).hexdigest() != WEIGHTS_SHA256:
        raise BaseModelError(
            f"{weights}: its SHA-256 is not {WEIGHTS_SHA256[:12]}...; restore it: git checkout -- "
            f"{weights}"
        )
    shutil.copytree(COMMITTED, folder)


def learn(recipe: BaseRecipe, folder: Path) -> None:
    """Train a recipe's model into a folder, with the next seeds where one does not learn."""
    warm_start.learned(recipe, lambda one: _build(one, folder))


def _build(recipe: BaseRecipe, folder: Path) -> None:
    tokenizer = build_tokenizer()
    losses: list[float] = []
    started = time.perf_counter()
    with progress("base model", recipe.steps, "step") as count:

        def on_step(step: int, loss: float) -> None:
            losses.append(loss)
            count()
            if step == recipe.chain_steps - 1:
                _check_chains(losses, recipe)

        model = train(recipe, tokenizer, on_step)
    warm_start.save(folder, model, tokenizer, recipe, losses, time.perf_counter() - started)


def _check_chains(losses: Sequence[float], recipe: BaseRecipe) -> None:
    """Raise BaseModelError where chains were not learned: reinforcement learning could then find
    nothing."""
    recent = statistics.fmean(losses[-20:])
    if recent > recipe.chain_loss_bound:
        raise BaseModelError(
            f"the base model did not learn chains: loss {recent:.3f} after {recipe.chain_steps} "
            f"steps, expected at "
            f"most {recipe.chain_loss_bound}; raise BaseRecipe.chain_steps or change its seed"
        )


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m recipes.lab.base_model",
        description="Train the committed weights of the lab's base model anew.",
    ).parse_args()
    shutil.rmtree(COMMITTED, ignore_errors=True)
    learn(BaseRecipe(), COMMITTED)
    sha256 = hashlib.sha256((COMMITTED / "model.safetensors").read_bytes()).hexdigest()
    print(
        f"{COMMITTED}: write WEIGHTS_SHA256 = {sha256!r} into {__file__}, and record the labs "
        f"again (make record)"
    )


if __name__ == "__main__":
    main()
