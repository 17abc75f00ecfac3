"""Advantage estimators: by hand, and what must not change them. Their formulas are held to
tests/golden."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.algorithm import advantages
from core.algorithm.sequences import masked_mean, whiten
from core.config import registry
from tests.padded import PaddedAdvantageInputs as AdvantageInputs
from tests.padded import flat_inputs, on_padded

FLAT = {name: advantages.estimator(name) for name in registry.ESTIMATORS}
ESTIMATORS = {name: on_padded(estimate) for name, estimate in FLAT.items()}


def make_inputs(
    seed: int, prompts: int = 3, n: int = 4, width: int = 7, **overrides
) -> AdvantageInputs:
    """Random rows in shuffled groups, with holes in the masks and a reward on the last policy
    token."""
    rng = np.random.default_rng(seed)
    rows = prompts * n
    mask = rng.random((rows, width)) < 0.7
    mask[:, 2] = True
    rewards = np.zeros((rows, width))
    last = [np.flatnonzero(row)[-1] for row in mask]
    rewards[np.arange(rows), last] = rng.choice([0.0, 0.25, 1.0, 1.75, -0.5], rows)
    labels = rng.permutation(np.repeat([7, -3, 2**40][:prompts], n))
    fields = {
        "token_level_rewards": torch.from_numpy(rewards),
        "response_mask": torch.from_numpy(mask),
        "group": torch.from_numpy(labels),
        "in_group_stats": torch.from_numpy(rng.random(rows) < 0.8),
        "values": torch.from_numpy(rng.normal(size=(rows, width))),
        "baseline": torch.from_numpy(rng.normal(size=rows)),
        "gamma": 0.9,
        "lam": 0.8,
    }
    return AdvantageInputs(**{**fields, **overrides})


def changed(inputs: AdvantageInputs, **fields) -> AdvantageInputs:
    return AdvantageInputs(**{**vars(inputs), **fields})


def test_group_estimators_by_hand():
    """Two groups of three, rewards (5, 2, -1) and (4, 4, 1): every estimator gives another
    number."""
    two_groups = AdvantageInputs(
        token_level_rewards=torch.tensor([[0.0, 5], [2, 0], [0, -1], [0, 4], [0, 4], [1, 0]]),
        response_mask=torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1], [1, 0]]).bool(),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    third = 1 / math.sqrt(3)
    for name, expected in {
        "grpo": [1, 0, -1, third, third, -2 * third],
        "rloo": [4.5, 0, -4.5, 1.5, 1.5, -3],
        "opo": [3, 0, -3, 0.6, 0.6, -2.4],
        "gpg": [3, 0, -3, 1, 1, -2],
        "grpo_passk": [1, 0, 0, 0, 0, 0],
    }.items():
        assert ESTIMATORS[name](two_groups)[0][:, 0].tolist() == pytest.approx(expected, 1e-5), name


def test_gae_by_hand():
    """Values 1, 2, 4 with a tool's token between the last two: rewards 0, 0, 10; gamma 0.5, lam
    0.5."""
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor([[0.0, 0, 0, 10]]),
        response_mask=torch.tensor([[True, True, False, True]]),
        group=torch.tensor([0]),
        values=torch.tensor([[1.0, 2, 99, 4]]),
        gamma=0.5,
        lam=0.5,
    )
    # deltas: 0 + 0.5 * 2 - 1 = 0; 0 + 0.5 * 4 - 2 = 0; 10 - 4 = 6; advantages 0.375, 1.5, 6
    advantages, returns = ESTIMATORS["gae"](inputs)
    assert returns.tolist() == [[1.375, 3.5, 0.0, 10.0]]
    mean, std = 2.625, math.sqrt(((2.25**2) + 1.125**2 + 3.375**2) / 2)
    assert advantages[0].tolist() == pytest.approx(
        [-2.25 / std, -1.125 / std, 0, (6 - mean) / std], 1e-5
    )


seeds = st.integers(0, 10**6)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=seeds)
@settings(max_examples=15, deadline=None)
def test_a_row_that_could_not_be_scored_is_as_if_it_were_not_there(name, seed):
    """As long as two rows of each group remain: whatever it holds, NaN included, it moves no other
    row."""
    inputs = make_inputs(seed)
    kept = torch.ones(12, dtype=torch.bool)
    for label in inputs.group.unique():
        kept[(inputs.group == label).nonzero()[seed % 4]] = False
    rewards = inputs.token_level_rewards.clone()
    rewards[~kept] = torch.nan
    advantages, returns = ESTIMATORS[name](
        changed(inputs, token_level_rewards=rewards, in_group_stats=kept)
    )
    assert not advantages[~kept].any() and not returns[~kept].any()
    rows = {
        field: value[kept]
        for field, value in vars(inputs).items()
        if isinstance(value, torch.Tensor)
    }
    alone = ESTIMATORS[name](changed(inputs, **{**rows, "in_group_stats": None}))
    torch.testing.assert_close(advantages[kept], alone[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns[kept], alone[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
@given(seed=seeds, garbage=st.sampled_from([math.nan, math.inf, -1e30]))
@settings(max_examples=15, deadline=None)
def test_what_lies_outside_the_mask_is_never_read(name, seed, garbage):
    inputs = make_inputs(seed)
    outside = ~inputs.response_mask
    dirty = changed(
        inputs,
        token_level_rewards=inputs.token_level_rewards.masked_fill(outside, garbage),
        values=inputs.values.masked_fill(outside, garbage),
        in_group_stats=None,
    )
    clean = changed(inputs, in_group_stats=None)
    for got, want in zip(ESTIMATORS[name](dirty), ESTIMATORS[name](clean), strict=True):
        assert torch.equal(got, want)
        assert not got[outside].any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
@given(seed=seeds, value=st.floats(-10, 10), dtype=st.sampled_from([torch.float32, torch.float64]))
@example(seed=0, value=0.1, dtype=torch.float64)  # 0.1 + 0.1 + 0.1 is not 0.3
# Answers of one group whose first tokens have no gradient
@example(seed=12211, value=1.0, dtype=torch.float32)
@settings(max_examples=25, deadline=None)
def test_equal_rewards_give_exactly_zero(name, seed, value, dtype):
    """Not 1e-8 over 1e-6: such groups are skipped in the update, and must not push in a random
    direction."""
    rewards = torch.zeros(9, 7, dtype=dtype)
    rewards[:, -1] = value
    inputs = make_inputs(seed, n=3, token_level_rewards=rewards, in_group_stats=None)
    assert not ESTIMATORS[name](inputs)[0].any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg"])
def test_a_group_of_one_keeps_its_reward_but_a_lone_survivor_gets_none(name):
    """With n = 1 there is nothing to compare with by design; where the others failed, by
    accident."""
    one = {
        "token_level_rewards": torch.tensor([[0.0, 3.0]]),
        "response_mask": torch.tensor([[True, True]]),
    }
    advantages, _ = ESTIMATORS[name](AdvantageInputs(**one, group=torch.tensor([5])))
    expected = 3 / (1 + 1e-6) if name == "grpo" else 3
    assert advantages.tolist() == [pytest.approx([expected, expected])]
    four = {key: value.repeat(4, 1) for key, value in one.items()}
    survivor = torch.tensor([False, True, False, False])
    advantages, _ = ESTIMATORS[name](
        AdvantageInputs(**four, group=torch.zeros(4).long(), in_group_stats=survivor)
    )
    assert not advantages.any()


@pytest.mark.parametrize("name", sorted(set(FLAT) - {"gae", "remax"}))
def test_a_branch_has_the_advantage_of_its_episode(name):
    """Two episodes, scores 1 and 0; the first has a second sequence."""
    inputs = advantages.AdvantageInputs(
        reward=torch.tensor([1.0, 1.0, 0.0]),
        lengths=torch.tensor([2, 2, 2]),
        response_mask=torch.tensor([0, 1, 0, 1, 0, 1]).bool(),
        group=torch.tensor([0, 0, 0]),
        is_branch=torch.tensor([False, True, False]),
    )
    first, branch = FLAT[name](inputs)[0][[1, 3]].tolist()
    assert first == branch > 0


def test_what_an_estimator_needs_is_named():
    for name, inputs, words in (
        ("gae", make_inputs(0, values=None), "gae estimator needs 'values'"),
        ("remax", make_inputs(0, baseline=None), "remax estimator needs 'baseline'"),
        ("grpo_passk", make_inputs(0, prompts=1, n=1), "rollout.n must be >= 2"),
    ):
        with pytest.raises(ValueError, match=words):
            ESTIMATORS[name](inputs)


def test_an_estimator_of_the_user_s_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def halved(inputs):\n    a = inputs.spread(0.5 * inputs.rewards_B)\n    return a, a\n"
    )
    inputs = flat_inputs(make_inputs(0))
    expected = inputs.spread(0.5 * inputs.rewards_B)
    assert torch.equal(advantages.estimator(f"{path}:halved")(inputs)[0], expected)


def test_the_reward_lies_on_the_last_token_the_policy_wrote():
    """Not on the tool's output that follows; one who wrote nothing gets none."""
    inputs = advantages.AdvantageInputs(
        reward=torch.tensor([1.0, 2.0, 7.0]),
        lengths=torch.tensor([3, 4, 2]),
        response_mask=torch.tensor([False, True, True, False, True, True, False, False, False]),
        group=torch.zeros(3).long(),
    )
    assert inputs.at_actions(inputs.action_rewards()).tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 0]


