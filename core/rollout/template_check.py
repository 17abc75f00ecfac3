"""Whether a chat template can carry what episodes add: tools' answers and simulated users' turns.

It is checked before a run begins, and by a dry run where the tokenizer's folder is on this machine; its template is
then rendered without loading the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.config.paths import is_local
from core.config.schema import Config
from core.config.section import thaw
from core.config.sections.model import ModelConfig
from core.data.chat_frames import ChatError, Message, Render, reply_frame
from core.errors import InputError
from core.rollout.call_formats import ANSWERED
from core.rollout.tools import check_tools
from core.rollout.users import check_users

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
A_TOOL = {"type": "function", "function": {"name": "tool", "description": "A tool.", "parameters": {"type": "object"}}}


class Use(NamedTuple):
    """What episodes write by the template: ``count`` messages of a role, each beginning with ``before``."""

    what: str
    role: str
    count: int = 1
    before: str = ""


def uses_of_template(config: Config, *, tools: bool, users: bool) -> list[Use]:
    """Return what episodes of the tool agent write by the chat template."""
    options = config.actor_rollout_ref.rollout.multi_turn
    role, before = ANSWERED[options.format]
    most = options.max_parallel_calls if role == "tool" else 1  # react has one call a turn
    uses = [Use("a tool's answer", role, count, before) for count in sorted({1, most})] if tools else []
    return uses + ([Use("a simulated user's turn", "user")] if users else [])


def template_problems(config: Config, render: Render, uses: Sequence[Use]) -> list[str]:
    """Return a line for each use that the template has no means for."""
    problems = []
    for use in uses:
        try:
            reply_frame(render, use.role, use.count, use.before)
        except ChatError as error:
            many = f" (and {use.count - 1} more)" if use.count > 1 else ""
            rule = f"the chat template cannot write {use.what}{many} as a message of role {use.role!r}: {error}"
            own = "set actor_rollout_ref.model.custom_chat_template to a template that does"
            other = f", or {MULTI_TURN}.format=react, which answers in a user's message" if use.role == "tool" else ""
            problems.append(f"{_named(config)}: {rule}; {own}{other}")
    return problems[:1]  # more calls a turn, or a user's turn, mostly fail for the same reason


def _named(config: Config) -> str:
    model = config.actor_rollout_ref.model
    if "chat_template" in config.data.apply_chat_template_kwargs:
        return "data.apply_chat_template_kwargs.chat_template"
    if model.custom_chat_template is not None:
        return "actor_rollout_ref.model.custom_chat_template"
    if model.tokenizer_path:
        return f"actor_rollout_ref.model.tokenizer_path={model.tokenizer_path}"
    return f"actor_rollout_ref.model.path={model.path}"


def problems_before_start(config: Config) -> list[str]:
    """Return what a dry run can know: the problems of the files of tools and users, and of a template at hand."""
    options, problems = config.actor_rollout_ref.rollout.multi_turn, []
    for path, check in ((options.tool_config_path, check_tools), (options.interaction_config_path, check_users)):
        if path is not None and Path(path).expanduser().is_file():
            try:
                check(path)
            except InputError as error:
                problems += error.problems
    tools, users = options.tool_config_path is not None, options.interaction_config_path is not None
    if problems or not (tools or users):
        return problems
    kwargs = {**thaw(config.data.apply_chat_template_kwargs), **({"tools": [A_TOOL]} if tools else {})}
    template, names = _template(config.actor_rollout_ref.model, tools=tools)
    template = kwargs.pop("chat_template", template)
    if not isinstance(template, str):
        return []
    uses = uses_of_template(config, tools=tools, users=users)
    return template_problems(config, _render(template, {**names, **kwargs}), uses)


def _template(model: ModelConfig, *, tools: bool) -> tuple[str | None, dict[str, str]]:
    """Return the template of a local tokenizer and its special tokens, as transformers chooses and names them."""
    path = model.tokenizer_path or model.path
    if not is_local(path):
        return model.custom_chat_template, {}
    folder, stored = Path(path).expanduser(), {}
    try:
        stored = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        own = stored.get("chat_template")
        if (folder / "chat_template.jinja").exists():
            own = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError, AttributeError):  # reported where the tokenizer is loaded
        return model.custom_chat_template, {}
    if isinstance(own, list):
        named = {one.get("name"): one.get("template") for one in own if isinstance(one, Mapping)}
        own = named.get("tool_use" if tools and "tool_use" in named else "default")
    tokens = {name: value for name, value in stored.items() if name.endswith("_token")}
    names = {name: value["content"] if isinstance(value, Mapping) else value for name, value in tokens.items()}
    names = {name: value for name, value in names.items() if isinstance(value, str)}
    return (own if model.custom_chat_template is None else model.custom_chat_template), names


def _render(template: str, names: Mapping[str, Any]) -> Render:
    """Return what renders a template as transformers' apply_chat_template does, without loading a tokenizer."""
    from transformers.utils.chat_template_utils import render_jinja_template  # it imports no torch

    def render(messages: Sequence[Message], **arguments: Any) -> str:
        texts, _ = render_jinja_template([list(messages)], chat_template=template, **{**names, **arguments})
        return texts[0]

    return render
