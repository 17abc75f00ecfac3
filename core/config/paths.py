"""Files and clusters that a configuration names, and what can only be checked when a run starts."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from core.config import convert, recipes, registry
from core.config.schema import Config
from core.config.section import Problem
from core.errors import InputError
from core.files import is_url, place

OWN_FUNCTIONS = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.rollout.agent_loop",
    "actor_rollout_ref.rollout.agent.path",
    "trainer.logger",
)


def is_local(model: str) -> bool:
    """Return whether the text is a folder's path, neither a hub id nor a URL."""
    is_no_id = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return (is_no_id and not is_url(model)) or Path(model).is_dir()


def run_folder(config: Config) -> Path:
    """Return the run's folder on this machine: of a URL ``outputs/remote/<protocol>/<path>``."""
    folder = config.trainer.default_local_dir
    if not is_url(folder):
        return Path(os.path.expanduser(folder))
    protocol, _, path = folder.partition("://")
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return Path("outputs", "remote", protocol, *parts)


def recipe_of(config: Config, run_dir: Path) -> str:
    """Return the recipe of a run: its configuration's class's, else the folder's parent's name."""
    package, _, rest = type(config).__module__.partition(".")
    return rest.partition(".")[0] if package == "recipes" else run_dir.resolve().parent.name


def models(config: Config) -> dict[str, str | None]:
    """Return key -> path, URL or hub id of every model; None if nothing loads the key's model."""
    policy = config.actor_rollout_ref.model
    critic = config.critic.model.path
    reward = config.reward_model
    is_another = config.has_critic and critic != policy.path
    return {
        "actor_rollout_ref.model.path": policy.path,
        "actor_rollout_ref.model.tokenizer_path": policy.tokenizer_path,
        "critic.model.path": critic if is_another else None,
        "reward_model.model.path": reward.model.path if reward.loads_model else None,
        **{frozen.key: frozen.model.path for frozen in config.frozen_models.values()},
    }


def named(config: Config) -> Iterator[tuple[str, str]]:
    """Yield every (key, path or URL) that has to exist."""
    for key in ("data.train_files", "data.val_files"):
        yield from ((key, path) for path in convert.get(config, key))
    for key, path in models(config).items():
        if path and (is_local(path) or is_url(path)):
            yield key, path
    for key in OWN_FUNCTIONS:
        value = convert.get(config, key) or ()
        for name in (value,) if isinstance(value, str) else value:
            if ".py:" in name:
                yield key, name.rpartition(":")[0]
    scorer = (config.custom_reward_function.path or "").removeprefix("file://")
    if scorer.endswith(".py"):
        yield "custom_reward_function.path", scorer
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    read = {
        f"{multi_turn}.tool_config_path": True,
        f"{multi_turn}.interaction_config_path": True,
        "reward_model.judge.template": config.reward_model.judged,
        "trainer.resume_from_path": config.trainer.resume_mode == "resume_path",
    }
    for key, is_read in read.items():
        if is_read and (path := convert.get(config, key)):
            yield key, path


def missing(config: Config, among: Collection[str] | None = None) -> list[Problem]:
    """Return the named paths that do not exist, those of the keys in ``among``.

    None means all keys: a run begins, and URLs are looked up. Otherwise only the driver of a URL
    has to be there.
    """
    problems: list[Problem] = []
    for key, path in dict.fromkeys(named(config)):
        # pathlib raises for an unknown user and for a long name
        here = os.path.abspath(os.path.expanduser(path))
        if is_url(path):
            try:
                place(path, key, look=among is None)
            except InputError as error:
                rule, _, fix = str(error).removeprefix(f"{key}={path}: ").rpartition("; ")
                problems.append(Problem(key, path, rule, fix))
        elif (among is None or key in among) and not os.path.exists(here):
            fix = "give another path"
            if command := recipes.maker_of(path):
                fix = f"type `{command}`, which makes it, or {fix}"
            elif key.startswith("data."):
                fix += "; data_preprocess/ makes parquet files of public data"
            elif key in models(config):
                fix += ", or a hub id (org/name)"
            problems.append(Problem(key, path, f"does not exist (looked for {here})", fix))
    return problems


def not_checked(config: Config) -> Iterator[str]:
    """Yield what a dry run leaves open: what is elsewhere, packages, servers, devices, logins."""
    trainer = config.trainer
    over_ray = trainer.backend == "ray"
    for key, path in dict.fromkeys((*named(config), *models(config).items())):
        if path and (is_url(path) or not os.path.exists(os.path.expanduser(path))):
            yield f"not on this machine: {key}={path}"
    engine = registry.ENGINES[config.actor_rollout_ref.rollout.name]
    for package in filter(None, (engine.package, "ray" if over_ray else None)):
        yield f"package: {package} can be imported"
    for key, value in convert.as_json(config).items():
        if value and key.endswith(".url"):
            yield f"server: {key}={value} answers"
    count = f"{trainer.nnodes} x {trainer.n_gpus_per_node} " if over_ray else ""
    device = trainer.device or "cuda if there is one, else cpu"
    yield f"devices: {count}{device}; the weights fit on them"
    for name in trainer.logger:
        if login := registry.logger(name).login:
            yield f"login: {name}, {login}"
    folder = trainer.default_local_dir
    yield f"run folder: {folder} can be written; its checkpoints, if any, are complete"


# --- clusters ---


def cluster_address(config: Config) -> str | None:
    """Return the address of a cluster; None if the run starts a Ray of its own on this machine."""
    address = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def address_problem(config: Config) -> Problem | None:
    """Return the problem of a run on several nodes that names no cluster.

    On CPUs a local Ray stands for all nodes.
    """
    trainer = config.trainer
    models = config.actor_rollout_ref
    if trainer.backend != "ray" or trainer.device == "cpu" or cluster_address(config) is not None:
        return None
    nodes = {"trainer.nnodes": trainer.nnodes}
    if not models.hybrid_engine:
        nodes["actor_rollout_ref.rollout.nnodes"] = models.rollout.nnodes
    rule = "needs a Ray cluster, and neither RAY_ADDRESS nor ray_kwargs.ray_init.address names one"
    fix = (
        "type `ray start --head` on the first node, `ray start --address=HEAD_IP:6379` on the "
        "others, then this command on any of them with RAY_ADDRESS=HEAD_IP:6379 in front"
    )
    return next((Problem(key, count, rule, fix) for key, count in nodes.items() if count > 1), None)