def test_nothing_kept_is_zero_and_has_no_variance():
    nothing = torch.zeros(2, 3).bool()
    assert float(masked_mean(torch.ones(2, 3), nothing)) == 0
    with pytest.raises(ValueError, match="a variance over 1 tokens"):
        whiten(torch.ones(1))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_advantages_of_a_group_add_up_to_zero_and_have_the_sign_of_their_rewards_distance(name):
    """Divided by the standard deviation of n rewards, none is above (n - 1) / sqrt(n)."""
    torch.manual_seed(0)
    for n in (2, 3, 8):
        group = torch.arange(4).repeat_interleave(n)
        reward = torch.randn(4 * n)
        everything = torch.ones(4 * n, dtype=torch.bool)
        fields = {"in_group_stats": everything, "epsilon": 1e-6}
        flat = reward, torch.ones_like(group), everything, group
        inputs = advantages.AdvantageInputs(*flat, **fields)
        values, _ = advantages.estimator(name)(inputs)
        by_group = values.view(4, n)
        distance = reward.view(4, n) - reward.view(4, n).mean(1, keepdim=True)
        assert by_group.sum(1).abs().max() < 1e-4
        assert torch.equal(by_group.sign(), distance.sign())
        if name == "grpo":
            assert by_group.abs().max() <= (n - 1) / n**0.5 + 1e-4
