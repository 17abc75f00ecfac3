"""Invariants of a step: what must hold between values that exist anyway, whatever the settings are. Always on.

Each function compares, changes nothing, and raises BrokenInvariant with the phase, what was found and what to do. Each
was written for bugs that trainers had and that no metric shows; ``results/museum.md`` has them. They are identities,
not bounds: of a sound run none is ever broken. What may differ by rounding has room for it, and where rounding could
be all that there is (a learning rate that is still being warmed up) nothing is compared.

:data:`SPENT` counts their CPU seconds in this process. They aim at 1 % of a step, which a lab's tiny model is near to.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from core.errors import BrokenInvariant

if TYPE_CHECKING:
    from core.algorithm.advantages import AdvantageInputs
    from core.config.sections.algorithm import AlgorithmConfig
    from core.types import ScoredGroup, TrainBatch, Trajectory

SPENT = {"cpu_s": 0.0}
MOST_TOKENS = 2**20  # of a batch whose advantages are computed again: a larger one is compared in its first groups
LEAST_RATE = 1e-7  # learning rates below may be lost in rounding
LEAST_NORM = 1e-3  # of gradients: smaller ones may be rounding, where all advantages are 0, and need not move a weight
SUM_TO_ONE = ("token-mean", "seq-mean-token-mean")
NEVER_NEGATIVE = ("abs", "mse", "k2", "low_var_kl", "k3")  # estimates of the KL


def counted(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its CPU seconds added to :data:`SPENT`."""

    @functools.wraps(check)
    def timed(*given: Any, **named: Any) -> Any:
        start = time.thread_time()
        try:
            return check(*given, **named)
        finally:
            SPENT["cpu_s"] += time.thread_time() - start

    return timed


def require(holds: Any, phase: str, found: str, remedy: str) -> None:
    if not holds:
        raise BrokenInvariant(f"invariant broken in phase {phase}: {found}; {remedy}")


# -- what was sampled --------------------------------------------------------------------------------


@counted
def turns_end_as_reported(turns: Iterable[tuple[np.ndarray, frozenset[int]]]) -> None:
    """Check that turns which stopped at the end of the sequence have that token: it is what teaches to stop.

    A turn is its tokens and the ids that end a sequence.
    """
    for ids, eos in turns:
        if not (len(ids) and ids.item(-1) in eos):
            found = f"an answer stopped at the end of its sequence, and its last tokens are {ids[-3:].tolist()}"
            require(False, "gen", found, "the tokens must be those that were sampled, never their text encoded again")


@counted
def prompts_begin_once(groups: Sequence[ScoredGroup], tokenizer: Any) -> None:
    """Check that no prompt begins with the same special token twice: template and tokenizer then both wrote it.

    Media may come first: many tokens of one kind.
    """
    special = frozenset(tokenizer.all_special_ids)
    for group in groups:
        ids = group.prompt.token_ids
        twice = len(ids) > 2 and ids[0] == ids[1] and ids[0] in special and not group.prompt.media
        found = f"the prompt of uid={group.prompt.uid!r} begins with token {ids[0]} twice" if twice else ""
        require(not twice, "gen", found, "take it out of the chat template, or out of what the tokenizer adds")


