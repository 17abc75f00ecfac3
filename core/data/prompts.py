"""Prompt number ``ordinal`` as a pure function of the seed and the ordinal: files checked and
measured when loaded.

What an example must hold is in ``core/data/parquet.py``, which one an ordinal draws in
``core/data/draw_order.py``. Data that reward functions make up while training runs is not
supported: an example is a function of its ordinal, and that is what makes a resumed run equal to an
uninterrupted one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from core.data.draw_order import DrawOrder, permutation
from core.data.parquet import Example, ExampleFile, Problems
from core.data.vocabulary import (
    MARK,
    ChatError,
    Message,
    has_template,
    template_arguments,
    template_of,
)
from core.errors import InputError
from core.types import Prompt
from core.vision.pictures import TEXT, MediaError, Modality, Pictures

log = logging.getLogger(__name__)
Text = str | Sequence[Message]  # a prompt as the data has it
SUBSET = -2  # keeps this permutation apart from those of the order
CHAT_FIX = "mend the roles, or set another chat template"
FIRST_TAG = re.compile(r"\s*<([a-zA-Z][\w-]*)>")
LAST_TAG = re.compile(r"<([a-zA-Z][\w-]*)>\s*\Z")
TAG_TOKENS = 16  # from the end of a prompt, in which a tag that it opens is looked for
# (sizes of the files) -> the numbers of the examples to take of each one
Choose = Callable[[Sequence[int]], Sequence[np.ndarray]]
# The schemas of tools of which an example's prompt tells the policy
ToolsOf = Callable[[Example], Sequence[Any]]
# Of an example that can be drawn: the place of its file, its row there, the tokens of its prompt
# before it is cut, and hashes of the question's content, of its name in the data (of its content
# where it has none), of its words
MEASURES = np.dtype("int64, int64, int64, uint64, uint64, uint64")
MEASURES.names = ("file", "number", "length", "content", "name", "question")


def truncate(ids: Sequence[int], limit: int, mode: str) -> list[int]:
    """Return the ids cut to ``limit``: ``left`` keeps the tail, ``right`` the head, ``middle`` both
    ends.

    ``middle`` keeps ``limit // 2`` of the head (verl's ``postprocess_data``). Raises ValueError for
    ``error``.
    """
    if len(ids) <= limit:
        return list(ids)
    heads = {"left": 0, "right": limit, "middle": limit // 2}
    if mode not in heads:
        raise ValueError(f"a prompt of {len(ids)} tokens is longer than {limit}")
    head = heads[mode]
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]


def chat_of(prompt: Text) -> tuple[Message, ...]:
    """Return a prompt as messages: a plain string is the user's words."""
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)


def question_hash(prompt: Text, pictures: Iterable[bytes] = ()) -> int:
    """Return a hash of what a prompt asks: equal words have equal hashes, regardless of spaces.

    It has 64 bits and is the same in every process, unlike Python's own.
    """
    words = [(each["role"], (each.get("content") or "").split()) for each in chat_of(prompt)]
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8)
    for picture in pictures:
        digest.update(hashlib.blake2b(picture).digest())
    return int.from_bytes(digest.digest(), "big")


def warn_of_trained_questions(
    trained: Mapping[str, Iterable[int]],
    prompts: Iterable[Prompt],
) -> None:
    """Warn if prompts of the validation ask what is trained on.

    ``trained`` is the path of a file -> hashes of the questions that training draws from it.
    """
    asked = []
    for prompt in prompts:
        pictures = prompt.media.pictures if prompt.media else ()
        asked.append(question_hash(prompt.messages, (each.data for each in pictures)))
    shared = {path: set(asked).intersection(questions) for path, questions in trained.items()}
    everywhere = set().union(*shared.values())
    if not everywhere:
        return
    total = sum(each in everywhere for each in asked)
    log.warning(
        "data.val_files: %d of %d questions are trained on, in %s; leave them out of "
        "data.train_files, or read their accuracy as memory",
        total,
        len(asked),
        ", ".join(path for path, found in shared.items() if found),
    )


