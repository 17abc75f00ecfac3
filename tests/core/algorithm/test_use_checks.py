"""Each check at the point of use holds of a sound step and fails where one value is changed one phase later."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.algorithm import use_checks
from core.algorithm.kl import kl_penalty
from core.algorithm.losses import MetricSums, policy_loss, value_loss
from core.config.sections.actor import ActorConfig, PolicyLossConfig
from core.config.sections.optim import OptimConfig
from core.engines import SampleRequest, SamplingParams
from core.learner.batching import mini_batches, mini_batching
from core.learner.learner import Actor, BasePolicy, Policy, multiplier, warmup_steps
from core.learner.weight_probe import WeightSyncError, compare_weights
from core.types import Segment, Stop, Trajectory
from tests.core.algorithm.test_invariants import GAE, GRPO, batch_of, broken, made_groups
from tests.tiny import tiny_model


def sealed_batch():
    batch = batch_of(made_groups(), GAE)
    return use_checks.sealed(batch, *batch.stored)


# -- seals -------------------------------------------------------------------------------------------


def test_seals_follow_the_rows_and_are_of_the_fields_that_are_sent():
    batch = sealed_batch()
    assert batch.broken_seal() is None and {"input_ids", "group", "reward", "advantages"} <= batch.seals.keys()
    assert batch.rows([4, 1]).broken_seal() is None and batch.rows(slice(1, 3)).broken_seal() is None
    assert batch.blank_row().broken_seal() is None and pickle.loads(pickle.dumps(batch)).broken_seal() is None
    assert batch.only(["returns", "group"]).seals.keys() == {"returns", "group"}
    assert batch.only(["returns"]).adding(returns=batch.require("returns") + 1).broken_seal() == ("returns", 0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("returns", lambda value: value.roll(1)),  # by one token
        ("advantages", lambda value: value * 2),
        ("reward", lambda value: value.flip(0)),
        ("group", lambda value: torch.arange(len(value)) % 2),
        ("loss_mask", lambda value: value & (torch.arange(len(value)) != len(value) - 1)),
        ("input_ids", lambda value: torch.cat([value[1:2], value[:1], value[2:]])),
        ("rollout_log_probs", lambda value: value + 1e-6),
    ],
)
def test_a_field_that_is_changed_after_its_phase_is_found_where_it_is_read(name, change):
    batch = sealed_batch()
    changed = batch.adding(**{name: change(batch.require(name))})
    use_checks.unchanged(batch, "update_actor")
    with broken(f"phase update_actor: {name} of row [0-5] is not what was set"):
        use_checks.unchanged(changed, "update_actor")
    use_checks.unchanged(changed, "update_actor", ("values",))  # which it does not read
    use_checks.unchanged(changed.sealed(name), "update_actor")  # changed on purpose


def test_the_learners_passes_check_what_they_read():
    actor, batch = Actor(tiny_model(), ActorConfig(), temperature=1.0), sealed_batch()
    (step,) = mini_batching(ActorConfig(), 8)(batch)
    actor.accumulate(step, MetricSums())
    with broken("phase update_actor: advantages of row"):
        actor.accumulate(step.adding(advantages=step.require("advantages").flip(0)), MetricSums())
    with broken("phase update_actor: loss_weight of row"):
        actor.micro_batch_loss(step.adding(loss_weight=step.require("loss_weight") / 2), MetricSums())
    log_prob, _ = actor.log_probs(batch, actor.size)
    actor.micro_batch_loss(step.adding(old_log_probs=log_prob).sealed("old_log_probs"), MetricSums())
    stale = step.adding(old_log_probs=log_prob + 0.1)
    actor.micro_batch_loss(stale, MetricSums())  # of no phase: a caller's own
    with broken("the old log-probs differ by 0.1 from those of the pass that trains"):
        actor.micro_batch_loss(stale.sealed("old_log_probs"), MetricSums())
    with broken("phase log_probs: input_ids of row"):
        actor.log_probs(batch.adding(input_ids=batch.input_ids.flip(0)), actor.size)


def test_rows_of_a_group_begin_with_one_prompt():
    batch = batch_of(made_groups(), GRPO)
    use_checks.groups_share_prompts(batch)
    use_checks.groups_share_prompts(batch.rows([5, 1, 0, 3, 2, 4]))
    ids = batch.input_ids.clone()
    ids[0] += 1
    with broken("phase adv: the rows of group 0 begin with different prompts"):
        use_checks.groups_share_prompts(batch.adding(input_ids=ids))


def test_every_row_is_in_one_micro_batch_and_in_each_epoch():
    use_checks.rows_are_used_once([torch.tensor([2, 0]), torch.tensor([1]), torch.empty(0, dtype=torch.int64)], 3)
    for indices in ([torch.tensor([2, 0])], [torch.tensor([2, 0]), torch.tensor([1, 0])]):
        with broken(f"hold {sum(map(len, indices))} rows, "):
            use_checks.rows_are_used_once(indices, 3)
    part = ActorConfig(ppo_mini_batch_size=1, ppo_epochs=2)
    assert len(list(mini_batching(part, 8)(batch_of(made_groups(), GRPO)))) == 4
    with broken("the optimizer steps of 2 epochs have 6 rows, the batch has 6"):
        use_checks.all_rows_are_used(6, 6, 2)


# -- what was sampled --------------------------------------------------------------------------------


def answered(ids=(5, 6, 1), *, seed=7, prompt=(3, 4), stop=Stop.EOS, most=8, mask=None):
    turn = Trajectory(
        prompt, ids, mask or [True] * len(ids), [-1.0] * len(ids), (Segment("policy", "a"),), stop, 0, seed
    )
    return SampleRequest((3, 4), SamplingParams(most), 7), turn


def test_turns_are_of_their_requests():
    use_checks.turns_are_of_their_requests([answered(), answered(stop=Stop.LENGTH, most=3)])
    for wrong, found in (
        ({"seed": 8}, "another prompt or seed"),
        ({"prompt": (3, 5)}, "another prompt or seed"),
        ({"most": 2}, "an answer of 3 tokens stopped by eos, of 2 allowed"),
        ({"stop": Stop.LENGTH}, "an answer of 3 tokens stopped by length, of 8 allowed"),
        ({"mask": [True, True, False]}, "a turn that stopped by eos has 1 tokens outside its mask"),
    ):
        with broken(found):
            use_checks.turns_are_of_their_requests([answered(), answered(**wrong)])


def test_what_trains_is_what_the_engine_returned():
    groups, sampled = made_groups(), use_checks.SampledTurns()
    for group in groups:
        seeded = [dataclasses.replace(t, seed=10 * group.prompt.ordinal + i) for i, t in enumerate(group.trajectories)]
        object.__setattr__(group, "trajectories", tuple(seeded))
    for one in (t for group in groups for t in group.trajectories):
        first = len(one.response_ids) - 4  # then the tool's two, "c" and the end
        for turn, (begin, end) in enumerate(((0, first), (first + 2, first + 4))):
            part = slice(begin, end)
            wrote = dataclasses.replace(
                one,
                response_ids=one.response_ids[part],
                response_mask=[True] * (end - begin),
                logprobs=one.logprobs[part],
            )
            request = SampleRequest(tuple(one.prompt_ids), SamplingParams(99), one.seed + 1000 * turn, one.seed)
            sampled.add(request, dataclasses.replace(wrote, seed=request.seed))
    sampled.check(groups)
    one = groups[1].trajectories[2]
    for name, value in (
        ("response_mask", np.append(one.response_mask[:-1], False)),
        ("response_ids", one.response_ids + 1),
        ("logprobs", one.logprobs * 0.5),
    ):
        changed = (*groups[1].trajectories[:2], dataclasses.replace(one, **{name: value}))
        with broken(r"of 1 trajectories are not what the engine returned, the first of seed \[12\]"):
            sampled.check([groups[0], dataclasses.replace(groups[1], trajectories=changed)])
    sampled.forget(oldest=1)
    assert not sampled.turns
    sampled.check(groups)  # of a checkpoint: unknown


def test_samples_of_a_step_are_independent():
    groups = made_groups()
    with broken("two trajectories of a step have the same seed"):
        use_checks.samples_are_independent(groups, greedy=False)
    number = iter(range(10**6))

    def group(count, logprob, *, equal):
        rows = (
            Trajectory((3,), [5 + (0 if equal else i)] * 4, [True] * 4, [logprob] * 4, (), Stop.EOS, 0, next(number))
            for i in range(count)
        )
        return dataclasses.replace(groups[0], trajectories=tuple(rows), scores=groups[0].scores[:1] * count)

    use_checks.samples_are_independent([group(8, -3.0, equal=False)] * 0 + [group(8, -0.2, equal=True)], greedy=False)
    equal = [group(8, -3.0, equal=True) for _ in range(8)]
    use_checks.samples_are_independent(equal, greedy=True)
    with broken("56 of 64 answers repeat one of their group, against all probability"):
        use_checks.samples_are_independent(equal, greedy=False)


def test_groups_have_their_prompts_and_differ_in_the_metric_that_the_filter_names():
    groups = made_groups()
    use_checks.prompts_are_their_groups(groups, untouched=True)
    other = dataclasses.replace(groups[1].trajectories[0], prompt_ids=[3, 5, 7])
    mixed = dataclasses.replace(groups[1], trajectories=(*groups[1].trajectories[:2], other))
    for untouched in (True, False):
        with broken("group of uid='q1' do not follow the same prompt"):
            use_checks.prompts_are_their_groups([groups[0], mixed], untouched=untouched)
    scores = [dataclasses.replace(score, parts={"acc": 1.0, "x": score.value}) for score in groups[0].scores]
    kept = dataclasses.replace(groups[0], scores=tuple(scores))
    use_checks.kept_groups_differ([kept], "x")
    use_checks.kept_groups_differ([kept], "seq_reward")  # no part
    with broken(r"a kept group \(uid='q0'\) has acc=\[1.0\] in all of its answers"):
        use_checks.kept_groups_differ([kept], "acc")


def test_scores_are_those_of_the_policys_own_text():
    groups, read = made_groups(), []
    scores = tuple(dataclasses.replace(score, parts={"score": score.value}) for score in groups[1].scores)
    group = dataclasses.replace(groups[1], scores=scores)

    def grade(prompt, trajectory, text):
        read.append(text)
        return 2.0

    use_checks.scores_are_of_their_answers([group], grade)  # of ordinal 1: its second answer
    assert read == ["abab" + "c"]
    use_checks.scores_are_of_their_answers([group], lambda *_: None)
    with broken("phase reward: an answer to uid='q1' has the score 2, graded again 0.5"):
        use_checks.scores_are_of_their_answers([group], lambda *_: 0.5)


# -- gradients and optimizer -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3+"])
def test_the_gradient_of_the_log_probs_is_that_of_the_objective(kind):
    torch.manual_seed(0)
    config = ActorConfig(use_kl_loss=kind is not None, kl_loss_type=kind or "kl", kl_loss_coef=0.3, entropy_coeff=0.0)
    (step,) = mini_batches(batch_of(made_groups(), GRPO), prompts=2, scale_factor=1)
    old = -torch.rand(step.tokens)
    step = step.adding(old_log_probs=old, ref_log_prob=old + 0.3 * torch.randn(step.tokens))

    def backward(**changed):
        torch.manual_seed(1)
        log_prob = (step.old_log_probs + 0.2 * torch.randn(step.tokens)).requires_grad_()
        used = step.adding(**changed)
        use_checks.watch_policy_gradient(log_prob * 1.0, log_prob, used.old_log_probs, step, config)
        watched = log_prob * 1.0
        use_checks.watch_policy_gradient(watched, watched, step.old_log_probs, step, config)
        loss, _ = policy_loss("vanilla")(
            watched, used.old_log_probs, used.require("advantages"), step.response_mask, config
        )
        total = (used.require("loss_weight") * loss).sum()
        if kind:
            penalty = kl_penalty(watched, used.require("ref_log_prob"), kind, step.response_mask)
            total = total + config.kl_loss_coef * (used.require("loss_weight") * penalty).sum()
        total.backward()

    backward()
    wrong = [{name: step.require(name).roll(1)} for name in ("advantages", "old_log_probs")]
    wrong += [{"loss_weight": step.require("loss_weight") * 2}, {"advantages": -step.require("advantages")}]
    for changed in wrong:
        with broken("phase update_actor: the gradient of .* log-probs is not that of the objective"):
            backward(**changed)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_a_kl_loss_alone_near_its_reference_is_the_objective_too(kind):
    """Where no group has an advantage and the policy has hardly moved, k3's slope is rounding for the most part."""
    torch.manual_seed(0)
    config = ActorConfig(use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=0.02, entropy_coeff=0.0)
    (step,) = mini_batches(batch_of(made_groups(), GRPO), prompts=2, scale_factor=1)
    old = -10 * torch.rand(step.tokens)
    near = old + 3e-6 * torch.randn(step.tokens)
    step = step.adding(old_log_probs=old, ref_log_prob=near, advantages=torch.zeros(step.tokens))
    watched = old.clone().requires_grad_() * 1.0
    use_checks.watch_policy_gradient(watched, watched, old, step, config)
    penalty = kl_penalty(watched, near, kind, step.response_mask)
    (config.kl_loss_coef * (step.require("loss_weight") * penalty).sum()).backward()


