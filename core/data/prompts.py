"""Prompts by ordinal: which example an ordinal draws, and the token ids of its prompt.

A prompt is a function of the run's seed and its ordinal, which makes a resumed run equal to an
uninterrupted one. So data that reward functions make up while training runs is not supported. What
an example must hold is in ``core/data/parquet.py``, the order of drawing in
``core/data/draw_order.py``, the way from text to ids in ``core/data/encoder.py``.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from core.data.draw_order import DrawOrder, permutation
from core.data.encoder import Encoder, Text, chat_of
from core.data.parquet import Example, ExampleFile
from core.data.vocabulary import ChatError, template_arguments
from core.errors import InputError, Problems
from core.types import Prompt
from core.vision.pictures import TEXT, MediaError, Modality

log = logging.getLogger(__name__)
SUBSET = -2  # keeps the permutation that chooses examples apart from those of the order
CHAT_FIX = "mend the roles, or set another chat template"
# Sizes of the files -> the numbers of the examples to take of each one
Choose = Callable[[Sequence[int]], Sequence[np.ndarray]]
# The schemas of the tools that an example's prompt describes
ToolsOf = Callable[[Example], Sequence[Any]]
# Called once, while files load, for each example that can be drawn
Visit = Callable[[Example], None]
# Of an example that can be drawn: its file's place, its row there, the tokens of its prompt before
# it is cut, and hashes of the question's content, of its name (of its content if it has none), and
# of its words
MEASURES = np.dtype("int64, int64, int64, uint64, uint64, uint64")
MEASURES.names = ("file", "number", "length", "content", "name", "question")


def truncate(ids: Sequence[int], limit: int, mode: str) -> list[int]:
    """Return the ids cut to ``limit``: ``left`` keeps the tail, ``right`` the head.

    ``middle`` keeps ``limit // 2`` of the head and the rest of the tail (verl's
    ``postprocess_data``).
    """
    if len(ids) <= limit:
        return list(ids)
    # With error no prompt is longer: PromptFiles refused it
    head = {"left": 0, "right": limit, "middle": limit // 2}[mode]
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]


def question_hash(prompt: Text, pictures: Iterable[bytes] = ()) -> int:
    """Return a hash of what a prompt asks: equal words have equal hashes, regardless of spaces.

    It has 64 bits and is the same in every process, unlike Python's own.
    """
    words = [(turn["role"], (turn.get("content") or "").split()) for turn in chat_of(prompt)]
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8)
    for picture in pictures:
        digest.update(hashlib.blake2b(picture).digest())
    return int.from_bytes(digest.digest(), "big")


def warn_of_trained_questions(
    trained: Mapping[str, Iterable[int]], prompts: Iterable[Prompt]
) -> None:
    """Warn if prompts of the validation ask what is trained on.

    ``trained`` is the path of a file -> hashes of the questions that training draws from it.
    """
    questions = []
    for prompt in prompts:
        pictures = prompt.media.pictures if prompt.media else ()
        questions.append(question_hash(prompt.messages, (picture.data for picture in pictures)))
    shared = {path: set(questions).intersection(hashes) for path, hashes in trained.items()}
    trained_questions = set().union(*shared.values())
    if trained_questions:
        log.warning(
            "data.val_files: %d of %d questions are trained on, in %s; leave them out of "
            "data.train_files, or read their accuracy as memory",
            sum(question in trained_questions for question in questions),
            len(questions),
            ", ".join(path for path, hashes in shared.items() if hashes),
        )


class PromptFiles:
    """Loads files and makes prompts of their examples. ``config`` is the ``data`` section.

    An example's ``uid`` is the name that the data gives the question, ``source/split/index``, so
    that runs with differently worded prompts can be paired. Without a name it is a hash of source,
    prompt and ground truth. If the loaded files give one name to different questions, the hash is
    added to the name. Copies of an example share their uid.

    A prompt has at most the tokens of the key ``data.<limit_key>``, its tools included.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        modality: Modality = TEXT,
        tools_of: ToolsOf | None = None,
        *,
        limit_key: str = "max_prompt_length",
        visit: Visit = lambda example: None,
    ):
        self.config = config
        self.modality = modality
        self.tools_of = tools_of or (lambda _: ())
        self.limit_key = limit_key
        self.limit: int = getattr(config, limit_key)
        self.visit = visit
        self.encoder = Encoder(tokenizer, template_arguments(config))
        self.files: list[ExampleFile] = []
        # Of the examples that can be drawn, in the order of the files
        self.measured = np.zeros(0, MEASURES)
        self.first: dict[str, Example] = {}  # data source -> its first example
        # With load(keep=True): each example that can be drawn, with the ids of its prompt
        self.kept: list[tuple[Example, np.ndarray]] = []
        # While files load: the ids of prompts, by prompt and tools
        self._ids: dict[Any, np.ndarray] = {}
        self._ambiguous_names: frozenset[int] = frozenset()

    def load(self, paths: Iterable[str], choose: Choose, *, keep: bool = False) -> None:
        """Read, check and measure the files. Raises InputError with every problem of all of them.

        Every example is parsed once, and equal prompts are tokenised once.
        """
        config = self.config
        errors: list[str] = []
        for path in paths:  # a path that is listed twice counts twice, as in verl
            try:
                keys = config.prompt_key, config.reward_fn_key, config.image_key
                self.files.append(ExampleFile(path, *keys))
            except InputError as error:
                errors += error.problems
        if errors:
            raise InputError(errors)
        problems = Problems()
        chosen = choose([len(file) for file in self.files])
        measured = [
            self._measure(place, numbers, problems, keep) for place, numbers in enumerate(chosen)
        ]
        problems.raise_if_any()
        self._ids.clear()
        self.measured = np.concatenate(measured)
        questions = np.unique(self.measured[["name", "content"]])
        names, counts = np.unique(questions["name"], return_counts=True)
        self._ambiguous_names = frozenset(names[counts > 1].tolist())

    def __len__(self) -> int:
        """Return the number of examples that can be drawn."""
        return len(self.measured)

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt that can be drawn, as it is cut."""
        return min(self.limit, int(self.measured["length"].max(initial=0)))

    def questions(self) -> Mapping[str, Sequence[int]]:
        """Return, by path, hashes of the questions that can be drawn."""
        questions: dict[str, list[int]] = {}
        for place, question in self.measured[["file", "question"]].tolist():
            questions.setdefault(self.files[place].path, []).append(question)
        return questions

    def prompt(self, index: int, ordinal: int) -> Prompt:
        """Return the prompt of the ``index``-th example that can be drawn."""
        row = self.measured[index]
        example = self.files[row["file"]].example(int(row["number"]))
        return self.make_prompt(example, self._encode(example), ordinal)

    def make_prompt(self, example: Example, ids: Sequence[int], ordinal: int) -> Prompt:
        """Return the prompt of an example with these ids."""
        uid = example.name or example.content_hash
        if example.name is not None and int(example.name_hash, 16) in self._ambiguous_names:
            uid = f"{example.name}/{example.content_hash}"
        return Prompt(
            ordinal=ordinal,
            uid=uid,
            token_ids=tuple(truncate(ids, self.limit, self.config.truncation)),
            messages=chat_of(example.prompt),
            ground_truth=example.ground_truth,
            data_source=example.data_source,
            extra_info=example.extra_info,
            style=example.style,
            media=self._media(example) or None,
            opened_tag=self.encoder.opened_tag(example.prompt, ids),
        )

    def _media(self, example: Example, *, decode: bool = False) -> Any:
        """Return the example's pictures; None for a model of text alone. Raises MediaError."""
        if example.media or self.modality.reads_media:
            return self.modality.read_media(example.media, decode=decode)
        return None

    def _encode(self, example: Example, *, decode: bool = False) -> list[int]:
        """Return the ids of an example's prompt; ``decode`` reads its pictures to their end."""
        media = self._media(example, decode=decode)
        return self.encoder.encode(example.prompt, self.tools_of(example), media)

    def _measure(
        self, place: int, numbers: np.ndarray, problems: Problems, keep: bool
    ) -> np.ndarray:
        """Return the measures of a file's examples that can be drawn, and visit each of them."""
        file = self.files[place]
        limit = f"data.{self.limit_key}={self.limit} tokens"
        rows = []
        lengths = []
        for example in file.examples(problems, numbers):
            ids = self._checked_ids(example, problems)
            if ids is None:
                continue
            lengths.append(len(ids))
            if len(ids) > self.limit and not self._takes_longer(example, ids, problems):
                continue
            self.first.setdefault(example.data_source, example)
            question = question_hash(example.prompt, (data for data, _ in example.media))
            hashes = int(example.content_hash, 16), int(example.name_hash, 16), question
            rows.append((place, example.number, len(ids), *hashes))
            self.visit(example)
            if keep:
                self.kept.append((example, ids))
        measured = np.array(rows, dtype=MEASURES)
        too_long = sum(length > self.limit for length in lengths)
        if lengths and too_long == len(lengths) and self.config.filter_overlong_prompts:
            rule = f"all {too_long} prompts are longer than {limit}"
            problems.add(file.path, rule, f"raise it: the shortest has {min(lengths)}")
        questions = len(np.unique(measured["content"]))
        text = f"{len(measured)} of {len(file)} rows, {questions} different questions"
        if too_long:
            cut = int((measured["length"] > self.limit).sum())
            text += f", {too_long - cut} left out and {cut} cut as longer than {limit}"
        longest = measured["length"].max(initial=0)
        log.info("%s: %s, longest prompt %d tokens", file.path, text, longest)
        return measured

    def _checked_ids(self, example: Example, problems: Problems) -> np.ndarray | None:
        """Return the ids of a prompt; None if it cannot be used, which is a problem."""
        key = example.prompt_hash, repr(self.tools_of(example))
        try:
            if key not in self._ids:
                self.encoder.check_roles(example.prompt)
                ids = self._encode(example, decode=True)
                self._ids[key] = np.array(ids, np.int32)
            if len(self._ids[key]):
                return self._ids[key]
            problem = "a prompt has no tokens", "leave the row out", ""
        except ChatError as error:
            problem = "the chat template refuses a prompt", CHAT_FIX, str(error)
        except MediaError as error:
            problem = error.rule, error.fix, error.value
        rule, fix, value = problem
        problems.add(example.file, rule, fix, example.number, value)
        return None

    def _takes_longer(self, example: Example, ids: np.ndarray, problems: Problems) -> bool:
        """Return whether a prompt over the limit is drawn, cut; add a problem if it must not be."""
        if self.config.filter_overlong_prompts:
            return False
        if self.config.truncation == "error" or example.media:  # nothing cuts pictures
            rule = f"a prompt is longer than data.{self.limit_key}={self.limit} tokens"
            fix = (
                "raise it (tools' schemas count), or set data.filter_overlong_prompts=True or, "
                "without media, data.truncation=left"
            )
            problems.add(example.file, rule, fix, example.number, f"{len(ids)} tokens")
        return True