class Encoder:
    """Turns prompts into ids with one tokenizer and one set of template arguments.

    A chat goes through the chat template with a generation prompt. If its last message is the
    assistant's, the policy goes on with that message instead (a prefilled beginning such as
    ``<think>``). A plain string is encoded as it is, with the special tokens that the tokenizer
    adds by default (BOS, where it has one).

    ``modality`` is how the model reads prompts. ``tools`` are the schemas that a prompt tells the
    policy of: the chat template writes them, so that a plain string becomes a user's message where
    there is a template.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        modality: Modality = TEXT,
    ):
        self.tokenizer, self.modality = tokenizer, modality
        self.template_kwargs = dict(template_kwargs or {})
        self.has_template = has_template(tokenizer, self.template_kwargs)
        self._written_roles: set[str] = set()  # whose text the template is known to write

    def encode(
        self, prompt: Text, tools: Sequence[Any] = (), media: Pictures | None = None
    ) -> list[int]:
        """Return the ids of a prompt, neither cut nor padded, one for each token of its media.

        Raises ChatError where the template refuses a chat, InputError where there is no template,
        MediaError for pictures without places or places without pictures.
        """
        text = prompt if media is None else media.mark(prompt)
        plain = isinstance(text, str) and not (tools and self.has_template)
        if not plain:
            chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
            text = self.render(
                chat, **({"tools": list(tools)} if tools and self.has_template else {})
            )
        # A template writes its special tokens itself: none are added to a chat.
        ids = self.tokenizer(text, add_special_tokens=plain)["input_ids"]
        if plain and ids and ids[-1] == self.tokenizer.eos_token_id:
            # Some tokenizers append it: the policy would have to write after its end
            ids = ids[:-1]
        return ids if media is None else media.expand(ids)

    def render(self, chat: Sequence[Message], **arguments: Any) -> str:
        """Return the chat as one string, ready for tokens to follow. Raises ChatError, and
        InputError as encode."""
        if not self.has_template:
            rule = "the tokenizer has no chat template, and the data holds chats"
            fix = (
                "set actor_rollout_ref.model.custom_chat_template, or write the prompts as "
                "plain strings"
            )
            raise InputError([f"{rule}; {fix}"])

        def written(messages: Sequence[Message], begun: bool) -> str:
            options = {"add_generation_prompt": not begun, "continue_final_message": begun}
            render = template_of(self.tokenizer, {**options, **self.template_kwargs})
            return render(messages, **arguments)

        last, whole = chat[-1], "continue_final_message" in self.template_kwargs
        begun = last["role"] == "assistant"
        if not begun or whole or len(chat) == 1 or not isinstance(last.get("content"), str):
            return written(chat, begun)
        try:
            continued = written(chat, True)
        except ChatError:
            continued = ""  # the template drops the beginning, as R1's does a closed thought
        return begin_answer(written(chat[:-1], False), last["content"], continued)

    def opened_tag(self, prompt: Text, ids: Sequence[int]) -> str | None:
        """Return the tag, such as ``<think>``, that a prompt opens for the policy to close; None
        without one.

        A template or a plain string opens one by ending with it, a begun answer by beginning with
        it.
        """
        match = LAST_TAG.search(self.tokenizer.decode(list(ids[-TAG_TOKENS:])))
        if match is None and len(prompt) > 1 and not isinstance(prompt, str):
            begun = prompt[-1].get("content") or ""
            if prompt[-1]["role"] == "assistant":
                match = FIRST_TAG.match(begun) or LAST_TAG.search(self.render(prompt[:-1]))
            if match is not None and f"</{match[1]}>" in begun:
                return None
        return f"<{match[1]}>" if match else None

    def check_roles(self, prompt: Text) -> None:
        """Raise ChatError for a role of the chat whose text the template leaves out without an
        error."""
        for number, message in enumerate([] if isinstance(prompt, str) else prompt):
            role = message["role"]
            if role not in self._written_roles and isinstance(message.get("content"), str):
                marked = self.render(
                    [*prompt[:number], {**message, "content": MARK}, *prompt[number + 1 :]]
                )
                if marked and MARK not in marked:  # no text at all is another problem
                    raise ChatError(f"it leaves out the text of role {role}")
                self._written_roles.add(role)


def begin_answer(asked: str, begun: str, continued: str) -> str:
    """Return the prompt that ends with the beginning of an answer.

    ``asked`` is the chat up to the answer, ``continued`` what the chat template makes of both. That
    stands unless it leaves out either, or writes a closed thought in front of the beginning (Qwen3,
    GLM 4.5). Then the beginning follows ``asked``, as if the policy had written it.
    """
    between = continued[len(asked) : len(continued) - len(begun)]
    is_whole = continued.startswith(asked) and continued.endswith(begun)
    if is_whole and not re.search(r"</[a-zA-Z][\w-]*>\s*\Z", between):
        return continued
    tag, opened = FIRST_TAG.match(begun), LAST_TAG.search(asked)
    if tag and opened and tag[1] == opened[1]:  # both open it
        asked = asked[: opened.start()]
    return asked + begun


class PromptFiles:
    """Loads files and makes prompts of their examples. ``config`` is the ``data`` section.

    An example's ``uid`` is the name that the data gives the question, ``source/split/index``, so
    that runs whose prompts are worded differently can still be paired. Where the data gives none,
    it is a hash of source, prompt and ground truth; where the loaded files give one name to
    different questions, the hash is added to the name. Copies of an example share their uid.
    Lengths are those of prompts with their tools.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        modality: Modality = TEXT,
        tools_of: ToolsOf | None = None,
    ):
        self.config, self.tools_of = config, tools_of or (lambda _: ())
        self.limited_by = (
            "max_prompt_length" if config.max_start_length is None else "max_start_length"
        )
        self.limit: int = getattr(config, self.limited_by)  # tokens of a prompt
        self.encoder = Encoder(tokenizer, template_arguments(config), modality)
        self.files: list[ExampleFile] = []
        # Of the examples that can be drawn, in the order of the files
        self.measured = np.zeros(0, MEASURES)
        self.first: dict[str, Example] = {}  # data source -> its first example
        self._lengths: dict[Any, int] = {}  # by prompt and tools
        self._ambiguous: frozenset[int] = frozenset()

    def load(self, paths: Iterable[str], choose: Choose) -> None:
        """Open, check and measure the files. Raises InputError with every problem of all of
        them."""
        errors: list[str] = []
        for path in paths:  # one that is listed twice counts twice, as in verl
            try:
                keys = self.config.prompt_key, self.config.reward_fn_key, self.config.image_key
                self.files.append(ExampleFile(path, *keys))
            except InputError as error:
                errors += error.problems
        if errors:
            raise InputError(errors)
        problems, chosen = Problems(), choose([len(file) for file in self.files])
        rows = [self._measure(place, numbers, problems) for place, numbers in enumerate(chosen)]
        measured = [
            self._fitting(file, some, problems) for file, some in zip(self.files, rows, strict=True)
        ]
        problems.raise_if_any()
        self.measured = np.concatenate(measured)
        self._lengths.clear()
        names, counts = np.unique(
            np.unique(self.measured[["name", "content"]])["name"], return_counts=True
        )
        self._ambiguous = frozenset(names[counts > 1].tolist())

    def __len__(self) -> int:
        """Return the number of examples that can be drawn."""
        return len(self.measured)

    def prompt(self, index: int, ordinal: int) -> Prompt:
        """Return the prompt of the ``index``-th example that can be drawn."""
        row = self.measured[index]
        example = self.files[row["file"]].example(int(row["number"]))
        media = self.encoder.modality.read_media(example.media)
        ids = self.encoder.encode(example.prompt, self.tools_of(example), media)
        uid = example.name or example.content_hash
        if example.name is not None and int(example.name_hash, 16) in self._ambiguous:
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
            media=media or None,
            opened_tag=self.encoder.opened_tag(example.prompt, ids),
        )

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt that can be drawn, as it is cut."""
        return min(self.limit, int(self.measured["length"].max(initial=0)))

    def questions(self) -> Mapping[str, Sequence[int]]:
        """Return, by path, hashes of the questions that can be drawn."""
        found: dict[str, list[int]] = {}
        for place, question in self.measured[["file", "question"]].tolist():
            found.setdefault(self.files[place].path, []).append(question)
        return found

    def examples(self) -> Iterator[Example]:
        """Yield every example that can be drawn, file by file."""
        for place, file in enumerate(self.files):
            yield from file.examples(
                Problems(), self.measured["number"][self.measured["file"] == place]
            )

    def _measure(self, place: int, numbers: np.ndarray, problems: Problems) -> np.ndarray:
        """Return the measures of a file's examples; a prompt that cannot be read is a problem."""
        found = []
        for example in self.files[place].examples(problems, numbers):
            if length := self._length(example, problems):
                self.first.setdefault(example.data_source, example)
                hashes = int(example.content_hash, 16), int(example.name_hash, 16)
                question = question_hash(example.prompt, (data for data, _ in example.media))
                found.append((place, example.number, length, *hashes, question))
        return np.array(found, dtype=MEASURES)

    def _length(self, example: Example, problems: Problems) -> int | None:
        """Return the tokens of a prompt; None where it cannot be read, which is a problem. Copies
        are read once."""
        tools = self.tools_of(example)
        key = example.prompt_hash, repr(tools)
        try:
            if key not in self._lengths:
                media = self.encoder.modality.read_media(example.media, decode=True)
                self.encoder.check_roles(example.prompt)
                self._lengths[key] = len(self.encoder.encode(example.prompt, tools, media))
            if self._lengths[key]:
                return self._lengths[key]
            rule, fix, value = "a prompt has no tokens", "leave the row out", ""
        except ChatError as error:
            rule, fix, value = "the chat template refuses a prompt", CHAT_FIX, str(error)
        except MediaError as error:
            rule, fix, value = error.rule, error.fix, error.value
        problems.add(example.file, rule, fix, example.number, value)
        return None

    def _fitting(self, file: ExampleFile, rows: np.ndarray, problems: Problems) -> np.ndarray:
        """Leave out what is too long, or report it, as the configuration has it; log what became of
        the file."""
        too_long, bound = (
            rows[rows["length"] > self.limit],
            f"data.{self.limited_by}={self.limit} tokens",
        )
        filters, cuts = self.config.filter_overlong_prompts, self.config.truncation != "error"
        kept = rows[rows["length"] <= self.limit] if filters else rows
        if len(rows) and not len(kept):
            rule = f"all {len(rows)} prompts are longer than {bound}"
            problems.add(file.path, rule, f"raise it: the shortest has {rows['length'].min()}")
        for row in [] if filters else too_long:
            # Nothing cuts pictures.
            if not cuts or (
                self.encoder.modality.reads_media and file.example(int(row["number"])).media
            ):
                choices = (
                    "data.filter_overlong_prompts=True or, without media, data.truncation=left"
                )
                rule, fix = (
                    f"a prompt is longer than {bound}",
                    (f"raise it (tools' schemas count), or set {choices}"),
                )
                problems.add(file.path, rule, fix, row["number"], f"{row['length']} tokens")
        cut, out = (0, len(too_long)) if filters else (len(too_long), 0)
        shown = (
            f"{len(kept)} of {len(file)} rows, {len(np.unique(kept['content']))} different "
            f"questions"
        )
        shown += f", {out} left out and {cut} cut as longer than {bound}" if len(too_long) else ""
        log.info(
            "%s: %s, longest prompt %d tokens", file.path, shown, kept["length"].max(initial=0)
        )
        return kept


