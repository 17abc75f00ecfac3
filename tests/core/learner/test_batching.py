"""Groups to tensors, optimizer steps, and pieces that fit: what trains is decided before memory is."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import types
from core.algorithm.losses import loss_weights
from core.learner.batching import (
    busy_sequences,
    make_batch,
    micro_batches,
    optimizer_steps,
    split_idle,
    token_rewards,
)
from core.types import Prompt, ScoredGroup, Stop, TrainBatch, Trajectory
from reward_scores.score import Score, ScoreStatus

PAD = 99


def trajectory(prompt, response, mask=None, stop=Stop.EOS):
    mask = [True] * len(response) if mask is None else mask
    return Trajectory(prompt, response, mask, [-0.5] * len(response), (), stop, policy_version=3, seed=1)


def scored(prompt, responses, scores, ordinal=0, baseline=None):
    question = Prompt(ordinal, f"q{ordinal}", tuple(prompt), (), "x", "test")
    return ScoredGroup(question, tuple(responses), tuple(scores), baseline)


@pytest.fixture
def groups():
    one = scored(
        [1, 2],
        [trajectory([1, 2], [3, 4, 5]), trajectory([1, 2], [6], stop=Stop.LENGTH)],
        [Score(1.0), Score(0.25, masked=True)],
    )
    crashed = Score(0.0, status=ScoreStatus.CRASH, masked=True)
    tool = trajectory([1, 2, 3], [7, 8, 9, 10], [True, False, True, False])
    two = scored([1, 2, 3], [tool, trajectory([1, 2, 3], [7])], [Score(2.0), crashed], ordinal=1)
    return [one, two]


def test_rows_are_prompt_then_response_padded_on_the_right(groups):
    batch = make_batch(groups, PAD)
    assert batch.input_ids.tolist() == [
        [1, 2, 3, 4, 5, PAD, PAD],
        [1, 2, 6, PAD, PAD, PAD, PAD],
        [1, 2, 3, 7, 8, 9, 10],
        [1, 2, 3, 7, PAD, PAD, PAD],
    ]
    assert batch.attention_mask.sum(1).tolist() == [5, 3, 7, 4]
    assert batch.response_mask.int().tolist()[2] == [0, 0, 0, 1, 0, 1, 0]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.reward.tolist() == [1.0, 0.25, 2.0, 0.0]
    assert batch.rollout_log_probs[0].tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0]


def test_a_masked_row_carries_no_loss_and_only_an_errored_one_leaves_the_statistics(groups):
    batch = make_batch(groups, PAD)
    assert batch.loss_mask.any(1).tolist() == [True, False, True, False]
    assert batch.in_group_stats.tolist() == [True, True, True, False]


def test_the_reward_lies_on_the_last_token_the_policy_wrote(groups):
    batch = make_batch(groups, PAD)
    rewards = batch.adding(token_level_rewards=token_rewards(batch)).token_level_rewards
    assert rewards[0].tolist() == [0, 0, 0, 0, 1.0, 0, 0]
    assert rewards[2].tolist() == [0, 0, 0, 0, 0, 2.0, 0]  # not on the tool output that follows


def test_a_response_without_a_policy_token_gets_no_reward():
    batch = make_batch([scored([1], [trajectory([1], [])], [Score(5.0)])], PAD)
    assert token_rewards(batch).abs().sum() == 0


def test_baselines_are_spread_over_their_group():
    responses = [trajectory([1], [2]), trajectory([1], [3])]
    batch = make_batch([scored([1], responses, [Score(1.0), Score(0.0)], baseline=Score(0.75))], PAD)
    assert batch.baseline.tolist() == [0.75, 0.75]


def test_a_late_field_names_the_phase_that_sets_it(groups):
    with pytest.raises(ValueError, match="old_log_probs is not set yet: compute_log_probs"):
        make_batch(groups, PAD).need("old_log_probs")
    with pytest.raises(ValueError, match=r"advantages has shape \(4, 2\), expected \(4, 7\)"):
        make_batch(groups, PAD).adding(advantages=torch.zeros(4, 2))


@st.composite
def batches(draw):
    seed = draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    groups = []
    for ordinal in range(draw(st.integers(1, 7))):
        prompt = list(range(1, 1 + int(rng.integers(1, 6))))
        responses = [trajectory(prompt, [5] * int(rng.integers(0, 12))) for _ in range(3)]
        groups.append(scored(prompt, responses, [Score(float(rng.normal())) for _ in responses], ordinal))
    return make_batch(groups, PAD)


def test_a_batch_of_padded_fields_is_the_batch_of_flat_ones(groups):
    batch = make_batch(groups, PAD)
    padded = {name: getattr(batch, name) for name in batch.stored}
    again = TrainBatch.of(attention_mask=batch.attention_mask, pad_id=PAD, **padded)
    assert again.stored.keys() == batch.stored.keys() and again.shape == (4, 7) and again.tokens == 19
    assert all(torch.equal(again.flat(name), value) for name, value in batch.stored.items())
    assert again.flat("input_ids").dtype == torch.int32 and again.input_ids.dtype == torch.int64
    assert batch.flat("rollout_log_probs").shape == (19,)
    with pytest.raises(ValueError, match="attention_mask has a gap"):
        TrainBatch.of(attention_mask=torch.tensor([[True, False, True]]), input_ids=torch.ones(1, 3))
    with pytest.raises(ValueError, match="cannot be cut to 6 columns: a sequence has 7 tokens"):
        batch.cut(6)
    assert batch.adding(reward=None).stored.keys() == batch.stored.keys() - {"reward"}


def test_what_is_cut_from_a_batch_is_pickled_without_the_rest_of_it():
    responses = [trajectory([1], [5] * 5000) for _ in range(20)] + [trajectory([1, 2], [3, 4])]
    whole = make_batch([scored([1], responses, [Score(1.0)] * 21)], PAD)
    assert len(pickle.dumps(whole, 5)) > 1_000_000
    for index in (slice(20, 21), [20], torch.tensor([20])):
        one = whole.rows(index).cut(4)
        data = pickle.dumps(one, 5)
        assert len(data) < 2_500
        again = pickle.loads(data)
        assert again.input_ids.tolist() == [[1, 2, 3, 4]] and again.shape == one.shape
        assert again.stored.keys() == one.stored.keys() and again.reward.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_rows_are_those_of_the_padded_fields(batch, data):
    """``response_mask`` and ids tell every sequence from its neighbours: the prompt counts up."""
    number = st.integers(0, len(batch) - 1)
    index = data.draw(st.slices(len(batch)).filter(lambda s: s.step in (None, 1)) | st.lists(number, max_size=9))
    chosen = index if isinstance(index, slice) else torch.tensor(index, dtype=torch.int64)
    found = batch.rows(chosen)
    for name in (*batch.stored, "attention_mask"):
        assert torch.equal(getattr(found, name), getattr(batch, name)[chosen]), name


@settings(max_examples=60, deadline=None)
@given(batch=batches(), slots=st.integers(1, 300), whole_groups=st.booleans())
def test_pieces_hold_every_row_once_in_order_and_no_more_than_fit(batch, slots, whole_groups):
    batch = batch.adding(advantages=torch.arange(batch.tokens) + 0.5)
    pieces = list(batch.pieces(slots, whole_groups=whole_groups))
    for piece in pieces:
        units = len(piece.group.unique()) if whole_groups else len(piece)
        assert len(piece) * piece.width <= slots or units == 1 or len(pieces) == 1
        assert len(pieces) == 1 or piece.width == int(piece.lengths.max())
    assert torch.equal(torch.cat([piece.flattened(piece.advantages) for piece in pieces]), batch.flat("advantages"))
    if whole_groups:
        assert sum(len(piece.group.unique()) for piece in pieces) == len(batch.group.unique())
    elif len(batch) * batch.width > slots and len(batch) > 1:
        assert len(pieces) > 1


def test_groups_whose_sequences_are_apart_stay_in_one_piece(groups):
    batch = make_batch(groups, PAD).adding(group=torch.tensor([0, 1, 0, 1]))
    (piece,) = batch.pieces(1, whole_groups=True)
    assert piece is batch


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("slots", [2**24, 8])
def test_the_weights_of_a_step_are_those_of_its_padded_mask(groups, mode, slots, monkeypatch):
    monkeypatch.setattr(types, "PIECE_SLOTS", slots)
    (step,) = optimizer_steps(make_batch(groups, PAD), prompts=2, agg_mode=mode, scale_factor=12.0)
    assert torch.equal(step.loss_weight, loss_weights(step.loss_mask, mode, scale_factor=12.0))
    step = step.adding(advantages=torch.zeros(4, 7).index_fill(0, torch.tensor([1, 2]), 1.5))
    assert busy_sequences(step, only_advantages_train=True).tolist() == [False, False, True, False]
    assert busy_sequences(step, only_advantages_train=False).tolist() == [True, False, True, False]


@settings(max_examples=60, deadline=None)
@given(batch=batches(), prompts=st.integers(1, 7), epochs=st.integers(1, 2), seed=st.none() | st.integers(0, 9))
def test_optimizer_steps_hold_every_row_once_an_epoch_and_weigh_one(batch, prompts, epochs, seed):
    steps = list(optimizer_steps(batch, prompts=prompts, epochs=epochs, scale_factor=12.0, shuffle_seed=seed))
    assert sum(len(step) for step in steps) == epochs * len(batch)
    for step in steps:
        assert len(step.group.unique()) <= prompts
        assert float(step.loss_weight.sum()) == pytest.approx(float(step.loss_mask.any()), abs=1e-5)
        assert bool((step.loss_weight[~step.loss_mask] == 0).all())


def test_shuffled_optimizer_steps_are_the_same_under_any_numpy():
    """Fixed values: a resumed run trains in the order of the run that it goes on from, whatever is installed."""
    prompts = [scored([1], [trajectory([1], [2])], [Score(float(ordinal))], ordinal) for ordinal in range(6)]
    options = dict(prompts=2, epochs=2, scale_factor=1.0)
    steps = list(optimizer_steps(make_batch(prompts, PAD), shuffle_seed=42, **options))
    assert [sorted(step.reward.tolist()) for step in steps] == [[1, 4], [2, 5], [0, 3], [1, 5], [0, 2], [3, 4]]


@settings(max_examples=60, deadline=None)
@given(batch=batches(), tokens=st.integers(18, 80), rows=st.none() | st.integers(1, 5))
def test_micro_batches_never_exceed_the_budget_and_lose_nothing(batch, tokens, rows):
    seen = []
    for index, micro in micro_batches(batch, max_sequences=rows, max_tokens=tokens):
        assert micro.input_ids.numel() <= tokens and (rows is None or len(micro) <= rows)
        assert bool(micro.attention_mask.any(0).all()), "a column of nothing but padding"
        assert torch.equal(micro.attention_mask.sum(1), batch.attention_mask[index].sum(1))
        seen += index.tolist()
    assert sorted(seen) == list(range(len(batch)))


def test_a_sequence_over_the_budget_is_refused_by_name(groups):
    with pytest.raises(ValueError, match="7 tokens is longer than the token budget of 6: raise ppo_max_token_len"):
        list(micro_batches(make_batch(groups, PAD), max_tokens=6))


def test_idle_rows_are_those_that_cannot_move_a_weight(groups):
    batch = make_batch(groups, PAD)
    (step,) = optimizer_steps(batch, prompts=2, scale_factor=1.0)
    step = step.adding(advantages=torch.zeros(4, 7).index_fill(0, torch.tensor([2, 3]), 1.5))
    busy, idle = split_idle(step, only_advantages_train=True)
    assert (len(busy), len(idle)) == (1, 3) and busy.reward.tolist() == [2.0]
    assert float(busy.loss_weight.sum()) == pytest.approx(2 / 5)  # weights were made over all rows
    busy, idle = split_idle(step, only_advantages_train=False)
    assert busy.reward.tolist() == [1.0, 2.0] and len(idle) == 2
