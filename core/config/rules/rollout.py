"""Rules on the section rollout: sampling, and what the engine can."""

from __future__ import annotations

from core.config.rules.algorithm import CORRECTION
from core.config.rules.rule import ROLLOUT, Rule
from core.config.view import View

HF_OPTIONS = ("cache_gib", "max_batch_rows", "max_prefill_tokens")  # core.engines.hf.HFEngine

TRUNCATED = "samples from another distribution than the one that trains, and no rollout correction weighs for it"

WEIGH = f"or {CORRECTION}.rollout_is=token"

SAMPLING = (
    Rule(
        f"{ROLLOUT}.top_p",
        lambda v: v.rollout.top_p < 1 and not v.corrects,
        TRUNCATED,
        f"set 1.0 (val_kwargs.top_p is free), {WEIGH}",
    ),
    Rule(
        f"{ROLLOUT}.top_k",
        lambda v: v.rollout.top_k != -1 and not v.corrects,
        TRUNCATED,
        f"set -1 (val_kwargs.top_k is free), {WEIGH}",
    ),
    Rule(
        f"{ROLLOUT}.temperature",
        lambda v: v.rollout.temperature == 0 and v.rollout.do_sample,
        "training needs answers that differ",
        "set 1.0; greedy validation is val_kwargs.do_sample=False",
    ),
    Rule(
        f"{ROLLOUT}.do_sample",
        lambda v: not v.rollout.do_sample and not v.trainer.val_only,
        "training needs answers that differ",
        "leave it out; greedy validation is val_kwargs.do_sample=False",
    ),
    Rule(
        f"{ROLLOUT}.val_kwargs.n",
        lambda v: v.val.n > 1 and not v.val.do_sample,
        "greedy answers to a question are all the same",
        f"set {ROLLOUT}.val_kwargs.do_sample=True and a temperature, or n=1",
    ),
    Rule(
        f"{ROLLOUT}.val_kwargs.temperature",
        lambda v: v.val.do_sample and v.val.temperature == 0,
        f"contradicts {ROLLOUT}.val_kwargs.do_sample=True",
        "set a temperature, or do_sample=False for greedy answers",
    ),
    Rule(
        f"{ROLLOUT}.max_model_len",
        lambda v: (
            "max_model_len" in v.engine.reads
            and v.rollout.max_model_len is not None
            and v.rollout.max_model_len < v.longest
        ),
        "must hold max_prompt_length + max_response_length = {longest} tokens",
        "raise it, or leave it out",
    ),
    Rule(
        f"{ROLLOUT}.max_num_batched_tokens",
        lambda v: (
            "enable_chunked_prefill" in v.engine.reads
            and not v.rollout.enable_chunked_prefill
            and v.rollout.max_num_batched_tokens < v.longest
        ),
        "must hold a sequence of {longest} tokens where prefill is not chunked",
        f"raise it, or {ROLLOUT}.enable_chunked_prefill=True",
    ),
    Rule(
        f"{ROLLOUT}.max_num_batched_tokens",
        lambda v: (
            "enable_chunked_prefill" in v.engine.reads and v.rollout.max_num_batched_tokens < v.rollout.max_num_seqs
        ),
        f"must be at least {ROLLOUT}.max_num_seqs={{rollout.max_num_seqs}}: each sequence takes one of them a step",
        "change one of them",
    ),
    Rule(
        "actor_rollout_ref.hybrid_engine",
        lambda v: not v.policy.hybrid_engine and v.trainer.backend == "local",
        "needs a cluster: trainer.backend=local runs learner and engine in one process",
        "set trainer.backend=ray, or leave it out",
    ),
)


def _strange_options(v: View) -> set[str]:
    return set(v.rollout.engine_kwargs.get("hf") or ()) - set(HF_OPTIONS) if v.rollout.name == "hf" else set()


ENGINE = (
    Rule(
        f"{ROLLOUT}.engine_kwargs",
        _strange_options,
        f"hf has {', '.join(HF_OPTIONS)} and no other option",
        "leave out what it lacks",
    ),
)
