"""Keys of other versions whose meaning depends on the rest of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from core.config.problem import show
from core.config.unknown_keys import CommandLine, Interpretation

Conversion = Callable[[str, Any, CommandLine], Interpretation | None]  # None: the tables decide
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
OPTIM, FSDP, VAL = f"{ACTOR}.optim", f"{ACTOR}.fsdp_config", f"{ROLLOUT}.val_kwargs"


def whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def over_all_ranks(target: str, ulysses: str | None) -> Conversion:
    """Return the conversion of a micro-batch that counts trajectories over all ranks: verl divides by the ranks."""

    def per_rank(key: str, value: Any, line: CommandLine) -> Interpretation | None:
        sizes = [line.value("trainer.nnodes"), line.value("trainer.n_gpus_per_node"), value]
        shared = line.value(ulysses) if ulysses else 1
        if not all(map(whole_number, [*sizes, shared])):
            return None
        ranks = max(sizes[0] * sizes[1] // shared, 1)
        return Interpretation(settings={target: max(value // ranks, 1)})

    return per_rank


def sampled_validation(name: str) -> Conversion:
    """Return the conversion of a setting of validation that samples, as forks of verl have it."""

    def settings(key: str, value: Any, line: CommandLine) -> Interpretation:
        samples = isinstance(value, int | float) and value > (1 if name == "n" else 0)
        return Interpretation(settings={f"{VAL}.{name}": value, **({f"{VAL}.do_sample": True} if samples else {})})

    return settings


def previous_checkpoint(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    return Interpretation(settings={"trainer.max_actor_ckpt_to_keep": 1}) if value is True else None


def profiled_steps(key: str, value: Any, line: CommandLine) -> Interpretation:
    return Interpretation(settings={"global_profiler.tool": "torch", "global_profiler.steps": value})


def token_level_loss(key: str, value: Any, line: CommandLine) -> Interpretation:
    mode = "token-mean" if value is True else "seq-mean-token-mean"
    return Interpretation(settings={f"{ACTOR}.loss_agg_mode": mode})


def response_limit(key: str, value: Any, line: CommandLine) -> Interpretation:
    """Read the length that the length penalty counts from, which here is the response's."""
    name = "data.max_response_length"
    if value == line.value(name):
        return Interpretation(unused=f"the length penalty counts from {name}, which is the same")
    rule = f"is another length than {name}={show(line.value(name))}, from which the length penalty counts"
    return Interpretation(rule=rule, fix="leave it out")


def consent_to_code(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    name = "actor_rollout_ref.model.trust_remote_code"
    if value is False or line.value(name) is True:
        return Interpretation(unused=f"{name} decides")
    return None


def weights_dtype(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Read the number format of weights: of the reference, which does not train, that of its passes."""
    if value not in ("bf16", "bfloat16"):
        return None
    if key.startswith(REF):
        return Interpretation(settings={f"{REF}.fsdp_config.dtype": "bfloat16"})
    return Interpretation(
        unused="master weights stay in float32, where small updates are not lost; passes are in dtype"
    )


def served_reward_model(name: str) -> Conversion:
    """Return the conversion of a key of main's reward model, which is a classifier unless a function asks it."""

    def classifier(key: str, value: Any, line: CommandLine) -> Interpretation | None:
        paths = ("custom_reward_function.path", "reward.custom_reward_function.path")
        if any(line.given.get(path) for path in paths):
            return None
        if name:
            return Interpretation(settings={f"reward_model.{name}": value})
        return Interpretation(
            unused="the classifier is computed in the run's own processes, on whole prompts and answers"
        )

    return classifier


def run_name(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Read a run's name with slashes, which verl makes folders of, as the name of one folder."""
    plain = isinstance(value, str) and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)+", value)
    return Interpretation(settings={key: value.replace("/", "-")}) if plain else None


def loggers(key: str, value: Any, line: CommandLine) -> Interpretation | None:
    """Read services that are not here as the file that they can be fed from."""
    names = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(name, str) for name in names):
        return None
    read = list(dict.fromkeys("jsonl" if name in OTHER_LOGGERS else name for name in names))
    return Interpretation(settings={key: read}) if read != names else None


OTHER_LOGGERS = ("file", "swanlab", "vemlp_wandb", "clearml", "trackio", "rl_logging_board")
VALUES: dict[str, Conversion] = {  # of keys that the schema has, where it refuses what was given
    "trainer.experiment_name": run_name,
    "trainer.project_name": run_name,
    "trainer.logger": loggers,
}
_SERVED = ("name", "gpu_memory_utilization", "tensor_model_parallel_size", "free_cache_engine", "enforce_eager")
_SERVED += ("prompt_length", "response_length", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype")
_MICRO = {  # key over all ranks -> the key that has the ranks which share a sequence
    f"{ACTOR}.ppo_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ROLLOUT}.log_prob_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{REF}.log_prob_micro_batch_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    "critic.ppo_micro_batch_size": "critic.ulysses_sequence_parallel_size",
    "reward_model.micro_batch_size": None,
}
CONVERSIONS: dict[str, Conversion] = {
    **{key: over_all_ranks(f"{key}_per_gpu", ulysses) for key, ulysses in _MICRO.items()},
    f"{ROLLOUT}.n_val": sampled_validation("n"),
    f"{ROLLOUT}.val_temperature": sampled_validation("temperature"),
    "trainer.remove_previous_ckpt_in_save": previous_checkpoint,
    "trainer.profile_steps": profiled_steps,
    f"{ACTOR}.use_token_level_loss": token_level_loss,
    "reward.reward_kwargs.max_resp_len": response_limit,
    "reward_model.reward_kwargs.max_resp_len": response_limit,
    "data.trust_remote_code": consent_to_code,
    f"{ROLLOUT}.trust_remote_code": consent_to_code,
    **{f"{part}.fsdp_config.model_dtype": weights_dtype for part in (ACTOR, REF, "critic.model")},
    **{
        f"reward.reward_model.{name}": served_reward_model(name)
        for name in ("enable", "enable_resource_pool", "nnodes", "n_gpus_per_node")
    },
    "reward.reward_model.model_path": served_reward_model("model.path"),
    **{f"reward.reward_model.rollout.{name}": served_reward_model("") for name in _SERVED},
}