def test_other_losses_are_not_judged_by_the_vanilla_one():
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gspo"))
    (step,) = mini_batches(batch_of(made_groups(), GRPO), prompts=2, scale_factor=1)
    log_prob = torch.zeros(step.tokens, requires_grad=True)
    use_checks.watch_policy_gradient(log_prob, log_prob, log_prob.detach(), step, config)
    (log_prob.sum() * 3).backward()


def test_the_gradient_of_the_values_is_that_of_the_objective():
    (step,) = mini_batches(sealed_batch(), prompts=2, scale_factor=1)

    def backward(returns):
        values = (step.require("values") + 0.1).requires_grad_()
        watched = values * 1.0
        use_checks.watch_value_gradient(watched, step, 0.5)
        loss, _ = value_loss(watched, returns, step.require("values"), 0.5, step.response_mask)
        (step.require("loss_weight") * loss).sum().backward()

    backward(step.require("returns"))
    with broken("phase update_critic: the gradient of .* values is not that of the objective"):
        backward(step.require("returns").roll(1))


def test_gradients_are_clipped_as_said():
    raw = torch.randn(64)
    norm = float(raw.norm()) * 2
    use_checks.gradients_are_clipped(raw, raw / norm, norm, 1.0)
    use_checks.gradients_are_clipped(raw, raw, norm, 1e6)
    use_checks.gradients_are_clipped(raw, raw, float("nan"), 1.0)  # skipped
    with broken("were not scaled to grad_clip=1"):
        use_checks.gradients_are_clipped(raw, raw, norm, 1.0)
    with broken("grad_norm is .* and a part of the gradients has"):
        use_checks.gradients_are_clipped(raw, raw, norm / 8, 1e6)


