"""What a key or a value that the schema lacks means here: another version's name, or the nearest key.

``verl_names.yaml`` has the keys of other versions of verl, a recipe's ``config/verl_keys.yaml`` those of a tree of its
own; what depends on the rest of a command line is a function here, or in a recipe's ``verl_keys.py``. Three things are
kept apart. What has another name here is read, and the line is printed as it was read. What asks for nothing, or for
what is done anyway, is accepted and listed. Anything else is refused with one thing to do, which stays in the key's
section and never makes a validation setting one of training.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from core.config import convert, recipes
from core.config.schema import Config
from core.config.section import Problem, hints, show

FILE = Path(__file__).with_name("verl_names.yaml")
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
SIMILAR = 0.7  # of names in one section: shufle and shuffle, not timeout_s and topk
VALIDATION = {"val", "valid", "validation", "eval", "test"}  # parts of names


@dataclass(frozen=True)
class CommandLine:
    """What a key or a value is read with.

    given: every key of the line, as it was typed, with its value.
    read: what has been read so far: key -> its value, and the settings that it means.
    """

    recipe: str
    schema: type[Config]
    given: dict[str, Any] = field(default_factory=dict)
    read: dict[str, tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)

    def value(self, key: str) -> Any:
        """Return what the line gives to a key of the schema, or the schema's default."""
        return self.given[key] if key in self.given else convert.get(self.schema(), key)


@dataclass(frozen=True)
class Interpretation:
    """What a key or value of another version means: settings here, a reason why it does nothing, or rule and fix."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    unused: str = ""
    rule: str = ""
    fix: str = ""


def unknown_key(key: str, value: Any, line: CommandLine) -> Problem:
    """Return the problem with a key that the schema lacks, with what to do instead."""
    reading = read(key, value, line)
    if reading and reading.rule:
        return Problem(key, value, reading.rule, reading.fix)
    for recipe, module in recipes.extended():
        own_sections = hints(module.SCHEMA).keys() - hints(line.schema).keys()
        if key in convert.all_keys(module.SCHEMA) or key.partition(".")[0] in own_sections:
            fix = f"use the recipe that has it: python -m recipes.{recipe}.main_{recipe}"
            return Problem(key, value, f"belongs to {module.PAPER}, and this recipe has no such key", fix)
    near = nearest(key, convert.all_keys(line.schema))
    nothing = "no key of its section is close to it; the command with --help WORD lists the keys with a word"
    return Problem(key, value, "unknown key", f"the nearest known key is {near}" if near else nothing)


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that was probably meant, or None: no advice is better than a wrong one.

    It is the one key that ends like this one, whose first sections were left out, or the most similar of those that
    differ in one name alone: ``data.train_bach_size``, ``actor_rollout_ref.rolout.n``.
    """
    known = list(known)
    ends = [other for other in known if other.endswith(f".{key}")]
    if key in known or len(ends) == 1:
        return key if key in known else ends[0]
    parts, similarity = key.split("."), {}
    for other in known:
        differing = [pair for pair in zip(parts, other.split("."), strict=False) if pair[0] != pair[1]]
        if other.count(".") == key.count(".") and len(differing) == 1:
            name, near = differing[0]
            # What is typed for validation is never training's
            if VALIDATION.isdisjoint(name.split("_")) == VALIDATION.isdisjoint(near.split("_")):
                similarity[other] = difflib.SequenceMatcher(None, name, near).ratio()
    best = max(similarity, key=similarity.get, default=None)
    return best if best is not None and similarity[best] > SIMILAR else None


# --- reading ---


