"""The warm start of tiny models: what the base models of the lab share, and the one of those that
play episodes.

It learns first from answers that do the task, then from a mixture in which they are rare. An
episode is a prompt and stretches of text, each written by the policy or by a tool; only the
policy's carry loss. A model is a function of its recipe (a dataclass) and of the code that makes
its answers, whose hash names its folder.
"""

from __future__ import annotations

import ast
import dataclasses
import fcntl
import hashlib
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.tracking.loggers import progress

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

IGNORED = -100  # label of a token that carries no loss
SEEDS = 3  # that are tried before a warm start is given up


class BaseModelError(RuntimeError):
    """The warm start failed to make a usable base model."""


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder for this process; others that ask for it wait. A killed process holds
    nothing."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def built_once(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return ``root/name``, made by ``make(folder)`` where it is missing. ``root/current`` then
    points to it.

    Of several processes one makes it and the others wait for it; a killed one leaves nothing that
    counts.
    """
    folder = root / name
    with locked(root):
        if not folder.exists():
            partial = root / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            os.rename(partial, folder)
        link = root / "current.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, root / "current")
    return folder


def digest(recipe: Any, files: Iterable[Path]) -> str:
    """Return a hash of the recipe's numbers and of the code of these files, without comments and
    layout."""
    code = [ast.dump(ast.parse(path.read_text("utf-8"))) for path in files]
    said = json.dumps([dataclasses.asdict(recipe), code], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def new_model(recipe: Any, tokenizer: Any, *, positions: int, tied: bool) -> PreTrainedModel:
    """Return a Qwen2-shaped transformer of the recipe's sizes, whose seed decides the weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen2ForCausalLM(config)


def fitted(
    model: PreTrainedModel,
    recipe: Any,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_of: Callable[[PreTrainedModel, Tensor, Tensor], Tensor],
) -> Iterator[float]:
    """Make an AdamW step for each batch of input ids and labels, [B, T] each, and yield its loss,
    nats a token."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    for step, (ids_BT, labels_BT) in enumerate(batches):
        loss = loss_of(model, ids_BT, labels_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.step()
        yield loss.item()


def save(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Any,
    losses: Sequence[float],
    seconds: float,
) -> None:
    """Save a Hugging Face folder, and in it ``warm_start.json``: how the model came about."""
    import torch
    import transformers

    from core.learner.models import quiet

    with quiet():  # a progress bar over one small file is noise
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": model.num_parameters(),
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "losses": [round(loss, 4) for loss in losses],
    }
    (folder / "warm_start.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


# --- episodes ---


Stretch = tuple[str, bool]  # text, and whether the policy writes it
Row = tuple[list[int], list[int]]  # input ids, and labels: IGNORED where the policy does not write


@dataclass(frozen=True)
class WarmStart:
    """Everything that decides the weights, up to rounding, but the episodes."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 3
    heads: int = 4
    positions: int = 512
    batch_size: int = 64
    pool: int = 1  # batches of episodes that do the task, among which one of like lengths is chosen
    task_steps: int = 500  # on episodes that do the task
    mixture_steps: int = 60
    hold_steps: int = 420  # learning rate constant until here, then linear to zero
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    max_grad_norm: float = 1.0
    # Nats a token when the mixture begins; more means that the task was not learned
    loss_bound: float = 0.3
    seed: int = 1

    @property
    def steps(self) -> int:
        return self.task_steps + self.mixture_steps

    def learning_rate_at(self, step: int) -> float:
        """Return the step's rate: a warm-up, constant, then linear to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return (
            self.learning_rate
            * warm
            * min(1.0, (self.steps - step) / (self.steps - self.hold_steps))
        )


def as_row(prompt: str, episode: Sequence[Stretch], tokenizer: Any) -> Row:
    """Return input ids and labels of an episode, each stretch encoded by itself as when it is
    played."""
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    labels = [IGNORED] * len(ids)
    for text, by_policy in episode:
        more = tokenizer.encode(text, add_special_tokens=False)
        ids += more
        labels += more if by_policy else [IGNORED] * len(more)
    return ids, labels


def padded(batch: Sequence[Row], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return input ids and labels, [B, T] int64 each, padded on the right."""
    import torch

    width = max(len(ids) for ids, _ in batch)
    ids_BT = torch.full((len(batch), width), pad_id)
    labels_BT = torch.full((len(batch), width), IGNORED)
    for at, (ids, labels) in enumerate(batch):
        ids_BT[at, : len(ids)], labels_BT[at, : len(ids)] = torch.tensor(ids), torch.tensor(labels)
    return ids_BT, labels_BT


