"""The bugs of ``bugs.yaml`` as mutations: each replaces one function of core for the time of a ``with`` block.

    with planted("weights_never_arrive"):
        ...

Everything that was imported before keeps working: a function is replaced in every module that has it by name.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from core.algorithm import advantages, kl, losses
from core.checkpoint.run_state import DriverState
from core.cluster import local_workers
from core.data.dataset import Encoder
from core.engines import hf, sampling, stepped
from core.learner import batching, learner, packing
from core.rewards import grading
from core.rollout.agent_loop import Episode
from core.types import Stop, TrainBatch, Trajectory
from reward_scores.score import Score

BUGS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "bugs.yaml").read_text(encoding="utf-8"))
MUTATIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {}  # bug -> what it replaces, and by what


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Plant the bug, in everything that is loaded and in what will be loaded in the block."""
    target, mutate = MUTATIONS[bug]
    owner, name = target
    original = vars(owner)[name]
    setattr(owner, name, mutate(original))
    tables = []
    if not isinstance(owner, type):
        modules = [vars(m) for n, m in sys.modules.items() if n.partition(".")[0] in ("core", "recipes", "tests")]
        tables = [*modules, *(value for module in modules for value in module.values() if type(value) is dict)]
    places = [(table, key) for table in tables for key, value in table.items() if value is original]
    for table, key in places:
        table[key] = mutate(original)
    try:
        yield
    finally:
        setattr(owner, name, original)
        for table, key in places:
            table[key] = original


def replaces(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Register a mutation: a function of what it replaces (first) and of that one's arguments."""

    def register(function: Callable) -> Callable:
        def mutate(original: Any) -> Any:
            if isinstance(original, property):
                return property(lambda self: function(original.fget, self))
            if isinstance(original, classmethod):
                return classmethod(lambda cls, *given, **named: function(original.__func__, cls, *given, **named))

            @functools.wraps(original)
            def mutated(*given: Any, **named: Any) -> Any:
                return function(original, *given, **named)

            return mutated

        MUTATIONS[function.__name__] = ((owner, name), mutate)
        return function

    return register


# -- engine and weights ----------------------------------------------------------------------------


@replaces(stepped, "one_turn")
def tokens_encoded_again(original, request, ids, logprobs, stop, version, tokenizer):
    again = tokenizer.encode(tokenizer.decode(list(ids), skip_special_tokens=True), add_special_tokens=False)
    logprobs = [*logprobs, *[0.0] * len(again)][: len(again)]
    return original(request, again, logprobs, stop, version, tokenizer)


@replaces(hf.DecodeBatch, "_prefill")
def stale_prefix_cache(original, self, begin):
    now, first = self.model, vars(self).setdefault("first_model", copy.deepcopy(self.model))
    self.model = first
    original(self, begin)
    self.model = now


@replaces(sampling, "_draw")
def engine_raw_log_probs(original, logits_NV, settings, uniform_N):
    token_N, _ = original(logits_NV, settings, uniform_N)
    return token_N, logits_NV.float().log_softmax(-1).gather(-1, token_N[:, None])[:, 0]


@replaces(hf.HFEngine, "load")
def weights_never_arrive(original, self, bucket):
    self._received.append(bucket.open(self.device)[1])


@replaces(hf.HFEngine, "load")
def one_weight_missing(original, self, bucket):
    weight = [p for name, p in self.model.named_parameters() if "down_proj" in name][-1]
    before = weight.detach().clone()
    original(self, bucket)
    weight.data.copy_(before)


@replaces(hf.HFEngine, "load")
def engine_rounds_weights(original, self, bucket):
    original(self, bucket)
    for parameter in self.model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())


# -- tokens, masks, batch --------------------------------------------------------------------------


@replaces(Encoder, "encode")
def prompt_begins_twice(original, self, prompts):
    first = self.tokenizer.all_special_ids[0]
    return [[first, first, *ids] for ids in original(self, prompts)]


@replaces(Episode, "_append")
def tool_tokens_trained(original, self, ids, by_policy, logprobs, segment):
    original(self, ids, True, logprobs, segment)


@replaces(Trajectory, "response_text")
def tool_text_scored(original, self):
    return "".join(segment.text for segment in self.segments)


@replaces(batching, "make_batch")
def groups_mixed(original, groups, *given, **named):
    batch = original(groups, *given, **named)
    return batch.adding(group=torch.arange(len(batch)) % len(groups))


@replaces(batching, "make_batch")
def eos_not_trained(original, groups, *given, **named):
    batch = original(groups, *given, **named)
    ended = torch.tensor([t.stop is Stop.EOS for group in groups for t in group.trajectories])
    keep = torch.ones(batch.tokens, dtype=torch.bool)
    keep[batch.lengths.cumsum(0)[ended] - 1] = False
    return batch.adding(response_mask=batch.flat("response_mask") & keep, loss_mask=batch.flat("loss_mask") & keep)


