"""What every rollout engine has to satisfy: ``core.engines.engine.RolloutEngine`` as tests.

A test file subclasses :class:`EngineContract` (any engine) or :class:`ModelEngineContract` (an
engine that holds a model's weights) and says in ``make`` how its engine is built. The expected
numbers come from a plain forward pass of the same model, never from an engine. Nothing here knows
which engine it tests.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from core.engines.engine import RolloutEngine, SampleRequest, SamplingParams
from core.types import Stop, Trajectory
from tests.tiny import tiny_model, tiny_tokenizer

LETTERS = tuple(range(40, 90))  # ids that decode to one printable character each
HELLO = (44, 73, 80, 80, 83)
PROMPTS = (HELLO, (50,), (60, 61, 62, 63, 64, 65, 66, 67, 68), (70, 71), (44, 73, 80, 80, 84))


def ask(
    prompt: Sequence[int] = HELLO, seed: int = 7, max_tokens: int = 12, **sampling: Any
) -> SampleRequest:
    return SampleRequest(tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling), seed)


def run(coroutine: Coroutine) -> Any:
    return asyncio.run(coroutine)


def sample_all(engine: RolloutEngine, requests: Sequence[SampleRequest]) -> list[Trajectory]:
    """All requests at once, in a fresh event loop."""

    async def gather() -> list[Trajectory]:
        return await asyncio.gather(*map(engine.sample, requests))

    return run(gather())


def ids(trajectory: Trajectory) -> list[int]:
    return trajectory.response_ids.tolist()


class EngineContract:
    """Requests, order, stopping, aborting, event loops, versions."""

    # A request's seed decides its answer; else greedy answers stand for those that have to come
    # again
    seeded = True
    long = 30  # tokens that still are written when another request has ended, and its consumer acts

    def ask(self, *request: Any, **settings: Any) -> SampleRequest:
        """A request whose answer comes again."""
        return ask(*request, **settings if self.seeded else {**settings, "temperature": 0})

    def make(self) -> RolloutEngine:
        raise NotImplementedError

    @pytest.fixture
    def engine(self):
        engine = self.make()
        yield engine
        engine.close()

    @pytest.fixture(scope="class")
    def tokenizer(self):
        return tiny_tokenizer()

    def test_ids_in_ids_out(self, engine, tokenizer):
        trajectory = sample_all(engine, [ask(HELLO, seed=2**62 + 5, ignore_eos=True)])[0]
        assert tuple(trajectory.prompt_ids.tolist()) == HELLO
        assert len(trajectory.response_ids) == 12 and all(
            0 <= i < len(tokenizer) for i in ids(trajectory)
        )
        assert trajectory.response_mask.all()
        assert np.isfinite(trajectory.logprobs).all() and (trajectory.logprobs <= 0).all()
        assert [segment.role for segment in trajectory.segments] == ["policy"]
        assert trajectory.response_text == tokenizer.decode(
            ids(trajectory), skip_special_tokens=True
        )
        assert (trajectory.seed, trajectory.policy_version, trajectory.turns) == (
            2**62 + 5,
            engine.policy_version,
            1,
        )

    def test_every_request_gets_its_own_answer(self, engine):
        requests = [
            ask(PROMPTS[i % 5], seed=i, max_tokens=3 + i * 7 % 20, ignore_eos=True)
            for i in range(30)
        ]
        for request, trajectory in zip(requests, sample_all(engine, requests), strict=True):
            assert tuple(trajectory.prompt_ids.tolist()) == request.prompt_ids
            assert trajectory.seed == request.seed
            assert len(trajectory.response_ids) == request.sampling.max_tokens
            assert trajectory.stop is Stop.LENGTH and trajectory.truncated

    def test_a_seed_gives_the_same_tokens_in_any_company(self, engine):
        requests = [
            self.ask(PROMPTS[i % 5], seed=100 + i, max_tokens=4 + i, temperature=0.8 + i % 3 / 10)
            for i in range(15)
        ]
        together = sample_all(engine, requests)
        reordered = sample_all(engine, requests[::-1])[::-1]
        for i, request in enumerate(requests):
            alone = sample_all(engine, [request])[0]
            assert ids(alone) == ids(together[i]) == ids(reordered[i])
            np.testing.assert_allclose(alone.logprobs, together[i].logprobs, atol=1e-5)

    def test_other_seeds_give_other_tokens(self, engine):
        seeds = [*range(16), *(2**40 + i for i in range(16))]
        responses = [
            tuple(ids(t)) for t in sample_all(engine, [ask(seed=s, ignore_eos=True) for s in seeds])
        ]
        assert len(set(responses)) == len(seeds)

    def test_the_longer_budget_continues_the_shorter(self, engine):
        short, long = sample_all(engine, [self.ask(max_tokens=n, ignore_eos=True) for n in (5, 25)])
        assert ids(long)[:5] == ids(short)

    def test_eos_ends_and_is_kept(self, engine, tokenizer):
        requests = [ask(seed=s, max_tokens=60) for s in range(40)]
        ended = [t for t in sample_all(engine, requests) if t.stop is Stop.EOS]
        assert len(ended) >= 5
        for trajectory in ended:
            assert ids(trajectory).index(tokenizer.eos_token_id) == len(ids(trajectory)) - 1
        if not self.seeded:
            return
        past = sample_all(engine, [ask(seed=t.seed, max_tokens=60, ignore_eos=True) for t in ended])
        for trajectory, longer in zip(ended, past, strict=True):
            assert longer.stop is Stop.LENGTH and len(ids(longer)) == 60
            assert ids(longer)[: len(ids(trajectory))] == ids(trajectory)

    def test_a_stop_id_ends_and_is_kept(self, engine):
        free = ids(sample_all(engine, [self.ask(max_tokens=30, ignore_eos=True)])[0])
        end = next(i for i in range(4, 30) if free[i] not in free[:i])
        stopped = sample_all(
            engine, [self.ask(max_tokens=30, ignore_eos=True, stop_token_ids=(free[end], 99999))]
        )[0]
        assert (ids(stopped), stopped.stop) == (free[: end + 1], Stop.STOP_TOKEN)

    def test_eos_is_named_before_a_stop_id_and_a_stop_id_before_the_limit(self, engine, tokenizer):
        eos = tokenizer.eos_token_id
        requests = [ask(seed=s, max_tokens=60, stop_token_ids=(eos,)) for s in range(20)]
        assert {t.stop for t in sample_all(engine, requests)} == {Stop.EOS, Stop.LENGTH}
        ignoring = [
            ask(seed=s, max_tokens=60, stop_token_ids=(eos,), ignore_eos=True) for s in range(20)
        ]
        assert {t.stop for t in sample_all(engine, ignoring)} == {Stop.STOP_TOKEN, Stop.LENGTH}
        free = ids(sample_all(engine, [self.ask(max_tokens=5, ignore_eos=True)])[0])
        if free[4] not in free[:4]:
            last = sample_all(
                engine, [self.ask(max_tokens=5, ignore_eos=True, stop_token_ids=(free[4],))]
            )[0]
            assert last.stop is Stop.STOP_TOKEN

    def test_a_stop_string_ends_where_it_is_complete(self, engine, tokenizer):
        def read(tokens: list[int]) -> str:
            return tokenizer.decode(tokens, skip_special_tokens=True)

        def fresh(free: list[int], begin: int) -> bool:
            """Three letters that were not written before."""
            three = free[begin : begin + 3]
            return all(token in LETTERS for token in three) and read(three) not in read(
                free[: begin + 2]
            )

        prompts = [(*HELLO, 40 + seed) for seed in range(20)]
        frees = sample_all(
            engine, [self.ask(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
        )
        written = [
            (prompt, ids(one), i)
            for prompt, one in zip(prompts, frees, strict=True)
            for i in range(5, 36)
        ]
        prompt, free, begin = next(one for one in written if fresh(*one[1:]))
        text = read(free[begin : begin + 3])
        stops = ((text,), ("never!", text))
        requests = [self.ask(prompt, max_tokens=40, ignore_eos=True, stop=stop) for stop in stops]
        for stopped in sample_all(engine, requests):
            assert (ids(stopped), stopped.stop) == (free[: begin + 3], Stop.STOP_STRING)
            assert stopped.response_text.endswith(text)

    def test_short_answers_arrive_while_long_ones_are_written(self, engine):
        async def follow() -> list[str]:
            order = []

            async def one(name: str, *lengths: int) -> None:
                for part, length in enumerate(lengths):
                    await engine.sample(ask(seed=part, max_tokens=length, ignore_eos=True))
                    order.append(f"{name}{part}")

            await asyncio.gather(
                one("long", self.long + 45), one("short", 4, 4, 4), one("middle", self.long + 5)
            )
            return order

        assert run(follow()) == ["short0", "short1", "short2", "middle0", "long0"]

    def test_an_aborted_request_leaves_the_others_alone(self, engine):
        requests = [
            self.ask(PROMPTS[i % 5], seed=i, max_tokens=self.long, ignore_eos=True)
            for i in range(10)
        ]
        untouched = [ids(t) for t in sample_all(engine, requests)]

        async def abort_some() -> list[Any]:
            tasks = [asyncio.ensure_future(engine.sample(request)) for request in requests]
            tick = asyncio.ensure_future(engine.sample(ask(seed=99, max_tokens=5, ignore_eos=True)))
            await tick
            for task in tasks[::3]:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = run(abort_some())
        for i, result in enumerate(results):
            if i % 3 == 0:
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert ids(result) == untouched[i]
        assert [ids(t) for t in sample_all(engine, requests)] == untouched

    def test_aborting_everything_leaves_the_engine_idle(self, engine):
        async def abort_all() -> None:
            tasks = [
                asyncio.ensure_future(engine.sample(ask(seed=i, max_tokens=100))) for i in range(5)
            ]
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="5 requests in flight"):
                engine.update_weights([], 1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.set_version(engine, 3)
            assert (await engine.sample(ask())).policy_version == 3

        run(abort_all())

    def test_one_event_loop_after_another(self, engine):
        first = [ids(t) for t in sample_all(engine, [self.ask(seed=i) for i in range(4)])]

        async def give_up() -> None:
            await asyncio.wait_for(
                asyncio.gather(*(engine.sample(ask(seed=i, max_tokens=200)) for i in range(4))), 0
            )

        with pytest.raises(TimeoutError):
            run(give_up())
        self.set_version(engine, 5)  # nothing is left in flight
        assert [ids(t) for t in sample_all(engine, [self.ask(seed=i) for i in range(4)])] == first

    def test_an_event_loop_closed_under_its_requests(self, engine):
        before = ids(sample_all(engine, [self.ask()])[0])
        loop = asyncio.new_event_loop()
        task = loop.create_task(engine.sample(ask(max_tokens=200, ignore_eos=True)))
        loop.run_until_complete(asyncio.sleep(0))
        assert not task.done()
        loop.close()
        self.set_version(engine, 8)
        assert ids(sample_all(engine, [self.ask()])[0]) == before

    def test_an_empty_prompt_is_refused(self, engine):
        with pytest.raises(ValueError, match="prompt_ids"):
            sample_all(engine, [ask(())])
        assert sample_all(engine, [ask()])

    def test_closing_cancels(self):
        engine = self.make()

        async def close_under() -> list[Any]:
            tasks = [
                asyncio.ensure_future(engine.sample(ask(seed=i, max_tokens=200))) for i in range(3)
            ]
            await asyncio.sleep(0)
            engine.close()
            engine.close()
            return await asyncio.gather(*tasks, return_exceptions=True)

        assert all(isinstance(result, asyncio.CancelledError) for result in run(close_under()))
        with pytest.raises(RuntimeError, match="closed"):
            sample_all(engine, [ask()])

    def set_version(self, engine: RolloutEngine, version: int) -> None:
        """An update that changes the version only."""
        engine.update_weights([], version)


@dataclass(frozen=True)
class Counts:
    """What a model engine has computed: prompt tokens ahead of decoding, rows of all decode steps
    together."""

    prefill_tokens: int
    row_steps: int


class ModelEngineContract(EngineContract):
    """Distributions, log-probs, weights and the work that is done for them.

    ``make`` builds its engine on a copy of ``self.model()``; ``model_options`` may ask for another
    shape.
    """

    model_options: dict[str, Any] = {}
    tolerance = 1e-5  # of log-probs, in fp32
    draws = 4000  # samples of a statistical test
    keeps_sets = True  # it returns the ids that truncation kept
    top_p_within_top_k = True  # with both set, top_p counts what top_k left

    def model(self, seed: int = 0) -> torch.nn.Module:
        return tiny_model(seed=seed, **self.model_options)

    def counts(self, engine: RolloutEngine) -> Counts:
        raise NotImplementedError

    def set_version(self, engine: RolloutEngine, version: int) -> None:
        engine.update_weights(self.model().state_dict().items(), version)

    # -- distributions

    def reference(self, request: SampleRequest, response: Sequence[int]) -> torch.Tensor:
        """Log-probs under the request's settings of every token of the vocabulary at every step:
        [R, V] float64."""
        with torch.no_grad():
            logits = self.model()(
                torch.tensor([[*request.prompt_ids, *response]]), use_cache=False
            ).logits[0]
        logits = logits[len(request.prompt_ids) - 1 :].double()[: max(len(response), 1)]
        s = request.sampling
        rows = [
            _truncated(row / (s.temperature or 1), s, within=self.top_p_within_top_k)
            for row in logits
        ]
        return torch.stack(rows).log_softmax(-1)

    @pytest.mark.parametrize(
        "settings",
        [
            dict(),
            dict(temperature=1.7),
            dict(temperature=0, top_k=3, top_p=0.5),
            dict(top_k=7),
            dict(top_k=5000),
            dict(top_p=0.9, temperature=1.5),
            dict(top_p=1e-6),
            dict(top_k=20, top_p=0.7, temperature=0.9),
        ],
        ids=str,
    )
    def test_logprobs_are_those_of_the_sampled_distribution(self, engine, settings):
        requests = [
            ask(PROMPTS[i % 5], seed=i, max_tokens=25, ignore_eos=True, **settings)
            for i in range(6)
        ]
        company = [ask(PROMPTS[i % 3], seed=50 + i, max_tokens=9, top_k=2 + i) for i in range(4)]
        for request, trajectory in zip(
            requests, sample_all(engine, requests + company), strict=False
        ):
            reference = self.reference(_untruncated_if_greedy(request), ids(trajectory))
            expected = reference.gather(-1, torch.tensor(ids(trajectory))[:, None])[:, 0]
            np.testing.assert_allclose(trajectory.logprobs, expected.numpy(), atol=self.tolerance)
            if request.sampling.temperature == 0:
                assert ids(trajectory) == reference.argmax(-1).tolist()

    def test_kept_ids_are_those_of_the_sampled_distribution(self, engine):
        """Beside a request that cuts nothing, a greedy one and one that does not ask for them."""
        if not self.keeps_sets:
            return
        cuts = [dict(top_p=0.9, temperature=1.5), dict(top_k=7), dict(top_k=20, top_p=0.7)]
        requests = [ask(seed=i, max_tokens=9, kept_sets=True, **cut) for i, cut in enumerate(cuts)]
        others = [dict(kept_sets=True), dict(kept_sets=True, top_k=3, temperature=0), dict(top_k=3)]
        requests += [ask(seed=9, max_tokens=9, **other) for other in others]
        found = sample_all(engine, requests)
        for request, trajectory in zip(requests[:3], found[:3], strict=True):
            reference = self.reference(request, ids(trajectory))
            expected = [row.isfinite().nonzero()[:, 0].tolist() for row in reference]
            ends = np.cumsum(trajectory.kept.counts)[:-1]
            sets = [part.tolist() for part in np.split(trajectory.kept.ids, ends)]
            assert sets == expected[: len(sets)] and len(sets) == len(ids(trajectory))
        assert [trajectory.kept for trajectory in found[3:]] == [None] * 3

    @pytest.mark.parametrize(
        "settings",
        [dict(temperature=0.7), dict(top_p=0.6), dict(top_k=30, top_p=0.8, temperature=1.3)],
        ids=str,
    )
    def test_tokens_are_drawn_from_the_distribution(self, engine, settings):
        """Chi-square over many first tokens; tokens expected less than 8 times are pooled. Seeds,
        if any, are fixed."""
        count = 3 * self.draws // 4
        requests = [ask(seed=i, max_tokens=1, ignore_eos=True, **settings) for i in range(count)]
        seen = Counter(ids(t)[0] for t in sample_all(engine, requests))
        expected = count * self.reference(requests[0], [])[0].exp()
        assert all(expected[token] > 0 for token in seen), (
            "a token outside of the truncated distribution"
        )
        assert_chi_square([seen[i] for i in range(len(expected))], expected.tolist())

    def test_later_tokens_follow_the_distribution_too(self, engine):
        """The second token given the first, over seeds: positions of one row are independent of one
        another."""
        count, sampling = self.draws, dict(top_k=3)
        pairs = [
            tuple(ids(t))
            for t in sample_all(
                engine, [ask(seed=i, max_tokens=2, **sampling) for i in range(count)]
            )
        ]
        first = self.reference(ask(max_tokens=2, **sampling), [])[0].exp()
        cells = {}
        for one in first.nonzero()[:, 0].tolist():
            following = self.reference(ask(HELLO + (one,), **sampling), [])[0].exp()
            cells |= {
                (one, two): float(count * first[one] * following[two])
                for two in range(len(following))
            }
        seen = Counter(pairs)
        assert all(cells[pair] > 0 for pair in seen)
        assert_chi_square([seen[pair] for pair in cells], list(cells.values()))

    def test_two_settings_share_a_seed(self, engine):
        """A fast path for plain settings may not draw differently: top_k of the whole vocabulary is
        no truncation."""
        size = self.model().config.vocab_size
        plain, full = sample_all(
            engine, [ask(max_tokens=20, ignore_eos=True, top_k=k) for k in (-1, size)]
        )
        mixed = sample_all(
            engine, [ask(max_tokens=20, ignore_eos=True), ask(seed=9, top_p=0.3, temperature=2.0)]
        )[0]
        assert ids(plain) == ids(full) == ids(mixed)

    # -- weights

    def test_the_probe_is_a_plain_forward_pass(self, engine):
        text = (3, 50, 60, 61, 99, 4, 17)
        with torch.no_grad():
            expected = self.model()(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(text[1:])[:, None])[:, 0].numpy()
        probed = engine.probe(text)
        assert probed.dtype == np.float32 and probed.shape == (6,)
        np.testing.assert_allclose(probed, expected, atol=self.tolerance)

    def test_new_weights_show_in_the_next_call_and_in_the_probe(self, engine):
        other, text = self.model(seed=1), (50, 60, 61, 62)
        before, probed = sample_all(engine, [self.ask(max_tokens=20)])[0], engine.probe(text)
        engine.update_weights(
            ((name, tensor.clone()) for name, tensor in other.state_dict().items()), 1
        )
        after = sample_all(engine, [self.ask(max_tokens=20)])[0]
        assert ids(after) != ids(before) and after.policy_version == 1
        with torch.no_grad():
            logits = other(torch.tensor([[*HELLO, *ids(after)]])).logits[0, len(HELLO) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids(after))[:, None])[:, 0]
        np.testing.assert_allclose(after.logprobs, expected.numpy(), atol=self.tolerance)
        assert np.abs(engine.probe(text) - probed).max() > 0.1
        engine.update_weights(self.model().state_dict().items(), 2)
        np.testing.assert_array_equal(engine.probe(text), probed)
        assert ids(sample_all(engine, [self.ask(max_tokens=20)])[0]) == ids(before)

    def test_weights_that_do_not_fit_change_nothing(self, engine):
        text = (50, 60, 61, 62)
        probed, good = engine.probe(text), dict(self.model(seed=1).state_dict())
        first, *_, last = good
        short = {**good, last: good[last][:-1]}
        unknown = {**good, "model.extra.weight": torch.zeros(2)}
        missing = {name: tensor for name, tensor in good.items() if name != first}
        for wrong, named in ((short, last), (unknown, "model.extra.weight"), (missing, first)):
            with pytest.raises(ValueError, match=named):
                engine.update_weights(wrong.items(), 9)
            assert engine.policy_version == 0
            np.testing.assert_array_equal(engine.probe(text), probed)

    def test_weights_are_refused_while_requests_are_in_flight(self, engine):
        async def update_under() -> Trajectory:
            task = asyncio.ensure_future(engine.sample(self.ask(max_tokens=50, ignore_eos=True)))
            await engine.sample(ask(seed=1, max_tokens=2, ignore_eos=True))
            with pytest.raises(RuntimeError, match="in flight"):
                engine.update_weights(self.model(seed=1).state_dict().items(), 1)
            return await task

        alone = sample_all(engine, [self.ask(max_tokens=50, ignore_eos=True)])[0]
        assert ids(run(update_under())) == ids(alone) and engine.policy_version == 0

    def test_a_response_that_the_model_has_no_positions_for(self, engine):
        limit = self.model().config.max_position_embeddings
        with pytest.raises(ValueError, match="max_position_embeddings"):
            sample_all(engine, [ask(HELLO, max_tokens=limit - len(HELLO) + 1)])
        full = sample_all(engine, [ask(HELLO, max_tokens=limit - len(HELLO), ignore_eos=True)])[0]
        assert len(ids(full)) == limit - len(HELLO)

    # -- work

    def test_samples_of_a_prompt_share_its_prefill(self, engine):
        prompt = tuple(40 + i % 50 for i in range(80))
        before = self.counts(engine).prefill_tokens
        sample_all(engine, [ask(prompt, seed=i, max_tokens=3) for i in range(8)])
        used = self.counts(engine).prefill_tokens - before
        assert 0.9 * len(prompt) <= used <= 1.1 * len(prompt)
        sample_all(engine, [ask((i + 40, *prompt[1:]), seed=i, max_tokens=3) for i in range(8)])
        assert self.counts(engine).prefill_tokens - before - used >= 0.9 * 8 * len(prompt)

    def test_no_row_waits_for_the_longest(self, engine):
        """A long tail: the rows computed in all decode steps are the tokens written, with a tenth
        to spare."""
        before = self.counts(engine).row_steps
        lengths = [3 + i % 9 for i in range(60)] + [120, 200]
        trajectories = sample_all(
            engine, [ask(seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]
        )
        assert [len(ids(t)) for t in trajectories] == lengths
        assert self.counts(engine).row_steps - before <= 1.1 * sum(lengths)

    def test_aborted_rows_are_not_computed_on(self, engine):
        before = self.counts(engine).row_steps

        async def abort_soon() -> None:
            doomed = [
                asyncio.ensure_future(engine.sample(ask(seed=i, max_tokens=200))) for i in range(20)
            ]
            await engine.sample(ask(seed=99, max_tokens=3, ignore_eos=True))
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            await engine.sample(ask(seed=98, max_tokens=150, ignore_eos=True))

        run(abort_soon())
        assert self.counts(engine).row_steps - before <= 150 + 21 * 6

    def test_a_replay_is_the_same_to_the_bit(self, engine):
        """The same requests in the same order, whatever the engine did before: resuming a run
        relies on it."""
        requests = [ask(PROMPTS[i % 5], seed=i, max_tokens=5 + i * 13 % 40) for i in range(25)]
        first = sample_all(engine, requests)
        sample_all(
            engine, [ask(PROMPTS[2], seed=i, max_tokens=90, ignore_eos=True) for i in range(40)]
        )
        for one, other in zip(first, sample_all(engine, requests), strict=True):
            assert ids(one) == ids(other)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


def _untruncated_if_greedy(request: SampleRequest) -> SampleRequest:
    s = request.sampling
    if s.temperature > 0:
        return request
    return SampleRequest(
        request.prompt_ids, SamplingParams(max_tokens=s.max_tokens, temperature=0), request.seed
    )


def _truncated(logits: torch.Tensor, sampling: SamplingParams, *, within: bool) -> torch.Tensor:
    """Top-k, then top-p of what is left, or else (``within=False``) of all, from the definitions:
    [V]."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    kept = order if sampling.top_k < 0 else order[: sampling.top_k]
    probs = (logits[kept].softmax(-1) if within else logits.softmax(-1)[kept]).tolist()
    mass, nucleus = 0.0, []
    for token, prob in zip(kept, probs, strict=True):
        if nucleus and mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += prob
    out = torch.full_like(logits, -math.inf)
    out[nucleus] = logits[nucleus]
    return out


def assert_chi_square(seen: Sequence[int], expected: Sequence[float]) -> None:
    """Within four standard deviations of what chance gives (the chi-square's own mean and
    variance)."""
    cells = [(s, e) for s, e in zip(seen, expected, strict=True) if e >= 8]
    rest = [(s, e) for s, e in zip(seen, expected, strict=True) if e < 8]
    pooled = (sum(s for s, _ in rest), sum(e for _, e in rest))
    cells += [pooled] if pooled[1] >= 8 else []
    freedom = len(cells) - 1
    assert freedom >= 2, "too few cells to tell anything"
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)
