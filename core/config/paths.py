"""Files and clusters that a configuration names, and what can only be checked when a run starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from core.config import convert, recipes, registry
from core.config.schema import Config
from core.config.section import Problem
from core.errors import InputError
from core.files import is_url, place

POLICY, REWARD = "actor_rollout_ref.model.path", "reward_model.model.path"
INSTEAD = (
    "give another path, or a hub id (org/name) of a model; data_preprocess/ makes parquet "
    "files of public data"
)
MAKE_IT = "type `{}`, which makes it, or give another path"
MODELS = (POLICY, "actor_rollout_ref.model.tokenizer_path", "critic.model.path")
OWN_FUNCTIONS = (
    *("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"),
    *("actor_rollout_ref.rollout.agent_loop", "trainer.logger"),
)


def is_local(model: str) -> bool:
    """Return whether the text is a folder's path, neither a hub id nor a URL; a folder that is
    there is one."""
    return model.startswith(("/", ".", "~")) or Path(model).is_dir()


def run_folder(config: Config) -> Path:
    """Return the run's folder on this machine: of a URL ``outputs/remote/<protocol>/<its
    path>``."""
    folder = config.trainer.default_local_dir
    if not is_url(folder):
        return Path(os.path.expanduser(folder))
    protocol, _, path = folder.partition("://")
    return Path(
        "outputs",
        "remote",
        protocol,
        *(part for part in path.split("/") if part not in ("", ".", "..")),
    )


def recipe_of(config: Config, run_dir: Path) -> str:
    """Return the recipe of a run: that of its configuration's class, or of the plain class the
    folder's parent."""
    package, _, rest = type(config).__module__.partition(".")
    return rest.partition(".")[0] if package == "recipes" else run_dir.resolve().parent.name


def models(config: Config) -> dict[str, str | None]:
    """Return key -> the model, of every key that names one: a path, URL or hub id; None where
    nothing loads one."""
    model, critic, reward = config.actor_rollout_ref.model, config.critic, config.reward_model
    critics = critic.model.path if critic.enable and critic.model.path != model.path else None
    rewards = reward.model.path if reward.loads_model else None
    found = dict(
        zip((*MODELS, REWARD), (model.path, model.tokenizer_path, critics, rewards), strict=True)
    )
    return found | {frozen.key: frozen.model.path for frozen in config.frozen_models.values()}


def named(config: Config) -> Iterator[tuple[str, str]]:
    """Yield every (key, path or URL) that has to exist."""
    multi_turn, reward, trainer = (
        config.actor_rollout_ref.rollout.multi_turn,
        config.reward_model,
        config.trainer,
    )
    custom = (config.custom_reward_function.path or "").removeprefix("file://")
    functions = {key: convert.get(config, key) or () for key in OWN_FUNCTIONS}
    functions = {
        key: (value,) if isinstance(value, str) else value for key, value in functions.items()
    }
    table = {
        "data.train_files": config.data.train_files,
        "data.val_files": config.data.val_files,
        **{
            key: [path]
            for key, path in models(config).items()
            if path and (is_local(path) or is_url(path))
        },
        "custom_reward_function.path": [custom] if custom.endswith(".py") else [],
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": [multi_turn.tool_config_path],
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path": [
            multi_turn.interaction_config_path
        ],
        "reward_model.judge.template": [reward.judge.template if reward.judged else None],
        "trainer.resume_from_path": [
            trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        ],
        **{
            key: [name.rpartition(":")[0] for name in value if ".py:" in name]
            for key, value in functions.items()
        },
    }
    yield from ((key, path) for key, paths in table.items() for path in paths if path)


def missing(config: Config, among: frozenset[str] | None = None) -> list[Problem]:
    """Return the named paths that do not exist; only those of the keys in ``among``, where it is
    given.

    Of a URL the driver has to be there. Where ``among`` is not given, so that a run begins, it is
    looked up too.
    """
    problems: list[Problem] = []
    for key, path in dict.fromkeys(named(config)):
        # Pathlib's raise for an unknown user and for a long name
        here = os.path.abspath(os.path.expanduser(path))
        if is_url(path):
            try:
                place(path, key, look=among is None)
            except InputError as error:
                rule, _, fix = str(error).removeprefix(f"{key}={path}: ").rpartition("; ")
                problems.append(Problem(key, path, rule, fix))
        elif (among is None or key in among) and not os.path.exists(here):
            command = recipes.maker_of(path)
            fix = MAKE_IT.format(command) if command else INSTEAD
            problems.append(Problem(key, path, f"does not exist (looked for {here})", fix))
    return problems


def not_checked(config: Config) -> list[str]:
    """Return what a dry run leaves open: what is elsewhere, packages, servers, devices, logins,
    checkpoints."""
    trainer, over_ray = config.trainer, config.trainer.backend == "ray"
    found = [*named(config), *models(config).items()]
    away = [
        one
        for one in found
        if one[1] and (is_url(one[1]) or not os.path.exists(os.path.expanduser(one[1])))
    ]
    loggers = {name: entry for name in trainer.logger if (entry := registry.logger(name)).function}
    packages = [
        registry.ENGINES[config.actor_rollout_ref.rollout.name].package,
        "ray" if over_ray else None,
    ]
    values = convert.as_json(config)
    devices = f"{trainer.nnodes} x {trainer.n_gpus_per_node} " if over_ray else ""
    return [
        *(f"not on this machine: {key}={path}" for key, path in dict.fromkeys(away)),
        *(f"package: {name} can be imported" for name in packages if name),
        *(
            f"server: {key}={value} answers"
            for key, value in values.items()
            if value and key.endswith(".url")
        ),
        f"devices: {devices}{trainer.device or 'cuda if there is one, else cpu'}; the weights fit "
        f"on them",
        *(f"login: {name}, {entry.login}" for name, entry in loggers.items() if entry.login),
        f"run folder: {trainer.default_local_dir} can be written; its checkpoints, if any, are "
        f"complete",
    ]


# --- clusters ---


def cluster_address(config: Config) -> str | None:
    """Return the address of a cluster that exists. None: the run starts a Ray of its own on this
    machine."""
    address = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def address_problem(config: Config) -> Problem | None:
    """Return the problem of a run on several nodes that names no cluster; on CPUs a local Ray
    stands for all nodes."""
    trainer, part = config.trainer, config.actor_rollout_ref
    if trainer.backend != "ray" or trainer.device == "cpu" or cluster_address(config) is not None:
        return None
    nodes = {"trainer.nnodes": trainer.nnodes}
    if not part.hybrid_engine:
        nodes["actor_rollout_ref.rollout.nnodes"] = part.rollout.nnodes
    rule = "needs a Ray cluster, and neither RAY_ADDRESS nor ray_kwargs.ray_init.address names one"
    fix = (
        "type `ray start --head` on the first node, `ray start --address=HEAD_IP:6379` on the "
        "others, then this "
    )
    fix += "command on any of them with RAY_ADDRESS=HEAD_IP:6379 in front"
    return next((Problem(key, count, rule, fix) for key, count in nodes.items() if count > 1), None)
