"""The base models of the lab: tiny transformers, made by a warm start of supervised learning.

The warm start learns first from episodes that do the task, then from a mixture in which these are
rare. Reinforcement learning starts from there. An episode is a prompt and stretches of text, each
written by the policy or by a tool; only the policy's carry loss. An answer is an episode of one
stretch.

A base model is a function of its settings, whose hash names its folder; the code that draws the
episodes is no part of the hash. Where ``<task>_base/`` beside this file holds the weights of these
settings, they are copied, so that every machine starts from the same ones.

    python -m recipes.lab.base_model hops        trains the committed weights of a task anew
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import hashlib
import importlib
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from core.files import file_sha256
from core.tracking.loggers import progress
from data_preprocess.schema import write_rows

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

COMMITTED = Path(__file__).parent  # holds <task>_base/ of the tasks whose weights are committed
IGNORED = -100  # label of a token that carries no loss
SEEDS = 3  # that are tried before a warm start is given up

Stretch = tuple[str, bool]  # text, and whether the policy writes it
Episode = tuple[str, Sequence[Stretch]]  # prompt, and what follows it
Labelled = tuple[list[int], list[int]]  # input ids, and labels: IGNORED where the policy is silent


class BaseModelError(RuntimeError):
    """The warm start failed to make a usable base model."""


@dataclass(frozen=True)
class WarmStart:
    """Everything that decides a base model, up to rounding. A subclass adds a task's episodes."""

    task: ClassVar[str]

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 3
    heads: int = 4
    positions: int = 512
    tied: bool = True  # whether the head's weights are the embedding's
    batch_size: int = 64
    task_steps: int = 500  # on episodes that do the task
    mixture_steps: int = 60
    hold_steps: int = 420  # the learning rate is constant until here, then linear to zero
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    max_grad_norm: float = 1.0
    loss_bound: float = 0.3  # nats a token after task_steps; more: the task was not learned
    seed: int = 1

    def new_tokenizer(self) -> Any:
        """Return the task's tokenizer."""
        raise NotImplementedError

    def splits(self) -> Mapping[str, Sequence[Any]]:
        """Return the questions of ``train`` and ``test``, the same on every machine."""
        raise NotImplementedError

    def row(self, question: Any, split: str, index: int) -> dict[str, Any]:
        """Return a question as a row in verl's schema."""
        raise NotImplementedError

    def episodes(self, tokenizer: Any) -> tuple[list[Episode], list[Episode]]:
        """Return episodes that do the task, and the mixture."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        return self.task_steps + self.mixture_steps

    @property
    def digest(self) -> str:
        """Return a hash of the settings."""
        settings = json.dumps([self.task, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:12]

    def learning_rate_at(self, step: int) -> float:
        """Return the step's rate: a warm-up, constant, then linear to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = min(1.0, (self.steps - step) / (self.steps - self.hold_steps))
        return self.learning_rate * warm * left

    def shape(self, tokenizer: Any) -> dict[str, Any]:
        """Return the shape of the transformer under the names of transformers."""
        return {
            "vocab_size": len(tokenizer),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        }

    def seeded(self, model_class: type[PreTrainedModel], config: Any) -> PreTrainedModel:
        """Return a model with the new weights that the seed decides."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return model_class(config)

    def new_model(self, tokenizer: Any) -> PreTrainedModel:
        """Return a Qwen2-shaped transformer."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        return self.seeded(Qwen2ForCausalLM, Qwen2Config(**self.shape(tokenizer)))

    def batches(self, tokenizer: Any) -> Iterator[tuple[Any, Tensor]]:
        """Yield the inputs of each step with their labels, which are [B, T] int64."""
        task, mixture = (
            [encode(prompt, stretches, tokenizer) for prompt, stretches in episodes]
            for episodes in self.episodes(tokenizer)
        )
        rng = random.Random(self.seed)
        for step in range(self.steps):
            examples = task if step < self.task_steps else mixture
            yield padded(self.choose(examples, step, rng), tokenizer.pad_token_id)

    def choose(self, examples: list[Labelled], step: int, rng: random.Random) -> list[Labelled]:
        """Return the examples of a step."""
        return rng.sample(examples, self.batch_size)

    def loss(self, model: PreTrainedModel, inputs: Any, labels_BT: Tensor) -> Tensor:
        """Return the mean next-token loss on what the policy writes, in nats."""
        hidden_BTH = model.base_model(input_ids=inputs).last_hidden_state
        return written_loss(model, hidden_BTH, labels_BT)

    def train(self, tokenizer: Any) -> tuple[PreTrainedModel, list[float]]:
        """Train a model with AdamW and return it with the loss of each step.

        Raises:
            BaseModelError: the task was not learned when the mixture begins.
        """
        import torch

        model = self.new_model(tokenizer)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        losses: list[float] = []
        with progress("base model", self.steps, "step") as count:
            for step, (inputs, labels_BT) in enumerate(self.batches(tokenizer)):
                loss = self.loss(model, inputs, labels_BT)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate_at(step)
                optimizer.step()
                losses.append(loss.item())
                count()
                if len(losses) == self.task_steps:
                    recent = statistics.fmean(losses[-20:])
                    if recent > self.loss_bound:
                        raise BaseModelError(
                            f"the base model did not learn {self.task}: loss {recent:.3f} after "
                            f"{len(losses)} steps, expected at most {self.loss_bound}; "
                            "raise task_steps or change the seed"
                        )
        return model.eval(), losses

    def learn(self, folder: Path) -> None:
        """Train into a Hugging Face folder, with the next seeds where one does not learn the task.

        Each kind of CPU rounds in its own way, and with that a seed may find the task early on one
        and never on another.

        Raises:
            BaseModelError: no seed of ``SEEDS`` learned the task.
        """
        import torch
        import transformers

        from core.learner.models import quiet

        started = time.perf_counter()
        tokenizer = self.new_tokenizer()
        for seed in range(self.seed, self.seed + SEEDS):
            recipe = dataclasses.replace(self, seed=seed)
            try:
                model, losses = recipe.train(tokenizer)
                break
            except BaseModelError as error:
                if seed == self.seed + SEEDS - 1:
                    raise
                print(f"{error}; trying seed {seed + 1}", file=sys.stderr, flush=True)
        with quiet():  # a progress bar over one small file is noise
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        record = {
            "recipe": dataclasses.asdict(recipe),
            "parameters": model.num_parameters(),
            "seconds": round(time.perf_counter() - started, 1),
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "weights_sha256": file_sha256(folder / "model.safetensors"),
            "losses": [round(loss, 4) for loss in losses],
        }
        (folder / "warm_start.json").write_text(json.dumps(record, indent=1), encoding="utf-8")

    def prepare(self, folder: Path | None = None) -> Path:
        """Write the questions, make the base model if it is missing, and return its folder.

        ``folder`` is ``outputs/lab/<task>`` by default.
        """
        folder = folder or Path("outputs/lab") / self.task
        self.write(self.splits(), folder)
        return self.build(folder / "base")

    def write(self, splits: Mapping[str, Sequence[Any]], folder: Path) -> None:
        """Write the questions of each split as ``<folder>/<split>.parquet``."""
        for split, questions in splits.items():
            rows = [self.row(question, split, index) for index, question in enumerate(questions)]
            write_rows(folder / f"{split}.parquet", rows)

    def copy_committed(self, folder: Path) -> bool:
        """Copy the committed weights; return False where none of these settings are committed.

        Raises:
            BaseModelError: the weights are damaged.
        """
        committed = COMMITTED / f"{self.task}_base"
        if not committed.exists():
            return False
        record = json.loads((committed / "warm_start.json").read_text("utf-8"))
        if record["recipe"] != dataclasses.asdict(self):
            return False
        weights = committed / "model.safetensors"
        if file_sha256(weights) != record["weights_sha256"]:
            raise BaseModelError(
                f"{weights}: its SHA-256 is not {record['weights_sha256'][:12]}...; "
                f"restore it: git checkout -- {weights}"
            )
        shutil.copytree(committed, folder)
        return True

    def build(self, root: Path) -> Path:
        """Return the model's folder, ``root/<digest>``, and let ``root/current`` point to it.

        A missing one is copied or trained by one process while others wait; a killed process
        leaves nothing that counts.
        """
        folder = root / self.digest
        with locked(root):
            if not folder.exists():
                partial = root / f"{self.digest}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                if not self.copy_committed(partial):
                    self.learn(partial)
                os.rename(partial, folder)
            link = root / "current.partial"
            link.unlink(missing_ok=True)
            link.symlink_to(folder.name)
            os.replace(link, root / "current")
        return folder


