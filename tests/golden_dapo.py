"""How the golden vectors of DAPO map onto the trainer's hooks and onto ``core.rollout.collect``."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from core.config.composition import compose
from core.errors import InputError
from core.rollout.collect import CollectLimits, CollectState, Exhausted, collect_groups
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from recipes.dapo.dapo_ray_trainer import SAME, RayDAPOTrainer
from reward_scores.score import Score
from tests.golden_io import Case, Comparison

BEYOND = "eq. 13 is -1 beyond the limit; published: the line goes on below -1"
ALONE = "one answer equals itself, and n=1 with filtering is refused; published: kept"
ROUNDING = (
    f"metrics within {SAME:g} of each other are equal; published: any standard deviation "
    f"above 0 is a difference"
)
NO_LIMIT = (
    "the limit is data.max_response_length, which always has a value; published: an "
    "argument that may be missing"
)
SURPLUS = (
    "prompts after the last one that trains are drawn again in the next step; published: "
    "they are lost"
)


@functools.cache
def trainer(*overrides: str) -> RayDAPOTrainer:
    """The trainer with the recipe's configuration; it has not started."""
    return RayDAPOTrainer(compose("dapo", overrides))


def trajectory(length: int, *, stop: Stop = Stop.EOS) -> Trajectory:
    return Trajectory([1, 2], [5] * length, [True] * length, [-1.0] * length, (), stop, 0, 0)


SHORT, BUFFER = trajectory(1), "reward_model.overlong_buffer"


def group(scores: list[Score], ordinal: int = 0) -> ScoredGroup:
    prompt = Prompt(ordinal, f"q{ordinal}", (1, 2), (), "a", "test")
    return ScoredGroup(prompt, (SHORT,) * len(scores), tuple(scores))


def _overlong(case: Case, precision: str) -> Iterator[Comparison]:
    params, want = case.params, case.expected[""]
    limit, factor, length = (
        params["max_resp_len"],
        params["penalty_factor"],
        case.inputs["valid_response_length"],
    )
    buffer = f"{BUFFER}.len={params['buffer_len']}", f"{BUFFER}.penalty_factor={factor}"
    shaping = trainer(f"data.max_response_length={limit}", *buffer)
    shaped = shaping.shape_reward(Score(case.inputs["base_score"]), trajectory(length))
    penalty, reward, why = want["overlong_reward"], want["final_reward"], ""
    if length > limit:
        penalty, reward, why = -factor, case.inputs["base_score"] - factor, BEYOND
    yield Comparison("overlong_reward", shaped.parts["overlong"], penalty, 1e-6, departure=why)
    yield Comparison("overlong", shaped.parts["overlong"] < 0, want["overlong"], 0)
    yield Comparison("final_reward", shaped.value, reward, 1e-6, departure=why)


def _overlong_ctor(case: Case, precision: str) -> Iterator[Comparison]:
    buffer: Mapping[str, Any] = case.params["overlong_buffer_cfg"] or {"enable": False}
    overrides = [f"{BUFFER}.{name}={value}" for name, value in buffer.items()]
    limit = case.params["max_resp_len"]
    try:
        trainer(*overrides, *([] if limit is None else [f"data.max_response_length={limit}"]))
    except InputError:
        accepted = False
    else:
        accepted = True
    departs = limit is None and buffer["enable"]
    yield Comparison(
        "ok",
        accepted,
        True if departs else case.expected[""]["ok"],
        0,
        departure=NO_LIMIT * departs,
    )


def _filter_groups(case: Case, precision: str) -> Iterator[Comparison]:
    values: dict[str, list[float]] = {}
    for uid, value in zip(case.inputs["uid"], case.inputs["metric"], strict=True):
        values.setdefault(uid, []).append(float(value))
    published = case.expected[""]["kept_uids_in_first_seen_order"]
    for uid, metric in values.items():
        kept = trainer().keep_group(group([Score(value) for value in metric]))
        why = (
            ALONE if len(metric) == 1 else ROUNDING if 0 < max(metric) - min(metric) <= SAME else ""
        )
        yield Comparison(uid, kept, False if why else uid in published, 0, departure=why)


def _accumulation(case: Case, precision: str) -> Iterator[Comparison]:
    """Batch k of the vector is the k-th stretch of ``size`` ordinals; the first ones of it pass, as
    many as it says."""
    passing, wanted = case.inputs["kept_prompts_per_gen_batch"], case.params["train_batch_size"]
    # Without a bound (0 or none is given) as many batches are drawn as the vector has
    size, bound = 3 * wanted, case.params.get("max_num_gen_batches") or len(passing)
    first = 0
    # The large ones take seconds
    for number, event in enumerate(case.expected[""][: 4 if wanted > 100 else None]):
        if event["event"] == "continue":
            continue
        # A step begins where the published one does, at a new batch
        start, drawn = first * size, min(bound, number + 1 - first) * size
        limits, first = CollectLimits(wanted, size, drawn, raise_on_exhausted=True), number + 1
        kept = _collected(tuple(passing), size, start, limits)
        if event["event"] == "error":
            yield Comparison(f"{number} raises", kept is None, True, 0)
            continue
        batches = kept[-1] // size - start // size + 1
        yield Comparison(f"{number} used_prompts", len(kept), event["used_prompts"], 0)
        yield Comparison(f"{number} num_gen_batches", batches, event["num_gen_batches"], 0)
        why = SURPLUS if event["discarded_surplus_prompts"] else ""
        yield Comparison(
            f"{number} lowest", kept, _lowest(passing, size, start)[:wanted], 0, departure=why
        )


def _lowest(passing: list[int], size: int, start: int) -> list[int]:
    first = start // size
    return [k * size + i for k, count in enumerate(passing[first:], first) for i in range(count)]


@functools.cache
def _collected(
    passing: tuple[int, ...], size: int, start: int, limits: CollectLimits
) -> list[int] | None:
    """The ordinals that train, and None where collecting gives up."""

    async def roll(ordinal: int) -> ScoredGroup:
        batch = passing[ordinal // size] if ordinal // size < len(passing) else 0
        return group([Score(1.0), Score(-1.0 if ordinal % size < batch else 1.0)], ordinal)

    try:
        done = asyncio.run(collect_groups(roll, trainer().keep_group, CollectState(start), limits))
    except Exhausted:
        return None
    return [each.prompt.ordinal for each in done.groups]


ADAPTERS = {
    "dapo_accumulation": _accumulation,
    "dapo_filter_groups": _filter_groups,
    "dapo_overlong": _overlong,
    "dapo_overlong_ctor": _overlong_ctor,
}
