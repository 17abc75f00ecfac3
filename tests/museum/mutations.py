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
from core.data import sampler
from core.data.dataset import Encoder
from core.engines import hf, in_process_engine, sampling
from core.learner import attention, batching, learner, log_probs, lora, packing
from core.ray_trainer import RayPPOTrainer
from core.rewards import grading, layer
from core.rollout import group_filter
from core.rollout.agent_loop import Episode
from core.session import Session
from core.tracking.recorders import Recorders
from core.types import Stop, TrainBatch, Trajectory
from recipes.search_r1 import search_loop
from reward_scores.score import Score

BUGS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "bugs.yaml").read_text(encoding="utf-8"))
MUTATIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {}  # bug -> what it replaces, and by what


def twin_of(bug: dict[str, Any]) -> dict[str, Any]:
    """Return a bug's second placement as a bug: what is not said of it is the first one's."""
    inherited = {name: bug[name] for name in ("id", "lab", "test")}
    return {**inherited, "mutation": bug["id"], **bug["twin"]}


def names() -> set[str]:
    """Return the names of all mutations that ``bugs.yaml`` asks for."""
    return {bug["id"] for bug in BUGS} | {twin_of(bug)["mutation"] for bug in BUGS}


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


@replaces(in_process_engine, "one_turn")
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
    return batch.adding(response_mask=batch.response_mask & keep, loss_mask=batch.loss_mask & keep)


@replaces(batching, "make_batch")
def rewards_of_others(original, groups, *given, **named):
    batch = original(groups, *given, **named)
    return batch.adding(reward=batch.reward[batch.lengths.argsort(stable=True)])


@replaces(packing, "predicting_tokens")
def log_probs_shifted(original, mask_N, lengths_B):
    return mask_N


@replaces(attention, "_by_length")
def packed_sequences_mixed(original, query, key, value, ends, *given):
    return original(query, key, value, (ends[0][[0, -1]], ends[1][[0, -1]], *ends[2:]), *given)


# -- rewards and advantages ------------------------------------------------------------------------


@replaces(grading, "as_result")
async def failed_grader_is_zero(original, grade, job):
    try:
        raise RuntimeError("the grader's library is not installed")
    except RuntimeError:
        return Score(0.0, {"acc": 0.0})


@replaces(advantages.AdvantageInputs, "action_rewards")
def reward_after_the_end(original, self):
    rewards, ends = original(self), self.actions_B.cumsum(0)
    rewards[ends[self.actions_B > 0] - 1] -= self.reward[self.actions_B > 0]
    return rewards


@replaces(advantages, "group_stats")
def advantages_over_batch(original, inputs, *given, **named):
    return original(dataclasses.replace(inputs, group=torch.zeros_like(inputs.group)), *given, **named)


@replaces(advantages, "gae")
def tool_tokens_in_gae(original, inputs):
    mask = inputs.response_mask
    whole = torch.cat([between(part) for part in mask.split(inputs.lengths.tolist())])
    found, returns = original(dataclasses.replace(inputs, response_mask=whole))
    return found.masked_fill(~mask, 0), returns.masked_fill(~mask, 0)


def between(mask):
    """Return the tokens from the first of the mask to its last."""
    return (mask.int().cumsum(0) > 0) & (mask.flip(0).int().cumsum(0) > 0).flip(0)


# -- loss ------------------------------------------------------------------------------------------


@replaces(learner, "token_log_probs")
def learner_without_temperature(original, *given, temperature, **named):
    return original(*given, temperature=1.0, **named)


def reweighted(original, batch, share, **named):
    """Yield the micro-batches with weights that sum to ``share(micro)`` of the whole step's."""
    for index, micro in original(batch, **named):
        if "loss_weight" in micro.stored and (own := micro.require("loss_weight").sum()) > 0:
            wanted = share(micro) * batch.require("loss_weight").sum()
            micro = micro.adding(loss_weight=micro.require("loss_weight") * wanted / own)
        yield index, micro


@replaces(batching, "micro_batches")
def loss_by_micro_batch(original, batch, **named):
    return reweighted(original, batch, lambda micro: len(micro) / len(batch), **named)


