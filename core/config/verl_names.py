"""What a key, a value or a group choice that the schema lacks means here: another version's name, or the nearest key.

``verl_names.yaml`` has the keys of other versions of verl, a recipe's ``config/verl_keys.yaml`` those of a tree of its
own; what depends on the rest of a command line is a function here, or in a recipe's ``verl_keys.py``. Three things are
kept apart. What has another name here is read, and the line is printed as it was read. What asks for nothing, or for
what is done anyway, is accepted and listed. Anything else is refused with one thing to do, which stays in the key's
section and never makes a validation setting one of training.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from core.config import convert, recipes
from core.config.convert import read_table
from core.config.problem import Problem, show
from core.config.schema import Config
from core.config.section import hints

FILE = Path(__file__).with_name("verl_names.yaml")
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
VAL = f"{ROLLOUT}.val_kwargs"
SIMILAR = 0.7  # of names in one section: shufle and shuffle, not timeout_s and topk


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
            if _of_validation(name) == _of_validation(near):  # what is typed for one is never the other's
                similarity[other] = difflib.SequenceMatcher(None, name, near).ratio()
    best = max(similarity, key=similarity.get, default=None)
    return best if best is not None and similarity[best] > SIMILAR else None


def _of_validation(name: str) -> bool:
    return not {"val", "valid", "validation", "eval", "test"}.isdisjoint(name.split("_"))


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
    if target := _target(key, names["same"], line.schema):
        return Interpretation(settings={target: value})
    if reason := next((names["no_effect"][form] for form in forms if form in names["no_effect"]), None):
        return Interpretation(unused=reason)
    if key in names["gone"]:
        return Interpretation(rule="is gone", fix=names["gone"][key])
    misspelt = convert.known(key, line.schema) or nearest(key, convert.all_keys(line.schema))
    named = [entry for entry in names["refused"] if key == entry[0]]
    like = [entry for entry in names["refused"] if not misspelt and fnmatchcase(key, entry[0])]
    for _, rule, fix in [*named, *like][:1]:
        return Interpretation(rule=rule, fix=fix.replace("{key}", key))
    return None


def read_value(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Return what a value means that the schema refuses for a key of its own, or None."""
    names = table(line.recipe)
    if key in VALUES and (reading := VALUES[key](key, value, line)):
        return reading
    for there, here in names["values"].get(key, {}).items():
        if _same(value, there):
            return Interpretation(settings={key: here})
    hint = next((text for name, text in names["hints"].items() if fnmatchcase(key, name)), None)
    return Interpretation(fix=hint) if hint else None


def older_defaults(line: CommandLine) -> list[str]:
    """Return a warning for each default of verl up to 0.3 that differs here and that a line of it relied on."""
    if own := recipes.module_of(line.recipe, "verl_keys"):
        return own.warnings(line)
    marks = sorted(table(line.recipe)["older_defaults"] & line.given.keys())
    coefficient, reward = "algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward"
    if not marks or (line.given.get(coefficient) and reward not in line.given):  # a rule says it then
        return []
    entropy = f"{ACTOR}.entropy_coeff"
    kl = {reward, f"{ACTOR}.use_kl_loss"} & line.given.keys()
    lines = {
        f"{entropy}: 0.001 was verl's default up to 0.3, and it is 0 here": entropy not in line.given,
        f"{reward}: verl up to 0.3 took the KL off the reward (algorithm.kl_ctrl.kl_coef=0.001) unless "
        "use_kl_loss was on, and it is off here": not kl,
    }
    told = f"this line has {marks[0]}, a key of verl's older versions; give the value that is meant"
    return [f"{text}; {told}" for text, missing in lines.items() if missing]


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

    same: key there -> key here. values: key here -> value there -> value here. hints: key here -> what to do.
    no_effect: key -> how its purpose is met. asks_nothing: key -> values that request nothing. gone: key of earlier
    versions of this repository -> what to do. refused: (key or pattern, rule, fix). older_defaults: keys of lines that
    relied on defaults of verl up to 0.3.
    """
    files = [read_table(FILE)]
    if own := recipe and recipes.table(recipe, "verl_keys.yaml"):
        files.append(own)
    joined: dict[str, Any] = {name: {} for name in ("same", "values", "hints", "no_effect", "asks_nothing", "gone")}
    joined |= {"refused": [], "older_defaults": set()}
    for one in files:
        for name in ("same", "values", "hints", "gone"):
            joined[name].update(one.get(name, {}))
        joined["no_effect"].update({key: why for why, keys in one.get("no_effect", {}).items() for key in _flat(keys)})
        for value, keys in one.get("asks_nothing", ()):
            for key in _flat(keys):
                joined["asks_nothing"].setdefault(key, []).append(value)
        entries = [(key, each["rule"], each["fix"]) for each in one.get("refused", ()) for key in each["keys"]]
        joined["refused"] = entries + joined["refused"]  # the first that fits counts
        joined["older_defaults"].update(_flat(one.get("older_defaults", {}).get("keys", ())))
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


def sampled_validation(name: str) -> Conversion:
    """Return the conversion of a setting of validation that samples, as forks of verl have it."""

    def settings(key: str, value: Any, line: CommandLine) -> Interpretation:
        samples = isinstance(value, int | float) and value > (1 if name == "n" else 0)
        return Interpretation(settings={f"{VAL}.{name}": value, **({f"{VAL}.do_sample": True} if samples else {})})

    return settings


def previous_checkpoint(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    return Interpretation(settings={"trainer.max_actor_ckpt_to_keep": 1}) if value is True else None


def profiled_steps(key: str, value: Any, line: CommandLine) -> Interpretation:
    return Interpretation(settings={"global_profiler.tool": "torch", "global_profiler.steps": value})


def token_level_loss(key: str, value: Any, line: CommandLine) -> Interpretation:
    mode = "token-mean" if value is True else "seq-mean-token-mean"
    return Interpretation(settings={f"{ACTOR}.loss_agg_mode": mode})


def response_limit(key: str, value: Any, line: CommandLine) -> Interpretation:
    """Read the length that the length penalty counts from, which here is the response's."""
    name = "data.max_response_length"
    if value == line.value(name):
        return Interpretation(unused=f"the length penalty counts from {name}, which is the same")
    rule = f"is another length than {name}={show(line.value(name))}, from which the length penalty counts"
    return Interpretation(rule=rule, fix="leave it out")


