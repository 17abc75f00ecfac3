"""Configurations that a run, a checkpoint or a file of answers recorded, and what their keys mean.

The role of a key tells what its change means; its field in the schema has it. Code is named on the
command line, never by a record, which may come from anybody: a command that takes settings from one
first calls :func:`core.config.composition.refuse_code`.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from core.config import convert, recipes
from core.config.defaults import resolve
from core.config.paths import OWN_FUNCTIONS
from core.config.schema import Config
from core.config.section import (
    IDENTITY,
    RULE_SECTION,
    RULE_UNKNOWN,
    Problem,
    build,
    hints,
    is_section,
    key_option,
    show,
)
from core.config.unknown_keys import unknown_key
from core.config.verl_names import Line, read_value
from core.secret_keys import without_hidden

# Keys whose value is code, a file that names some, or an argument that a library imports. Besides,
# the keys of OWN_FUNCTIONS name code by a path with a colon, and options of a scorer may lift
# the sandbox.
CODE = re.compile(
    r"((tool|interaction)_config_path|custom_reward_function\.(path|name)|override_config"
    r"|engine_kwargs|ray_init|trust_remote_code|allow_unisolated|rollout\.agent\.command)$"
)


def validated(schema: type[Config], tree: Any, line: Line) -> tuple[Config, list[Problem]]:
    """Return the typed configuration of a tree, and a problem for each key that was refused.

    Such a key keeps its default.
    """
    config, refused = build(schema, tree)
    problems = []
    for key, value, rule in refused:
        if rule == RULE_UNKNOWN:
            problems.append(unknown_key(key, value, schema))
        elif rule == RULE_SECTION:
            problems.append(Problem(key, value, rule, "set one of its keys"))
        else:
            hint = read_value(key, value, line)
            fix = hint.fix if hint else f"the default is {show(convert.get(config, key))}"
            problems.append(Problem(key, value, rule, fix))
    return config, problems


@functools.cache
def schemas() -> list[type[Config]]:
    """Return the classes of all recipes' configurations."""
    return [Config, *(module.SCHEMA for _, module in recipes.extended())]


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return flat key -> default of every recipe: in another recipe's record it means nothing."""
    return {key: value for schema in schemas() for key, value in convert.as_json(schema()).items()}


def _leaves(values: Mapping[str, Any], schema: type[Config]) -> Iterator[tuple[str, Any]]:
    """Yield flat keys and values (as JSON has them) of a configuration, nested or flat."""
    for key, value in convert.leaves(values, lambda key: convert.known(key, schema)):
        yield key, json.loads(json.dumps(value, default=str))


def own_tree(values: Mapping[str, Any], schema: type[Config]) -> dict[str, Any]:
    """Return a recorded configuration as a tree of the schema's keys, without secrets."""
    leaves = _leaves(without_hidden(values), schema)
    return convert.nested({key: value for key, value in leaves if convert.known(key, schema)})


def completed(values: Mapping[str, Any], schema: type[Config], recipe: str = "") -> dict[str, Any]:
    """Return flat key -> value (as JSON has it) of a configuration that any version wrote.

    ``values`` may be nested or flat. A key that it lacks has its default, which may follow from
    others. A value that the schema refuses is as it was recorded, and so is a key of another
    recipe, if it was changed. A key that no recipe has any more counts as nothing. So two versions'
    records of the same settings are equal.
    """
    config, problems = validated(schema, own_tree(values, schema), Line(recipe))
    complete = convert.as_json(resolve(config, recipe))
    for key, value in _leaves(values, schema):
        if not convert.known(key, schema) and value != _defaults().get(key, value):
            complete[key] = value
    return complete | {problem.key: problem.value for problem in problems}


def role_of(key: str) -> str:
    """Return the role of a flat key, or of one inside a user's own mapping.

    It is IDENTITY if no schema has the key.
    """
    for section in schemas():
        role = None
        for name in key.split("."):
            if name not in section.model_fields:
                break
            role = key_option(section, name, "role") or role
            section = hints(section)[name]
            if not is_section(section):
                return role or IDENTITY
    return IDENTITY


def code_in(config: Config) -> dict[str, Any]:
    """Return flat key -> value of all that names code in a configuration."""
    code: dict[str, Any] = {}
    defaults = convert.flat(type(config)())
    for key, value in convert.flat(config).items():
        text = json.dumps(value, default=str)
        names = CODE.search(key) or (key in OWN_FUNCTIONS and ":" in text)
        if (names or "allow_unisolated" in text) and value and value != defaults[key]:
            code |= convert.leaves({key: value})
    return code
