"""All that the repository knows about a name in a configuration: one entry of one table.

Adding an estimator, a policy loss, an engine, a reward manager, a logger or an agent loop touches two files: a function
in a module of its own, and an entry here. The schema takes its names from these tables, the rules, the unused keys and
the plan read the facts, and :mod:`core.config.plugins` imports the function when a run first uses it. This module
imports nothing heavy. A user's own function, named by its path, needs no entry.

``function`` is always ``module:name``. ``reads`` lists the keys of the entry's section that not every other entry
reads: where they are set for an entry without them, they are reported as unused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.config import extensions
from core.config.entries import (
    CLIP,
    SERVING,
    AgentLoopEntry,
    EngineEntry,
    EstimatorEntry,
    LoggerEntry,
    LossEntry,
    ManagerEntry,
)

ESTIMATORS = {
    "gae": EstimatorEntry("core.algorithm.advantages:gae", critic=True, reads=("gamma", "lam")),
    "grpo": EstimatorEntry("core.algorithm.advantages:grpo", groups=True, reads=("norm_adv_by_std_in_grpo",)),
}


POLICY_LOSSES = {
    "vanilla": LossEntry("core.algorithm.losses:vanilla", reads=(*CLIP, "clip_ratio_c")),
}


ENGINES = {  # actor_rollout_ref.rollout.name
    "hf": EngineEntry("core.engines.factory:hf_engine"),
    "vllm": EngineEntry("core.engines.factory:vllm_engine", package="vllm", reads=SERVING),
}


REWARD_MANAGERS = {  # reward_model.reward_manager
    "naive": ManagerEntry("core.rewards.managers:naive", in_process=True),
    "batch": ManagerEntry("core.rewards.managers:pool", batched=True),
    "prime": ManagerEntry("core.rewards.managers:pool"),
    # The overlong penalty, the other half of verl's manager of this name, is the trainer's shape_reward.
    "dapo": ManagerEntry("core.rewards.managers:pool"),
}


LOGGERS = {  # trainer.logger
    "console": LoggerEntry(),
    "jsonl": LoggerEntry(),
    "tensorboard": LoggerEntry("core.tracking.loggers:TensorboardLogger"),
    "wandb": LoggerEntry("core.tracking.loggers:WandbLogger", login="unless WANDB_MODE=offline"),
    "mlflow": LoggerEntry(
        "core.tracking.loggers:MlflowLogger", login="unless the server of MLFLOW_TRACKING_URI is open"
    ),
}


SINGLE_TURN = "single_turn_agent"  # verl's name
AGENT_LOOPS = {  # actor_rollout_ref.rollout.agent_loop, and the column agent_name of the data
    SINGLE_TURN: AgentLoopEntry("core.rollout.agent_loop:SingleTurn"),
}
MODALITIES: dict[str, str] = {}  # model_type -> "module:class" of core.modality.Modality, of models that read media
MEDIA_COLUMNS: dict[str, str] = {}  # key of the section data that names a column of media -> how a cell's part is read
CARRIED: dict[str, str] = {}  # name -> "module:class" of a dataclass in media, which a checkpoint may hold
RAY_INIT = (  # ray_kwargs.ray_init: the arguments of ray.init in Ray 2.60, which a dry run does not import
    *("address", "num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "local_mode"),
    *("ignore_reinit_error", "include_dashboard", "dashboard_host", "dashboard_port", "job_config"),
    *("configure_logging", "logging_level", "logging_format", "logging_config", "log_to_driver", "namespace"),
    *("runtime_env", "enable_resource_isolation", "cgroup_path", "system_reserved_cpu", "system_reserved_memory"),
    *("proxy_server_url", "_plasma_directory", "_node_ip_address", "_memory", "_temp_dir", "_metrics_export_port"),
    *("_system_config", "_node_name"),
)
KL_KINDS = (
    *("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
    *("kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"),
)
LOSS_AGG_MODES = (
    *("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "prompt-mean-token-mean",  # not in verl
)


for _name, _table in (
    ("estimators", ESTIMATORS),
    ("policy_losses", POLICY_LOSSES),
    ("engines", ENGINES),
    ("agent_loops", AGENT_LOOPS),
    ("modalities", MODALITIES),
    ("media_columns", MEDIA_COLUMNS),
    ("carried", CARRIED),
):
    _table.update(extensions.entries(_name))  # what a run of the papers' recipes does not need


def estimator(name: str) -> EstimatorEntry:
    """Return the estimator's entry. A user's own may read any key, and provides for itself what it needs."""
    return ESTIMATORS.get(name) or EstimatorEntry(name, reads=_all_keys(ESTIMATORS))


def policy_loss(name: str) -> LossEntry:
    """Return the policy loss's entry. A user's own may read any key, and has a ratio."""
    return POLICY_LOSSES.get(name) or LossEntry(name, reads=_all_keys(POLICY_LOSSES))


def logger(name: str) -> LoggerEntry:
    """Return the logger's entry; a user's own is its path."""
    return LOGGERS.get(name) or LoggerEntry(name)


def reward_manager(name: str, source: str) -> ManagerEntry:
    """Return the manager's entry. A user's own is neither in process nor batched."""
    return ManagerEntry("") if own_manager(name, source) else REWARD_MANAGERS[name]


def own_manager(name: str, source: str) -> bool:
    """Return whether the manager is a user's: a class by its path, or a name that its module registers."""
    return source == "importlib" or name not in REWARD_MANAGERS


def _all_keys(table: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(key for entry in table.values() for key in entry.reads)


def readers(table: Mapping[str, Any], key: str) -> str:
    """Return the names of the entries that read a key, for a message."""
    return ", ".join(name for name, entry in table.items() if key in entry.reads)
