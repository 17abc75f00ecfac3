"""Rules on the reward model's keys."""

from __future__ import annotations

from core.config.rule import Rule
from core.config.view import View


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