@counted
def batch_is_its_groups(groups: Sequence[ScoredGroup], batch: TrainBatch) -> None:
    """Check that every row has the tokens, engine log-probs, reward, group and loss mask of its trajectory."""
    trajectories = [t for group in groups for t in group.trajectories]
    scores = [score for group in groups for score in group.scores]
    remedy = "rows were reordered or masked after they were sampled: look at what makes the batch"
    mask = batch.require("sampled_mask" if "sampled_mask" in batch.stored else "response_mask").numpy()
    wrote = np.concatenate([t.response_mask for t in trajectories])
    counts = _sums(wrote, np.array([len(t.response_ids) for t in trajectories]))
    found = _sums(mask, batch.lengths.numpy())
    row = int(np.argmax(found != counts))
    require(
        (found == counts).all(),
        "batch",
        f"the mask of row {row} has {found[row]:g} tokens, and the policy wrote {counts[row]:g}",
        remedy,
    )
    sampled = np.concatenate([t.logprobs for t in trajectories])[wrote]
    same = np.array_equal(batch.rollout_log_probs.numpy()[mask], sampled)
    require(same, "batch", "rollout_log_probs of the policy's tokens are not those of the engine", remedy)
    whole = np.concatenate([ids for t in trajectories for ids in (t.prompt_ids, t.response_ids)])
    same = np.array_equal(batch.input_ids.numpy(), whole)
    require(same, "batch", "input_ids are not the prompts and responses that were sampled", remedy)
    values = np.array([score.value for score in scores], np.float32)
    same = np.array_equal(batch.reward.numpy(), values)
    require(same, "batch", "rewards are not the scores of their rows", remedy)
    of_group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    same = np.array_equal(batch.group.numpy(), of_group)
    require(same, "batch", "rows are counted to groups of other prompts than their own", remedy)
    live = np.repeat([not score.masked for score in scores], batch.lengths.numpy())
    same = np.array_equal(batch.loss_mask.numpy(), batch.response_mask.numpy() & live)
    require(same, "batch", "the loss mask is not the policy's tokens of the answers that count", remedy)


@counted
def text_is_the_policys(groups: Sequence[ScoredGroup], tokenizer: Any) -> None:
    """Check on the trajectory of the most turns that what was scored is the text of the policy's tokens, no other's."""
    one: Trajectory = max((t for group in groups for t in group.trajectories), key=lambda t: len(t.segments))
    scored = one.response_text
    written = tokenizer.decode(one.response_ids[one.response_mask].tolist(), skip_special_tokens=True)
    same = _letters(scored) == _letters(written) or "\ufffd" in scored + written  # half a character at a seam
    remedy = "a scorer must not read what a tool wrote, and a mask must not hold it"
    require(same, "reward", f"the scorer read {scored[-200:]!r}, and the policy wrote {written[-200:]!r}", remedy)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))  # tokenizers put spaces as they like


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the sum over each row's stretch of a flat array, [rows] float64; of a stretch without a token 0."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.cumsum(lengths)
    return total[ends] - total[ends - lengths]


# -- rewards and advantages --------------------------------------------------------------------------


@counted
def rewards_are_on_policy_tokens(inputs: AdvantageInputs) -> None:
    """Check that the rewards which an estimator reads stand on the policy's tokens, and add up to its sequences'."""
    remedy = "a reward there reaches no token that trains; put it on the last token that the policy wrote"
    stray = inputs.token_rewards is not None and inputs.token_rewards[~inputs.response_mask].any()
    require(not stray, "adv", "a reward stands on a token that the policy did not write", remedy)
    expected = float(inputs.rewards_B[inputs.actions_B > 0].sum())
    total = float(inputs.action_rewards().sum(dtype=torch.float64))
    same = abs(total - expected) <= 1e-4 * (1 + abs(expected))
    require(same, "adv", f"token rewards add up to {total:g}, and the rows' to {expected:g}", remedy)


@counted
def advantages_follow(batch: TrainBatch, token_rewards_N: Tensor | None, config: AlgorithmConfig) -> None:
    """Check ``advantages`` and ``returns`` against what defines them, for grpo, rloo and gae.

    Of the first two: within a group they add up to 0 and have the sign of the reward's distance from the mean. Of gae:
    ``G_t = r_t + gamma ((1 - lam) V_t' + lam G_t')`` where t' is the next token that the policy wrote.
    ``token_rewards_N`` is what tokens add to the rewards of their sequences.
    """
    if config.adv_estimator not in ("grpo", "rloo", "gae"):
        return
    group = batch.group.numpy()
    bounds = np.flatnonzero(np.diff(group, append=group[-1] + 1)) + 1  # rows at which a group has ended
    rows = bounds[batch.lengths.numpy().cumsum()[bounds - 1] <= MOST_TOKENS][-1:]
    if len(bounds) != len(np.unique(group)) or not len(rows):
        return
    part = batch if rows[0] == len(batch) else batch.rows(slice(0, int(rows[0])))
    added = np.zeros(part.tokens) if token_rewards_N is None else token_rewards_N[: part.tokens].numpy()
    if config.adv_estimator == "gae":
        _gae_holds(part, added, config.gamma, config.lam)
    else:
        _groups_hold(part, added, bounded=config.adv_estimator == "grpo" and config.norm_adv_by_std_in_grpo)