class PromptStream:
    """The training prompts, in the order of drawing, without end.

    ``config`` is the ``data`` section, whose own ``seed`` goes before ``trainer.seed``. ``files``
    load and hold what an ordinal draws: prompts, or what a recipe trains on in their place. With
    ``keeps_tail`` the last step draws what is left of the last epoch. Raises InputError: every
    problem of every file.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        seed: int,
        files: Any = None,
        *,
        modality: Modality = TEXT,
        tools_of: ToolsOf | None = None,
        keeps_tail: bool = False,
    ):
        self.keeps_tail = keeps_tail
        self.config, self.seed = config, int(seed if config.seed is None else config.seed)
        self.files = PromptFiles(config, tokenizer, modality, tools_of) if files is None else files
        self.files.load(config.train_files, self._choose)
        self._order = DrawOrder(len(self.files), self.seed, bool(config.shuffle))

    def _choose(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Choose ``data.train_max_samples`` examples of all files together, by the seed if
        ``data.shuffle``."""
        total, ends, most = sum(sizes), np.cumsum(sizes), self.config.train_max_samples or -1
        order = permutation(total, self.seed, SUBSET) if self.config.shuffle else np.arange(total)
        chosen = np.sort(order[:most]) if most > 0 else np.arange(total)
        parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        return [part - (end - size) for part, end, size in zip(parts, ends, sizes, strict=True)]

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


