"""Rules on sizes: what has to divide what, and what has to fit into a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.config.rules.rule import ACTOR, REF, ROLLOUT, Rule, always
from core.config.view import View


def _uneven(rows: int, micro: int | None, dynamic: bool) -> bool:
    return not dynamic and micro is not None and micro < rows and rows % micro != 0


def _section(view: View, section: str) -> Any:
    return view[section.rsplit(".", 1)[-1]]


def _parallel(part: Any) -> int:
    return part.ulysses_sequence_parallel_size


def _rows(view: View, mini: int) -> int:
    """Trajectories of an optimizer step on one rank."""
    return mini * view.rollout.n // view.data_ranks


BATCHES = (
    Rule(
        "data.train_batch_size",
        lambda v: v.data.train_batch_size % v.actor.ppo_mini_batch_size,
        f"must be a multiple of {ACTOR}.ppo_mini_batch_size={{actor.ppo_mini_batch_size}}",
        f"change one of them; {ACTOR}.ppo_mini_batch_size={{data.train_batch_size}} is one update a batch",
    ),
    Rule(
        "data.train_batch_size",
        lambda v: (
            v.critic.enable
            and v.critic.ppo_mini_batch_size != v.actor.ppo_mini_batch_size
            and v.data.train_batch_size % v.critic.ppo_mini_batch_size
        ),
        "must be a multiple of critic.ppo_mini_batch_size={critic.ppo_mini_batch_size}",
        "change one of them; left out, the critic's follows the actor's",
    ),
    Rule(
        "data.train_batch_size",
        lambda v: v.data.train_batch_size * v.rollout.n % v.data_ranks,
        f"times {ROLLOUT}.n={{rollout.n}} must be a multiple of the {{data_ranks}} ranks that share it "
        "(trainer.nnodes * trainer.n_gpus_per_node / ulysses_sequence_parallel_size)",
        "change one of them; trainer.backend=local without these keys runs one rank",
    ),
    Rule(
        f"{ACTOR}.ppo_mini_batch_size",
        lambda v: (
            v.data.train_batch_size * v.rollout.n % v.data_ranks == 0
            and v.actor.ppo_mini_batch_size * v.rollout.n % v.data_ranks
        ),
        f"times {ROLLOUT}.n={{rollout.n}} must be a multiple of the {{data_ranks}} ranks that share it",
        "change one of them",
    ),
    *(
        Rule(
            f"{section}.ulysses_sequence_parallel_size",
            lambda v, section=section, runs=runs: runs(v) and v.cluster and v.ranks % _parallel(_section(v, section)),
            "must divide the {ranks} ranks (trainer.nnodes * trainer.n_gpus_per_node)",
            "change one of them",
        )
        for section, runs in (
            (ACTOR, always),
            (REF, lambda v: v.needs_ref and v.ref.ulysses_sequence_parallel_size != _parallel(v.actor)),
            ("critic", lambda v: v.critic.enable),
        )
    ),
    *(
        Rule(
            f"{section}.ulysses_sequence_parallel_size",
            lambda v, section=section, model=model: (
                v.cluster and _parallel(_section(v, section)) > 1 and not v[model].use_remove_padding
            ),
            f"splits packed sequences, and {key}=False",
            f"set {key}=True, or ulysses_sequence_parallel_size=1",
        )
        for section, model, key in (
            (ACTOR, "model", "actor_rollout_ref.model.use_remove_padding"),
            ("critic", "critic_model", "critic.model.use_remove_padding"),
        )
    ),
    Rule(
        f"{ROLLOUT}.tensor_model_parallel_size",
        lambda v: (
            "tensor_model_parallel_size" in v.engine.reads
            and v.cluster
            and v.engine_gpus % v.rollout.tensor_model_parallel_size
        ),
        "must divide the {engine_gpus} GPUs of a node that engines compute on",
        "change one of them; a model that fits one GPU needs 1",
    ),
    Rule(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        lambda v: _uneven(
            _rows(v, v.actor.ppo_mini_batch_size), v.actor.ppo_micro_batch_size_per_gpu, v.actor.use_dynamic_bsz
        ),
        "must divide the trajectories of an optimizer step on a rank "
        "(ppo_mini_batch_size={actor.ppo_mini_batch_size} * n={rollout.n} / {data_ranks} ranks)",
        f"choose a divisor, or {ACTOR}.use_dynamic_bsz=True",
    ),
    Rule(
        "critic.ppo_micro_batch_size_per_gpu",
        lambda v: (
            v.critic.enable
            and _uneven(
                _rows(v, v.critic.ppo_mini_batch_size), v.critic.ppo_micro_batch_size_per_gpu, v.critic.use_dynamic_bsz
            )
        ),
        "must divide the trajectories of an optimizer step on a rank "
        "(ppo_mini_batch_size={critic.ppo_mini_batch_size} * n={rollout.n} / {data_ranks} ranks)",
        "choose a divisor, or critic.use_dynamic_bsz=True",
    ),
)


# section, its micro-batch size, its flag, its budget, whether it runs at all
PASSES = (
    (ACTOR, "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", always),
    (
        *(ROLLOUT, "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        always,
    ),
    (
        *(REF, "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        lambda v: v.needs_ref,
    ),
    (
        *("critic", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
        lambda v: v.critic.enable,
    ),
)


def _memory_rules(
    section: str, micro: str, dynamic: str, budget: str, runs: Callable[[View], bool]
) -> tuple[Rule, ...]:
    def size_missing(v: View) -> bool:
        part = _section(v, section)
        missing = getattr(part, dynamic) is False and getattr(part, micro) is None
        # The others take the actor's size: where that one is missing, it alone is to be mended.
        return (
            runs(v)
            and missing
            and (section == ACTOR or v.actor.ppo_micro_batch_size_per_gpu or v.actor.use_dynamic_bsz)
        )

    def too_small(v: View) -> bool:
        part, actor = _section(v, section), v.actor
        parallel = (part if section in (REF, "critic") else actor).ulysses_sequence_parallel_size
        return runs(v) and getattr(part, dynamic) and getattr(part, budget) * parallel < v.longest

    return (
        Rule(
            f"{section}.{micro}",
            size_missing,
            f"is needed with {section}.{dynamic}=False",
            f"give a number of trajectories a pass, or leave {dynamic} out: passes are then packed by tokens",
        ),
        Rule(
            f"{section}.{budget}",
            too_small,
            "must hold a sequence of max_prompt_length + max_response_length = {longest} tokens "
            "(times ulysses_sequence_parallel_size)",
            "raise it to {longest}, or shorten the sequences",
        ),
    )


MEMORY = tuple(rule for one in PASSES for rule in _memory_rules(*one))
