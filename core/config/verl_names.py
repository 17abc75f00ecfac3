"""What a key or a value that the schema lacks means here: another version's name, or the nearest
key.

``verl_names.yaml`` has the keys of other versions of verl, a recipe's ``config/verl_keys.yaml``
those of a tree of its own; what depends on the rest of a command line is a function here, or in a
recipe's ``verl_keys.py``. What has another name here is read, what asks for nothing or for what is
done anyway is accepted and listed, anything else is refused.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from core.config import convert, recipes, registry
from core.config.schema import Config
from core.config.section import Problem

FILE = Path(__file__).with_name("verl_names.yaml")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
CHOICES = {  # a misspelt name of these tables is told the nearest one
    "algorithm.adv_estimator": registry.ESTIMATORS,
    f"{ACTOR}.policy_loss.loss_mode": registry.POLICY_LOSSES,
    f"{ROLLOUT}.name": registry.ENGINES,
    "trainer.logger": registry.LOGGERS,
}


@dataclass
class Composed:
    """A configuration and everything that was found out about it and about the command line."""

    recipe: str
    schema: type[Config]
    # Every key of the line, as it was typed, with its value
    words: dict[str, Any] = field(default_factory=dict)
    config: Config = None  # resolved; with ``problems`` a refused value is replaced by its default
    problems: Sequence[Any] = field(default_factory=list)
    warnings: Sequence[str] = field(default_factory=list)
    # Keys that an override set (no recipe's file), values as read
    given: dict[str, Any] = field(default_factory=dict)
    typed: frozenset[str] = frozenset()  # those of them that were typed
    # Those that a run script gives, whatever was typed over them
    scripted: frozenset[str] = frozenset()
    # Of another version -> what it means
    read: dict[str, tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)
    # Overrides that do nothing here -> value, reason
    unused: dict[str, tuple[Any, str]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()  # every key that has no effect, from any source
    foreign: dict[str, Any] = field(default_factory=dict)  # keys of another recipe's techniques

    def value(self, key: str) -> Any:
        """Return what the line gives to a key of the schema, or the schema's default."""
        return self.words[key] if key in self.words else convert.get(self.schema(), key)


@dataclass(frozen=True)
class Interpretation:
    """What a key or value of another version means: settings here, a reason why it does nothing, or
    rule and fix."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    unused: str = ""
    rule: str = ""
    fix: str = ""


def unknown_key(key: str, value: Any, line: Composed) -> Problem:
    """Return the problem with a key that the schema lacks, with what to do instead."""
    reading = read(key, value, line)
    if reading and reading.rule:
        return Problem(key, value, reading.rule, reading.fix)
    near = nearest(key, convert.all_keys(line.schema))
    nothing = (
        "no such key here; if only a fork reads it, leave it out (--help WORD lists the "
        "keys with a word)"
    )
    return Problem(
        key, value, "unknown key", f"the nearest known key is {near}" if near else nothing
    )


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that was probably meant, or None: no advice is better than a wrong one.

    It is the one key (of several the actor's) that is this one but for a letter, a hyphen or the
    case; one that ends like this one, whose first sections were left out, as it is or but for a
    letter; or one that differs by a misspelling of one name.
    """
    known = list(known)
    text = _plain(key)
    ways = (
        lambda other: _plain(other) == text,
        lambda other: f".{other}".endswith(f".{key}"),
        lambda other: one_letter_apart(text, other),
        lambda other: _ends_almost(text, other),
    )
    for is_near in ways:
        found = list(filter(is_near, known))
        found = [other for other in found if other.startswith(ACTOR)] if len(found) > 1 else found
        if len(found) == 1:
            return found[0]
    names, found = key.split("."), {}
    for other in (one.split(".") for one in known):
        pairs = [pair for pair in zip(names, other, strict=False) if pair[0] != pair[1]]
        if len(other) == len(names) and len(pairs) == 1:
            found[".".join(other)] = SequenceMatcher(None, *pairs[0]).ratio()
    return max((one for one in found if found[one] >= 0.9), key=found.get, default=None)


def _plain(key: str) -> str:
    return key.lower().replace("-", "_")


def _ends_almost(key: str, other: str) -> bool:
    """Return whether the end of ``other`` with as many names as ``key`` is that key but for a
    letter."""
    end = ".".join(other.split(".")[-key.count(".") - 1 :])
    return end != other and min(len(key), len(end)) > 3 and one_letter_apart(key, end)