def _groups_hold(batch: TrainBatch, added: np.ndarray, *, bounded: bool) -> None:
    mask, lengths = batch.response_mask.numpy(), batch.lengths.numpy()
    tokens = _sums(mask, lengths)
    reward = batch.reward.numpy() + _sums(added, lengths)
    mine = _sums(np.where(mask, batch.require("advantages").numpy(), 0), lengths) / np.maximum(tokens, 1)
    counts = batch.in_group_stats.numpy() & (tokens > 0)
    _, group = np.unique(batch.group.numpy(), return_inverse=True)
    size, number = np.bincount(group), np.bincount(group, counts)
    whole = (size == number) & (size > 1)  # an answer without a token or a score would have to be left out
    distance = reward - (np.bincount(group, reward) / size)[group]
    scale = 1e-3 * (1e-6 + np.abs(mine[whole[group]]).max(initial=0))
    remedy = "an answer must be compared with those to the same prompt: look at the estimator"
    sums = np.abs(np.bincount(group, mine)[whole]).max(initial=0)
    require(sums <= scale * size.max(), "adv", f"advantages of a group add up to {sums:.3g} instead of 0", remedy)
    wrong = (mine * distance < -scale * (1e-6 + np.abs(distance).max())) & whole[group]
    text = f"row {np.argmax(wrong)} has an advantage of the other sign than its reward's distance from the group's mean"
    require(not wrong.any(), "adv", text, remedy)
    most = (size[group] - 1) / np.sqrt(size[group])  # of n numbers divided by their standard deviation
    beyond = bounded and (np.abs(mine) > 1.01 * most + 1e-3)[whole[group]].any()
    require(not beyond, "adv", "an advantage is larger than any that its group's size allows", remedy)


def _gae_holds(batch: TrainBatch, added: np.ndarray, gamma: float, lam: float) -> None:
    lengths = batch.lengths.numpy()
    places = np.flatnonzero(batch.response_mask.numpy() & np.repeat(batch.in_group_stats.numpy(), lengths))
    value, returns = batch.require("values").numpy()[places], batch.require("returns").numpy()[places]
    row = np.repeat(np.arange(len(lengths)), lengths)[places]
    goes_on = np.append(row[1:] == row[:-1], False)
    reward = added[places] + np.where(goes_on, 0, batch.reward.numpy()[row])
    after = (1 - lam) * np.append(value[1:], 0) + lam * np.append(returns[1:], 0)
    gap = np.abs(returns - reward - gamma * np.where(goes_on, after, 0)).max(initial=0)
    room = 1e-4 * (1 + np.abs(returns).max(initial=0) + np.abs(value).max(initial=0))
    remedy = "GAE steps from one token of the policy to the next one: look at the estimator and at the mask"
    require(gap <= room, "adv", f"returns differ by {gap:.3g} from what follows from rewards and values", remedy)


# -- updates -----------------------------------------------------------------------------------------


@counted
def weights_are_a_mean(step: TrainBatch, mode: str) -> None:
    """Check that an optimizer step weighs the tokens that carry loss alone, and that a mean's weights sum to one."""
    carries = step.loss_mask != 0
    left = int((carries != (step.require("loss_weight") != 0)).sum())
    found = f"{left} tokens have a loss weight and carry no loss, or carry loss and have no weight"
    require(not left, "update", found, "an answer's end of the sequence carries loss like its other tokens")
    if mode not in SUM_TO_ONE or not bool(step.loss_mask.any()):
        return
    total = float(step.require("loss_weight").sum(dtype=torch.float64))
    remedy = "the mean must be over the tokens that carry loss, and over no others"
    require(abs(total - 1) < 1e-3, "update", f"with loss_agg_mode={mode} the weights sum to {total:.4g}", remedy)


