"""Files of examples as prompts: checked and measured when loaded, tokenised when drawn.

What an example must hold is checked in ``core/data/parquet.py``; which of them a run draws, and in which order, is
decided in ``core/data/stream.py``.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from core.data.chat_frames import ChatError, dropped_roles, rendered, template_of
from core.data.parquet import Example, ExampleFile, Message, Problems
from core.errors import InputError
from core.types import Media, Prompt
from core.vision.modality import TEXT, Modality
from core.vision.pictures import MediaError

OWNED = ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
NO_TEMPLATE = (
    "the tokenizer has no chat template, and the data holds chats; set actor_rollout_ref.model.custom_chat_template, "
    "take an instruct model's tokenizer, or write the prompts as plain strings"
)
_OPENED_AT_THE_END = re.compile(r"<([a-zA-Z][\w-]*)>\s*\Z")
_OPENED_AT_THE_START = re.compile(r"\s*<([a-zA-Z][\w-]*)>")
TAG_TOKENS = 16  # from the end of a prompt, in which a tag that it opens is looked for


@dataclass(frozen=True)
class Worded:
    """A prompt as the policy reads it: the example's, or what an agent loop makes of it to tell of tools.

    ``arguments`` are for the chat template, beside the configuration's. Loops word equal prompts alike where ``tools``,
    the names of those that it tells of, are equal.
    """

    prompt: str | Sequence[Message]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ()


Word = Callable[[Example], Worded]


def truncate(ids: Sequence[int], limit: int, mode: str) -> list[int]:
    """Return the ids cut to ``limit``: ``left`` keeps the tail, ``right`` the head, ``middle`` both ends.

    ``middle`` keeps ``limit // 2`` of the head (verl's ``postprocess_data``). Raises ValueError for ``error``.
    """
    if len(ids) <= limit:
        return list(ids)
    heads = {"left": 0, "right": limit, "middle": limit // 2}
    if mode not in heads:
        raise ValueError(f"a prompt of {len(ids)} tokens is longer than {limit}")
    head = heads[mode]
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]


class Encoder:
    """Turns prompts into ids with one tokenizer and one set of template arguments.

    A chat goes through the chat template with a generation prompt. If its last message is the assistant's, the
    policy goes on with that message instead (a prefilled beginning such as ``<think>``). A plain string is encoded
    as it is, with the special tokens that the tokenizer adds by default (BOS, where it has one).

    ``modality`` is how the model reads prompts.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        modality: Modality = TEXT,
    ):
        self.tokenizer, self.modality = tokenizer, modality
        self.template_kwargs = dict(template_kwargs or {})
        self._written_roles: set[str] = set()  # whose text the template is known to write
        clash = [name for name in OWNED if name in self.template_kwargs]
        if clash:
            raise InputError([f"data.apply_chat_template_kwargs: {', '.join(clash)} cannot be set here; leave it out"])

    def encode(self, prompts: Sequence[str | Sequence[Message]], **arguments: Any) -> list[list[int]]:
        """Return the ids of each prompt, neither cut nor padded. ``arguments`` are the chat template's.

        Raises ChatError where the template refuses a chat, InputError where there is no template.
        """
        ids: list[list[int]] = [[] for _ in prompts]
        for plain in (False, True):
            indices = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str) == plain]
            texts = [prompts[index] if plain else self.render(prompts[index], **arguments) for index in indices]
            # A template writes its special tokens itself: none are added to a chat.
            encoded = self.tokenizer(texts, add_special_tokens=plain)["input_ids"] if texts else []
            for index, value in zip(indices, encoded, strict=True):
                # Some tokenizers append an EOS to a plain string: the policy would have to write after its end.
                ends = plain and value and value[-1] == self.tokenizer.eos_token_id
                ids[index] = value[:-1] if ends else value
        return ids

    def encode_example(
        self, example: Example, worded: Worded | None = None, *, decode: bool = False
    ) -> tuple[list[int], Media | None]:
        """Return the ids of an example's prompt, one for each token of its media, and the media if it has any.

        ``worded`` is the prompt as an agent loop words it. ``decode`` tries all of each file and not its size alone.
        Raises MediaError and what :meth:`encode` raises.
        """
        media = self.modality.read_media(example.media, decode=decode)
        return self.encode_with(worded or Worded(example.prompt), media), media or None

    def encode_with(self, worded: Worded, media: Media | None) -> list[int]:
        """Return the ids of a prompt, one for each token of its media. Raises what :meth:`encode_example` raises.

        What measures prompts and what plays episodes both call it, so that they count the same tokens.
        """
        prompt = worded.prompt if media is None else media.mark(worded.prompt)
        (ids,) = self.encode([prompt], **worded.arguments)
        return ids if media is None else media.expand(ids)

    def opened_tag(self, prompt: str | Sequence[Message], ids: Sequence[int]) -> str | None:
        """Return the tag, such as ``<think>``, that a prompt opens for the policy to close; None without one.

        A template or a plain string opens one by ending with it, a begun answer by beginning with it.
        """
        match = _OPENED_AT_THE_END.search(self.tokenizer.decode(list(ids[-TAG_TOKENS:])))
        if match is None and not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            begun = prompt[-1].get("content") or ""
            match = _OPENED_AT_THE_START.match(begun)
            if match is not None and f"</{match[1]}>" in begun:
                return None
        return f"<{match[1]}>" if match else None

    def dropped_role(self, worded: Worded) -> str | None:
        """Return a role of the chat whose text the template leaves out, without a word; None where there is none."""
        roles = set() if isinstance(worded.prompt, str) else {message["role"] for message in worded.prompt}
        if roles <= self._written_roles:
            return None
        try:
            if not self.render(worded.prompt, **worded.arguments):  # no text at all is another message
                return None
            dropped = dropped_roles(self.render, worded.prompt, **worded.arguments)
        except (ChatError, InputError):  # which encoding reports
            return None
        self._written_roles |= roles - set(dropped)
        return dropped[0] if dropped else None

    def render(self, chat: Sequence[Message], **arguments: Any) -> str:
        """Return the chat as one string, ready for tokens to follow."""
        if not (self.template_kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", None)):
            raise InputError([NO_TEMPLATE])
        prefilled = chat[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled, **self.template_kwargs}
        return rendered(template_of(self.tokenizer, options), chat, **arguments)


log = logging.getLogger(__name__)
MEASURED_TOGETHER = 512  # examples; the tokenizer spreads a batch over the cores
CHAT_FIX = "mend the roles, or set another chat template"
CUT_FIX = "set data.filter_overlong_prompts=True or data.truncation=error, or raise the limit"
# (prompt, tools that it tells of) -> tokens, so that copies are tokenised once
Lengths = dict[tuple[str, tuple[str, ...]], "int | Unreadable"]
# (sizes of the files) -> the numbers of the examples to take of each one
Choose = Callable[[Sequence[int]], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Unreadable:
    """Why a prompt cannot be read: the rule, the fix, and what breaks the rule."""

    rule: str
    fix: str
    value: str


@dataclass(frozen=True, eq=False)
class Measured:
    """What is known of a file's chosen examples (N of them), in file order.

    Shapes:
        number   [N] int64   row in the file
        length   [N] int64   tokens of the prompt before it is cut
        content  [N] uint64  hash of the question's content
        name     [N] uint64  hash of the question's name in the data, of its content where it has none
        source   [N] int64   index into ``sources``
    """

    number: np.ndarray
    length: np.ndarray
    content: np.ndarray
    name: np.ndarray
    source: np.ndarray
    sources: tuple[str, ...]
    told: str = ""  # what their lengths count beside the data's own text, for messages

    def where(self, mask: np.ndarray) -> Measured:
        arrays = (self.number, self.length, self.content, self.name, self.source)
        return Measured(*(values[mask] for values in arrays), self.sources, self.told)

    def __len__(self) -> int:
        return len(self.number)


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
        self.measured: dict[str, Measured] = {}  # of the examples that can be drawn
        self._left_out: dict[str, int] = {}
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
        problems = Problems()
        lengths: Lengths = {}
        sizes = [len(file) for file in self.files.values()]
        cuts = not self.config.filter_overlong_prompts and self.config.truncation != "error"
        uncut = self.limit if cuts else float("inf")
        for file, numbers in zip(self.files.values(), choose(sizes) if choose else [None] * len(sizes), strict=True):
            self._keep(file, _measure(file, numbers, self.encoder, self.word, lengths, problems, uncut), problems)
        problems.raise_if_any()
        self._ambiguous = _ambiguous_names(list(self.measured.values()))
        for line in self.counts():
            log.info(line)

    def prompt(self, path: str, index: int, ordinal: int) -> Prompt:
        """Return the prompt of a file's ``index``-th example that can be drawn."""
        example = self.files[path].example(int(self.measured[path].number[index]))
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
        return min(self.limit, max((int(one.length.max()) for one in self.measured.values() if len(one)), default=0))

    def examples(self) -> Iterator[Example]:
        """Yield every example that can be drawn, file by file."""
        for path, measured in self.measured.items():
            yield from self.files[path].examples(Problems(), measured.number)

    def sample_examples(self, each: int) -> list[Example]:
        """Return up to ``each`` examples of each data source of each file, spread evenly over it."""
        chosen = []
        for path, measured in self.measured.items():
            for source in range(len(measured.sources)):
                numbers = measured.number[measured.source == source]
                spread = np.linspace(0, len(numbers) - 1, min(each, len(numbers))).astype(np.int64)
                chosen += [self.files[path].example(int(number)) for number in numbers[spread]]
        return chosen

    def counts(self) -> list[str]:
        """Return a line a file: rows, what is left out or cut and why, different questions, longest prompt."""
        lines, limit = [], self.limit
        for path, measured in self.measured.items():
            parts = [f"{len(measured)} of {len(self.files[path])} rows"]
            different = len(np.unique(measured.content))
            if different < len(measured):
                parts.append(f"{different} different questions")
            if self._left_out[path]:
                parts.append(f"{self._left_out[path]} left out, longer than data.{self.limited_by}={limit} tokens")
            cut = int((measured.length > limit).sum())
            if cut:
                parts.append(f"{cut} cut to {limit} tokens (data.truncation={self.config.truncation})")
            longest = int(measured.length.max()) if len(measured) else 0
            lines.append(f"{path}: {', '.join(parts)}, longest prompt{measured.told} {longest} tokens")
        return lines

    def _keep(self, file: ExampleFile, measured: Measured, problems: Problems) -> None:
        """Leave out what is too long, or report it, as the configuration has it."""
        limit = self.limit
        fits = measured.length <= limit
        self.measured[file.path] = measured
        self._left_out[file.path] = 0
        too_long = f"a prompt{measured.told} is longer than data.{self.limited_by}={limit} tokens"
        if not self.config.filter_overlong_prompts:
            if self.config.truncation == "error":
                fix = "raise it, or set data.filter_overlong_prompts=True or data.truncation=left|right|middle"
                for number, length in zip(measured.number[~fits], measured.length[~fits], strict=True):
                    problems.add(file.path, too_long, fix, int(number), f"{length} tokens")
        elif len(measured) and not fits.any():
            shortest = int(measured.length.min())
            rule = f"all {len(measured)} prompts{measured.told} are longer than data.{self.limited_by}={limit} tokens"
            problems.add(file.path, rule, f"raise it: the shortest has {shortest}")
        else:
            self._left_out[file.path] = int((~fits).sum())
            self.measured[file.path] = measured.where(fits)


def _measure(
    file: ExampleFile,
    numbers: np.ndarray | None,
    encoder: Encoder,
    word: Word,
    lengths: Lengths,
    problems: Problems,
    uncut: float,
) -> Measured:
    """Measure a file's examples. Prompts with media must not be cut: longer ones than ``uncut`` are problems."""
    signed = {key: array("q") for key in ("number", "length", "source")}
    hashed = {key: array("Q") for key in ("content", "name")}
    sources: dict[str, int] = {}
    warned = False
    examples = file.examples(problems, numbers)
    while batch := list(islice(examples, MEASURED_TOGETHER)):
        worded = [word(example) for example in batch]
        _add_lengths(batch, worded, encoder, lengths)
        warned |= any(one.tools for one in worded)
        for example, one in zip(batch, worded, strict=True):
            length = lengths[example.prompt_hash, one.tools]
            if isinstance(length, Unreadable):
                problems.add(file.path, length.rule, length.fix, example.number, length.value)
            elif length == 0:
                problems.add(file.path, "a prompt has no tokens", "leave the row out", example.number)
            elif example.media and length > uncut:
                rule = "a prompt with media is longer than the limit of tokens, and data.truncation would cut it"
                problems.add(file.path, rule, CUT_FIX, example.number, f"{length} of {uncut} tokens")
            else:
                signed["number"].append(example.number)
                signed["length"].append(length)
                signed["source"].append(sources.setdefault(example.data_source, len(sources)))
                hashed["content"].append(int(example.content_hash, 16))
                hashed["name"].append(int(example.name_hash, 16))
    columns = {key: np.array(values, dtype=np.int64) for key, values in signed.items()}
    columns |= {key: np.array(values, dtype=np.uint64) for key, values in hashed.items()}
    return Measured(sources=tuple(sources), told=" with its tools' schemas" if warned else "", **columns)


def _add_lengths(examples: list[Example], worded: list[Worded], encoder: Encoder, lengths: Lengths) -> None:
    """Add the length of every new prompt, or why it has none."""
    new: dict[tuple[str, ...], dict[str, tuple[Example, Worded]]] = defaultdict(dict)  # by what they tell of
    for example, one in zip(examples, worded, strict=True):
        key = (example.prompt_hash, one.tools)
        if key not in lengths and (role := encoder.dropped_role(one)):
            lengths[key] = Unreadable("the chat template leaves out the text of a message", CHAT_FIX, f"role {role}")
        elif key not in lengths:
            new[one.tools][example.prompt_hash] = example, one
    for tools, measured in new.items():
        _add_alike(tools, measured, encoder, lengths)


def _add_alike(
    tools: tuple[str, ...], measured: Mapping[str, tuple[Example, Worded]], encoder: Encoder, lengths: Lengths
) -> None:
    """Add the lengths of prompts that tell of the same tools, in one call where none is refused or has media."""
    keys = [(key, tools) for key in measured]
    try:
        if not encoder.modality.reads_media and not any(example.media for example, _ in measured.values()):
            pairs = list(measured.values())
            prompts, arguments = [one.prompt for _, one in pairs], pairs[0][1].arguments
            lengths.update(zip(keys, map(len, encoder.encode(prompts, **arguments)), strict=True))
            return
    except ChatError:
        pass  # the one that is refused is found below
    for key, (example, one) in zip(keys, measured.values(), strict=True):
        try:
            lengths[key] = len(encoder.encode_example(example, one, decode=True)[0])
        except ChatError as error:
            lengths[key] = Unreadable("the chat template refuses a prompt", CHAT_FIX, str(error))
        except MediaError as error:
            lengths[key] = Unreadable(error.rule, error.fix, error.value)


def _ambiguous_names(files: Sequence[Measured]) -> frozenset[int]:
    """Return the hashes of names that stand for more than one question."""
    name = np.concatenate([measured.name for measured in files])
    content = np.concatenate([measured.content for measured in files])
    order = np.lexsort((content, name))
    name, content = name[order], content[order]
    differs = (name[1:] == name[:-1]) & (content[1:] != content[:-1])
    return frozenset(int(value) for value in name[1:][differs])