@replaces(batching, "make_batch")
def rewards_of_others(original, groups, *given, **named):
    batch = original(groups, *given, **named)
    return batch.adding(reward=batch.reward[batch.lengths.argsort(stable=True)])


@replaces(packing, "before")
def log_probs_shifted(original, mask_BT):
    return mask_BT


@replaces(packing, "_by_length")
def packed_sequences_mixed(original, query, key, value, ends, *given):
    return original(query, key, value, (ends[0][[0, -1]], ends[1][[0, -1]], *ends[2:]), *given)


# -- rewards and advantages ------------------------------------------------------------------------


@replaces(grading, "as_result")
async def failed_grader_is_zero(original, grade, job):
    try:
        raise RuntimeError("the grader's library is not installed")
    except RuntimeError:
        return Score(0.0, {"acc": 0.0})


@replaces(batching, "token_rewards")
def reward_after_the_end(original, batch):
    out = torch.zeros(batch.tokens)
    for row, span in enumerate(batch.spans(torch.arange(len(batch)))):
        out[span.start + int(batch.flat("response_mask")[span].int().argmax()) - 1] = batch.flat("reward")[row]
    return out


@replaces(advantages, "group_stats")
def advantages_over_batch(original, inputs, *given, **named):
    return original(dataclasses.replace(inputs, group=torch.zeros_like(inputs.group)), *given, **named)


@replaces(advantages, "gae")
def tool_tokens_in_gae(original, inputs):
    mask = inputs.response_mask.bool()
    whole = (mask.int().cumsum(-1) > 0) & (mask.flip(-1).int().cumsum(-1) > 0).flip(-1)
    found, returns = original(dataclasses.replace(inputs, response_mask=whole))
    return found.masked_fill(~mask, 0), returns.masked_fill(~mask, 0)


# -- loss ------------------------------------------------------------------------------------------


@replaces(learner, "read_tokens")
def learner_without_temperature(original, *given, temperature, **named):
    return original(*given, temperature=1.0, **named)


def reweighted(original, batch, share, **named):
    """Yield the micro-batches with weights that sum to ``share(micro)`` of the whole step's."""
    for index, micro in original(batch, **named):
        if "loss_weight" in micro.stored and (own := micro.flat("loss_weight").sum()) > 0:
            wanted = share(micro) * batch.flat("loss_weight").sum()
            micro = micro.adding(loss_weight=micro.flat("loss_weight") * wanted / own)
        yield index, micro


@replaces(batching, "micro_batches")
def loss_by_micro_batch(original, batch, **named):
    return reweighted(original, batch, lambda micro: len(micro) / len(batch), **named)


@replaces(batching, "micro_batches")
def loss_summed_over_micro_batches(original, batch, **named):
    return reweighted(original, batch, lambda micro: 1.0, **named)


@replaces(batching, "optimizer_steps")
def masked_tokens_in_denominator(original, batch, **named):
    unmasked: TrainBatch = batch.adding(loss_mask=batch.flat("response_mask"))
    for step, counted in zip(original(batch, **named), original(unmasked, **named), strict=True):
        yield step.adding(loss_weight=counted.flat("loss_weight") * step.flat("loss_mask"))


@replaces(losses, "policy_loss")
def ratio_always_one(original, name):
    loss = original(name)
    return lambda log_prob, old, *given: loss(log_prob, log_prob.detach(), *given)


@replaces(kl, "kl_penalty")
def kl_sign(original, *given):
    return -original(*given)


@replaces(local_workers.LocalWorkers, "compute_ref_log_prob")
def reference_is_policy(original, self, batch):
    self.ref = self.actor
    return original(self, batch)


# -- optimizer and schedule ------------------------------------------------------------------------


@replaces(learner.Stepper, "__init__")
def optimizer_of_other_weights(original, self, trained, config):
    original(self, trained, config)
    for group in self.optimizer.param_groups:
        group["params"] = [parameter.detach().clone().requires_grad_() for parameter in group["params"]]


@replaces(learner.Stepper, "__init__")
def gradients_kept(original, self, trained, config):
    original(self, trained, config)
    self.optimizer.zero_grad = lambda **_: None


@replaces(learner.Actor, "__init__")
def dropout_in_training(original, self, module, *given, **named):
    original(self, module, *given, **named)
    for part in module.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.1
    module.train()


@replaces(learner, "multiplier")
def learning_rate_zero(original, *given):
    return 0.0


@replaces(DriverState, "load")
def resume_repeats_data(original, cls, folder):
    return dataclasses.replace(original(cls, folder), next_ordinal=0)