def prepare_command(recipe: WarmStart, description: str | None) -> None:
    """Run ``python -m recipes.lab.<task>``."""
    argparse.ArgumentParser(
        prog=f"python -m recipes.lab.{recipe.task}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    print(f"base model: {recipe.prepare()}", flush=True)


def draw_distinct(
    draw: Callable[[random.Random], Any], count: int, rng: random.Random, without: Iterable[str]
) -> Iterator[Any]:
    """Yield ``count`` questions of different ``key``, none of which is in ``without``."""
    seen = set(without)
    while count:
        question = draw(rng)
        if question.key not in seen:
            seen.add(question.key)
            count -= 1
            yield question


def draw_splits(
    draw_many: Callable[..., Iterable[Any]], train: int, test: int
) -> dict[str, list[Any]]:
    """Return questions of ``draw_many(count, split, without)``; train and test share no key."""
    tests = list(draw_many(test, "test"))
    keys = [question.key for question in tests]
    return {"train": list(draw_many(train, "train", keys)), "test": tests}


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder for this process while others wait. A killed process holds nothing."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def encode(prompt: str, stretches: Sequence[Stretch], tokenizer: Any) -> Labelled:
    """Return input ids and labels of an episode. Each stretch is encoded alone, as it is played."""
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    labels = [IGNORED] * len(ids)
    for text, by_policy in stretches:
        stretch_ids = tokenizer.encode(text, add_special_tokens=False)
        ids += stretch_ids
        labels += stretch_ids if by_policy else [IGNORED] * len(stretch_ids)
    return ids, labels


def padded(examples: Sequence[Labelled], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return input ids and labels, [B, T] int64 each, padded on the right."""
    import torch

    width = max(len(ids) for ids, _ in examples)
    ids_BT = torch.full((len(examples), width), pad_id)
    labels_BT = torch.full((len(examples), width), IGNORED)
    for at, (ids, labels) in enumerate(examples):
        ids_BT[at, : len(ids)] = torch.tensor(ids)
        labels_BT[at, : len(ids)] = torch.tensor(labels)
    return ids_BT, labels_BT


def written_loss(model: PreTrainedModel, hidden_BTH: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the mean next-token loss; only positions that predict a label go through the head."""
    import torch.nn.functional as F

    written_BT = labels_BT[:, 1:] != IGNORED
    logits_NV = model.lm_head(hidden_BTH[:, :-1][written_BT])
    return F.cross_entropy(logits_NV, labels_BT[:, 1:][written_BT])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.base_model",
        description="Train the committed weights of a task anew.",
    )
    parser.add_argument("task", choices=["hops", "maze"], help="The task.")
    task = parser.parse_args().task
    folder = COMMITTED / f"{task}_base"
    shutil.rmtree(folder, ignore_errors=True)
    importlib.import_module(f"recipes.lab.{task}").RECIPE.learn(folder)
    print(f"{folder}: made; record the runs that start from it again")


if __name__ == "__main__":
    main()
