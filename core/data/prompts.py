"""Prompt number ``ordinal`` as a pure function of the seed and the ordinal: files checked and measured when loaded.

What an example must hold is in ``core/data/parquet.py``, how it becomes ids in ``core/data/encoder.py``, which one an
ordinal draws in ``core/data/draw_order.py``. Data that reward functions make up while training runs is not supported:
an example is a function of its ordinal, and that is what makes a resumed run equal to an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from core.data.chat_frames import ChatError
from core.data.draw_order import Order, Stage, apportion, permutation
from core.data.encoder import Encoder, Word, Worded, truncate
from core.data.parquet import Example, ExampleFile, Problems, named_loops
from core.errors import InputError
from core.types import Prompt
from core.vision.modality import TEXT, Modality
from core.vision.pictures import MediaError

log = logging.getLogger(__name__)
SUBSET, VALIDATION = -2, -3  # keep these permutations apart from those of the order
MEASURED_TOGETHER = 512  # examples; the tokenizer spreads a batch over the cores
CHAT_FIX = "mend the roles, or set another chat template"
CUT_FIX = "set data.filter_overlong_prompts=True or data.truncation=error, or raise the limit"
# (sizes of the files) -> the numbers of the examples to take of each one
Choose = Callable[[Sequence[int]], Sequence[np.ndarray]]
# Of an example: its row in the file, tokens of its prompt before it is cut, the number of its data source, hashes of
# the question's content and of its name in the data (of its content where it has none)
MEASURES = [(name, np.int64) for name in ("number", "length", "source")]
MEASURES += [(name, np.uint64) for name in ("content", "name")]


class Unreadable(NamedTuple):
    """Why a prompt cannot be read: the rule, the fix, and what breaks the rule."""

    rule: str
    fix: str
    value: str


@dataclass(frozen=True, eq=False)
class Measured:
    """A file's examples that can be drawn, in file order: ``rows`` of ``MEASURES``, [N]."""

    rows: np.ndarray
    sources: tuple[str, ...]
    told: str = ""  # what the lengths count beside the data's own text, for messages

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt."""
        return int(self.rows["length"].max(initial=0))


class PromptFiles:
    """Loads files, each one once, and makes prompts of their examples. ``config`` is the ``data`` section.

    An example's ``uid`` is the name that the data gives the question, ``source/split/index``, so that runs whose
    prompts are worded differently can still be paired. Where the data gives none, it is a hash of source, prompt
    and ground truth; where the loaded files give one name to different questions, the hash is added to the name.
    Copies of an example share their uid. ``word`` gives an example's prompt as its agent loop words it: lengths are
    those of prompts with their tools.
    """

    def __init__(self, config: Any, tokenizer: Any, modality: Modality = TEXT, word: Word | None = None):
        self.config = config
        self.limited_by = "max_prompt_length" if config.max_start_length is None else "max_start_length"
        self.limit: int = getattr(config, self.limited_by)  # tokens of a prompt
        self.encoder = Encoder(tokenizer, config.apply_chat_template_kwargs, modality)
        self.word = word or (lambda example: Worded(example.prompt))
        self.files: dict[str, ExampleFile] = {}
        self.measured: dict[str, Measured] = {}
        self._ambiguous: frozenset[int] = frozenset()

    def load(self, paths: Iterable[str], choose: Choose | None = None) -> None:
        """Open, check and measure the files. Raises InputError with every problem of all of them."""
        errors: list[str] = []
        for path in dict.fromkeys(paths):
            try:
                keys = self.config.prompt_key, self.config.reward_fn_key, self.config.image_key
                self.files[path] = ExampleFile(path, *keys)
            except InputError as error:
                errors += error.problems
        if errors:
            raise InputError(errors)
        problems, lengths = Problems(), {}
        sizes = [len(file) for file in self.files.values()]
        for file, numbers in zip(self.files.values(), choose(sizes) if choose else [None] * len(sizes), strict=True):
            self.measured[file.path] = self._fitting(file, self._measure(file, numbers, lengths, problems), problems)
        problems.raise_if_any()
        self._ambiguous = _ambiguous_names([measured.rows for measured in self.measured.values()])

    def prompt(self, path: str, index: int, ordinal: int) -> Prompt:
        """Return the prompt of a file's ``index``-th example that can be drawn."""
        example = self.files[path].example(int(self.measured[path].rows["number"][index]))
        ids, media = self.encoder.encode_example(example)
        # A plain string stands in messages as what it is to a reader: the user's words.
        chat = ({"role": "user", "content": example.prompt},) if isinstance(example.prompt, str) else example.prompt
        uid = example.name or example.content_hash
        if example.name is not None and int(example.name_hash, 16) in self._ambiguous:
            uid = f"{example.name}/{example.content_hash}"
        return Prompt(
            ordinal=ordinal,
            uid=uid,
            token_ids=tuple(truncate(ids, self.limit, self.config.truncation)),
            messages=chat,
            ground_truth=example.ground_truth,
            data_source=example.data_source,
            extra_info=example.extra_info,
            style=example.style,
            media=media,
            agent_name=example.agent_name,
            opened_tag=self.encoder.opened_tag(example.prompt, ids),
        )

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt that can be drawn, as it is cut."""
        return min(self.limit, max((one.longest for one in self.measured.values()), default=0))

    def examples(self) -> Iterator[Example]:
        """Yield every example that can be drawn, file by file."""
        for path, measured in self.measured.items():
            yield from self.files[path].examples(Problems(), measured.rows["number"])

    def sample_examples(self, each: int) -> list[Example]:
        """Return up to ``each`` examples of each data source of each file, spread evenly over it."""
        chosen = []
        for path, measured in self.measured.items():
            for source in range(len(measured.sources)):
                numbers = measured.rows["number"][measured.rows["source"] == source]
                spread = np.linspace(0, len(numbers) - 1, min(each, len(numbers))).astype(np.int64)
                chosen += [self.files[path].example(int(number)) for number in numbers[spread]]
        return chosen

    def _measure(
        self, file: ExampleFile, numbers: np.ndarray | None, lengths: dict[Any, int | Unreadable], problems: Problems
    ) -> Measured:
        """Measure a file's examples. ``lengths`` are known by prompt and tools, so that copies are tokenised once."""
        cuts = not self.config.filter_overlong_prompts and self.config.truncation != "error"
        found, sources, warned = [], {}, False
        examples = file.examples(problems, numbers)
        while batch := [(example, self.word(example)) for example in islice(examples, MEASURED_TOGETHER)]:
            _add_lengths(batch, self.encoder, lengths)
            warned |= any(worded.tools for _, worded in batch)
            for example, worded in batch:
                length = lengths[example.prompt_hash, worded.tools]
                if isinstance(length, Unreadable):
                    problems.add(file.path, length.rule, length.fix, example.number, length.value)
                elif length == 0:
                    problems.add(file.path, "a prompt has no tokens", "leave the row out", example.number)
                elif example.media and cuts and length > self.limit:
                    rule = "a prompt with media is longer than the limit of tokens, and data.truncation would cut it"
                    problems.add(file.path, rule, CUT_FIX, example.number, f"{length} of {self.limit} tokens")
                else:
                    hashes = int(example.content_hash, 16), int(example.name_hash, 16)
                    number = sources.setdefault(example.data_source, len(sources))
                    found.append((example.number, length, number, *hashes))
        rows = np.array(found, dtype=MEASURES)
        return Measured(rows, tuple(sources), " with its tools' schemas" if warned else "")

    def _fitting(self, file: ExampleFile, measured: Measured, problems: Problems) -> Measured:
        """Leave out what is too long, or report it, as the configuration has it; log what became of the file."""
        limit, rows = self.limit, measured.rows
        fits = rows["length"] <= limit
        bound = f"data.{self.limited_by}={limit} tokens"
        if not self.config.filter_overlong_prompts:
            kept = measured
            if self.config.truncation == "error":
                fix = "raise it, or set data.filter_overlong_prompts=True or data.truncation=left|right|middle"
                for row in rows[~fits]:
                    rule = f"a prompt{measured.told} is longer than {bound}"
                    problems.add(file.path, rule, fix, int(row["number"]), f"{row['length']} tokens")
        else:
            kept = Measured(rows[fits], measured.sources, measured.told)
            if len(rows) and not fits.any():
                rule = f"all {len(rows)} prompts{measured.told} are longer than {bound}"
                problems.add(file.path, rule, f"raise it: the shortest has {rows['length'].min()}")
        parts, different = [f"{len(kept)} of {len(file)} rows"], len(np.unique(kept.rows["content"]))
        parts += [f"{different} different questions"] if different < len(kept) else []
        parts += [f"{len(rows) - len(kept)} left out, longer than {bound}"] if len(kept) < len(rows) else []
        cut = int((kept.rows["length"] > limit).sum())
        parts += [f"{cut} cut to {limit} tokens (data.truncation={self.config.truncation})"] if cut else []
        log.info("%s: %s, longest prompt%s %d tokens", file.path, ", ".join(parts), measured.told, kept.longest)
        return kept