@pytest.mark.parametrize("rate", [1e-3, 1e-6])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adams_first_step_is_of_the_learning_rate_and_no_later_one_beyond_its_bound(rate, decay):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(0.02 * torch.randn(256))
    optimizer = torch.optim.AdamW([weight], lr=rate, weight_decay=decay)
    for number in range(4):
        weight.grad = torch.randn(256) * (0.01 if number < 3 else 10)
        before, gradient = weight.detach().clone(), weight.grad.clone()
        optimizer.step()
        after, group = weight.detach().clone(), optimizer.param_groups[0]
        use_checks.step_is_adams(before, after, gradient, group, rate, first=number == 0)
        if number:
            continue
        for claimed in (rate * 10, rate / 10):  # full rate under a warm-up, and the reverse
            with broken("the first optimizer step moved weights by .* times the learning rate"):
                use_checks.step_is_adams(before, after, gradient, group, claimed, first=True)
        with broken("an optimizer step moved weights by 0 times"):
            use_checks.step_is_adams(before, before, gradient, {**group, "weight_decay": 0}, rate, first=False)
    with broken("an optimizer step moved weights by"):
        use_checks.step_is_adams(before, before + 100 * rate, gradient, group, rate, first=False)


def test_rates_are_read_from_the_optimizer_and_follow_the_schedule():
    use_checks.rates_are_used([1e-6, 1e-6], 1e-6)
    with broken("the optimizer stepped at a learning rate of 2e-06 instead of 1e-06"):
        use_checks.rates_are_used([1e-6, 2e-6], 1e-6)
    for optim in (
        OptimConfig(lr=1e-6),
        OptimConfig(lr=1e-6, lr_warmup_steps=5),
        OptimConfig(lr=1e-4, lr_warmup_steps_ratio=0.1, lr_scheduler_type="cosine", min_lr_ratio=0.1),
        OptimConfig(lr=1e-4, lr_scheduler_type="cosine", num_cycles=1.5),
    ):
        warmup = warmup_steps(optim, 20)
        for step in range(1, 21):
            use_checks.rate_is_scheduled(optim.lr * multiplier(optim, step - 1, 20), optim, warmup, step, 20)
        with broken("and the schedule gives step 3"):
            use_checks.rate_is_scheduled(optim.lr * 1.01 * multiplier(optim, 3, 20), optim, warmup, 3, 20)