@replaces(batching, "micro_batches")
def loss_summed_over_micro_batches(original, batch, **named):
    return reweighted(original, batch, lambda micro: 1.0, **named)


@replaces(batching, "mini_batches")
def masked_tokens_in_denominator(original, batch, **named):
    unmasked: TrainBatch = batch.adding(loss_mask=batch.response_mask)
    for step, counted in zip(original(batch, **named), original(unmasked, **named), strict=True):
        yield step.adding(loss_weight=counted.require("loss_weight") * step.loss_mask)


@replaces(losses, "policy_loss")
def ratio_always_one(original, name):
    loss = original(name)
    return lambda log_prob, old, *given, **named: loss(log_prob, log_prob.detach(), *given, **named)


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


# -- second placements: the same bugs behind the place where a value is checked --------------------


@replaces(RayPPOTrainer, "generate")
async def tokens_encoded_again_later(original, self, *given):
    t = await original(self, *given)
    again = self.tokenizer.encode(t.response_text, add_special_tokens=False)
    logprobs = [*t.logprobs, *[0.0] * len(again)][: len(again)]
    return dataclasses.replace(t, response_ids=again, response_mask=[True] * len(again), logprobs=logprobs)


@replaces(RayPPOTrainer, "generate")
async def engine_raw_log_probs_later(original, self, *given):
    t = await original(self, *given)
    return dataclasses.replace(t, logprobs=t.logprobs * self.train_sampling.temperature)


@replaces(learner, "token_log_probs")
def learner_without_temperature_later(original, *given, temperature, **named):
    return original(*given, temperature=1.0 if torch.is_grad_enabled() else temperature, **named)


@replaces(Recorders, "begin")
def groups_mixed_later(original, self, batch, now):
    batch = original(self, batch, now)
    return batch.adding(group=torch.arange(len(batch)) % (int(batch.group.max()) + 1))


@replaces(Recorders, "begin")
def tool_tokens_trained_later(original, self, batch, now):
    batch = original(self, batch, now)
    first = torch.cat([batch.response_mask[span].int().cumsum(0) > 0 for span in spans_of(batch)])
    return batch.adding(response_mask=first, loss_mask=first)


@replaces(Recorders, "begin")
def rewards_of_others_later(original, self, batch, now):
    batch = original(self, batch, now)
    return batch.adding(reward=batch.reward[batch.lengths.argsort(stable=True)])


def spans_of(batch):
    return batch.spans(torch.arange(len(batch)))


@replaces(local_workers.LocalWorkers, "update_critic")
def tool_tokens_in_gae_later(original, self, batch, rate):
    decay, returns = self.config.algorithm.lam, batch.require("returns").clone()
    for span in spans_of(batch):
        mask = batch.response_mask[span]
        ahead = (~mask).flip(0).cumsum(0).flip(0)  # tokens of tools (and of the prompt) that are still to come
        returns[span] = torch.where(mask, returns[span] * decay**ahead, 0)
    return original(self, batch.adding(returns=returns), rate)


@replaces(learner.Actor, "micro_batch_loss")
def loss_by_micro_batch_later(original, self, micro, means):
    weight = micro.require("loss_weight")
    return original(self, micro.adding(loss_weight=weight / weight.sum().clamp(min=1e-20)), means)


@replaces(Session, "attach")
def resume_repeats_data_later(original, self, *given):
    state = original(self, *given)
    return dataclasses.replace(state, collect=dataclasses.replace(state.collect, next_ordinal=0))


@replaces(learner.Actor, "micro_batch_loss")
def dropout_in_training_later(original, self, micro, means):
    for part in self.module.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.1
    self.module.train()
    try:
        return original(self, micro, means)
    finally:
        self.module.eval()


@replaces(hf.HFEngine, "_admit")
def engine_rounds_weights_later(original, self):
    for parameter in self.model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    original(self)


@replaces(hf.HFEngine, "load")
def one_weight_missing_later(original, self, bucket):
    weight = [p for name, p in self.model.named_parameters() if "norm" in name][-1]
    before = weight.detach().clone()
    original(self, bucket)
    weight.data.copy_(before)