def consent_to_code(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    name = "actor_rollout_ref.model.trust_remote_code"
    decided = value is False or line.value(name) is True
    return Interpretation(unused=f"{name} decides") if decided else None


def weights_dtype(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Read the number format of weights: of the reference, which does not train, that of its passes."""
    if value not in ("bf16", "bfloat16"):
        return None
    if key.startswith(REF):
        return Interpretation(settings={f"{REF}.fsdp_config.dtype": "bfloat16"})
    kept = "master weights stay in float32, where small updates are not lost; passes are in dtype"
    return Interpretation(unused=kept)


def served_reward_model(name: str) -> Conversion:
    """Return the conversion of a key of main's reward model, which is a classifier unless a function asks it."""

    def classifier(key: str, value: Any, line: CommandLine) -> Interpretation | None:
        paths = ("custom_reward_function.path", "reward.custom_reward_function.path")
        if any(line.given.get(path) for path in paths):
            return None
        if name:
            return Interpretation(settings={f"reward_model.{name}": value})
        why = "the classifier is computed in the run's own processes, on whole prompts and answers"
        return Interpretation(unused=why)

    return classifier


def run_name(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Read a run's name with slashes, which verl makes folders of, as the name of one folder."""
    plain = isinstance(value, str) and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)+", value)
    return Interpretation(settings={key: value.replace("/", "-")}) if plain else None


def loggers(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Read services that are not here as the file that they can be fed from."""
    names = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(name, str) for name in names):
        return None
    others = ("file", "swanlab", "vemlp_wandb", "clearml", "trackio", "rl_logging_board")
    known = list(dict.fromkeys("jsonl" if name in others else name for name in names))
    return Interpretation(settings={key: known}) if known != names else None


VALUES: dict[str, Conversion] = {  # of keys that the schema has, where it refuses what was given
    "trainer.experiment_name": run_name,
    "trainer.project_name": run_name,
    "trainer.logger": loggers,
}
_SERVED = ("name", "gpu_memory_utilization", "tensor_model_parallel_size", "free_cache_engine", "enforce_eager")
_SERVED += ("prompt_length", "response_length", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype")
_MICRO = {  # key over all ranks -> the key that has the ranks which share a sequence
    f"{ACTOR}.ppo_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ROLLOUT}.log_prob_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{REF}.log_prob_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    "critic.ppo_micro_batch_size": "critic.ulysses_sequence_parallel_size",
    "reward_model.micro_batch_size": None,
}
_POOL = ("enable", "enable_resource_pool", "nnodes", "n_gpus_per_node")
CONVERSIONS: dict[str, Conversion] = {
    **{key: over_all_ranks(f"{key}_per_gpu", ulysses) for key, ulysses in _MICRO.items()},
    f"{ROLLOUT}.n_val": sampled_validation("n"),
    f"{ROLLOUT}.val_temperature": sampled_validation("temperature"),
    "trainer.remove_previous_ckpt_in_save": previous_checkpoint,
    "trainer.profile_steps": profiled_steps,
    f"{ACTOR}.use_token_level_loss": token_level_loss,
    "reward.reward_kwargs.max_resp_len": response_limit,
    "reward_model.reward_kwargs.max_resp_len": response_limit,
    "data.trust_remote_code": consent_to_code,
    f"{ROLLOUT}.trust_remote_code": consent_to_code,
    **{f"{part}.fsdp_config.model_dtype": weights_dtype for part in (ACTOR, REF, "critic.model")},
    **{f"reward.reward_model.{name}": served_reward_model(name) for name in _POOL},
    "reward.reward_model.model_path": served_reward_model("model.path"),
    **{f"reward.reward_model.rollout.{name}": served_reward_model("") for name in _SERVED},
}
