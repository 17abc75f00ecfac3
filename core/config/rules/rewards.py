"""Rules on the section reward_model: who grades, the model that does, the penalty on long answers."""

from __future__ import annotations

from core.config.rules.rule import DAPO, Rule
from core.config.view import View

LEAST_MEMORY_MB = 256  # of address space: a worker with the scorers imported maps about 120


def _foreign_tokenizer(v: View) -> bool:
    known = (None, "policy", v.model.path, v.model.tokenizer_path)
    return v.reward.enable and v.reward.model.input_tokenizer not in known


JUDGES = (
    Rule(
        "reward_model.weight",
        lambda v: v.reward.weight and not v.reward.enable,
        "there is no model whose number could be added",
        "set reward_model.enable=True and reward_model.model.path, or leave it out",
    ),
    Rule(
        "reward_model.model.input_tokenizer",
        _foreign_tokenizer,
        "is the tokenizer of what the policy wrote; the reward model's own comes with reward_model.model.path",
        "leave it out, or null where both read the same token ids",
    ),
    Rule(
        "reward_model.micro_batch_size_per_gpu",
        lambda v: v.reward.enable and v.reward.use_dynamic_bsz is False and not v.reward.micro_batch_size_per_gpu,
        "is needed with reward_model.use_dynamic_bsz=False",
        "give a number of answers a pass, or leave use_dynamic_bsz out: passes are then packed by tokens",
    ),
    Rule(
        "reward_model.forward_max_token_len_per_gpu",
        lambda v: (
            v.reward.enable
            and v.reward.use_dynamic_bsz
            and v.reward.forward_max_token_len_per_gpu < v.reward.max_length
        ),
        "must hold an answer of reward_model.max_length={reward.max_length} tokens",
        "raise it, or lower reward_model.max_length",
    ),
)

MANAGERS = (
    Rule(
        "reward_model.reward_manager",
        lambda v: v.manager.batched and not v.custom.path,
        "calls a function of yours with lists of answers, and there is none",
        "set custom_reward_function.path, or use prime",
    ),
    *(
        Rule(
            f"reward_model.module.{name}",
            lambda v, name=name: v.reward.source == "importlib" and not getattr(v.reward.module, name),
            "is needed with reward_model.source=importlib",
            "name the manager's class and its file or module, or use reward_model.source=register",
        )
        for name in ("path", "name")
    ),
    Rule(
        "reward_model.memory_limit_mb",
        lambda v: v.reward.memory_limit_mb is not None and v.reward.memory_limit_mb < LEAST_MEMORY_MB,
        f"is too little for a worker that has only started; at least {LEAST_MEMORY_MB}",
        "raise it, or null for no limit",
    ),
)

OVERLONG = (
    Rule(
        "reward_model.overlong_buffer.enable",
        lambda v: v.buffer.enable and "shape_reward" not in v.hooks,
        "recipe {recipe} does not shape rewards: its trainer has no shape_reward",
        DAPO,
    ),
    Rule(
        "reward_model.overlong_buffer.len",
        lambda v: v.buffer.enable and not 1 <= v.buffer.len <= v.data.max_response_length,
        "must be between 1 and data.max_response_length={data.max_response_length}",
        "shorten the buffer, or lengthen the response",
    ),
    Rule(
        "reward_model.overlong_buffer.penalty_factor",
        lambda v: v.buffer.enable and v.buffer.penalty_factor == 0,
        "penalises nothing",
        "set 1.0, or reward_model.overlong_buffer.enable=False",
    ),
)
