"""Papers that are one function: each formula against the same one written out by hand in float64."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from core.algorithm.advantages import AdvantageInputs
from core.algorithm.losses import LossInputs
from core.config.composition import compose, examine
from core.errors import InputError
from core.types import Prompt, ScoredGroup, StepMetrics, Stop, TrainBatch, Trajectory
from recipes.asymre.asymre_ray_trainer import RayAsymRETrainer
from recipes.dppo.functions import dppo
from recipes.gdpo.functions import gdpo
from recipes.gdpo.gdpo_ray_trainer import RayGDPOTrainer
from recipes.m2po.functions import BOUND, m2po, outliers
from recipes.maxrl.functions import maxrl
from recipes.nsr.functions import nsr, psr, w_reinforce
from reward_scores.score import graded

# Two groups of four answers with scores of 0 and 1, one group without a right answer; lengths 2 and
# 1, a prompt's token before each answer; the last answer could not be graded
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
GROUPS = (5, 5, 5, 5, 9, 9, 9, 9)
GRADED = (True,) * 7 + (False,)
LENGTHS = (3, 2, 3, 2, 3, 2, 3, 2)


def inputs(**changes) -> AdvantageInputs:
    mask = [token > 0 for length in LENGTHS for token in range(length)]
    fields = {
        "reward": torch.tensor(REWARDS, dtype=torch.float64),
        "lengths": torch.tensor(LENGTHS),
        "response_mask": torch.tensor(mask),
        "group": torch.tensor(GROUPS),
        "in_group_stats": torch.tensor(GRADED),
    }
    return AdvantageInputs(**{**fields, **changes})


def on_tokens(by_sequence: list[float]) -> list[float]:
    """Return the numbers of sequences at the tokens of their answers, 0 at those of prompts."""
    return [
        number if token > 0 else 0.0
        for number, length in zip(by_sequence, LENGTHS, strict=True)
        for token in range(length)
    ]


def by_hand(formula) -> list[float]:
    """Apply ``formula(reward, mean of the group's graded answers)`` to each graded answer."""
    numbers = []
    for reward, group, counted in zip(REWARDS, GROUPS, GRADED, strict=True):
        answers = zip(REWARDS, GROUPS, GRADED, strict=True)
        others = [r for r, g, counts in answers if g == group and counts]
        numbers.append(formula(reward, sum(others) / len(others)) if counted else 0.0)
    return on_tokens(numbers)


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        (maxrl, lambda reward, mean: (reward - mean) / mean if mean else 0.0),
        (psr, lambda reward, mean: float(reward == 1)),
        (nsr, lambda reward, mean: -float(reward == 0)),
        (w_reinforce, lambda reward, mean: 0.1 if reward == 1 else -1.0),
    ],
    ids=["maxrl", "psr", "nsr", "w_reinforce"],
)
def test_an_advantage_is_that_of_its_formula(estimator, formula):
    advantages, returns = estimator(inputs())
    assert advantages.dtype == torch.float64
    assert advantages.tolist() == pytest.approx(by_hand(formula), abs=1e-12)
    assert torch.equal(advantages, returns)


@pytest.mark.parametrize("recipe", ["gdpo", "nsr", "opd"])
def test_a_kl_in_the_reward_that_no_advantage_would_hold_is_refused(recipe):
    (problem,) = examine(recipe, ["algorithm.use_kl_in_reward=True"]).problems
    assert problem.startswith("algorithm.use_kl_in_reward=true: adds to the ")


def test_opd_takes_a_kl_in_the_reward_where_it_takes_the_reward():
    keys = ["algorithm.use_kl_in_reward=True", "distillation.reward_weight=1"]
    assert not examine("opd", keys).problems


def test_nsr_reads_the_score_and_not_what_the_tokens_add():
    kl = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    kl[1:3] = -2.0  # on the first answer, which is right
    assert torch.equal(nsr(inputs(token_rewards=kl))[0], nsr(inputs())[0])


def test_maxrl_weighs_a_rare_right_answer_as_maximum_likelihood_does():
    """The sum of |A| of a group with success rate p is 2 n (1 - p): most where success is rare, and
    n times the gradient of log p, not of p."""
    for right in (1, 2, 4, 7, 8):
        reward = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
        ones = torch.ones(8, dtype=torch.int64)
        alone = inputs(
            reward=reward,
            lengths=ones,
            response_mask=ones.bool(),
            group=0 * ones,
            in_group_stats=ones.bool(),
        )
        advantages = maxrl(alone)[0]
        assert float(advantages.abs().sum()) == pytest.approx(2 * 8 * (1 - right / 8), abs=1e-12)
        assert float(advantages.sum()) == pytest.approx(0, abs=1e-12)


def test_maxrl_refuses_scores_below_zero():
    with pytest.raises(ValueError, match="at least 0"):
        maxrl(inputs(reward=torch.tensor(REWARDS) - 0.5))