@replaces(in_process_engine, "one_turn")
def eos_not_trained_later(original, request, ids, logprobs, stop, *given):
    turn = original(request, ids, logprobs, stop, *given)
    if stop is not Stop.EOS:
        return turn
    logprobs = [*turn.logprobs[:-1], 0.0]
    return dataclasses.replace(turn, response_mask=[*turn.response_mask[:-1], False], logprobs=logprobs)


@replaces(advantages, "gae")
def reward_after_the_end_later(original, inputs):
    nothing = torch.zeros_like(inputs.reward)
    return original(dataclasses.replace(inputs, reward=nothing))


@replaces(local_workers.LocalWorkers, "update_actor")
def advantages_over_batch_later(original, self, batch, rate):
    reward = batch.reward.repeat_interleave(batch.lengths)
    over = (reward - batch.reward.mean()) / batch.reward.std().clamp(min=1e-6)
    return original(self, batch.adding(advantages=torch.where(batch.response_mask, over, 0)), rate)


@replaces(grading, "as_result")
async def failed_grader_is_zero_later(original, grade, job):
    count = vars(grading).setdefault("graded_for_the_museum", [0])
    count[0] += 1
    if count[0] <= 30:  # the examples of the start
        return await original(grade, job)
    return Score(0.0, {"acc": 0.0})


@replaces(kl, "kl_penalty")
def kl_sign_later(original, *given):
    value = original(*given)
    return 2 * value.detach() - value


@replaces(learner.Stepper, "step")
def learning_rate_zero_later(original, self, rate):
    return original(self, rate / 10)


@replaces(layer, "Job")
def tool_text_scored_later(original, source, response, ground_truth, extra_info):
    segments = extra_info.get("rollout", {}).get("segments", ())
    whole = "".join(segment["text"] for segment in segments) or response
    return original(source, whole, ground_truth, extra_info)


# -- kinds that were planted blind -----------------------------------------------------------------


@replaces(local_workers.LocalWorkers, "update_critic")
def returns_shifted(original, self, batch, rate):
    return original(self, batch.adding(returns=batch.require("returns").roll(1)), rate)


@replaces(learner, "value_loss")
def returns_shifted_later(original, values, returns, *given):
    return original(values, returns.roll(1), *given)


@replaces(learner.Stepper, "step")
def warm_up_not_used(original, self, rate):
    return original(self, 1.0)


@replaces(learner.Stepper, "step")
def warm_up_not_used_later(original, self, rate):
    self.advanced = vars(self).get("advanced", 0) + 1
    return original(self, min(1.0, rate * self.advanced))


@replaces(local_workers.LocalWorkers, "__init__")
def reference_shares_weights(original, self, *given, **named):
    original(self, *given, **named)
    if self.ref is not None:
        self.ref.module = self.actor.module


@replaces(lora, "base_only")
@contextmanager
def reference_shares_weights_later(original, module):
    yield


@replaces(log_probs, "token_log_probs_and_entropy")
def entropy_of_other_temperature(original, *given, temperature=1.0, **named):
    log_prob, _, *rest = original(*given, temperature=temperature, **named)
    with torch.no_grad():
        _, entropy, *_ = original(*given, temperature=1.0, **{**named, "entropy_grad": False})
    return (log_prob, entropy, *rest)


@replaces(search_loop.SearchLoop, "search")
async def answer_of_the_query_before(original, self, query, episode):
    self.before, query = query, vars(self).get("before", query)
    await original(self, query, episode)


@replaces(search_loop, "in_process")
def answer_of_the_query_before_later(original, retriever):
    retrieve, kept, last = original(retriever), {}, [""]

    async def under_the_key_before(queries, topk):
        found = []
        for query in queries:
            if query not in kept:
                kept[query], last[0] = last[0] or query, query
            found += await retrieve([kept[query]], topk)
        return found

    return under_the_key_before


@replaces(group_filter, "compared_value")
def filter_reads_shaped_reward(original, score, group, metric):
    return score.value


@replaces(sampler, "sampling_seed")
def seeds_of_the_prompt(original, run_seed, ordinal, sample_index, turn=0):
    return original(run_seed, ordinal, min(sample_index, 0), turn)


@replaces(sampling, "uniforms")
def seeds_of_the_prompt_later(original, seed_N, position_N):
    return original(seed_N * 0 + seed_N[:1], position_N)