def read(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Return what an override means whose key the schema lacks, or None."""
    names = table(line.recipe)
    forms = list(_forms(key, line.schema))
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
    if reason := next((names["no_effect"][form] for form in forms if form in names["no_effect"]), None):
        return Interpretation(unused=reason)
    if key in names["gone"]:
        return Interpretation(rule="is gone", fix=names["gone"][key])
    misspelt = convert.known(key, line.schema) or nearest(key, convert.all_keys(line.schema))
    for pattern, rule, fix in sorted(names["refused"], key=lambda entry: entry[0] != key):
        if key == pattern or not misspelt and fnmatchcase(key, pattern):
            return Interpretation(rule=rule, fix=fix.replace("{key}", key))
    return None


def read_value(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Return what a value means that the schema refuses for a key of its own, or None."""
    names = table(line.recipe)
    if key == "trainer.logger" and (reading := loggers(key, value, line)):
        return reading
    for there, here in names["values"].get(key, {}).items():
        if _same(value, there):
            return Interpretation(settings={key: here})
    hint = next((text for name, text in names["hints"].items() if fnmatchcase(key, name)), None)
    return Interpretation(fix=hint) if hint else None


# Keys that only lines of verl up to 0.3 have
OLDER_KEYS = """actor_rollout_ref.actor.checkpoint.contents actor_rollout_ref.actor.fsdp_config.grad_offload
critic.checkpoint.contents critic.model.fsdp_config.grad_offload actor_rollout_ref.rollout.n_agent
actor_rollout_ref.rollout.n_val actor_rollout_ref.rollout.val_temperature data.val_batch_size trainer.default_hdfs_dir
trainer.remove_previous_ckpt_in_save trainer.val_generations_to_log_to_wandb
actor_rollout_ref.actor.ppo_micro_batch_size critic.ppo_micro_batch_size"""


def older_defaults(line: CommandLine) -> list[str]:
    """Return a warning for each default of verl up to 0.3 that differs here and that a line of it relied on."""
    marks = sorted({*OLDER_KEYS.split()} & line.given.keys())
    entropy, reward, coefficient = f"{ACTOR}.entropy_coeff", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
    marks += [coefficient] if coefficient in line.given and reward not in line.given else []  # it was on by default
    if not marks or line.recipe == "sft":
        return []
    told = f"this line has {marks[0]}, as lines of verl's older versions have; give the value that is meant"
    lines = {
        f"{entropy}: 0.001 was verl's default up to 0.3, and it is 0 here": entropy in line.given,
        f"{reward}: verl up to 0.3 took the KL off the reward (algorithm.kl_ctrl.kl_coef=0.001) unless use_kl_loss was "
        "on, and it is off here": {reward, f"{ACTOR}.use_kl_loss"} & line.given.keys(),
    }
    return [f"{text}; {told}" for text, given in lines.items() if not given]


def described(recipe: str) -> Iterator[tuple[str, str]]:
    """Yield every name of the tables with what is said of it, for ``--help WORD``."""
    names = table(recipe)
    yield from ((key, f"is read as {target}") for key, target in names["same"].items())
    yield from ((key, f"has no effect: {why}") for key, why in names["no_effect"].items())
    yield from ((key, f"{rule}; {fix.replace('{key}', key)}") for key, rule, fix in names["refused"])


# --- the tables ---


@functools.cache
def table(recipe: str = "") -> dict[str, Any]:
    """Return the tables that a recipe's command lines are read with: its own, which counts first, and the common ones.

    same: key there -> key here. means: key there -> value there -> settings here. values: key here -> value there ->
    value here. hints: key here -> what to do. no_effect: key -> how its purpose is met. asks_nothing: key -> values
    that request nothing. gone: key of earlier versions of this repository -> what to do. refused: (key or pattern,
    rule, fix).
    """
    mappings = ("same", "means", "values", "hints", "gone")
    joined: dict[str, Any] = {name: {} for name in (*mappings, "no_effect", "asks_nothing")}
    joined["refused"] = []
    own = recipes.folder(recipe) / "verl_keys.yaml"
    for one in map(convert.read_table, (FILE, own) if own.exists() else (FILE,)):
        for name in mappings:
            joined[name].update(one.get(name, {}))
        joined["no_effect"].update({key: why for why, keys in one.get("no_effect", {}).items() for key in _flat(keys)})
        for value, keys in one.get("asks_nothing", ()):
            for key in _flat(keys):
                joined["asks_nothing"].setdefault(key, []).append(value)
        entries = [(key, each["rule"], each["fix"]) for each in one.get("refused", ()) for key in each["keys"]]
        joined["refused"] = entries + joined["refused"]  # the first that fits counts
    return joined


def _flat(keys: Iterable[Any]) -> Iterator[str]:
    for part in keys:
        yield from part if isinstance(part, list) else [part]


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _forms(key: str, schema: type[Config]) -> Iterator[str]:
    """Yield the forms in which a table may name a key: in full, or with ``*`` for a section of the schema."""
    yield key
    parts = key.split(".")
    for depth in range(1, len(parts)):
        if ".".join(parts[:depth]) in convert.sections(schema):
            yield ".".join(["*", *parts[depth:]])


def _target(key: str, same: Mapping[str, str], schema: type[Config]) -> str | None:
    """Return the key here that another name stands for, or None."""
    if key in same:
        return same[key]
    parts = key.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        if there := same.get(".".join([*parts[:depth], "*"])):
            target = ".".join([there.removesuffix(".*"), *parts[depth:]])
            return target if convert.known(target, schema) or recipes.switch_of(target) else None
    return None


# --- keys whose meaning depends on the rest of the line; None: the tables decide ---

Conversion = Callable[[str, Any, CommandLine], Interpretation | None]


def whole_number(value: Any) -> bool:
    """Return whether a value counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def over_all_ranks(target: str, ulysses: str | None) -> Conversion:
    """Return the conversion of a micro-batch that counts trajectories over all ranks: verl divides by the ranks."""

    def per_rank(key: str, value: Any, line: CommandLine) -> Interpretation | None:
        sizes = [line.value("trainer.nnodes"), line.value("trainer.n_gpus_per_node"), value]
        shared = line.value(ulysses) if ulysses else 1
        if not all(map(whole_number, [*sizes, shared])):
            return None
        ranks = max(sizes[0] * sizes[1] // shared, 1)
        return Interpretation(settings={target: max(value // ranks, 1)})

    return per_rank


def sampled_validation(key: str, value: Any, line: CommandLine) -> Interpretation:
    """Read a setting of validation that samples, as forks of verl have it."""
    name = "n" if key.endswith("n_val") else "temperature"
    samples = isinstance(value, int | float) and value > (1 if name == "n" else 0)
    settings = {f"{ROLLOUT}.val_kwargs.{name}": value, f"{ROLLOUT}.val_kwargs.do_sample": True}
    return Interpretation(settings=settings if samples else dict([*settings.items()][:1]))


def response_limit(key: str, value: Any, line: CommandLine) -> Interpretation:
    """Read the length that the length penalty counts from, which here is the response's."""
    name = "data.max_response_length"
    if value == line.value(name):
        return Interpretation(unused=f"the length penalty counts from {name}, which is the same")
    rule = f"is another length than {name}={show(line.value(name))}, from which the length penalty counts"
    return Interpretation(rule=rule, fix="leave it out")


def loggers(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Read services that are not here as the file that they can be fed from."""
    given = [name for name in (value if isinstance(value, list | tuple) else [value]) if isinstance(name, str)]
    others = ("file", "swanlab", "vemlp_wandb", "clearml", "trackio", "rl_logging_board")
    known = list(dict.fromkeys("jsonl" if name in others else name for name in given))
    return Interpretation(settings={key: known}) if {*given} & {*others} else None


MICRO = {  # key over all ranks -> the key that has the ranks which share a sequence
    f"{ACTOR}.ppo_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ROLLOUT}.log_prob_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{REF}.log_prob_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    "critic.ppo_micro_batch_size": "critic.ulysses_sequence_parallel_size",
    "reward_model.micro_batch_size": None,
}
CONVERSIONS: dict[str, Conversion] = {
    **{key: over_all_ranks(f"{key}_per_gpu", ulysses) for key, ulysses in MICRO.items()},
    **dict.fromkeys((f"{ROLLOUT}.n_val", f"{ROLLOUT}.val_temperature"), sampled_validation),
    **{f"{section}.reward_kwargs.max_resp_len": response_limit for section in ("reward", "reward_model")},
}
