"""What a key, a value or a group choice of another version of verl means here: settings, nothing, or an advice.

Three things are kept apart. What has another name here is read, and the line is printed as it was read. What asks for
nothing, or for what is done anyway, is accepted and listed. Anything else is refused with one thing to do, which stays
in the key's section and never makes a validation setting one of training.
"""

from __future__ import annotations

from typing import Any

from core.config import convert, recipes
from core.config.unknown_keys import CommandLine, Interpretation, nearest
from core.config.verl_keys.conversions import CONVERSIONS, VALUES
from core.config.verl_keys.tables import tables


def read(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Return what an override means whose key the schema lacks, or None."""
    table = tables(line.recipe)
    if table.requests_nothing(key, value, line.schema):
        return Interpretation(unused="ignored: already the behaviour")
    own = recipes.module_of(line.recipe, "verl_keys")
    convert_key = {**CONVERSIONS, **(own.CONVERSIONS if own else {})}.get(key)
    if convert_key and (reading := convert_key(key, value, line)):
        return reading
    if target := table.target(key, line.schema):
        return Interpretation(settings={target: value})
    if reason := table.reason(key, line.schema):
        return Interpretation(unused=reason)
    misspelt = convert.known(key, line.schema) or nearest(key, convert.all_keys(line.schema))
    advice = table.advice(key, by_pattern=not misspelt)
    return Interpretation(rule=advice[0], fix=advice[1]) if advice else None


def read_value(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Return what a value means that the schema refuses for a key of its own, or None."""
    table = tables(line.recipe)
    if key in VALUES and (reading := VALUES[key](key, value, line)):
        return reading
    for there, here in table.values.get(key, {}).items():
        if value == there and isinstance(value, bool) == isinstance(there, bool):
            return Interpretation(settings={key: here})
    hint = table.hint(key)
    return Interpretation(fix=hint) if hint else None


def older_defaults(line: CommandLine) -> list[str]:
    """Return a warning for each default of verl up to 0.3 that differs here and that a line of it relied on."""
    if own := recipes.module_of(line.recipe, "verl_keys"):
        return own.warnings(line)
    marks = sorted(tables(line.recipe).older & line.given.keys())
    coefficient, reward = "algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward"
    if not marks or (line.given.get(coefficient) and reward not in line.given):  # a rule says it then
        return []
    entropy = "actor_rollout_ref.actor.entropy_coeff"
    kl = {reward, "actor_rollout_ref.actor.use_kl_loss"} & line.given.keys()
    lines = {
        f"{entropy}: 0.001 was verl's default up to 0.3, and it is 0 here": entropy not in line.given,
        f"{reward}: verl up to 0.3 took the KL off the reward (algorithm.kl_ctrl.kl_coef=0.001) unless "
        "use_kl_loss was on, and it is off here": not kl,
    }
    told = f"this line has {marks[0]}, a key of verl's older versions; give the value that is meant"
    return [f"{text}; {told}" for text, missing in lines.items() if missing]
