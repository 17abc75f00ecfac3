"""Checks at the point of use: what a phase reads is what the phase before it set, reported and sent. Always on.

:mod:`core.algorithm.invariants` checks values where they are made. A value that is changed after that, or a number that
is reported and not used, passes there: each check here runs where the value has its effect (the forward pass, the
gradient, the optimizer, the engine) and compares with what was recorded at the source. The rules are those of the
invariants: identities, no false alarm in a sound run, BrokenInvariant otherwise, and their time is counted with theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from core.algorithm import invariants
from core.algorithm.invariants import LEAST_NORM, LEAST_RATE, counted
from core.types import Stop
from reward_scores.score import RAW, ScoreStatus

if TYPE_CHECKING:
    from core.config.sections.actor import ActorConfig
    from core.config.sections.optim import OptimConfig
    from core.types import ScoredGroup, TrainBatch, Trajectory

SAMPLED = 1024  # numbers of each weight that a checksum covers, evenly spread
GRADED_AGAIN = 4  # answers of a step
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SURPRISE_ROOM = 0.02  # nats a token by which entropy and -log p may differ without a fault


# -- from the engine to the batch --------------------------------------------------------------------


class SampledTurns:
    """What the engine returned to which requests, by episode, until a step has trained on it."""

    def __init__(self) -> None:
        self.turns: dict[int, list[tuple[Any, Trajectory]]] = {}

    def add(self, request: Any, turn: Trajectory) -> None:
        """Keep a turn until :meth:`forget`."""
        episode = request.seed if request.episode is None else request.episode
        if request.seed == episode:  # the first turn, perhaps of an episode that was begun before and given up
            self.turns[episode] = []
        self.turns.setdefault(episode, []).append((request, turn))

    def forget(self, oldest: int) -> None:
        """Forget what no later step may train on: samples of policies older than ``oldest``."""
        self.turns = {seed: turns for seed, turns in self.turns.items() if turns[-1][1].policy_version >= oldest}

    def check(self, groups: Sequence[ScoredGroup]) -> None:
        """Check the trajectories of a step against the turns that the engine returned, and those against the requests.

        What came from elsewhere (a checkpoint, a hook's own engine) is not known here.
        """
        known = [t for group in groups for t in group.trajectories if t.seed in self.turns]
        turns = [self.turns[one.seed] for one in known]
        turns_are_of_their_requests([pair for each in turns for pair in each])
        trajectories_are_what_was_sampled(known, [[turn for _, turn in each] for each in turns])


class WatchedEngine:
    """An engine as an episode sees it: what it returns is kept, to be checked before a step trains on it."""

    def __init__(self, engine: Any, sampled: SampledTurns):
        self.engine, self.sampled = engine, sampled

    async def sample(self, request: Any) -> Trajectory:
        """Return the engine's trajectory."""
        turn = await self.engine.sample(request)
        self.sampled.add(request, turn)
        return turn


@counted
def turns_are_of_their_requests(pairs: Sequence[tuple[Any, Trajectory]]) -> None:
    """Check that turns follow the prompts of their requests, keep their limits, and are all the policy's."""
    remedy = "look at the engine: requests, answers and masks must not be mixed up"
    prompts: dict[int, bytes] = {}  # by the identity of the tuple, which the answers to a prompt share
    for request, turn in pairs:
        ids = request.prompt_ids
        if id(ids) not in prompts:
            prompts[id(ids)] = np.array(ids, np.int32).tobytes()
        same = turn.prompt_ids.tobytes() == prompts[id(ids)] and turn.seed == request.seed
        invariants.require(same, "gen", "an answer came back for another prompt or seed", remedy)
        count, most = len(turn.response_ids), request.sampling.max_tokens
        if count > most or (turn.stop is Stop.LENGTH and count != most):
            found = f"an answer of {count} tokens stopped by {turn.stop.value}, of {most} allowed"
            invariants.require(False, "gen", found, remedy)
    if pairs and not np.concatenate([turn.response_mask for _, turn in pairs]).all():
        turn = next(turn for _, turn in pairs if not turn.response_mask.all())
        left = int((~turn.response_mask).sum())
        found = f"a turn that stopped by {turn.stop.value} has {left} tokens outside its mask"
        remedy = "the policy wrote all of a turn, its end of the sequence included"
        invariants.require(False, "gen", found, remedy)


@counted
def trajectories_are_what_was_sampled(
    trajectories: Sequence[Trajectory], turns: Sequence[Sequence[Trajectory]]
) -> None:
    """Check that the policy's tokens of each trajectory, and their log-probs, are those of its turns, in order."""
    if not trajectories:
        return
    mask = np.concatenate([one.response_mask for one in trajectories])
    for name in ("response_ids", "logprobs"):
        held = np.concatenate([getattr(one, name) for one in trajectories])[mask]
        wanted = np.concatenate([getattr(turn, name) for each in turns for turn in each])
        if np.array_equal(held, wanted):
            continue
        pairs = zip(trajectories, turns, strict=True)
        wrong = [one.seed for one, each in pairs if not _made_of(one, each, name)]
        found = f"{name} of {len(wrong)} trajectories are not what the engine returned, the first of seed {wrong[:1]}"
        remedy = "an agent loop or a hook changed tokens, mask or log-probs after they were sampled"
        invariants.require(False, "batch", found, remedy)


def _made_of(one: Trajectory, turns: Sequence[Trajectory], name: str) -> bool:
    whole = np.concatenate([getattr(turn, name) for turn in turns])
    return np.array_equal(getattr(one, name)[one.response_mask], whole)


@counted
def samples_are_independent(groups: Sequence[ScoredGroup], *, greedy: bool) -> None:
    """Check that no two trajectories of a step have the same seed, and that equal answers are no more than chance.

    An answer of probability p is one of n in a group again with less than n p. Summed over the repeated answers of a
    step, ``-log(n p)`` has an expectation of at most 1 / e an answer, whatever the policy.
    """
    remedy = "each sample needs a seed of its own: look at what derives and what passes on the seeds"
    seeds = [t.seed for group in groups for t in group.trajectories]
    invariants.require(len(set(seeds)) == len(seeds), "gen", "two trajectories of a step have the same seed", remedy)
    surprise = repeated = 0.0
    for group in () if greedy else groups:
        seen: set[bytes] = set()
        for one in group.trajectories:
            text = one.response_ids.tobytes()
            if text in seen:
                repeated += 1
                surprise += max(0.0, -float(one.logprobs.sum()) - math.log(len(group)))
            seen.add(text)
    found = f"{repeated:g} of {len(seeds)} answers repeat one of their group, against all probability"
    invariants.require(surprise <= len(seeds) + 30, "gen", found, remedy)


@counted
def prompts_are_their_groups(groups: Sequence[ScoredGroup], *, untouched: bool) -> None:
    """Check that the answers of a group follow one prompt, that of the group where no hook changes it."""
    remedy = "answers were attached to another prompt: look at what rolls a group, and at the hook generate"
    for group in groups:
        wanted = list(group.prompt.token_ids) if untouched else group.trajectories[0].prompt_ids.tolist()
        same = all(one.prompt_ids.tolist() == wanted for one in group.trajectories)
        found = f"the answers in the group of uid={group.prompt.uid!r} do not follow the same prompt"
        invariants.require(same, "batch", found, remedy)


@counted
def scores_are_of_their_answers(groups: Sequence[ScoredGroup], grade: Callable[..., float | None]) -> None:
    """Grade some answers of a step again, directly, and compare with what the scorer gave them.

    The text is put together here from the policy's own segments. A scorer is pure, so another score means that it was
    given another text, another ground truth, or that the score was kept for another answer.
    """
    for group in groups[:: max(1, len(groups) // GRADED_AGAIN)][:GRADED_AGAIN]:
        place = group.prompt.ordinal % len(group)
        one, score = group.trajectories[place], group.scores[place]
        if RAW not in score.parts or score.status in (ScoreStatus.TIMEOUT, ScoreStatus.CRASH):
            continue
        text = "".join(segment.text for segment in one.segments if segment.role == "policy")
        value = grade(group.prompt, one, text)
        same = value is None or math.isclose(value, score.raw, rel_tol=1e-6, abs_tol=1e-9)
        found = f"an answer to uid={group.prompt.uid!r} has the score {score.raw:g}, graded again {value}"
        remedy = "a scorer reads what the policy wrote to this prompt, and a failure of it is no score"
        invariants.require(same, "reward", found, remedy)


@counted
def answer_is_of_its_query(query: str, shown: str, again: Sequence[str]) -> None:
    """Check that what a tool showed begins like an answer that the query finds ``again``, as far as it goes."""
    same = not shown or not again or any(shown[: len(one)] == one[: len(shown)] for one in again)
    found = f"the answer shown for the query {query[:80]!r} ({shown[:60]!r}) is not one that it finds"
    remedy = "an answer was kept or passed on under another query: look at caches and batches of searches"
    invariants.require(same, "gen", found, remedy)


# -- from one phase to the next ----------------------------------------------------------------------


@counted
def sealed(batch: TrainBatch, *names: str) -> TrainBatch:
    """Return :meth:`core.types.TrainBatch.sealed`, for the phase that has just set these fields."""
    return batch.sealed(*names)


@counted
def unchanged(batch: TrainBatch, phase: str, reads: Sequence[str] | None = None) -> None:
    """Check that a phase reads what the phases before it set, row by row: the fields ``reads``, or all."""
    found = batch.broken_seal(reads)
    text = f"{found[0]} of row {found[1]} is not what was set" if found else ""
    remedy = "rows were reordered or values changed on the way; who changes a field on purpose seals it again"
    invariants.require(found is None, phase, text, remedy)


@counted
def groups_share_prompts(batch: TrainBatch) -> None:
    """Check that the rows of a group begin with the same prompt, up to the first token that the policy wrote."""
    ids, mask = batch.input_ids.numpy(), batch.response_mask.numpy()
    lengths, group = batch.lengths.numpy(), batch.group.numpy()
    starts = np.cumsum(lengths) - lengths
    if not lengths.all() or not len(lengths):
        return
    written = np.cumsum(mask)
    of_prompt = written == np.repeat(written[starts] - mask[starts], lengths)
    place = np.arange(1, len(ids) + 1) - np.repeat(starts, lengths)
    sums = np.add.reduceat(ids * place * of_prompt, starts)
    order = np.argsort(group, kind="stable")
    other = (np.diff(sums[order]) != 0) & (np.diff(group[order]) == 0)
    row = int(order[np.argmax(other)]) if len(other) else 0
    found = f"the rows of group {group[row]} begin with different prompts"
    invariants.require(not other.any(), "adv", found, "an answer must be compared with those to the same prompt")


# -- gradients and optimizer -------------------------------------------------------------------------


@counted
def old_log_probs_are_current(log_prob: Tensor, old: Tensor, mask: Tensor, *, full: bool) -> None:
    """Check before a weight has moved that the old log-probs, [N], are those of the pass that trains, on average.

    ``full`` is float32; in bf16 another micro-batch rounds otherwise.
    """
    if not bool(mask.any()):
        return
    gap = float((log_prob.detach() - old)[mask].abs().mean())
    found = f"before the first optimizer step the old log-probs differ by {gap:.3g} from those of the pass that trains"
    remedy = "both must be of the same weights, temperature and mode (no dropout)"
    invariants.require(not gap > (1e-3 if full else 0.1), "update_actor", found, remedy)


def watch_policy_gradient(
    log_prob: Tensor, entropy: Tensor, old: Tensor, micro: TrainBatch, config: ActorConfig
) -> None:
    """Compare the gradient that will reach the log-probs, [N] each, with that of the objective written out.

    Of a token whose ratio r is within the clip it is ``-w A r`` (times its importance weight), and with a KL loss
    ``coef w f(d)``. Only for the vanilla loss; tokens at the edge of a clip are left out.
    """
    if config.policy_loss.loss_mode != "vanilla" or not log_prob.requires_grad:
        return
    log_prob.register_hook(partial(_policy_gradient_holds, log_prob.detach(), old.detach(), micro, config))
    if config.entropy_coeff and entropy.requires_grad:
        entropy.register_hook(partial(_entropy_gradient_holds, micro, config.entropy_coeff))


@counted
def _policy_gradient_holds(log_prob: Tensor, old: Tensor, micro: TrainBatch, config: ActorConfig, grad: Tensor) -> None:
    mask, weight = micro.response_mask, micro.require("loss_weight")
    log_ratio = torch.where(mask, log_prob - old, 0.0)
    ratio = log_ratio.exp()
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    plain = mask & (ratio > 1 - 0.9 * low) & (ratio < 1 + 0.9 * high)
    wanted = -weight * micro.require("advantages") * ratio
    if micro.rollout_is_weights is not None:
        wanted = wanted * micro.rollout_is_weights
    terms = wanted.abs()
    if config.use_kl_loss:
        d = log_prob - micro.require("ref_log_prob")
        kind = "mse" if config.kl_loss_type.endswith("+") else config.kl_loss_type
        slope = {"kl": torch.ones_like, "k1": torch.ones_like, "abs": torch.sign}.get(kind)
        if kind in ("low_var_kl", "k3"):
            slope, plain = (lambda x: -torch.expm1(-x)), plain & (d.abs() < 2)  # beyond it the estimate is clamped
        terms = terms + config.kl_loss_coef * weight.abs()  # k3's slope is the difference of two numbers near 1
        wanted = wanted + config.kl_loss_coef * weight * (d if slope is None else slope(d))
    of = "advantages, loss weights, ratio and KL term"
    _gradients_agree(grad, wanted, plain, "update_actor", "log-probs", of, terms)


@counted
def _entropy_gradient_holds(micro: TrainBatch, coefficient: float, grad: Tensor) -> None:
    wanted = -coefficient * micro.require("loss_weight")
    _gradients_agree(grad, wanted, micro.response_mask, "update_actor", "entropies", "entropy_coeff and loss weights")


def watch_value_gradient(values: Tensor, micro: TrainBatch, clip: float) -> None:
    """Compare the gradient that will reach the values, [N], with ``w (V - R)`` where V is within its clip."""
    if values.requires_grad:
        values.register_hook(partial(_value_gradient_holds, values.detach(), micro, clip))


@counted
def _value_gradient_holds(values: Tensor, micro: TrainBatch, clip: float, grad: Tensor) -> None:
    plain = micro.response_mask & ((values - micro.require("values")).abs() < 0.9 * clip)
    wanted = micro.require("loss_weight") * (values - micro.require("returns"))
    _gradients_agree(grad, wanted, plain, "update_critic", "values", "returns and loss weights")


def _gradients_agree(
    grad: Tensor, wanted: Tensor, where: Tensor, phase: str, of: str, parts: str, terms: Tensor | None = None
) -> None:
    """Compare a gradient with what it should be, up to the float32 rounding of the ``terms`` that it is made of."""
    where = where & torch.isfinite(grad) & torch.isfinite(wanted)  # a step that is not finite is skipped, and counted
    wanted, grad = (torch.where(where, one.detach().double(), 0.0) for one in (wanted, grad))
    room = 1e-3 * wanted.abs() + 1e-5 * wanted.abs().max().clamp(min=1e-30)
    if terms is not None:
        room = room + 4 * torch.finfo(torch.float32).eps * terms
    count = int(((grad - wanted).abs() > room).sum())
    found = f"the gradient of {count} of {int(where.sum())} {of} is not that of the objective"
    invariants.require(not count, phase, found, f"the loss must be made of the batch's own {parts}")


@counted
def rows_are_used_once(indices: Sequence[Tensor], count: int) -> None:
    """Check that the micro-batches of an optimizer step hold each of its rows once."""
    used = np.concatenate([index.numpy() for index in indices]) if indices else np.zeros(0, np.int64)
    if np.array_equal(np.sort(used), np.arange(count)):
        return
    found = f"the micro-batches of an optimizer step hold {len(used)} rows, {len(set(used))} of its {count}"
    invariants.require(False, "update", found, "each row must be in exactly one micro-batch")


@counted
def all_rows_are_used(rows: int, count: int, epochs: int) -> None:
    """Check that the optimizer steps of an update have all rows of its batch, in each epoch."""
    found = f"the optimizer steps of {epochs} epochs have {rows} rows, the batch has {count}"
    invariants.require(rows == epochs * count, "update", found, "no mini-batch may be dropped or taken twice")


@counted
def gradients_are_clipped(raw: Tensor, clipped: Tensor, norm: float, bound: float) -> None:
    """Check on a part of the gradients (as they were, as they are now) that they were clipped to the norm ``bound``."""
    if not math.isfinite(norm):
        return
    least = float(raw.double().norm())
    remedy = "the norm must be over all trained parameters: look at the clipping, and at actor.grad_clip"
    invariants.require(
        norm >= 0.99 * least, "update", f"grad_norm is {norm:.4g}, and a part of the gradients has {least:.4g}", remedy
    )
    wanted = raw.double() * min(1.0, bound / (norm + 1e-6))
    gap = float((clipped.double() - wanted).norm())
    found = f"gradients of norm {norm:.4g} were not scaled to grad_clip={bound:g}"
    invariants.require(gap <= 0.01 * float(wanted.norm()) + 1e-20, "update", found, remedy)


@counted
def step_is_adams(
    weights_before: Tensor,
    weights_after: Tensor,
    gradient: Tensor,
    group: Mapping[str, Any],
    rate: float,
    *,
    first: bool,
) -> None:
    """Check on a part of the weights that the optimizer moved them as far as the learning rate says.

    Adam's first step moves a weight by the rate, whatever the size of its gradient; no step moves one further than a
    bound that follows from its betas (Cauchy-Schwarz on the moments). ``group`` has betas and weight decay.
    """
    low = torch.finfo(weights_before.dtype).eps
    told = (gradient.abs() > 1e-7) & (weights_before.abs() * 4 * low < rate)
    count = int(told.sum())
    if count < 10:
        return
    decay = rate * group["weight_decay"] * weights_before.double()
    moved = ((weights_after - weights_before).double() + decay)[told].abs()
    ratio = float(moved.median()) / rate
    remedy = "does the optimizer hold the model's own parameters, in float32, and use the scheduled rate?"
    found = f"the first optimizer step moved weights by {ratio:.2g} times the learning rate {rate:.3g}"
    invariants.require(not first or 0.5 < ratio < 1.5, "update", found, remedy)
    b1, b2 = group["betas"]
    if b1**2 < b2:
        most = (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2)) * max(1.0, math.sqrt(1 - b2) / (1 - b1))
        found = f"an optimizer step moved weights by {ratio:.2g} times the learning rate {rate:.3g}"
        invariants.require(ratio < 1.5 * max(1.0, most) and (ratio > 0 or rate < LEAST_RATE), "update", found, remedy)


@counted
def rates_are_used(rates: Sequence[float], rate: float) -> None:
    """Check that the optimizer took every step of an update at one learning rate, that of the update."""
    wrong = [one for one in rates if not math.isclose(one, rate, rel_tol=1e-6, abs_tol=1e-15)]
    found = f"the optimizer stepped at a learning rate of {wrong[0] if wrong else 0:.4g} instead of {rate:.4g}"
    remedy = "all optimizer steps of an RL step share its rate: the schedule advances once a step"
    invariants.require(not wrong, "update", found, remedy)


@counted
def rate_is_scheduled(used: float, optim: OptimConfig, warmup: int, step: int, total: int) -> None:
    """Check the rate that the optimizer had in ``step`` (from 1) of ``total`` against the schedule written out."""
    if step < warmup:
        factor = step / warmup
    elif optim.lr_scheduler_type == "constant":
        factor = 1.0
    else:
        done = 2 * math.pi * optim.num_cycles * (step - warmup) / max(total - warmup, 1)
        least = optim.min_lr_ratio or 0.0
        factor = max(0.0, least + (1 - least) * (1 + math.cos(done)) / 2)
    wanted = optim.lr * factor
    same = math.isclose(used, wanted, rel_tol=1e-4, abs_tol=1e-12)
    found = f"the optimizer's learning rate was {used:.4g}, and the schedule gives step {step} {wanted:.4g}"
    invariants.require(same, "update", found, "the schedule counts RL steps; the metric is read from the optimizer")


# -- weights -----------------------------------------------------------------------------------------


@counted
@torch.no_grad()
def weight_sums(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, int]:
    """Return a checksum of each weight, by name, of at most :data:`SAMPLED` numbers of it (of a shard's own).

    ``dtype`` is the number format that it is compared in; None: its own.
    """
    return _sums_of({name: _some_of(value, dtype) for name, value in named})


def _some_of(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    flat = _local(value).detach().reshape(-1)
    some = flat[:: max(1, len(flat) // SAMPLED)]
    some = some.to(dtype) if dtype is not None and some.is_floating_point() else some
    return some.contiguous().view(BITS[some.element_size()])


def _sums_of(bits: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of each tensor's bits, weighted by their places; all of a width at once."""
    sums: dict[str, int] = {}
    for width in {one.dtype for one in bits.values()}:
        names = [name for name, one in bits.items() if one.dtype == width and len(one)]
        lengths = np.array([len(bits[name]) for name in names], np.int64)
        starts = np.cumsum(lengths) - lengths
        values = torch.cat([bits[name] for name in names]).cpu().numpy().astype(np.int64) if names else np.zeros(0)
        place = np.arange(1, len(values) + 1) - np.repeat(starts, lengths)
        sums |= dict(zip(names, np.add.reduceat(values * place, starts).tolist() if names else (), strict=True))
    return sums


def _local(value: Tensor) -> Tensor:
    """Return the numbers of a sharded weight that this rank has."""
    return value.to_local() if hasattr(value, "to_local") else value


class SentWeights:
    """Weights on their way to an engine in this process; ``sums`` has their checksums as the engine must have them."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None):
        self.named, self.dtype, self.sent = named, dtype, {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.named:
            self.sent[name] = _some_of(value, self.dtype).clone()
            yield name, value

    @property
    def sums(self) -> dict[str, int]:
        return counted(_sums_of)(self.sent)


@counted
def weights_stayed(then: Mapping[str, int], now: Mapping[str, int], whose: str, phase: str) -> None:
    """Check that weights which nothing may change have not changed."""
    wrong = [name for name, value in then.items() if now.get(name) != value]
    found = (
        f"{len(wrong)} of {len(then)} weights of {whose} have changed since they were loaded: {', '.join(wrong[:3])}"
    )
    invariants.require(not wrong, phase, found, "something else writes to them; they must be a copy of their own")


class FrozenReference:
    """The reference policy: the weights that it began with, and that it has none of those that train."""

    def __init__(self, reference: Any):
        self.sums = weight_sums(self._own(reference.module))

    @staticmethod
    def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return ((name, value) for name, value in module.named_parameters() if not value.requires_grad)

    def check(self, reference: Any, trained: Any) -> None:
        """Check the reference before its pass: ``trained`` is the policy, whose module it has where adapters train."""
        weights_stayed(self.sums, weight_sums(self._own(reference.module)), "the reference policy", "ref")
        reference_is_apart(reference, trained)


@counted
def reference_is_apart(reference: Any, trained: Any) -> None:
    """Check that no weight of the reference trains, unless its passes switch off the adapters that do."""
    places = {_local(p).data_ptr() for p in trained.module.parameters() if p.requires_grad} - {0}
    shared = any(_local(p).data_ptr() in places for p in reference.module.parameters())
    found = "the reference policy has weights that train"
    invariants.require(
        not shared or reference.without_adapters, "ref", found, "it must have a copy, or pass without adapters"
    )


@counted
def adapters_are_off(layers: Iterable[Any]) -> None:
    """Check that a pass of the base model goes through no adapter."""
    on = any(not layer.disable_adapters for layer in layers)
    invariants.require(
        not on, "ref", "the reference policy is computed with adapters", "they must be switched off for its passes"
    )


def no_kl(metrics: Mapping[str, float], was_zero: bool, trained: Any, reference: Any) -> bool:
    """Return whether the KL loss of an update was exactly 0. Raises BrokenInvariant where weights had moved before.

    ``was_zero``: so it was in the update before this one, too, which has moved weights. In bf16 a small step may be
    lost in the passes, so only weights that differ there count; adapters change no weight that could be counted.
    """
    if metrics.get("actor/kl_loss") != 0 or not moved_enough(metrics, "actor"):
        return False
    if was_zero:
        full = trained.compute_dtype is None
        adapters = reference.without_adapters
        apart = 1000 if adapters and full else 0
        if not adapters:
            apart = weights_apart(trained.module, reference.module, trained.compute_dtype)
        remedy = "the reference must keep the weights from before training, and the loss must read its log-probs"
        found = "kl_loss is exactly 0 in two updates, and the weights have moved"
        invariants.require(apart < 1000, "update_actor", found, remedy)
    return True


@torch.no_grad()
def weights_apart(one: nn.Module, other: nn.Module, dtype: torch.dtype | None) -> int:
    """Count the weights in which two models of a shape differ in the number format of their passes."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum(int((a.to(dtype or a.dtype) != b.to(dtype or b.dtype)).sum()) for a, b in pairs)


@counted
def stored_prompts_are_current(wanted: Sequence[Any], stored: Sequence[Any]) -> None:
    """Check that rows continue the stored prompts that are theirs: the same ids and media, the weights of now."""
    remedy = "keys and values of prompts must be computed again after each sync of weights"
    same = all(one == other for one, other in zip(wanted, stored, strict=True))
    invariants.require(same, "gen", "a row decodes behind stored keys of another prompt or of other weights", remedy)


@counted
def stored_keys_are_current(stored: Tensor, again: Tensor) -> None:
    """Check the stored keys of a prompt against those that the weights of now give, [heads, tokens, dim] each."""
    if stored.shape != again.shape or not again.isfinite().all():  # a layer that keeps a window alone; broken weights
        return
    gap = float((stored - again).float().norm() / again.float().norm().clamp(min=1e-20))
    bound = 5e-2 if stored.dtype.itemsize == 2 else 1e-3
    remedy = "keys and values of prompts must be computed again after each sync of weights"
    found = f"the stored keys of a prompt differ by {gap:.2g} from those that the engine's weights give"
    invariants.require(gap <= bound, "gen", found, remedy)


# -- engine and learner on the same tokens -----------------------------------------------------------


def surprise_z(metrics: Mapping[str, float], tokens: int) -> float | None:
    """Return how many standard errors entropy and -log p of the sampled tokens are apart beyond what is allowed.

    Where samples are drawn from the whole distribution, ``-log p`` of a token has the entropy as its expectation. What
    engine and learner differ by (precision, staleness) moves the mean, hence the allowance.
    """
    mean, square = (metrics.get(f"rollout_corr/{name}") for name in ("surprise_gap", "surprise_gap_square"))
    if mean is None or tokens < 100 or square <= 0:
        return None
    room = SURPRISE_ROOM + 3 * metrics.get("rollout_corr/logp_diff_mean", 0.0)
    beyond = max(0.0, abs(mean) - room)
    return math.copysign(beyond * math.sqrt(tokens / square), mean)


def moved_enough(metrics: Mapping[str, float], name: str) -> bool:
    """Return whether an update has surely moved weights: its rate and its gradients are beyond rounding."""
    rate, norm = metrics.get(f"{name}/lr", 0.0), metrics.get(f"{name}/grad_norm", 0.0)
    return rate >= LEAST_RATE and norm >= LEAST_NORM and not metrics.get(f"{name}/skipped_updates")
