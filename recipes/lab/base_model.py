"""The tiny base model of the lab: a Qwen2-shaped transformer, warmed up by supervised learning.

First it learns to write chains; then a mixture of answers teaches it to write one only now and then, and mostly to
guess. Reinforcement learning starts from there. The model is a function of :class:`BaseRecipe` and of the code that
reads it, whose hash names its folder.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import random
import statistics
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.lab import hops
from recipes.lab.once import built_once
from recipes.lab.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CODE = ("hops.py", "tokenizer.py", "base_model.py")
IGNORED = -100  # label of a token that carries no loss
RESPONSE_CHARS = max(hops.HOPS) + 4  # path, "#", letter, end of sequence


class BaseModelError(RuntimeError):
    """The warm start failed to make a usable base model."""


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
    chain_loss_bound: float = 0.15  # nats a token at the end of the chains; more means they were not learned
    seed: int = 1
    test_questions: int = 500  # these are kept out of the warm start
    data_seed: int = 1

    @property
    def steps(self) -> int:
        return self.chain_steps + self.mixture_steps

    @property
    def digest(self) -> str:
        """Changes with a number above or with the code that uses it, not with comments or layout."""
        code = [ast.dump(ast.parse((Path(__file__).parent / name).read_text("utf-8"))) for name in CODE]
        said = json.dumps([dataclasses.asdict(self), code], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    def learning_rate_at(self, step: int) -> float:
        """Warm-up, then constant while chains are learned, then linear to zero over the mixture."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = min(1.0, (self.steps - step) / (self.steps - self.hold_steps))
        return self.learning_rate * warm * left


def mixture_answer(question: hops.Hops, recipe: BaseRecipe, rng: random.Random) -> str:
    """A chain, digits that answer nothing, or a guess: ``#`` and any letter of the cycle."""
    kind = rng.random()
    if kind < recipe.chain_share:
        return question.chain
    if kind < recipe.chain_share + recipe.junk_share:
        return "".join(rng.choices(string.digits, k=rng.randint(1, max(hops.HOPS))))
    return hops.direct(rng.choice(question.cycle))


def encode(pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Input ids and labels of (prompt, answer) pairs, the end of the sequence appended.

    Shapes:
        returns  [B, T] int64 twice; labels are IGNORED on the prompt and on padding
    """
    import torch

    width = hops.PROMPT_CHARS + RESPONSE_CHARS
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), IGNORED)
    texts = tokenizer([prompt + answer for prompt, answer in pairs], add_special_tokens=False)["input_ids"]
    for at, ((prompt, _), tokens) in enumerate(zip(pairs, texts, strict=True)):
        row = torch.tensor([*tokens, tokenizer.eos_token_id])
        ids[at, : len(row)] = row
        labels[at, len(prompt) : len(row)] = row[len(prompt) :]
    return ids, labels


def new_model(recipe: BaseRecipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen2ForCausalLM(config)


def answer_loss(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labelled tokens of -log p(token | tokens before it), in nats.

    Shapes:
        ids, labels  [B, T] int64, as :func:`encode` returns them
    """
    import torch.nn.functional as F

    # Only the answers' positions and the one before them go through the head: the prompt has no labels.
    logits_BRV = model(input_ids=ids, logits_to_keep=RESPONSE_CHARS + 1).logits[:, :-1]
    return F.cross_entropy(logits_BRV.flatten(0, 1), labels[:, -RESPONSE_CHARS:].flatten(), ignore_index=IGNORED)


def train(
    recipe: BaseRecipe, tokenizer: PreTrainedTokenizerFast, on_step: Callable[[int, float], None]
) -> PreTrainedModel:
    """The warm start: next-token loss on the answers, in nats. Calls ``on_step(step, loss)`` after each step."""
    import torch

    model = new_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(recipe.seed)
    tests = {question.key for question in hops.held_out(recipe.test_questions, recipe.data_seed)}
    questions = hops.draw_many(recipe.steps * recipe.batch_size, f"hops warm start {recipe.seed}", tests)
    for step in range(recipe.steps):
        batch = [next(questions) for _ in range(recipe.batch_size)]
        chains = step < recipe.chain_steps
        answers = [q.chain if chains else mixture_answer(q, recipe, rng) for q in batch]
        ids, labels = encode([(q.prompt, answer) for q, answer in zip(batch, answers, strict=True)], tokenizer)
        loss = answer_loss(model, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.step()
        on_step(step, loss.item())
    return model.eval()


def build(root: Path, recipe: BaseRecipe | None = None) -> Path:
    """The folder of the trained model, ``root/<digest>``, which ``root/current`` then points to.

    Trains only where that folder is missing.

    Raises:
        BaseModelError: the warm start did not teach the model to write chains.
    """
    recipe = recipe or BaseRecipe()
    return built_once(root, recipe.digest, lambda folder: _build(recipe, folder))


def _build(recipe: BaseRecipe, folder: Path) -> None:
    import torch
    import transformers
    from tqdm import tqdm

    tokenizer = build_tokenizer()
    losses: list[float] = []
    started = time.perf_counter()
    with tqdm(total=recipe.steps, desc="base model", unit="step", mininterval=0.5) as bar:

        def on_step(step: int, loss: float) -> None:
            losses.append(loss)
            bar.set_postfix_str(
                f"{'chains' if step < recipe.chain_steps else 'mixture'}, loss {loss:.2f}", refresh=False
            )
            bar.update()
            if step == recipe.chain_steps - 1:
                _check_chains(losses, recipe)

        model = train(recipe, tokenizer, on_step)
    transformers.utils.logging.disable_progress_bar()  # its bar over one small file says nothing
    model.save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    record = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - started, 1),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "losses": [round(loss, 4) for loss in losses],
    }
    (folder / "warm_start.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def _check_chains(losses: Sequence[float], recipe: BaseRecipe) -> None:
    """Without chains in the base model there is nothing that reinforcement learning could find."""
    recent = statistics.fmean(losses[-20:])
    if recent > recipe.chain_loss_bound:
        raise BaseModelError(
            f"the base model did not learn chains: loss {recent:.3f} after {recipe.chain_steps} steps, expected at "
            f"most {recipe.chain_loss_bound}; raise BaseRecipe.chain_steps or change its seed"
        )
