"""The chat template that ``actor_rollout_ref.model.custom_chat_template`` gives: as text, or as a file's path.

A file's text takes the path's place when a configuration is composed, so that the run's record holds what was used and
every machine of a cluster has it. What a template writes for a chat is seen when the data is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

from core.config import convert
from core.config.problem import Problem
from core.config.schema import Config

KEY = "actor_rollout_ref.model.custom_chat_template"
FIX = "give a Jinja template that goes through messages, or the path of a file that holds one"


def names_file(value: str) -> bool:
    """Return whether the value is a path: one word without braces that has a slash or a file's ending."""
    word = value.strip()
    return bool(re.fullmatch(r"[^{}\n]+", word)) and bool("/" in word or re.search(r"^[^\s]+\.\w{2,7}$", word))


def with_text(config: Config) -> Config:
    """Return the configuration with the file's text where the key names a file that can be read."""
    value = config.actor_rollout_ref.model.custom_chat_template
    if value is None or not names_file(value):
        return config
    try:
        with open(os.path.expanduser(value.strip()), encoding="utf-8") as file:
            return convert.replaced(config, {KEY: file.read()})
    except (OSError, ValueError):  # what cannot be read is refused as a path, where paths are checked
        return config


def problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with templates that prompts would be made of. Whether a file exists is not asked here."""
    value = config.actor_rollout_ref.model.custom_chat_template
    if value is not None and not names_file(value) and (rule := _broken(value)):
        yield Problem(KEY, value, rule, FIX)
    argument = config.data.apply_chat_template_kwargs.get("chat_template")  # a text, or one of the tokenizer's names
    if isinstance(argument, str) and names_file(argument):
        rule = "is a path, and every prompt would be this text"
        yield Problem("data.apply_chat_template_kwargs.chat_template", argument, rule, f"use {KEY}={argument}")


def _broken(text: str) -> str | None:
    """Return the rule that a template's text breaks, or None."""
    if "{{" not in text and "{%" not in text:
        return "has no variable: every prompt would be this text"
    if not re.search(r"\bmessages\b", text):
        return "does not read messages: every prompt would be the same"
    try:
        json.loads(text)
    except ValueError:
        return None
    return "is JSON and no template, which stands under its chat_template"