def alike(rows: Sequence[Row], recipe: WarmStart, rng: random.Random) -> list[Row]:
    """Draw a batch of rows of like lengths: of a pool of several batches, sorted, one.

    It saves padding. A batch of the mixture is not drawn so: the last ones would decide how often
    the model guesses.
    """
    pool = rng.sample(rows, recipe.pool * recipe.batch_size)
    if recipe.pool == 1:
        return pool
    first = rng.randrange(recipe.pool) * recipe.batch_size
    return sorted(pool, key=lambda row: len(row[0]))[first : first + recipe.batch_size]


def written_loss(model: PreTrainedModel, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the next-token loss on what the policy writes: only these positions go through the
    head."""
    import torch.nn.functional as F

    written_BT = labels_BT[:, 1:] != IGNORED
    hidden_NH = model.base_model(input_ids=ids_BT).last_hidden_state[:, :-1][written_BT]
    return F.cross_entropy(model.lm_head(hidden_NH), labels_BT[:, 1:][written_BT])


def train(
    recipe: WarmStart, tokenizer: Any, task: Sequence[Row], mixture: Sequence[Row]
) -> tuple[PreTrainedModel, list[float]]:
    """Train a model, and return it with each step's loss.

    Raises:
        BaseModelError: the task was not learned when the mixture begins.
    """
    model, losses = new_model(recipe, tokenizer, positions=recipe.positions, tied=True), []
    rng = random.Random(recipe.seed)
    batches = (
        padded(
            alike(task, recipe, rng)
            if step < recipe.task_steps
            else rng.sample(mixture, recipe.batch_size),
            tokenizer.pad_token_id,
        )
        for step in range(recipe.steps)
    )
    with progress("base model", recipe.steps, "step") as count:
        for loss in fitted(model, recipe, batches, written_loss):
            losses.append(loss)
            count()
            if (
                len(losses) == recipe.task_steps
                and (last := statistics.fmean(losses[-20:])) > recipe.loss_bound
            ):
                raise BaseModelError(
                    f"the base model did not learn the task: loss {last:.3f} after {len(losses)} "
                    f"steps, expected at "
                    f"most {recipe.loss_bound}; raise WarmStart.task_steps or change its seed"
                )
    return model.eval(), losses


def learned(recipe: Any, make: Callable[[Any], None], apart: int = 1) -> None:
    """Call ``make(recipe)``, and again with the next seeds, ``apart`` from each other, where the
    model did not learn.

    Each kind of CPU rounds in its own way, and with that a seed may find the task early on one and
    never on another.

    Raises:
        BaseModelError: no seed of ``SEEDS`` learned the task.
    """
    for tries, seed in enumerate(range(recipe.seed, recipe.seed + SEEDS * apart, apart), start=1):
        try:
            return make(dataclasses.replace(recipe, seed=seed))
        except BaseModelError as error:
            if tries == SEEDS:
                raise
            print(f"{error}; trying seed {seed + apart}", file=sys.stderr, flush=True)


def build(
    root: Path, recipe: WarmStart, tokenizer: Any, make_rows: Any, *files: Path, apart: int = 1
) -> Path:
    """Return the folder of the trained model, ``root/<digest>``, to which ``root/current`` then
    points.

    ``make_rows()`` gives the two lists of :func:`train`; ``files`` are the code that it depends on;
    ``apart``, see :func:`learned`.
    """

    def make(folder: Path) -> None:
        started, rows = time.perf_counter(), make_rows()

        def attempt(one: WarmStart) -> None:
            model, losses = train(one, tokenizer, *rows)
            save(folder, model, tokenizer, one, losses, time.perf_counter() - started)

        learned(recipe, attempt, apart)

    return built_once(root, digest(recipe, (*files, Path(__file__))), make)