PROBABILITIES = (  # old, new, advantage: whether the token is masked at bounds of 0.1 and 0.2
    (0.5, 0.75, 1.0, True),
    (0.5, 0.65, 1.0, False),
    (0.5, 0.35, 1.0, False),  # down although A > 0: the gradient leads back
    (0.5, 0.35, -1.0, True),
    (0.5, 0.45, -1.0, False),
    (0.001, 0.1, 2.0, False),  # a ratio of 100, and hardly any probability
    (0.99, 0.85, -2.0, True),  # a ratio of 0.86, and much probability
)


def test_dppo_masks_by_the_difference_of_probabilities_and_not_by_their_ratio():
    old, new, advantages, masked = map(list, zip(*PROBABILITIES, strict=True))
    config = SimpleNamespace(clip_ratio_low=0.1, clip_ratio_high=0.2)
    log_prob = torch.tensor(new, dtype=torch.float64).log().requires_grad_()
    tokens = LossInputs(
        log_prob=log_prob,
        old_log_prob=torch.tensor(old, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones(len(old), dtype=torch.bool),
        config=config,
        lengths=torch.tensor([len(old)]),
    )
    loss, stats = dppo(tokens)
    by_token = zip(old, new, advantages, masked, strict=True)
    expected = [0.0 if off else -a * p / q for q, p, a, off in by_token]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert stats["pg_clipfrac"].bool().tolist() == masked
    loss.sum().backward()
    # The gradient of -A r in the log-prob is -A r: a masked token has none
    assert log_prob.grad.tolist() == pytest.approx(expected, abs=1e-12)


# Old log-ratios of tokens with an advantage of their sign, or of the other one, 100 times
LOG_RATIOS = (0.05, -0.4, 0.1, 0.3, -0.2, 0.01, 0.6, -0.15, 0.0, 1.2)
OUTWARD = (1, 1, 0, 1, 1, 1, 1, 1, 1, 0)


def stale_tokens(**changes) -> LossInputs:
    """Return tokens whose log-ratio leads away from the old policy where OUTWARD is 1."""
    log_ratio = torch.tensor(LOG_RATIOS, dtype=torch.float64)
    sign = torch.where(log_ratio < 0, -1.0, 1.0) * (2 * torch.tensor(OUTWARD) - 1)
    fields = {
        "log_prob": log_ratio - 1,
        "old_log_prob": torch.full_like(log_ratio, -1),
        "advantages": sign * torch.arange(1, 11).double(),
        "mask": torch.ones(10, dtype=torch.bool),
        "config": None,
        "lengths": torch.tensor([10]),
    }
    return LossInputs(**{**fields, **changes})


def masked_by_hand(tokens: LossInputs) -> list[bool]:
    """Mask the largest square of an outward token until the mean of the others is in bounds."""
    outward = {at: LOG_RATIOS[at] ** 2 for at in range(10) if OUTWARD[at] and tokens.mask[at]}
    outward = {at: square for at, square in outward.items() if square > 0}
    while outward and sum(outward.values()) / len(outward) > BOUND:
        del outward[max(outward, key=outward.get)]
    return [
        bool(OUTWARD[at] and LOG_RATIOS[at] and tokens.mask[at] and at not in outward)
        for at in range(10)
    ]


def test_m2po_masks_the_fewest_outliers_that_bring_the_second_moment_into_bounds():
    tokens = stale_tokens()
    masked = outliers(tokens, lambda value: [value])
    assert masked.tolist() == masked_by_hand(tokens)
    assert 0 < int(masked.sum()) < sum(OUTWARD)
    # The token of the largest ratio of all leads back: it stays
    assert not masked[9] and masked[6]
    loss, stats = m2po(stale_tokens(selected=masked))
    by_token = zip(LOG_RATIOS, tokens.advantages.tolist(), masked.tolist(), strict=True)
    expected = [0.0 if off else -a * math.exp(log_ratio) for log_ratio, a, off in by_token]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert stats["pg_clipfrac"].bool().tolist() == masked.tolist()


def test_m2po_chooses_among_the_tokens_of_all_ranks():
    """The outlier of another rank makes room for none here; tokens without loss do not count."""
    half = stale_tokens(mask=torch.arange(10) < 5)
    alone = outliers(half, lambda value: [value])
    assert alone.tolist() == masked_by_hand(half)
    small = torch.full((100,), 0.01, dtype=torch.float64)
    beside = outliers(half, lambda value: [value, small])
    assert alone.any() and not beside.any()
    whole = outliers(stale_tokens(), lambda value: [value])
    other = stale_tokens(mask=torch.arange(10) >= 5)
    squares = {}
    outliers(half, lambda value: squares.setdefault("half", [value]))
    outliers(other, lambda value: squares.setdefault("other", [value]))
    both = [squares["half"][0], squares["other"][0]]
    shares = [outliers(part, lambda value: both) for part in (half, other)]
    assert torch.equal(shares[0] | shares[1], whole)


def test_asymre_subtracts_a_shifted_mean_from_the_scores_of_graded_answers():
    keys = ["preset=lab", "baseline_shift=-0.25"]
    trainer = RayAsymRETrainer(compose("asymre", keys))
    fields = inputs()
    batch = TrainBatch(fields.lengths, 0).adding(
        reward=fields.reward,
        response_mask=fields.response_mask,
        group=fields.group,
        in_group_stats=fields.in_group_stats,
    )
    batch = trainer.compute_advantages(batch, StepMetrics(1))
    expected = by_hand(lambda reward, mean: reward - mean + 0.25)
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert math.fsum(expected) > 0  # right answers weigh more


@pytest.mark.parametrize("recipe", ["maxrl", "nsr", "dppo", "asymre", "gdpo", "m2po"])
def test_a_method_s_configuration_composes_with_the_lab_s_preset(recipe):
    config = compose(recipe, ["preset=lab"])
    assert config.actor_rollout_ref.rollout.n == 16
    assert not config.critic.enable


def test_gdpo_normalises_each_part_in_its_group_and_the_sum_over_the_batch():
    fields = inputs()
    parts = {"acc": fields.reward, "short": torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6]).double()}
    weights = {"acc": 1.0, "short": 0.25}
    sums = [0.0] * len(REWARDS)
    for name, weight in weights.items():
        for group in set(GROUPS):
            members = [i for i, g in enumerate(GROUPS) if g == group and GRADED[i]]
            values = [float(parts[name][i]) for i in members]
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            for i, value in zip(members, values, strict=True):
                sums[i] += weight * (value - mean) / (deviation + 1e-6)
    graded = [total for total, counts in zip(sums, GRADED, strict=True) if counts]
    mean, deviation = statistics.mean(graded), statistics.stdev(graded)
    expected = [
        (total - mean) / (deviation + 1e-6) if counts else 0.0
        for total, counts in zip(sums, GRADED, strict=True)
    ]
    advantages = gdpo(fields, parts, weights)
    assert advantages.tolist() == pytest.approx(on_tokens(expected), abs=1e-12)


