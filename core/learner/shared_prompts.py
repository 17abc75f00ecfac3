"""The learner's pass over trajectories that share a prompt: the prompt is computed once, its answers continue it.

The plain pass computes ``B * T`` tokens, of which a group of G answers repeats its prompt G times. Here a first pass
computes the keys and values of each prompt, a second one the answers, which attend to them; gradients flow back
through the keys and values, where the sums over a prompt's answers are what the repetitions would have added up.
The result is that of the plain pass up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

WORTH_IT = 0.85  # of the plain pass's tokens: a second pass and a mask in memory cost something, too
MASK_ELEMENTS = 2**28  # of the second pass's attention mask, a byte each


@dataclass(frozen=True)
class SharedPrompts:
    """The sequences that continue each prompt. The last token of a prompt is the first input of its answers.

    Shapes (B sequences, P prompts):
        first_P   [P] a sequence that begins with the prompt
        place_B   [B] the sequence's prompt
        prefix_B  [B] tokens of the prompt but its last one
        width     the longest prefix;  length: the longest sequence behind its prefix, but its last token
    """

    first_P: Tensor
    place_B: Tensor
    prefix_B: Tensor
    width: int
    length: int

    @classmethod
    def of(cls, input_ids_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> SharedPrompts | None:
        """Return None where sharing does not pay, a sequence has nothing that the policy wrote, or a group's differ.

        A prompt ends before the first token of the mask; all sequences of a group must begin with the same one.
        """
        count, total = mask_BT.shape
        if not count or not bool(mask_BT.any(1).all()):
            return None
        _, place_B = torch.unique(group_B, return_inverse=True)
        prompts = int(place_B.max()) + 1
        number_B = torch.arange(count, device=mask_BT.device)
        first_P = torch.full((prompts,), count, device=mask_BT.device).scatter_reduce(0, place_B, number_B, "amin")
        prefix_B = mask_BT.int().argmax(1) - 1
        before_BT = torch.arange(total, device=mask_BT.device) < prefix_B[:, None]
        alike_BT = (input_ids_BT == input_ids_BT[first_P[place_B]]) | ~before_BT
        if not bool(alike_BT.all()) or not torch.equal(prefix_B, prefix_B[first_P[place_B]]):
            return None
        last_B = total - 1 - mask_BT.flip(1).int().argmax(1)
        width, length = int(prefix_B.max()), int((last_B - prefix_B).max())
        shared = prompts * width + count * length
        fits = count * length * (width + length) <= MASK_ELEMENTS
        pays = int(prefix_B.min()) > 0 and shared <= WORTH_IT * count * total
        return cls(first_P, place_B, prefix_B, width, length) if fits and pays else None

    def attention(self) -> Tensor:
        """Return [B, 1, length, width + length] bool: an answer's token sees its prompt and what stands before it."""
        device = self.prefix_B.device
        prompt_BK = torch.arange(self.width, device=device) < self.prefix_B[:, None]
        answer_QK = torch.ones(self.length, self.length, dtype=torch.bool, device=device).tril()
        shape = len(self.prefix_B), 1, self.length
        return torch.cat(
            [prompt_BK[:, None, None].expand(*shape, self.width), answer_QK.expand(*shape, self.length)], -1
        )


def can_share(module: nn.Module) -> bool:
    """Return whether the model's layers keep keys and values of all tokens, and keep them for a second pass.

    Not in float64, which is for proofs: models that normalise in float32 would differ by its rounding.
    """
    kinds = getattr(module.config, "layer_types", None) or ("full_attention",)
    recomputes = getattr(module, "is_gradient_checkpointing", False) and module.training
    implementation = module.config._attn_implementation
    plain = set(kinds) == {"full_attention"} and implementation in ("sdpa", "eager")
    return plain and not recomputes and module.dtype != torch.float64


def hidden_before_tokens(module: nn.Module, input_ids_BT: Tensor, mask_BT: Tensor, shared: SharedPrompts) -> Tensor:
    """Return [N, H]: for each token of the mask, sequence by sequence, the hidden state at the position before it."""
    prompt_ids_PT = input_ids_BT[shared.first_P, : shared.width]  # padding stands behind a prompt: it is not seen
    prompts = DynamicCache()
    module.base_model(input_ids=prompt_ids_PT, past_key_values=prompts, use_cache=True)
    position_BT = shared.prefix_B[:, None] + torch.arange(shared.length, device=input_ids_BT.device)
    inside_BT = position_BT.clamp(max=input_ids_BT.shape[1] - 1)
    seen = shared.attention()
    if module.config._attn_implementation == "eager":  # it adds its mask to the scores
        zeros = torch.zeros(seen.shape, dtype=module.dtype, device=seen.device)
        seen = zeros.masked_fill_(~seen, torch.finfo(zeros.dtype).min)
    hidden_BTH = module.base_model(
        input_ids=input_ids_BT.gather(1, inside_BT),
        position_ids=position_BT,
        attention_mask=seen,
        past_key_values=DynamicCache(
            [(one.keys[shared.place_B], one.values[shared.place_B]) for one in prompts.layers]
        ),
        use_cache=True,
    ).last_hidden_state
    after_BT = position_BT + 1
    written_BT = (after_BT < mask_BT.shape[1]) & mask_BT.gather(1, after_BT.clamp(max=mask_BT.shape[1] - 1))
    return hidden_BTH[written_BT]
