"""The learner against the plain computation: alignment, gradients whatever memory is allowed,
skipped steps."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from core.config.training_keys import PolicyLossConfig
from core.learner.batching import MicroBatchSize, make_batch, mini_batches, mini_batching
from core.learner.learner import Actor, Critic, zero_advantage_gives_no_gradient
from core.learner.passes import Policy
from core.tracking.metric_sums import MetricSums
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_model

PAD = 0


def actor_config(**overrides):
    optim = SimpleNamespace(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
    base = dict(
        optim=optim,
        grad_clip=1.0,
        use_dynamic_bsz=False,
        ppo_micro_batch_size_per_gpu=16,
        ppo_max_token_len_per_gpu=4096,
        policy_loss=SimpleNamespace(loss_mode="vanilla"),
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
        use_kl_loss=False,
        kl_loss_coef=0.1,
        kl_loss_type="low_var_kl",
        entropy_coeff=0.0,
        cliprange_value=0.5,
    )
    return SimpleNamespace(**{**base, **overrides})


def random_batch(seed=0, groups=4, n=3):
    """Prompts and responses of mixed lengths, tool gaps, one masked row, every later field filled
    with noise."""
    rng = np.random.default_rng(seed)
    made = []
    for ordinal in range(groups):
        prompt = rng.integers(4, VOCAB_SIZE, rng.integers(2, 7))
        trajectories, scores = [], []
        for i in range(n):
            length = int(rng.integers(1, 15))
            mask = rng.random(length) < 0.8
            mask[0] = True
            ids = rng.integers(4, VOCAB_SIZE, length)
            trajectories.append(
                Trajectory(prompt, ids, mask, -rng.random(length) * mask, (), Stop.EOS, 0, 0)
            )
            scores.append(Score(float(rng.normal()), masked=ordinal == 1 and i == 2))
        question = Prompt(ordinal, str(ordinal), tuple(prompt), (), "x", "test")
        made.append(ScoredGroup(question, tuple(trajectories), tuple(scores)))
    batch = make_batch(made, PAD)
    generator = torch.Generator().manual_seed(seed)
    noise = {
        name: torch.randn(batch.tokens, generator=generator, dtype=torch.float64)
        * batch.response_mask
        for name in ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    }
    now, _ = Policy(policy_module(), temperature=0.7).log_probs(
        batch, MicroBatchSize(max_sequences=100)
    )
    for name in ("old_log_probs", "ref_log_prob"):  # near the policy, as after a few updates
        noise[name] = 0.3 * noise[name] + now * batch.response_mask
    return batch.adding(**{name: value.float() for name, value in noise.items()})


MEMORY = [{"ppo_micro_batch_size_per_gpu": k} for k in (1, 3, 100)]
MEMORY += [{"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": k} for k in (21, 50)]


def accumulated(part, step):
    """The gradient of a step, and the mean of its loss."""
    means, part.mismatch = MetricSums(), MetricSums()
    part.accumulate(step, means)
    return gradient(part), means.result("actor")["actor/pg_loss"]


def one_step(batch, mode="token-mean"):
    (step,) = mini_batches(batch, prompts=100, agg_mode=mode, scale_factor=20.0)
    return step


def policy_module():
    # Logits of a few units, as trained models have: fp32 then rounds at 1e-7
    return tiny_model(initializer_range=0.08)


def actor(dtype=torch.float64, **overrides):
    module = policy_module().to(dtype).train()
    return Actor(module, actor_config(**overrides), temperature=0.7)


def gradient(part):
    return torch.cat([p.grad.flatten() for p in part.module.parameters()])


def test_log_probs_and_entropies_are_those_of_a_plain_forward_pass_of_each_row():
    """Every row alone, unpadded, with full logits: this catches a shift by one and any leak from
    the padding."""
    policy, batch = actor(torch.float32), random_batch()
    log_prob, entropy = policy.log_probs(batch, MicroBatchSize(max_tokens=60))
    for row in range(len(batch)):
        (span,) = batch.spans(torch.tensor([row]))
        ids = batch.input_ids[span].long()
        logits = policy.module(input_ids=ids[None], use_cache=False).logits[0] / 0.7
        expected = torch.log_softmax(logits, -1).detach()
        for t in range(1, len(ids)):
            if batch.response_mask[span][t]:
                assert float(log_prob[span][t]) == pytest.approx(
                    float(expected[t - 1, ids[t]]), abs=2e-5
                )
                h = -(expected[t - 1].exp() * expected[t - 1]).sum()
                assert float(entropy[span][t]) == pytest.approx(float(h), abs=2e-5)
    assert float(log_prob[~batch.response_mask].abs().sum()) == 0


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("terms", [{}, {"use_kl_loss": True, "entropy_coeff": 0.03}])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_memory_knobs_do_not_change_the_gradient(mode, terms, dtype, tolerance):
    step = one_step(random_batch(), mode)
    gradients, losses = zip(
        *(accumulated(actor(dtype, **knob, **terms), step) for knob in MEMORY), strict=True
    )
    scale = gradients[0].norm()
    assert scale > 0
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / scale) < tolerance
    assert list(losses) == pytest.approx([losses[0]] * len(losses), rel=1e-5)


COV = {
    "clip_cov_ratio": 0.1,
    "clip_cov_lb": 0.1,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.2,
    "ppo_kl_coef": 2.0,
}


@pytest.mark.parametrize(("mode", "number"), [("clip_cov", 0), ("clip_cov", 1), ("kl_cov", 1)])
def test_what_a_loss_selects_does_not_depend_on_micro_batches(mode, number):
    """The tokens are chosen among the whole step; the gradient is the same to 1e-12, and is not
    that of no choice."""
    loss = PolicyLossConfig(loss_mode=mode, **COV)
    batch, gradients = random_batch(), []
    idle = torch.arange(len(batch)) % 3 == 0  # advantages of 0: kl_cov trains these sequences too
    batch = batch.adding(advantages=batch.advantages * ~idle.repeat_interleave(batch.lengths))
    steps = {"ppo_mini_batch_size": 4, "ppo_epochs": 1, "shuffle": False}
    for knob in MEMORY:
        part = actor(torch.float64, policy_loss=loss, **knob)
        part.stepper.step_index = number
        config = SimpleNamespace(
            **vars(part.config), **steps, loss_agg_mode="token-mean", loss_scale_factor=None
        )
        (step,) = mini_batching(config, 20, mode)(batch)
        field = "selected" if mode == "kl_cov" else "selection_order"
        chosen = getattr(step, field) > 0
        assert 0 < chosen.sum() < step.loss_mask.sum() and not (chosen & ~step.loss_mask).any()
        gradients.append(accumulated(part, step)[0])
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-12
    nothing = step.adding(**{field: torch.zeros_like(getattr(step, field))})
    without = accumulated(actor(torch.float64, policy_loss=loss), nothing)[0]
    assert float((without - gradients[0]).norm() / gradients[0].norm()) > 1e-3


def halves(inputs, gather):
    """Select the tokens whose log-ratio is above the mean of those of all ranks that carry loss."""
    mean = torch.cat(gather(inputs.log_ratio[inputs.mask])).mean()
    return inputs.mask & (inputs.log_ratio > mean)


def without_halves(x):
    """Return a loss that is 0 for the selected tokens."""
    return (-x.advantages * x.log_ratio.exp()).masked_fill(x.selected, 0), {}


def test_a_loss_of_ones_own_selects_from_the_whole_step_at_its_present_weights():
    step, gradients, selections = one_step(random_batch()), [], []
    path = f"{__name__}:without_halves"
    for knob in MEMORY:
        part = actor(policy_loss=SimpleNamespace(loss_mode=path), **knob)
        part.user_select = halves
        selections.append(part.selected_by_user(step))
        gradients.append(accumulated(part, step)[0])
    now, _ = part.log_probs(step, MicroBatchSize(max_sequences=100))
    log_ratio, carries = now - step.old_log_probs, step.loss_mask
    expected = carries & (log_ratio > log_ratio[carries].mean())
    assert 0 < expected.sum() < carries.sum() < step.response_mask.sum()
    assert all(torch.equal(selected, expected) for selected in selections)
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-12


def clip_cov_step(share, old="old_log_probs"):
    """Return an actor, a step, and by verl's formula: how many to draw, of which, which are
    clipped.

    A sequence has advantages of zero and is in the draw all the same.
    """
    part = actor(
        policy_loss=PolicyLossConfig(loss_mode="clip_cov", **{**COV, "clip_cov_ratio": share})
    )
    batch = random_batch()
    zero = (torch.arange(len(batch)) == 4).repeat_interleave(batch.lengths)
    batch = batch.adding(advantages=batch.advantages.masked_fill(zero, 0))
    if old != "old_log_probs":
        batch = batch.adding(old_log_probs=None, **{old: batch.old_log_probs})
        part.bypass = True
    cut = {"ppo_mini_batch_size": 4, "ppo_epochs": 1, "shuffle": False, "loss_scale_factor": None}
    config = SimpleNamespace(**vars(part.config), **cut, loss_agg_mode="token-mean")
    (step,) = mini_batching(config, 20, "clip_cov")(batch)
    now, _ = part.log_probs(step, MicroBatchSize(max_sequences=100))
    adv, before, mask = step.advantages.double(), getattr(step, old).double(), step.loss_mask
    ratio = torch.exp(now - before)
    clipped = (-adv * ratio.clamp(0.8, 1.28) > -adv * ratio) & mask
    covariance = (adv - adv[mask].mean()) * (before - before[mask].mean())
    inside = mask & (covariance > COV["clip_cov_lb"]) & (covariance < COV["clip_cov_ub"])
    assert (inside & clipped).any() and (inside & zero).any()
    return part, step, max(int(share * int(mask.sum())), 1), inside, clipped


@pytest.mark.parametrize("old", ["old_log_probs", "rollout_log_probs"])
def test_clip_cov_draws_no_token_that_the_clip_holds_already(old):
    """As many are drawn as may be, in the order of the draw, or all that are left where those are
    fewer."""
    for share in (0.001, 0.1, 0.15, 1.0):
        part, step, count, inside, clipped = clip_cov_step(share, old)
        # The engine's policy is another from the start
        part.stepper.step_index = 0 if part.bypass else 1
        free = inside & ~clipped
        drawn = part.selected_by_order(step)
        assert int(drawn.sum()) == min(count, int(free.sum())) and not (drawn & ~free).any()
        first = step.selection_order > 0
        assert torch.equal(drawn & first, free & first)  # none is given up without need
        reserves = step.selection_order[free & ~drawn]
        assert not len(reserves) or reserves.max() < step.selection_order[drawn].min()


def test_what_clip_cov_drops_instead_of_a_clipped_token_is_what_the_step_trains_without():
    part, step, _, _, _ = clip_cov_step(0.1)
    part.stepper.step_index = 1
    means, part.mismatch = MetricSums(), MetricSums()
    part.accumulate(step, means)
    drawn, before = part.selected_by_order(step), step.selection_order > 0
    contributing = (step.advantages != 0) & step.response_mask
    assert means.sums["cov_selected"] == int((drawn & contributing).sum())
    assert not torch.equal(drawn, before)
    part.stepper.step_index = 0  # the first step of a rollout: no weight has moved
    assert torch.equal(part.selected_by_order(step), before)


def test_the_objective_is_the_formula_written_out():
    """Token-mean of the clipped surrogate, minus entropy bonus, plus k3, by a loop over single
    tokens."""
    batch = random_batch()
    part = actor(use_kl_loss=True, entropy_coeff=0.03)
    log_prob, entropy = part.log_probs(batch, MicroBatchSize(max_sequences=100))
    total, places = 0.0, batch.loss_mask.nonzero()[:, 0].tolist()
    for n in places:
        lp, adv = float(log_prob[n]), float(batch.advantages[n])
        ratio = np.exp(lp - float(batch.old_log_probs[n]))
        surrogate = max(-adv * ratio, -adv * min(max(ratio, 0.8), 1.28))
        if adv < 0:
            surrogate = min(surrogate, -adv * 3.0)
        d = lp - float(batch.ref_log_prob[n])
        total += surrogate - 0.03 * float(entropy[n]) + 0.1 * (np.exp(-d) - 1 + d)
    part.mismatch = MetricSums()
    loss = part.micro_batch_loss(one_step(batch), MetricSums())
    assert float(loss.detach()) == pytest.approx(total / len(places), rel=1e-6)


def test_skipping_rows_without_advantage_changes_nothing():
    batch = random_batch()
    flat = batch.adding(
        advantages=batch.advantages * (batch.group % 2 == 0).repeat_interleave(batch.lengths)
    )
    skipped, whole = (accumulated(actor(entropy_coeff=c), one_step(flat))[0] for c in (0.0, 1e-300))
    # An entropy term keeps every row in
    torch.testing.assert_close(skipped, whole, rtol=1e-12, atol=1e-15)


def test_a_missing_old_log_prob_means_a_ratio_of_one_and_measures_the_pass_it_saved():
    batch = random_batch()
    old, entropy = actor().log_probs(batch, MicroBatchSize(max_sequences=100))
    with_old, without = actor(), actor()
    metrics = with_old.update([one_step(batch.adding(old_log_probs=old))], 1.0)
    flat = batch.adding(
        advantages=batch.advantages * (batch.group > 0).repeat_interleave(batch.lengths)
    )
    short = without.update([one_step(batch.adding(old_log_probs=None))], 1.0)
    assert short["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-6)
    for a, b in zip(with_old.module.parameters(), without.module.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    # with idle rows the entropy and the engine's mismatch are still those of every row
    measured = actor().update([one_step(flat.adding(old_log_probs=None))], 1.0)
    assert measured["actor/entropy"] == pytest.approx(
        float(entropy[batch.response_mask].mean()), rel=1e-5
    )
    gap = (old - batch.rollout_log_probs)[batch.response_mask]
    expected = {
        "logp_diff_mean": gap.abs().mean(),
        "kl": -gap.mean(),
        "logp_diff_max": gap.abs().max(),
    }
    for name, value in expected.items():
        assert measured[f"rollout_corr/{name}"] == pytest.approx(float(value), rel=1e-5)


@pytest.mark.parametrize("use_kl_loss", [False, True])
def test_a_loss_in_the_metrics_is_the_mean_of_the_steps(use_kl_loss):
    """With a rate of 0 all steps are the same, and every micro-batch adds a part."""
    step = one_step(random_batch())
    step = step.adding(ref_log_prob=step.old_log_probs - 0.5)
    once, thrice = (
        actor(use_kl_loss=use_kl_loss, ppo_micro_batch_size_per_gpu=1).update([step] * count, 0.0)
        for count in (1, 3)
    )
    for name in ("actor/pg_loss", *(["actor/kl_loss"] if use_kl_loss else [])):
        assert abs(once[name]) > 1e-3 and thrice[name] == pytest.approx(once[name], rel=1e-9)


def test_a_non_finite_gradient_skips_the_step_and_is_counted():
    part, batch = actor(torch.float32), random_batch()
    before = [p.clone() for p in part.module.parameters()]
    broken = batch.adding(advantages=torch.where(batch.response_mask, float("inf"), 0.0))
    metrics = part.update([one_step(broken), one_step(broken)], 1.0)
    assert metrics["actor/skipped_updates"] == 2 and "actor/pg_loss" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(before, part.module.parameters(), strict=True))
    healthy = part.update([one_step(batch)], 1.0)
    assert healthy["actor/skipped_updates"] == 0 and np.isfinite(healthy["actor/grad_norm"])
    assert not torch.equal(before[0], next(part.module.parameters()))


def test_mismatch_of_a_skipped_first_step_is_dropped_with_its_metrics():
    """Without a pass for old log-probs the step's own pass measures it."""
    part = actor(torch.float32)
    batch = one_step(random_batch()).adding(old_log_probs=None)
    assert part.update([batch], 1.0)["rollout_corr/logp_diff_max"] > 0
    with torch.no_grad():
        kept = next(part.module.parameters()).clone()
        next(part.module.parameters()).fill_(float("nan"))
    part.stepper.end_update = dict  # it would raise for the weights, which the test has broken
    assert "rollout_corr/logp_diff_max" not in part.update([batch], 1.0)
    with torch.no_grad():
        next(part.module.parameters()).copy_(kept)
    broken = batch.adding(advantages=torch.where(batch.response_mask, float("inf"), 0.0))
    assert "rollout_corr/kl" in part.update([batch, broken], 1.0)  # of the first, which was taken


