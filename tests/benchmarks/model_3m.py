"""The benchmarks' model: 3.2 M parameters, which ends an answer with a set probability or never."""

from __future__ import annotations

import math

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

EOS, VOCAB, PROMPTS, SAMPLES = 1, 512, 32, 8
NEVER = -25.0  # a logit of EOS that no sampling reaches: every response is as long as it may be


def model_3m(mean_length: int | None = None) -> PreTrainedModel:
    """The benchmark's model. It ends a response with probability 1/mean_length a token, or
    never."""
    torch.manual_seed(0)
    shape = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4)
    config = Qwen2Config(
        vocab_size=VOCAB,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        **shape,
    )
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )
    _set_eos(model, math.log((VOCAB - 1) / (mean_length - 1)) if mean_length else NEVER)
    return model


def _set_eos(model: PreTrainedModel, logit: float) -> None:
    # Channel 0 of the residual stream is made a constant, and only the EOS logit reads it.
    model.model.embed_tokens.weight[:, 0] = 0.1
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    with torch.inference_mode():
        hidden = model.model(torch.randint(2, VOCAB, (16, 64))).last_hidden_state
    model.lm_head.weight[EOS] = 0
    model.lm_head.weight[EOS, 0] = logit / hidden[..., 0].mean()
