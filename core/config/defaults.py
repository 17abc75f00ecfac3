"""What a null default stands for if the rest of the configuration implies its value.

A null that stands for another key's value has ``follows`` at its field.
"""

from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.config import convert, registry
from core.config.paths import run_folder
from core.config.schema import Config
from core.config.section import Problem, key_option
from core.config.training_keys import ACTOR, LearnerConfig

ROLLOUT = "actor_rollout_ref.rollout"
# Mean difference of log-probs between engine and learner, in nats a token: what float32 explains,
# and what bfloat16 does. A small published model in bfloat16 differs by 0.045; a gap of 0.13 cost
# 2 points of the mean accuracy over a lab run.
EXACT = 1e-4
ROUNDED = 0.06


def has_accelerator() -> bool:
    """Return whether this machine has the devices of an NVIDIA or AMD driver, without torch."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def _dynamic(config: Config, learner: LearnerConfig) -> bool:
    """Return the actor's choice; if null, whether no micro-batch size is given here or there."""
    actor = config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz is not None:
        return actor.use_dynamic_bsz
    return not (learner.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu)


def _precision(config: Config, other: str) -> str:
    """Return the number format of engine or learner, where ``other`` is the key of the other one's.

    Two programs that round to bfloat16 differ by 0.03 nats a token on a small published model,
    whatever is the same in them. In one process, where runs are small, both are float32 and agree.
    """
    return (convert.get(config, other) or "float32") if config.in_one_process else "bfloat16"


def logp_diff(config: Config) -> float | None:
    """Return the bound between engine and learner; None where more is expected and corrected."""
    correction = config.algorithm.rollout_correction
    rollout = config.actor_rollout_ref.rollout
    truncates = rollout.truncates and not rollout.kept_sets
    if truncates or config.trainer.max_staleness or correction.weighs or correction.bypass_mode:
        return None
    return EXACT if config.full_precision else ROUNDED


def _agent_loop(config: Config) -> str | None:
    """Return who plays episodes: the user's agent, the tool agent, or nobody."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.agent.plays:
        return registry.OUTSIDE_AGENT
    return registry.TOOL_AGENT if rollout.multi_turn.enable else None


def _implied(recipe: str) -> dict[str, Callable[[Config], Any]]:
    """Return key -> its value where it is null. In order: a later one may read an earlier one."""
    actor_dtype = f"{ACTOR}.fsdp_config.dtype"
    engine_dtype = f"{ROLLOUT}.dtype"
    return {
        # It reads what the actor was given
        "critic.use_dynamic_bsz": lambda c: _dynamic(c, c.critic),
        f"{ACTOR}.use_dynamic_bsz": lambda c: _dynamic(c, c.actor_rollout_ref.actor),
        f"{ROLLOUT}.name": lambda c: "vllm" if find_spec("vllm") and has_accelerator() else "hf",
        actor_dtype: lambda c: _precision(c, engine_dtype),
        engine_dtype: lambda c: _precision(c, actor_dtype),
        f"{ROLLOUT}.agent_loop": _agent_loop,
        # Engines read the end of a turn from the tokenizer's template
        "actor_rollout_ref.model.custom_chat_template": lambda c: (
            c.data.apply_chat_template_kwargs.get("chat_template")
        ),
        f"{ROLLOUT}.kept_sets": lambda c: (
            c.actor_rollout_ref.rollout.truncates
            and c.actor_rollout_ref.rollout.top_k != 1
            and registry.ENGINES[c.actor_rollout_ref.rollout.name].kept_sets
        ),
        "critic.enable": lambda c: c.has_critic,
        "trainer.health.logp_diff.bound": logp_diff,
        "trainer.project_name": lambda c: f"rlrepro-{recipe}",
        "trainer.experiment_name": lambda c: (
            f"{Path(c.actor_rollout_ref.model.path).name or 'model'}-seed{c.trainer.seed}"
        ),
        "trainer.default_local_dir": lambda c: f"outputs/{recipe}/{c.trainer.experiment_name}",
        "reward_model.max_length": lambda c: c.longest_sequence,
        "reward_model.judge.cache_dir": lambda c: (
            str(run_folder(c) / "judge") if c.reward_model.judged else None
        ),
    }


def over_ray(config: Config, given: Collection[str]) -> tuple[Config, list[Problem]]:
    """Return the configuration, over Ray if several GPUs are ``given`` and no backend is.

    Several GPUs for a backend of one process are a problem.
    """
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node")
    several = [key for key in keys if key in given and convert.get(config, key) > 1]
    if not several or config.trainer.backend == "ray":
        return config, []
    if "trainer.backend" not in given:
        return convert.replaced(config, {"trainer.backend": "ray"}), []
    rule = "asks for several ranks, and trainer.backend=local is one process"
    fix = "set trainer.backend=ray, or 1"
    return config, [Problem(key, convert.get(config, key), rule, fix) for key in several]


def resolve(config: Config, recipe: str) -> Config:
    """Return the configuration with every such null filled in.

    ``data.seed`` stays null, and follows ``trainer.seed`` for training examples only, so that runs
    of different seeds answer the same validation questions; ``trainer.device`` and ``cpu_threads``
    stay null too: they belong to the machine.
    """
    keys = convert.all_keys(type(config))
    for key, value in _implied(recipe).items():
        if key in keys and convert.get(config, key) is None:
            config = convert.replaced(config, {key: value(config)})
    sections = {"": type(config), **convert.sections(type(config))}
    for key in keys:
        section, _, name = key.rpartition(".")
        followed = key_option(sections[section], name, "follows")
        if followed and convert.get(config, key) is None:
            config = convert.replaced(config, {key: convert.get(config, followed)})
    return config