def test_an_update_reports_the_rate_that_its_optimizer_had():
    actor = Actor(tiny_model(), ActorConfig(optim=OptimConfig(lr=1e-4)), temperature=1.0)
    (step,) = mini_batches(sealed_batch(), prompts=2, scale_factor=1)
    assert actor.update([step], 0.5)["actor/lr"] == pytest.approx(5e-5)
    take = actor.stepper.step
    actor.stepper.step = lambda rate: take(1.0)  # the warm-up is not applied, and would be reported
    with broken("learning rate of 0.0001 instead of 5e-05"):
        actor.update([step], 0.5)


# -- weights -----------------------------------------------------------------------------------------


def test_checksums_of_weights_cover_each_and_their_number_format():
    model = tiny_model()
    sums = use_checks.weight_sums(model.named_parameters())
    sent = use_checks.SentWeights(model.state_dict().items(), torch.float32)
    assert dict(sent).keys() >= sums.keys() and sums.items() <= sent.sums.items()
    compare_weights(sent.sums, sums)
    name = [name for name in sums if "norm" in name][-1]  # the last norm, in bf16 or at a rate of 1e-6
    with torch.no_grad():
        model.get_parameter(name)[0] += 1e-6
    held = use_checks.weight_sums(model.named_parameters())
    with pytest.raises(WeightSyncError, match=f"1 of {len(sums)} weights of the engine .*{name}"):
        compare_weights(sent.sums, held)
    with broken(f"1 of {len(sums)} weights of the engine have changed since they were loaded: {name}"):
        use_checks.weights_stayed(sums, held, "the engine", "update_weights")
    half = use_checks.SentWeights(model.named_parameters(), torch.bfloat16)
    list(half)
    assert half.sums == use_checks.weight_sums(model.bfloat16().named_parameters())