class PromptStream:
    """The training prompts, in the order of drawing, without end.

    ``config`` is the ``data`` section, whose own ``seed`` goes before ``trainer.seed``. ``files``
    load and hold what an ordinal draws: prompts, or what a recipe trains on in their place. With
    ``keeps_tail`` the last step draws what is left of the last epoch. Raises InputError with every
    problem of every file.
    """

    def __init__(self, config: Any, files: Any, seed: int, *, keeps_tail: bool = False):
        self.config = config
        self.files = files
        self.seed = int(seed if config.seed is None else config.seed)
        self.keeps_tail = keeps_tail
        self.files.load(config.train_files, self._choose)
        self._order = DrawOrder(len(self.files), self.seed, bool(config.shuffle))

    def _choose(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Choose ``data.train_max_samples`` examples of all files together.

        They are the first ones, or with ``data.shuffle`` chosen by the seed.
        """
        total = sum(sizes)
        ends = np.cumsum(sizes)
        chosen = np.arange(total)
        if (self.config.train_max_samples or -1) > 0:
            if self.config.shuffle:
                chosen = permutation(total, self.seed, SUBSET)
            chosen = np.sort(chosen[: self.config.train_max_samples])
        by_file = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        starts = ends - np.array(sizes)
        return [numbers - start for numbers, start in zip(by_file, starts, strict=True)]

    def __len__(self) -> int:
        """Return the prompts in an epoch."""
        return len(self.files)

    def prompt(self, ordinal: int) -> Prompt:
        """Return the prompt that is drawn at this ordinal."""
        return self.files.prompt(self._order.index(ordinal), ordinal)

    def epoch(self, ordinal: int) -> int:
        """Return the epoch in which the ordinal is drawn, from 0."""
        return ordinal // len(self)

    def steps(self, epochs: int, batch_size: int, first_ordinal: int = 0) -> int:
        """Return the steps from ``first_ordinal`` to the end of these epochs.

        They are the whole batches of each epoch, as in verl, or with ``keeps_tail`` as many as draw
        all examples. The tail of an epoch begins the first batch of the next one.
        """
        if self.keeps_tail:
            return math.ceil((epochs * len(self) - first_ordinal) / batch_size)
        return epochs * (len(self) // batch_size)


def load_val_prompts(files: PromptFiles) -> list[Prompt]:
    """Return the validation prompts, file by file; none without ``data.val_files``.

    ``data.val_max_samples`` keeps that many examples of each file, so that a small benchmark beside
    a large one does not vanish. The choice follows from ``data.seed`` alone (0 if it is null): runs
    with different ``trainer.seed`` answer the same questions. The i-th example of the files has
    ordinal ``-1 - i``, whatever is left out, so that it has sampling seeds of its own.
    """
    config = files.config
    if not config.val_files:
        return []
    seed = int(config.seed or 0)
    most = config.val_max_samples or -1

    def choose(sizes: Sequence[int]) -> list[np.ndarray]:
        # Seeded by the size, not by the file's place: a file keeps its choice if another is added
        orders = [permutation(size, seed, SUBSET, size) for size in sizes]
        return [np.sort(order[:most] if most > 0 else order) for order in orders]

    files.load(config.val_files, choose, keep=True)
    starts = np.cumsum([0, *map(len, files.files)])
    positions = (starts[files.measured["file"]] + files.measured["number"]).tolist()
    return [
        files.make_prompt(example, ids.tolist(), -1 - position)
        for (example, ids), position in zip(files.kept, positions, strict=True)
    ]