def one_letter_apart(text: str, other: str) -> bool:
    """Return whether one letter is missing, added or another, or two neighbours changed places."""
    if abs(len(text) - len(other)) > 1 or text == other:
        return False
    if {len(text.rpartition(".")[2]), len(other.rpartition(".")[2])} == {1}:
        return False  # k is no misspelt n
    start = len(os.path.commonprefix([text, other]))
    text, other = text[start:], other[start:]
    end = len(os.path.commonprefix([text[::-1], other[::-1]]))
    text, other = text[: len(text) - end], other[: len(other) - end]
    return max(len(text), len(other)) <= 1 or len(text) == 2 and text == other[::-1]


def nearest_name(value: str, names: Iterable[str]) -> str | None:
    """Return the name of a table that a value is but for its case, or that it nearly is."""
    plain = {name.lower(): name for name in names}
    near = get_close_matches(value.lower(), plain, 1, 0.7)
    return plain[near[0]] if near and plain[near[0]] != value else None


# --- reading ---


def read(key: str, value: Any, line: Composed) -> Interpretation | None:
    """Return what an override means whose key the schema lacks, or None."""
    names, sections = table(line.recipe), convert.sections(line.schema)
    forms = [
        key,
        *(f"*{key.removeprefix(start)}" for start in sections if key.startswith(f"{start}.")),
    ]
    if any(_same(value, one) for form in forms for one in names["asks_nothing"].get(form, ())):
        return Interpretation(unused="ignored: already the behaviour")
    own = recipes.module_of(line.recipe, "verl_keys")
    conversion = (own.CONVERSIONS if own else {}).get(key) or CONVERSIONS.get(key)
    if conversion and (reading := conversion(key, value, line)):
        return reading
    for there, settings in names["means"].get(key, {}).items():
        if _same(value, there):
            return Interpretation(settings=settings)
    if target := _target(key, names["same"], line.schema):
        return Interpretation(settings={target: value})
    if reason := next(
        (names["no_effect"][form] for form in forms if form in names["no_effect"]), None
    ):
        return Interpretation(unused=reason)
    known = convert.known(key, line.schema) or nearest(key, convert.all_keys(line.schema))
    for pattern, rule, fix in sorted(names["refused"], key=lambda entry: entry[0] != key):
        if key == pattern or not known and fnmatchcase(key, pattern):
            return Interpretation(rule=rule, fix=fix.replace("{key}", key))
    return None


def read_value(key: str, value: Any, line: Composed) -> Interpretation | None:
    """Return what a value means that the schema refuses for a key of its own, or None."""
    names, given = table(line.recipe), value if isinstance(value, list | tuple) else [value]
    if key == "trainer.logger" and any(str(one) in names["files"] for one in given):
        return Interpretation(
            settings={
                key: list(dict.fromkeys("jsonl" if x in names["files"] else x for x in given))
            }
        )
    for there, here in names["values"].get(key, {}).items():
        if _same(value, there):
            return Interpretation(settings={key: here})
    choices = CHOICES.get(key) or _literals(convert.all_keys(line.schema).get(key))
    for one in given:
        if one not in [*choices] and (near := nearest_name(str(one), choices)):
            return Interpretation(fix=f"the nearest name is {near}")
    hint = next((text for name, text in names["hints"].items() if fnmatchcase(key, name)), None)
    return Interpretation(fix=hint) if hint else None


def _literals(hint: Any) -> tuple[Any, ...]:
    """Return the names that a type admits; none where it admits any text."""
    if get_origin(hint) is Literal:
        return tuple(name for name in get_args(hint) if isinstance(name, str))
    return tuple(name for part in get_args(hint) for name in _literals(part))


def older_defaults(line: Composed) -> list[str]:
    """Return a warning for each default of verl up to 0.3 that differs here and that a line of it
    relied on."""
    reward, given = "algorithm.use_kl_in_reward", line.words
    marks = [key for key in table()["older"] if key in given]
    marks += ["algorithm.kl_ctrl.kl_coef"] * (
        "algorithm.kl_ctrl.kl_coef" in given and reward not in given
    )
    if not marks or line.recipe == "sft":
        return []
    told = (
        f"this line has {marks[0]}, as lines of those versions have; give the value that is meant"
    )
    entropy = [
        f"{ACTOR}.entropy_coeff: 0.001 was verl's default up to 0.3, and it is 0 here; {told}"
    ]
    kl = [
        f"{reward}: verl up to 0.3 took a KL off the reward (kl_coef=0.001), and it is off "
        f"here; {told}"
    ]
    relied = [] if given.keys() & {reward, f"{ACTOR}.use_kl_loss"} else kl
    return [*([] if f"{ACTOR}.entropy_coeff" in given else entropy), *relied]


def described(recipe: str) -> Iterator[tuple[str, str]]:
    """Yield every name of the tables with what is said of it, for ``--help WORD``."""
    names = table(recipe)
    yield from ((key, f"is read as {target}") for key, target in names["same"].items())
    yield from ((key, f"has no effect: {why}") for key, why in names["no_effect"].items())
    yield from (
        (key, f"{rule}; {fix.replace('{key}', key)}") for key, rule, fix in names["refused"]
    )