def pulls(x):
    """Return a loss with a term that does not vanish where the advantage is 0."""
    return -x.advantages * x.log_ratio.exp() - 0.1 * x.log_prob, {}


def pulls_not(x):
    return -x.advantages * x.log_ratio.exp(), {}


pulls_not.moves_without_advantage = False


def test_a_loss_of_ones_own_may_move_without_an_advantage_and_says_so_if_it_does_not():
    batch = random_batch()
    step = one_step(batch.adding(advantages=torch.zeros(batch.tokens)))
    parts = {
        loss.__name__: actor(policy_loss=SimpleNamespace(loss_mode=f"{__name__}:{loss.__name__}"))
        for loss in (pulls, pulls_not)
    }
    assert float(accumulated(parts["pulls"], step)[0].norm()) > 0.01
    assert not zero_advantage_gives_no_gradient(parts["pulls"].config)
    assert zero_advantage_gives_no_gradient(parts["pulls_not"].config)
    part, passes = parts["pulls_not"], []
    part.micro_batch_loss = lambda *arguments: passes.append(arguments)
    part.accumulate(step, MetricSums())
    assert not passes


@pytest.mark.parametrize(
    "keys", [{"entropy_coeff": 0.1}, {"use_kl_loss": True}], ids=["entropy", "kl"]
)
def test_a_sequence_without_an_advantage_trains_where_another_term_does(keys):
    """Its gradient is that of the term alone, so that gradients of both terms add up."""
    batch = random_batch()
    advantages = batch.advantages.masked_fill(torch.arange(batch.tokens) > batch.tokens // 2, 0)
    half, nothing = (
        batch.adding(advantages=advantages),
        batch.adding(advantages=torch.zeros(batch.tokens)),
    )
    both, _ = accumulated(actor(**keys), one_step(half))
    reward, _ = accumulated(actor(), one_step(half))
    term, _ = accumulated(actor(**keys), one_step(nothing))
    assert term.norm() > 1e-3 and reward.norm() > 1e-3
    assert (both - reward - term).norm() < 1e-5 * term.norm()


@pytest.mark.parametrize("masked", [False, True])
def test_a_step_without_a_gradient_moves_the_weights_by_momentum_and_decay(masked):
    """As in verl, where the zeros of a loss of 0 are gradients: AdamW written out, with the second
    gradient zero."""
    part, batch = actor(), random_batch()
    before = [p.detach().clone() for p in part.module.parameters()]
    grads, step = [], part.stepper.step
    part.stepper.step = lambda sums: (
        grads.extend(p.grad.clone() for p in part.module.parameters()) or step(sums)
    )
    part.update([one_step(batch)], 1.0)
    part.stepper.step = step
    nothing = torch.zeros(batch.tokens)
    lost = {"loss_mask": nothing.bool()} if masked else {"advantages": nothing}
    metrics = part.update([one_step(batch.adding(**lost))], 1.0)
    assert metrics["actor/grad_norm"] == 0 and metrics["actor/skipped_updates"] == 0
    norm = torch.cat([g.flatten() for g in grads]).norm()
    for weight, start, grad in zip(part.module.parameters(), before, grads, strict=True):
        m, v = (
            0.1 * grad * min(1.0, 1.0 / (norm + 1e-6)),
            0.001 * (grad * min(1.0, 1.0 / (norm + 1e-6))).square(),
        )
        for count in (1, 2):
            start = start * (1 - 1e-2 * 0.01)
            start = start - 1e-2 * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-8)
            m, v = 0.9 * m, 0.999 * v
        torch.testing.assert_close(weight.detach(), start, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_first_step_moves_weights_by_the_scheduled_rate(share):
    """Adam's first step is of the rate, whatever the gradient: that the optimizer had, and the
    metric reports."""
    part = actor(
        torch.float64, optim=SimpleNamespace(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    )
    before = [p.detach().clone() for p in part.module.parameters()]
    metrics = part.update([one_step(random_batch())], share)
    moved = [(p.detach() - b).abs() for p, b in zip(part.module.parameters(), before, strict=True)]
    moved = torch.cat([one.flatten() for one in moved])
    assert float(moved.median()) == pytest.approx(1e-4 * share, rel=1e-2)
    assert metrics["actor/lr"] == pytest.approx(1e-4 * share)
    first = float(next(part.module.parameters()).detach().sum())
    # Every optimizer step of an update has its rate
    part.update([one_step(random_batch())] * 2, 0.0)
    assert float(next(part.module.parameters()).detach().sum()) == first


def test_the_norm_is_clipped_and_reported_unclipped():
    big, small = actor(grad_clip=1e9), actor(grad_clip=1e-3)
    norms = [
        part.update([one_step(random_batch())], 0.0)["actor/grad_norm"] for part in (big, small)
    ]
    assert norms[0] == pytest.approx(norms[1]) and norms[0] > 1e-3


def critic(dtype=torch.float64, **overrides):
    config = tiny_config(num_labels=1, classifier_dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = AutoModelForTokenClassification.from_config(config).to(dtype)
    return Critic(module, actor_config(**overrides))


def test_a_value_is_that_of_the_state_before_its_token():
    part, batch = critic(torch.float32), random_batch()
    values = part.values(batch)
    for row in range(len(batch)):
        (span,) = batch.spans(torch.tensor([row]))
        expected = part.module(input_ids=batch.input_ids[span].long()[None]).logits[0, :, 0]
        for t in batch.response_mask[span].nonzero()[:, 0].tolist():
            assert float(values[span][t]) == pytest.approx(
                float(expected[t - 1].detach()), abs=2e-5
            )


def test_the_critics_objective_clips_around_the_old_values():
    """Half the larger of two squares, that of the value within ``cliprange_value`` of the old one,
    token by token."""
    batch, part = random_batch(), critic()
    values, total, clipped = part.values(batch), 0.0, 0
    places = batch.loss_mask.nonzero()[:, 0].tolist()
    for n in places:
        value, old, target = float(values[n]), float(batch.values[n]), float(batch.returns[n])
        within = min(max(value, old - 0.5), old + 0.5)
        total += 0.5 * max((value - target) ** 2, (within - target) ** 2)
        clipped += (within - target) ** 2 > (value - target) ** 2
    loss = part.micro_batch_loss(one_step(batch), MetricSums())
    assert clipped > 5 and float(loss.detach()) == pytest.approx(total / len(places), rel=1e-6)


def test_the_critics_gradient_does_not_depend_on_memory_and_zero_advantages_still_train_it():
    step, gradients = (
        one_step(random_batch().adding(advantages=torch.zeros(random_batch().tokens))),
        [],
    )
    for rows in (1, 5, 100):
        part = critic(ppo_micro_batch_size_per_gpu=rows)
        part.stepper.step = lambda _, part=part: gradients.append(gradient(part))
        part.update([step], 1.0)
    assert len(gradients) == 3
    assert gradients[0].norm() > 0
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-9, atol=1e-12)