@counted
def gradients_are_cleared(parameters: Iterable[Tensor]) -> None:
    """Check that an optimizer step begins without gradients of an earlier one, on weights that small steps can move."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    remedy = "clear them after each optimizer step"
    left = any(parameter.grad is not None for parameter in trained)
    require(not left, "update", "gradients of an earlier optimizer step are left", remedy)
    short = {parameter.dtype for parameter in trained if parameter.dtype.itemsize < 4}
    found = f"the optimizer steps on weights in {', '.join(map(str, short))}"
    require(not short, "update", found, "their rounding swallows a learning rate of 1e-6: masters must be float32")


@counted
def ratio_moves(log_ratio: float | None, tokens: float, rate: float, norm: float) -> None:
    """Check that after an optimizer step the ratio to the old policy is not exactly one at all tokens.

    ``log_ratio`` is its sum over the tokens of a later step of the same batch, ``norm`` the largest of the gradients'
    norms in the steps before it.
    """
    frozen = log_ratio == 0 and tokens >= 100 and rate >= LEAST_RATE and norm >= LEAST_NORM
    remedy = "the old log-probs must be those from before the first step; clipping does nothing otherwise"
    require(not frozen, "update_actor", "the weights have moved, and the ratio is exactly 1 at every token", remedy)


@counted
def watched(parameters: Iterable[Tensor]) -> Tensor | None:
    """Return the parameter that is looked at for all of them: the last float32 one that has a gradient."""
    return next((p for p in reversed([*parameters]) if p.grad is not None and p.dtype == torch.float32), None)


@counted
def sample(value: Tensor) -> Tensor:
    """Return a copy of the first numbers of a tensor, of a sharded one of those that this rank has."""
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().flatten()[:4096].clone()


@counted
def kl_is_a_distance(kl: float, kind: str) -> None:
    """Check that the mean estimate of the KL to the reference is not negative, for estimators that cannot be."""
    negative = kind.removesuffix("+") in NEVER_NEGATIVE and kl < -1e-5
    remedy = "with this sign it drives the policy away from the reference: look at the estimate"
    require(not negative, "update_actor", f"kl_loss_type={kind} gave a mean KL of {kl:.3g}", remedy)


@counted
def reference_stays(old: Tensor, reference: Tensor, mask: Tensor) -> None:
    """Check that a policy which has been updated is not its own reference, [N] each: equal to the bit at all tokens."""
    frozen = int(mask.sum()) >= 100 and bool((old == reference)[mask].all())
    found = "the policy was updated, and its log-probs are those of the reference at every token, to the bit"
    remedy = "the reference must keep the weights from before training; it seems to share the policy's"
    require(not frozen, "ref", found, remedy)


@counted
def rate_is_positive(rate: float, base: float, step: int) -> None:
    """Check that a run does not begin with a learning rate of 0 that nobody asked for."""
    remedy = "look at optim.lr_scheduler_type and the warm-up; optim.lr=0 itself is allowed"
    require(step != 1 or base == 0 or rate > 0, "update", "the schedule gives step 1 a learning rate of 0", remedy)


@counted
def samples_are_fresh(groups: Sequence[ScoredGroup], step: int, max_staleness: int) -> None:
    """Check that no trajectory of a step is of an older policy than ``trainer.max_staleness`` allows."""
    oldest = min(trajectory.policy_version for group in groups for trajectory in group.trajectories)
    found = f"step {step} has samples of policy {oldest}, older than trainer.max_staleness={max_staleness} allows"
    require(oldest >= step - 1 - max_staleness, "gen", found, "look at what carries groups from step to step")


@counted
def ordinals_go_on(ordinals: Sequence[int], trained: int) -> None:
    """Check that a step trains on later prompts than those ``trained``: below it all ordinals are done."""
    found = f"a step begins with example {min(ordinals, default=trained)}, and those below {trained} are trained"
    require(min(ordinals, default=trained) >= trained, "gen", found, "each example is drawn once: look at what resumes")


@counted
def resume_goes_on(recorded: float | None, next_ordinal: int, step: int) -> None:
    """Check that a run is resumed at the example after the last one that its metrics recorded."""
    require(
        recorded is None or recorded == next_ordinal,
        "resume",
        f"step {step} ended before example {recorded:g}, and the checkpoint goes on with {next_ordinal}"
        if recorded is not None
        else "",
        "examples would be repeated or skipped: the checkpoint's driver.json and metrics.jsonl are of different runs",
    )