def load_val_prompts(
    config: Any, tokenizer: Any, modality: Modality = TEXT, tools_of: ToolsOf | None = None
) -> list[Prompt]:
    """Return the validation prompts, file by file; none without ``data.val_files``.

    ``data.val_max_samples`` keeps that many examples of **each** file, so that a small benchmark
    beside a large one does not vanish. The choice follows from ``data.seed`` alone (0 where it is
    null): runs with different ``trainer.seed`` answer the same questions. The i-th example of the
    files has ordinal ``-1 - i``, whatever is left out, so its sampling seeds are its own in every
    validation.
    """
    seed, most = int(config.seed or 0), config.val_max_samples or -1
    if not config.val_files:
        return []

    def choose(sizes: Sequence[int]) -> list[np.ndarray]:
        # Seeded by the size and not by the file's place, so a file keeps its choice when another is
        # added.
        return [np.sort(permutation(n, seed, SUBSET, n)[: most if most > 0 else n]) for n in sizes]

    files = PromptFiles(config, tokenizer, modality, tools_of)
    files.load(config.val_files, choose)
    starts = np.cumsum([0, *map(len, files.files)])
    ordinals = (-1 - starts[files.measured["file"]] - files.measured["number"]).tolist()
    return [files.prompt(index, ordinal) for index, ordinal in enumerate(ordinals)]