def _add_lengths(
    batch: Sequence[tuple[Example, Worded]], encoder: Encoder, lengths: dict[Any, int | Unreadable]
) -> None:
    """Add the length of every new prompt, or why it has none; those that tell of the same tools are one call."""
    new: dict[tuple[str, ...], dict[Any, tuple[Example, Worded]]] = defaultdict(dict)
    for example, worded in batch:
        key = example.prompt_hash, worded.tools
        if key not in lengths and (role := encoder.dropped_role(worded)):
            lengths[key] = Unreadable("the chat template leaves out the text of a message", CHAT_FIX, f"role {role}")
        elif key not in lengths:
            new[worded.tools][key] = example, worded
    for alike in new.values():
        try:
            if not encoder.modality.reads_media and not any(example.media for example, _ in alike.values()):
                prompts = [worded.prompt for _, worded in alike.values()]
                arguments = next(worded.arguments for _, worded in alike.values())
                lengths.update(zip(alike, map(len, encoder.encode(prompts, **arguments)), strict=True))
                continue
        except ChatError:
            pass  # the one that is refused is found below
        for key, (example, worded) in alike.items():
            try:
                lengths[key] = len(encoder.encode_example(example, worded, decode=True)[0])
            except ChatError as error:
                lengths[key] = Unreadable("the chat template refuses a prompt", CHAT_FIX, str(error))
            except MediaError as error:
                lengths[key] = Unreadable(error.rule, error.fix, error.value)


def _ambiguous_names(files: Sequence[np.ndarray]) -> frozenset[int]:
    """Return the hashes of names that stand for more than one question."""
    rows = np.unique(np.concatenate(files)[["name", "content"]])
    names, counts = np.unique(rows["name"], return_counts=True)
    return frozenset(int(name) for name in names[counts > 1])


# ---------------------------------------------------------------- training


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

    ``data.dataset_weights`` has one weight a training file (:class:`core.data.draw_order.Order`). ``data.curriculum``
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
        """Return the prompt that is drawn at this ordinal."""
        place = self._order.place(ordinal)
        return self.files.prompt(self._paths[place.stage][place.dataset], place.row, ordinal)

    def epoch(self, ordinal: int) -> int:
        """Return the epoch in which the ordinal is drawn, from 0."""
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
        numbers = files.measured[path].rows["number"]
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
