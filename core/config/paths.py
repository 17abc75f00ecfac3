"""Files and clusters that a configuration names, and what can only be checked when a run starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from core.config import convert, registry
from core.config.limits import is_plugin
from core.config.problem import Problem
from core.config.schema import Config
from core.files import is_url, url_problem

MODELS = ("actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path", "critic.model.path")
# The keys that may be URLs: what is read is copied first, what is written is checked when a run starts.
COPIED = {*MODELS, "reward_model.model.path", "trainer.resume_from_path"}
COPIED |= {"data.train_files", "data.val_files"}
WRITTEN = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")

CLUSTER_RULE = "needs a Ray cluster, and neither RAY_ADDRESS nor ray_kwargs.ray_init.address names one"
CLUSTER_FIX = (
    "type `ray start --head --port=6379` on the first node (the head node), `ray start --address=HEAD_IP:6379` on each "
    "of the others, then this command on any of them with RAY_ADDRESS=HEAD_IP:6379 in front"
)


def is_local(model: str) -> bool:
    """Return whether the text is a folder's path, neither a hub id nor a URL."""
    return model.startswith(("/", ".", "~"))


def run_folder(config: Config) -> Path:
    """Return the run's folder on this machine: of a URL ``outputs/remote/<protocol>/<its path>``."""
    folder = config.trainer.default_local_dir
    if not is_url(folder):
        return Path(folder)
    protocol, _, path = folder.partition("://")
    return Path("outputs", "remote", protocol, *(part for part in path.split("/") if part not in ("", ".", "..")))


def named(config: Config) -> Iterator[tuple[str, str]]:
    """Yield every (key, path or URL) that has to exist."""
    data, model, critic = config.data, config.actor_rollout_ref.model, config.critic
    yield from (("data.train_files", path) for path in data.train_files)
    yield from (("data.val_files", path) for path in data.val_files)
    models = {
        "actor_rollout_ref.model.path": model.path,
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path,
    }
    if critic.enable and critic.model.path != model.path:
        models["critic.model.path"] = critic.model.path
    yield from ((key, path) for key, path in models.items() if path and (is_local(path) or is_url(path)))
    if model.custom_chat_template is not None and names_template_file(model.custom_chat_template):
        yield TEMPLATE, model.custom_chat_template.strip()
    custom = (config.custom_reward_function.path or "").removeprefix("file://")
    if custom.endswith(".py"):
        yield "custom_reward_function.path", custom
    reward, scoring = config.reward_model, config.reward_model.model.path
    if reward.loads_model and (is_local(scoring) or is_url(scoring)):
        yield "reward_model.model.path", scoring
    if reward.judged and reward.judge.template:
        yield "reward_model.judge.template", reward.judge.template
    for name in ("tool_config_path", "interaction_config_path"):
        if path := getattr(config.actor_rollout_ref.rollout.multi_turn, name):
            yield f"actor_rollout_ref.rollout.multi_turn.{name}", path
    yield from _plugins(config)
    if config.trainer.resume_mode == "resume_path" and config.trainer.resume_from_path:
        yield "trainer.resume_from_path", config.trainer.resume_from_path


def _plugins(config: Config) -> Iterator[tuple[str, str]]:
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    functions = {
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "actor_rollout_ref.actor.policy_loss.loss_mode": loss,
        "actor_rollout_ref.rollout.agent_loop": config.actor_rollout_ref.rollout.agent_loop or "",
    }
    named_paths = [*functions.items(), *(("trainer.logger", name) for name in config.trainer.logger)]
    for key, value in named_paths:
        where = value.rpartition(":")[0]
        if is_plugin(value) and where.endswith(".py"):
            yield key, where


def missing(config: Config, among: frozenset[str] | None = None) -> list[Problem]:
    """Return the named paths that do not exist; only those of the keys in ``among``, where it is given.

    Of a URL the driver has to be there. Where ``among`` is not given, so that a run begins, it is looked up too.
    """
    problems: list[Problem] = []
    written = [(key, path) for key in WRITTEN if (path := convert.get(config, key))]
    for key, path in dict.fromkeys([*named(config), *written]):
        if is_url(path):
            problems += _url_problems(key, path, look=among is None)
        elif key in WRITTEN or among is not None and key not in among:
            continue
        elif not os.path.exists(_absolute(path)):
            problems.append(Problem(key, path, f"does not exist (looked for {_absolute(path)})", _where_from(key)))
    return problems


def _url_problems(key: str, url: str, look: bool) -> Iterator[Problem]:
    if key not in COPIED and key not in WRITTEN:
        yield Problem(key, url, "is read from this machine alone", "copy the file here and give its path")
    elif problem := url_problem(url, key, look=look and key in COPIED):
        yield Problem(key, url, *problem)


def _absolute(path: str) -> str:
    """Return the absolute path. Not pathlib's, which raises for the home of an unknown user and for too long a name."""
    return os.path.abspath(os.path.expanduser(path))


def _where_from(key: str) -> str:
    if key.startswith("data."):
        return "give parquet files; data_preprocess/ makes those of the public data sets"
    if key == TEMPLATE:
        return TEMPLATE_FIX
    return "give another path, a hub id (org/name) or a URL" if ".model." in key else "give another path"


