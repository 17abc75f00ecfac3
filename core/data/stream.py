"""The prompt stream: prompt number ``ordinal`` as a pure function of the seed and the ordinal.

What an example must hold is in ``core/data/parquet.py``, how it becomes ids in ``core/data/dataset.py``, which
one an ordinal draws in ``core/data/sampler.py``. Data that reward functions make up while training runs is not
supported: an example is a function of its ordinal, and that is what makes a resumed run equal to an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.data.dataset import Choose, PromptFiles, Word
from core.data.parquet import named_loops
from core.data.sampler import Order, Stage, apportion, permutation
from core.errors import InputError
from core.types import Prompt
from core.vision.modality import TEXT, Modality

SUBSET, VALIDATION = -2, -3  # keep these permutations apart from those of the order


@dataclass(frozen=True)
class StageFiles:
    """A curriculum stage as it is configured; without a curriculum there is one."""

    key: str
    files: tuple[str, ...]
    weights: tuple[float, ...] | None
    prompts: int | None


class PromptStream:
    """The training prompts, in the order of drawing, without end.

    ``config`` is the ``data`` section; its own ``seed`` goes before ``seed`` (``trainer.seed``). Every example is
    checked and measured here, so bad data ends the run before a model loads; a prompt is tokenised when drawn.

    ``data.dataset_weights`` has one weight a training file, see :class:`core.data.sampler.Order`. ``data.curriculum``
    is a list of ``{files, prompts, weights}`` that takes the place of ``data.train_files``: ``prompts`` ordinals are
    drawn from a stage's files, then the next stage begins; the last one lasts for ever (``prompts: null``).
    ``data.train_max_samples`` keeps that many examples of all files together, a seeded choice if ``data.shuffle``.

    ``files`` load and hold what an ordinal draws: prompts, or what a recipe trains on in their place
    (``recipes/sft/demonstrations.py``). ``modality`` is how the model reads prompts; ``word`` gives a prompt as its
    agent loop words it.

    Raises InputError: every problem of every file, one line a rule; or no example has media for a model that reads
    them.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        seed: int,
        files: Any = None,
        *,
        modality: Modality = TEXT,
        word: Word | None = None,
    ):
        self.seed = int(seed if config.seed is None else config.seed)
        stages = _stages(config)
        self.files = PromptFiles(config, tokenizer, modality, word) if files is None else files
        self.files.load((path for stage in stages for path in stage.files), _training_choice(config, self.seed))
        modality.check_examples(self.files.examples(), config)
        self._paths, sized = zip(*map(self._sized, stages), strict=True)
        self._order = Order(sized, self.seed, bool(config.shuffle))

    def __len__(self) -> int:
        """Return the prompts in an epoch: all examples, or a curriculum's lengths (one pass for its last stage)."""
        return self._order.length

    def prompt(self, ordinal: int) -> Prompt:
        place = self._order.place(ordinal)
        return self.files.prompt(self._paths[place.stage][place.dataset], place.row, ordinal)

    def epoch(self, ordinal: int) -> int:
        return ordinal // len(self)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the whole batches in an epoch, which is the number of steps verl counts.

        The tail is not lost: it begins the next epoch's first batch.
        """
        return len(self) // batch_size

    def _sized(self, stage: StageFiles) -> tuple[tuple[str, ...], Stage]:
        """Return the stage's files of which ``train_max_samples`` chose an example, and their sizes and weights."""
        files = tuple(path for path in stage.files if len(self.files.measured[path]))
        if stage.weights and files != stage.files:
            raise InputError([f"{stage.key}: data.train_max_samples left no row of a weighted file; raise it"])
        sizes = tuple(len(self.files.measured[path]) for path in files)
        if stage.weights and min(apportion(sum(sizes), stage.weights)) < 1:
            rule = f"a weight of {list(stage.weights)} is worth less than one of {sum(sizes)} rows"
            raise InputError([f"{stage.key}: {rule}; raise it, or leave its file out"])
        return files, Stage(sizes, stage.weights, stage.prompts)


