"""Groups to tensors, optimizer steps, and pieces that fit: what trains is decided before memory
is."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.algorithm.advantages import AdvantageInputs, estimator, grpo, inputs_of, remax
from core.algorithm.losses import loss_weights
from core.config.training_keys import AlgorithmConfig
from core.learner.batching import (
    contributing_sequences,
    make_batch,
    micro_batches,
    mini_batches,
    split_zero_gradient,
)
from core.types import BATCH_FIELDS, KeptSets, Prompt, ScoredGroup, Stop, Trajectory, pad
from reward_scores.score import Score, ScoreStatus

PAD = 99


def trajectory(prompt, response, mask=None, stop=Stop.EOS):
    mask = [True] * len(response) if mask is None else mask
    return Trajectory(
        prompt, response, mask, [-0.5] * len(response), (), stop, policy_version=3, seed=1
    )


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


def test_sequences_are_prompt_then_response(groups):
    batch = make_batch(groups, PAD)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 6, 1, 2, 3, 7, 8, 9, 10, 1, 2, 3, 7]
    assert batch.lengths.tolist() == [5, 3, 7, 4] and batch.tokens == 19
    assert batch.padded("input_ids").tolist() == [
        [1, 2, 3, 4, 5, PAD, PAD],
        [1, 2, 6, PAD, PAD, PAD, PAD],
        [1, 2, 3, 7, 8, 9, 10],
        [1, 2, 3, 7, PAD, PAD, PAD],
    ]
    masks = batch.padded("response_mask").int().tolist()
    assert masks[0] == [0, 0, 1, 1, 1, 0, 0] and masks[2] == [0, 0, 0, 1, 0, 1, 0]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.reward.tolist() == [1.0, 0.25, 2.0, 0.0]
    assert batch.rollout_log_probs[:5].tolist() == [0, 0, -0.5, -0.5, -0.5]
    based = [scored([1], [trajectory([1], [2])] * 2, [Score(1.0)] * 2, baseline=Score(0.75))]
    assert make_batch(based, PAD).baseline.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("status", [ScoreStatus.CRASH, ScoreStatus.TIMEOUT])
def test_a_greedy_answer_that_could_not_be_graded_is_no_baseline_of_0(status):
    """With on_error=mask its group trains nothing, and the other group is trained as if alone."""
    failed = Score(0.0, {"acc": 0.0}, status, masked=True)
    answers = [trajectory([1], [2, 3]), trajectory([1], [4])]
    lost = scored([1], answers, [Score(1.0), Score(2.0)], baseline=failed)
    kept = scored([5], answers, [Score(1.0), Score(2.0)], ordinal=1, baseline=Score(0.75))
    batch = make_batch([lost, kept], PAD)
    assert batch.in_group_stats.tolist() == [False, False, True, True]
    assert batch.padded("loss_mask").any(1).tolist() == [False, False, True, True]
    advantages, _ = remax(inputs_of(batch, AlgorithmConfig(adv_estimator="remax")))
    assert pad(advantages, batch.lengths).amax(1).tolist() == [0.0, 0.0, 0.25, 1.25]
    cut_short = Score(0.75, masked=True)  # a penalty for length masks an answer that was graded
    batch = make_batch([scored([1], answers, [Score(1.0), Score(2.0)], baseline=cut_short)], PAD)
    assert batch.in_group_stats.all() and batch.baseline.tolist() == [0.75, 0.75]


def test_two_groups_with_one_prompt_stay_two():
    """A question that is drawn twice: each answer is compared with those of its own draw."""
    answers = [trajectory([1, 2], [3]), trajectory([1, 2], [4])]
    batch = make_batch(
        [scored([1, 2], answers, [Score(float(n)), Score(n + 2.0)], ordinal=n) for n in (0, 1)], PAD
    )
    assert batch.group.tolist() == [0, 0, 1, 1]
    fields = {"in_group_stats": batch.in_group_stats, "epsilon": 0}
    advantages, _ = grpo(
        AdvantageInputs(batch.reward, batch.lengths, batch.response_mask, batch.group, **fields)
    )
    by_answer = advantages[batch.response_mask].tolist()
    assert by_answer[:2] == by_answer[2:] == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_a_masked_row_carries_no_loss_and_only_an_errored_one_leaves_the_statistics(groups):
    batch = make_batch(groups, PAD)
    assert batch.padded("loss_mask").any(1).tolist() == [True, False, True, False]
    assert batch.in_group_stats.tolist() == [True, True, True, False]


@st.composite
def batches(draw):
    seed = draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    groups = []
    for ordinal in range(draw(st.integers(1, 7))):
        prompt = list(range(1, 1 + int(rng.integers(1, 6))))
        responses = [trajectory(prompt, [5] * int(rng.integers(0, 12))) for _ in range(3)]
        if seed % 2:  # truncated samples: the second one has kept ids
            counts = rng.integers(0, 3, len(responses[1].response_ids)).astype(np.int32)
            kept_ids = rng.integers(0, 99, counts.sum()).astype(np.int32)
            responses[1] = dataclasses.replace(responses[1], kept=KeptSets(kept_ids, counts))
        groups.append(
            scored(prompt, responses, [Score(float(rng.normal())) for _ in responses], ordinal)
        )
    return make_batch(groups, PAD)


def test_what_is_cut_from_a_batch_is_pickled_without_the_rest_of_it():
    responses = [trajectory([1], [5] * 5000) for _ in range(20)] + [trajectory([1, 2], [3, 4])]
    whole = make_batch([scored([1], responses, [Score(1.0)] * 21)], PAD)
    assert len(pickle.dumps(whole, 5)) > 1_000_000
    for index in (slice(20, 21), [20], torch.tensor([20])):
        one = whole.rows(index)
        data = pickle.dumps(one, 5)
        assert len(data) < 2_500
        again = pickle.loads(data)
        assert again.input_ids.tolist() == [1, 2, 3, 4] and again.lengths.tolist() == [4]
        assert again.stored.keys() == one.stored.keys() and again.reward.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_rows_are_those_of_the_padded_fields(batch, data):
    """``response_mask`` and ids tell every sequence from its neighbours: the prompt counts up."""
    number = st.integers(0, len(batch) - 1)
    index = data.draw(
        st.slices(len(batch)).filter(lambda s: s.step in (None, 1)) | st.lists(number, max_size=9)
    )
    chosen = index if isinstance(index, slice) else torch.tensor(index, dtype=torch.int64)
    found = batch.rows(chosen)
    spans = batch.spans(chosen)
    for name, value in batch.stored.items():
        axes = BATCH_FIELDS[name].metadata["axes"]
        if axes == "B":
            expected = value[chosen]
        else:
            parts = value.split(batch.kept_counts.tolist()) if axes == "K" else value[:, None]
            expected = torch.cat([value[:0], *(part for span in spans for part in parts[span])])
        assert torch.equal(found.stored[name], expected), name
    everything = torch.zeros_like(batch.rollout_log_probs)
    batch.put_into(everything, torch.arange(len(batch)), batch.rollout_log_probs)
    assert torch.equal(everything, batch.rollout_log_probs)


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_the_weights_of_a_mini_batch_are_those_of_its_mask(groups, mode):
    (step,) = mini_batches(make_batch(groups, PAD), prompts=2, agg_mode=mode, scale_factor=12.0)
    assert torch.equal(
        step.loss_weight, loss_weights(step.loss_mask, step.lengths, mode, scale_factor=12.0)
    )


@settings(max_examples=60, deadline=None)
@given(
    batch=batches(),
    prompts=st.integers(1, 7),
    epochs=st.integers(1, 2),
    seed=st.none() | st.integers(0, 9),
)
def test_optimizer_steps_hold_every_row_once_an_epoch_and_weigh_one(batch, prompts, epochs, seed):
    steps = list(
        mini_batches(batch, prompts=prompts, epochs=epochs, scale_factor=12.0, shuffle_seed=seed)
    )
    assert sum(len(step) for step in steps) == epochs * len(batch)
    for step in steps:
        assert len(step.group.unique()) <= prompts
        assert float(step.loss_weight.sum()) == pytest.approx(float(step.loss_mask.any()), abs=1e-5)
        assert bool((step.loss_weight[~step.loss_mask] == 0).all())


def test_shuffled_optimizer_steps_are_the_same_under_any_numpy():
    """Fixed values: a resumed run trains in the order of the run that it goes on from, whatever is
    installed."""
    prompts = [
        scored([1], [trajectory([1], [2])], [Score(float(ordinal))], ordinal)
        for ordinal in range(6)
    ]
    options = dict(prompts=2, epochs=2, scale_factor=1.0)
    steps = list(mini_batches(make_batch(prompts, PAD), shuffle_seed=42, **options))
    assert [sorted(step.reward.tolist()) for step in steps] == [
        [1, 4],
        [2, 5],
        [0, 3],
        [1, 5],
        [0, 2],
        [3, 4],
    ]


@settings(max_examples=60, deadline=None)
@given(
    batch=batches(),
    size=st.tuples(st.none(), st.integers(18, 80)) | st.tuples(st.integers(1, 5), st.none()),
)
def test_micro_batches_never_exceed_the_budget_and_lose_nothing(batch, size):
    seen, (rows, tokens) = [], size
    for index, micro in micro_batches(batch, max_sequences=rows, max_tokens=tokens):
        assert (tokens is None or micro.tokens <= tokens) and (rows is None or len(micro) <= rows)
        assert torch.equal(micro.lengths, batch.lengths[index])
        seen += index.tolist()
    assert sorted(seen) == list(range(len(batch)))
    with pytest.raises(
        ValueError, match="longer than the token budget of 1: raise ppo_max_token_len"
    ):
        list(micro_batches(batch, max_tokens=1))


def test_idle_rows_are_those_that_cannot_move_a_weight(groups):
    batch = make_batch(groups, PAD)
    (step,) = mini_batches(batch, prompts=2, scale_factor=1.0)
    step = step.adding(advantages=torch.tensor([0, 0, 1.5, 1.5]).repeat_interleave(step.lengths))
    busy, idle = split_zero_gradient(step, skip_zero_advantage=True)
    assert (len(busy), len(idle)) == (1, 3) and busy.reward.tolist() == [2.0]
    assert float(busy.loss_weight.sum()) == pytest.approx(2 / 5)  # weights were made over all rows
    busy, idle = split_zero_gradient(step, skip_zero_advantage=False)
    assert busy.reward.tolist() == [1.0, 2.0] and len(idle) == 2
    nothing = step.rows([])  # a rank whose share is empty takes part in every pass
    assert len(contributing_sequences(nothing, skip_zero_advantage=True)) == 0


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg", "reinforce_plus_plus_baseline"])
def test_an_episode_of_several_trajectories_counts_once_in_its_group(name):
    """Its branch trains with its own mask and the episode's advantage, and moves nobody else's."""
    branch = trajectory([1, 2, 9], [5, 5], [False, True])
    long = dataclasses.replace(trajectory([1, 2], [3]), branches=(branch,))
    answers = [long, trajectory([1, 2], [4]), trajectory([1, 2], [6])]
    scores = [Score(1.0), Score(0.25), Score(-1.0)]
    batch = make_batch([scored([1, 2], answers, scores)], PAD)
    assert batch.lengths.tolist() == [3, 5, 3, 3] and batch.is_branch.tolist() == [0, 1, 0, 0]
    assert batch.reward.tolist() == [1.0, 1.0, 0.25, -1.0]
    assert batch.response_mask[3:8].tolist() == [False, False, False, False, True]
    settings = AlgorithmConfig()
    advantages = estimator(name)(inputs_of(batch, settings))[0]
    last = [advantages[end - 1].item() for end in batch.lengths.cumsum(0)]
    assert last[0] == last[1]
    if name != "reinforce_plus_plus_baseline":  # whitening is over the batch's tokens
        alone = [trajectory([1, 2], [3]), *answers[1:]]
        of_one_each = make_batch([scored([1, 2], alone, scores)], PAD)
        assert not of_one_each.has("is_branch")
        expected = estimator(name)(inputs_of(of_one_each, settings))[0][2::3]
        assert [last[0], *last[2:]] == expected.tolist()
    single = make_batch([scored([1, 2], [long], [Score(1.0)])], PAD)
    kept = grpo(inputs_of(single, settings))[0].tolist()
    assert kept == pytest.approx([0, 0, 1, 0, 0, 0, 0, 1], abs=1e-5)
