"""What is said of a key that the schema lacks, or whose value it refuses, with what to do instead."""

from __future__ import annotations

from typing import Any

from core.config import peer_names, recipes, verl_keys
from core.config.convert import all_keys, get, sections
from core.config.problem import Problem, show
from core.config.schema import Config
from core.config.section import MAPPING, build, hints

NOTHING_NEAR = "no known key is close to it; the command with --help WORD lists the keys that have to do with a word"


def unknown_key(key: str, value: Any, schema: type[Config]) -> Problem:
    """Return the problem with a key that the schema lacks, with what to do instead."""
    of_schema = sections(schema)
    if advice := verl_keys.advice(key, of_schema):
        return Problem(key, value, advice.rule, advice.fix)
    if meant := verl_keys.beside(key, all_keys(schema), of_schema):
        told = verl_keys.advice(meant, of_schema)
        more = f", which {told.rule}: {told.fix}" if told else ""
        return Problem(key, value, "unknown key", f"the nearest known key is {meant}{more}")
    if advice := verl_keys.advice(key):
        return Problem(key, value, advice.rule, advice.fix)
    for recipe, module in recipes.extended():
        if key.partition(".")[0] in hints(module.SCHEMA).keys() - hints(schema).keys():
            fix = f"use the recipe that has it: python -m recipes.{recipe}.main_{recipe}"
            return Problem(key, value, f"belongs to {module.PAPER}, and this recipe has no such key", fix)
    near = verl_keys.nearest(key, all_keys(schema))
    if (told := peer_names.advice(key)) and not (near or "").endswith(f".{key}"):
        return Problem(key, value, *told)
    return Problem(key, value, "unknown key", f"the nearest known key is {near}" if near else NOTHING_NEAR)


def validated(schema: type[Config], tree: Any, problems: list[Problem]) -> Config:
    """Return the typed configuration of a tree. What is wrong goes to ``problems``, and its key keeps the default."""
    config, refused = build(schema, tree)
    for key, value, rule in refused:
        if not rule:
            problems.append(unknown_key(key, value, schema))
        elif rule == MAPPING and key not in all_keys(schema):
            problems.append(Problem(key, value, "is a section of the configuration", "set one of its keys"))
        else:
            fix = verl_keys.hint(key) or f"the default is {show(get(config, key))}"
            problems.append(Problem(key, value, f"must be {rule}", fix))
    return config