def checked_at_start(config: Config) -> list[str]:
    """Return what a dry run leaves open: data, models, packages, devices, logins, checkpoints."""
    rollout, model, trainer = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, config.trainer
    files = sorted({path for key, path in named(config) if key.startswith("data.")})
    lines = [f"data: every row of {', '.join(files)} is read, measured and shown to its scorer"]
    source = "exists and is a model's folder" if is_local(model.path) else "is on the hub or in its cache"
    source = "can be read and is a model's folder" if is_url(model.path) else source
    lines.append(f"model: {model.path} {source}; its tokenizer and chat template")
    if package := registry.ENGINES[rollout.name].package:
        where = f"for the device of the run (actor_rollout_ref.rollout.name={rollout.name})"
        lines.append(f"package: {package} is installed, {where}")
    if rollout.name == "sglang":
        lines.append("server: SGLang has an environment (environment/sglang.sh)")
    if model.lora_rank or (config.critic.enable and config.critic.model.lora_rank):
        lines.append("package: peft can be imported (lora_rank)")
    if trainer.backend == "ray":
        lines.append("package: ray can be imported (trainer.backend=ray)")
        lines.append(f"devices: {trainer.nnodes} x {trainer.n_gpus_per_node} {trainer.device or 'cuda'} in the cluster")
        if not config.actor_rollout_ref.hybrid_engine:
            lines.append(f"devices: {rollout.nnodes} x {rollout.n_gpus_per_node} more for the engines")
    else:
        lines.append(f"device: {trainer.device or 'cuda if there is one, else cpu'}, and its memory")
    reward = config.reward_model
    if reward.judged:
        lines.append(f"judge: {reward.judge.url} has the model {reward.judge.model}")
    if reward.loads_model:
        lines.append(f"reward model: {reward.model.path} is a classifier with one label; its chat template")
    loggers = {name: registry.logger(name) for name in trainer.logger}
    lines += [f"package: {name} can be imported (trainer.logger)" for name, entry in loggers.items() if entry.function]
    lines += [f"login: {name}, {entry.login}" for name, entry in loggers.items() if entry.login]
    functions = {key for key, _ in _plugins(config)}
    if config.custom_reward_function.path:
        functions.add("custom_reward_function.path")
    for key in sorted(functions):
        lines.append(f"function: {key} can be loaded and called")
    lines.append(f"run folder: {trainer.default_local_dir} can be written; its checkpoints, if any, are complete")
    return lines


def cluster_address(config: Config) -> str | None:
    """Return the address of a cluster that exists. None: the run starts a Ray of its own on this machine."""
    address = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def address_problem(config: Config) -> Problem | None:
    """Return the problem of a run on several nodes that names no cluster, None for any other run.

    With ``trainer.device=cpu`` a local Ray stands for any number of nodes, because its CPUs are only tickets.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.backend != "ray" or trainer.device == "cpu" or cluster_address(config) is not None:
        return None
    nodes = {"trainer.nnodes": trainer.nnodes}
    if not config.actor_rollout_ref.hybrid_engine:
        nodes["actor_rollout_ref.rollout.nnodes"] = rollout.nnodes or 1
    return next((Problem(key, count, CLUSTER_RULE, CLUSTER_FIX) for key, count in nodes.items() if count > 1), None)


# --- a chat template, as text or as a file's path ---

# A file's text takes the path's place when a configuration is composed, so that the run's record holds what was used
# and every machine of a cluster has it. What a template writes for a chat is seen when the data is read.
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
TEMPLATE_FIX = "give a Jinja template that goes through messages, or the path of a file that holds one"


def names_template_file(value: str) -> bool:
    """Return whether the value is a path: one word without braces that has a slash or a file's ending."""
    word = value.strip()
    return bool(re.fullmatch(r"[^{}\n]+", word)) and bool("/" in word or re.search(r"^[^\s]+\.\w{2,7}$", word))


def with_template_text(config: Config) -> Config:
    """Return the configuration with the file's text where the key names a file that can be read."""
    value = config.actor_rollout_ref.model.custom_chat_template
    if value is None or not names_template_file(value):
        return config
    try:
        with open(os.path.expanduser(value.strip()), encoding="utf-8") as file:
            return convert.replaced(config, {TEMPLATE: file.read()})
    except (OSError, ValueError):  # what cannot be read is refused as a path, where paths are checked
        return config


def template_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with templates that prompts would be made of. Whether a file exists is not asked here."""
    value = config.actor_rollout_ref.model.custom_chat_template
    if value is not None and not names_template_file(value) and (rule := _broken(value)):
        yield Problem(TEMPLATE, value, rule, TEMPLATE_FIX)
    argument = config.data.apply_chat_template_kwargs.get("chat_template")  # a text, or one of the tokenizer's names
    if isinstance(argument, str) and names_template_file(argument):
        rule = "is a path, and every prompt would be this text"
        yield Problem("data.apply_chat_template_kwargs.chat_template", argument, rule, f"use {TEMPLATE}={argument}")


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