@functools.cache
def table(recipe: str = "") -> dict[str, Any]:
    """Return the tables that a recipe's command lines are read with: the common ones and over them
    its own.

    What each table holds is said in ``verl_names.yaml``. ``no_effect`` and ``asks_nothing`` are
    turned to key -> reason and key -> values, ``refused`` to (key or pattern, rule, fix), of which
    the first that fits counts.
    """
    own = recipes.folder(recipe) / "verl_keys.yaml"
    tables = [convert.read_table(path) for path in (FILE, own) if path.exists()]
    mappings = ("same", "means", "values", "hints", "files", "older")
    joined = {
        name: {k: v for one in tables for k, v in one.get(name, {}).items()} for name in mappings
    }
    joined |= {"no_effect": {}, "asks_nothing": {}, "refused": []}
    for one in tables:
        for why, keys in one.get("no_effect", {}).items():
            joined["no_effect"] |= dict.fromkeys(flattened(keys), why)
        for value, keys in one.get("asks_nothing", ()):
            for key in flattened(keys):
                joined["asks_nothing"].setdefault(key, []).append(value)
        entries = [
            (key, each["rule"], each["fix"])
            for each in one.get("refused", ())
            for key in each["keys"]
        ]
        joined["refused"] = entries + joined["refused"]
    return joined


def flattened(keys: Iterable[Any]) -> list[str]:
    """Return the keys of a list of keys and of lists of keys."""
    return [key for part in keys for key in (part if isinstance(part, list) else [part])]


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _target(key: str, same: Mapping[str, str], schema: type[Config]) -> str | None:
    """Return the key here that another name stands for, or None. ``a.*`` names every key below
    ``a``."""
    if key in same:
        return same[key]
    starts = [
        one.removesuffix("*")
        for one in same
        if one.endswith(".*") and key.startswith(one.removesuffix("*"))
    ]
    if not starts:
        return None
    longest = max(starts, key=len)
    target = same[f"{longest}*"].removesuffix("*") + key.removeprefix(longest)
    return target if convert.known(target, schema) or recipes.owner_of(target) else None


# --- keys whose meaning depends on the rest of the line; None: the tables decide ---

Conversion = Callable[[str, Any, Composed], Interpretation | None]


def whole_number(value: Any) -> bool:
    """Return whether a value counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def over_all_ranks(target: str) -> Conversion:
    """Return the conversion of a micro-batch that counts trajectories over all ranks: verl divides
    by the ranks."""

    def per_rank(key: str, value: Any, line: Composed) -> Interpretation | None:
        part = "critic" if key.startswith("critic") else ACTOR
        shared = f"{part}.ulysses_sequence_parallel_size"
        sizes = [line.value(name) for name in ("trainer.nnodes", "trainer.n_gpus_per_node", shared)]
        if not all(map(whole_number, [*sizes, value])):
            return None
        ranks = max(sizes[0] * sizes[1] // sizes[2], 1)
        return Interpretation(settings={target: max(value // ranks, 1)})

    return per_rank


def sampled_validation(key: str, value: Any, line: Composed) -> Interpretation:
    """Read a setting of validation that samples, as forks of verl have it."""
    name = "n" if key.endswith("n_val") else "temperature"
    samples = isinstance(value, int | float) and value > (name == "n")
    sampling = {f"{ROLLOUT}.val_kwargs.do_sample": True} if samples else {}
    return Interpretation(settings={f"{ROLLOUT}.val_kwargs.{name}": value, **sampling})


def rejection(key: str, value: Any, line: Composed) -> Interpretation | None:
    """Read verl 0.6.0's way to weigh tokens of another policy: those outside the threshold may be
    masked."""
    if value != "mask":
        return None
    level = line.words.get("algorithm.rollout_is_level", "token")
    upper = line.words.get("algorithm.rollout_is_threshold", 2.0)
    if not line.words.get("algorithm.rollout_is"):
        return Interpretation(unused="read with algorithm.rollout_is=True")
    return Interpretation(
        settings={f"{CORRECTION}.rollout_rs": level, f"{CORRECTION}.rollout_rs_threshold": upper}
    )


MICRO = (f"{ACTOR}.ppo_micro_batch_size", "critic.ppo_micro_batch_size")
CONVERSIONS: dict[str, Conversion] = {
    **{key: over_all_ranks(f"{key}_per_gpu") for key in MICRO},
    "algorithm.rollout_is_mode": rejection,
    **dict.fromkeys((f"{ROLLOUT}.n_val", f"{ROLLOUT}.val_temperature"), sampled_validation),
}