def test_gdpo_tells_mixtures_apart_that_grpo_gives_one_advantage():
    """Two answers of one group, one right without the mark and one wrong with it: the same sum of
    two equal weights, and different advantages in a batch where the parts are differently rare."""
    ones = torch.ones(4, dtype=torch.int64)
    fields = inputs(
        reward=torch.zeros(4).double(),
        lengths=ones,
        response_mask=ones.bool(),
        group=0 * ones,
        in_group_stats=None,
    )
    right, marked = torch.tensor([1.0, 0, 0, 0]).double(), torch.tensor([0.0, 1, 1, 0]).double()
    advantages = gdpo(fields, {"acc": right, "marked": marked}, {"acc": 1.0, "marked": 1.0})
    # By hand: parts 1.5 and -0.866, -0.5 and 0.866, -0.5 and -0.866; deviation of the sums 0.919
    assert advantages.tolist() == pytest.approx([0.6896, 0.3981, 0.3981, -1.4858], abs=1e-3)


def test_the_trainer_of_gdpo_takes_each_part_from_the_scores_of_its_answers():
    """The part that trains is not the score: an answer right and unmarked beside a wrong one."""
    trainer = RayGDPOTrainer(
        compose("gdpo", ["preset=lab", "reward_weights={acc: 0, marked: 1.0}"])
    )
    trainer.tokenizer = SimpleNamespace(pad_token_id=0)
    prompt = Prompt(0, "0", (4,), (), "x", "lab/hops")
    scores = tuple(graded(right, "a", marked=float(not right)) for right in (True, False, False))
    answers = tuple(Trajectory([4], [5], [True], [-1.0], (), Stop.EOS, 0, 0) for _ in scores)
    batch = trainer.make_batch([ScoredGroup(prompt, answers, scores)])
    batch = trainer.compute_advantages(batch, StepMetrics(1))
    # By hand: marks 0, 1, 1 less their mean by their deviation, twice
    expected = [0.0, -1.1547, 0.0, 0.5774, 0.0, 0.5774]
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-3)


def test_a_part_that_no_score_has_is_refused_with_its_key():
    trainer = RayGDPOTrainer(compose("gdpo", ["preset=lab", "reward_weights={acc: 1.0, len: 2.0}"]))
    with pytest.raises(InputError, match="reward_weights.len=2.0"):
        trainer.shape_reward(graded(True, "a", marked=1.0), None)
    trainer = RayGDPOTrainer(compose("gdpo", ["preset=lab", "reward_weights={marked: 2.0}"]))
    assert trainer.shape_reward(graded(False, "a", marked=1.0), None).value == 2.0