def test_the_reference_keeps_its_weights_and_has_none_that_train():
    module = tiny_model()
    actor = Policy(module, temperature=1.0)
    reference = Policy(copy.deepcopy(module).requires_grad_(False), temperature=1.0)
    frozen = use_checks.FrozenReference(reference)
    frozen.check(reference, actor)
    with torch.no_grad():
        next(reference.module.parameters())[0] += 1e-6
    with broken("phase ref: 1 of .* weights of the reference policy have changed"):
        frozen.check(reference, actor)
    shared = Policy(module, temperature=1.0)
    with broken("phase ref: the reference policy has weights that train"):
        use_checks.FrozenReference(shared).check(shared, actor)
    base = BasePolicy(module, temperature=1.0)  # which passes without adapters
    use_checks.FrozenReference(base).check(base, actor)
    use_checks.adapters_are_off([SimpleNamespace(disable_adapters=True)])
    with broken("the reference policy is computed with adapters"):
        use_checks.adapters_are_off([SimpleNamespace(disable_adapters=True), SimpleNamespace(disable_adapters=False)])


def test_a_kl_loss_of_exactly_0_after_an_update_is_found():
    one = SimpleNamespace(module=tiny_model(), compute_dtype=None, without_adapters=False)
    other = SimpleNamespace(module=tiny_model(seed=5), compute_dtype=None, without_adapters=False)
    zero = {"actor/kl_loss": 0.0, "actor/lr": 1e-6, "actor/grad_norm": 1.0}
    assert use_checks.no_kl(zero, False, one, other)  # before the first update it is 0 by definition
    assert not use_checks.no_kl({**zero, "actor/kl_loss": 1e-9}, True, one, other)
    assert not use_checks.no_kl({**zero, "actor/lr": 1e-9}, True, one, other)
    assert use_checks.no_kl(zero, True, one, one)  # a step that the number format of the passes swallows
    with broken("kl_loss is exactly 0 in two updates"):
        use_checks.no_kl(zero, True, one, other)


def test_stored_prompts_are_of_the_weights_and_tokens_of_now():
    use_checks.stored_prompts_are_current([("a", 2)], [("a", 2)])
    for stored in (("a", 1), ("b", 2)):
        with broken("another prompt or of other weights"):
            use_checks.stored_prompts_are_current([("a", 2)], [stored])
    keys = torch.randn(2, 5, 4)
    use_checks.stored_keys_are_current(keys, keys + 1e-6)
    with broken("the stored keys of a prompt differ by"):
        use_checks.stored_keys_are_current(keys, keys * 1.01)


# -- entropy and samples -----------------------------------------------------------------------------


def test_entropy_and_surprise_agree_for_samples_of_the_same_temperature_alone():
    torch.manual_seed(0)
    logits = 2 * torch.randn(3000, 40)
    found = {}
    for temperature in (1.0, 0.8):
        log_probs = logits.log_softmax(-1)
        token = log_probs.exp().multinomial(1)
        wrong = (logits / temperature).log_softmax(-1)
        gap = -(wrong.exp() * wrong).sum(-1) + log_probs.gather(1, token)[:, 0]
        metrics = {"surprise_gap": float(gap.mean()), "surprise_gap_square": float(gap.square().mean())}
        named = {f"rollout_corr/{name}": value for name, value in metrics.items()}
        found[temperature] = use_checks.surprise_z(named, 3000)
        assert use_checks.surprise_z({**named, "rollout_corr/logp_diff_mean": 0.2}, 3000) == 0  # engine is apart
    assert abs(found[1.0]) < 3 and found[0.8] < -8
    assert use_checks.surprise_z({}, 3000) is None