def load_val_prompts(config: Any, tokenizer: Any, modality: Modality = TEXT, word: Word | None = None) -> list[Prompt]:
    """Return the validation prompts, file by file.

    ``data.val_max_samples`` keeps that many examples of **each** file, so that a small benchmark beside a large one
    does not vanish. The choice, and the order under ``data.validation_shuffle``, follow from ``data.seed`` alone (0
    where it is null), not from ``trainer.seed``: runs with different seeds answer the same questions.

    The i-th example of the files has ordinal ``-1 - i``, whatever is left out, so its sampling seeds are those of no
    training prompt and stay the same from one validation to the next. Without ``data.val_files`` there are none.
    """
    seed, most = int(config.seed or 0), config.val_max_samples
    if not config.val_files:
        return []

    def choose(sizes: Sequence[int]) -> list[np.ndarray]:
        # Seeded by the size and not by the file's place, so a file keeps its choice when another is added.
        return [np.sort(permutation(size, seed, SUBSET, size)[:most]) for size in sizes]

    paths = _paths(config.val_files, "data.val_files")
    files = PromptFiles(config, tokenizer, modality, word)
    files.load(paths, choose if most is not None and most > 0 else None)
    prompts, start = [], 0
    for path in dict.fromkeys(paths):
        numbers = files.measured[path].number
        prompts += [files.prompt(path, index, -1 - start - int(number)) for index, number in enumerate(numbers)]
        start += len(files.files[path])
    if config.validation_shuffle:
        return [prompts[index] for index in permutation(len(prompts), seed, VALIDATION)]
    return prompts


def agent_names(config: Any, *, training: bool = True) -> set[str]:
    """Return the agent loops that the files of the ``data`` section name, before their examples are read.

    A file that cannot be read names none: loading it reports that.
    """
    files = [config.val_files]
    if training:
        stages = config.curriculum
        files += [config.train_files] if stages is None else [_given(stage).get("files") for stage in stages]
    paths = (path for each in files for path in ((each,) if isinstance(each, str) else each or ()))
    return set().union(*(named_loops(str(path)) for path in dict.fromkeys(paths)))


def _training_choice(config: Any, seed: int) -> Choose | None:
    most = config.train_max_samples
    if most is None or most <= 0:
        return None

    def choose(sizes: Sequence[int]) -> list[np.ndarray]:
        total = sum(sizes)
        chosen = permutation(total, seed, SUBSET)[:most] if config.shuffle else np.arange(min(most, total))
        ends = np.cumsum(sizes)
        parts = np.split(np.sort(chosen), np.searchsorted(np.sort(chosen), ends[:-1]))
        return [part - (end - size) for part, end, size in zip(parts, ends, sizes, strict=True)]

    return choose


def _stages(config: Any) -> list[StageFiles]:
    if config.curriculum is None:
        key, paths = "data.dataset_weights", _paths(config.train_files, "data.train_files")
        return [StageFiles(key, paths, _weights(config.dataset_weights, paths, key), None)]
    errors, stages = [], []
    for number, entry in enumerate(config.curriculum):
        try:
            stages.append(_stage(entry, f"data.curriculum[{number}]", number == len(config.curriculum) - 1))
        except InputError as error:
            errors += error.problems
    if errors:
        raise InputError(errors)
    return stages


def _given(stage: Any) -> Mapping[str, Any]:
    return stage if isinstance(stage, Mapping) else vars(stage)


def _stage(entry: Any, key: str, last: bool) -> StageFiles:
    stage = _given(entry)
    unknown = sorted(set(stage) - {"files", "prompts", "weights"})
    if unknown:
        raise InputError([f"{key}: unknown {', '.join(unknown)}; a stage has files, prompts and weights"])
    paths = _paths(stage.get("files"), f"{key}.files")
    prompts = stage.get("prompts")
    if prompts is None and not last:
        raise InputError([f"{key}.prompts=null: only the last stage may last for ever; give a number"])
    if prompts is not None and (isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1):
        raise InputError([f"{key}.prompts={prompts!r}: must be a whole number of at least 1, or null"])
    return StageFiles(f"{key}.weights", paths, _weights(stage.get("weights"), paths, f"{key}.weights"), prompts)


def _weights(weights: Any, paths: Sequence[str], key: str) -> tuple[float, ...] | None:
    if weights is None:
        return None
    if len(weights) != len(paths):
        raise InputError([f"{key}: {len(weights)} weights for {len(paths)} files; give one a file, or null"])
    if not all(isinstance(weight, int | float) and 0 < weight < float("inf") for weight in weights):
        raise InputError([f"{key}={list(weights)}: every weight must be positive; leave the file out instead of 0"])
    return tuple(float(weight) for weight in weights)


def _paths(files: Any, key: str) -> tuple[str, ...]:
    paths = (files,) if isinstance(files, str) else tuple(files or ())
    if not paths:
        raise InputError([f"{key}: no file is given; give a parquet path or a list of them"])
    return tuple(str(path) for path in paths)
