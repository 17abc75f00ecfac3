"""What a plan takes from others: lengths, validation questions, and the step times that its errors are measured by."""

from __future__ import annotations

import dataclasses
import re

import pytest

from core.config import compose
from core.config.recipes import trainer_of
from core.planning import published
from core.planning.estimate import Plan, lines
from core.planning.model_shapes import gpu
from core.planning.step_seconds import Assumptions

MODEL = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"
RAY = ("trainer.backend=ray", "actor_rollout_ref.rollout.name=vllm", MODEL)
ROWS = list(published.rows())
SEVEN = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")


def planned(*keys: str, on: str = "H100", recipe: str = "grpo", **assumed) -> Plan:
    return Plan(compose(recipe, [*RAY, *keys], trainer_of(recipe)[1]), gpu(on), Assumptions(**assumed))


# --- errors against published step times ---


def test_the_errors_of_the_table_are_those_of_the_plan():
    found = []
    for row, keys in ROWS:
        assumed = Assumptions(mean_length=row.get("length"), prompt_length=row.get("prompt"))
        plan = Plan(compose("grpo", keys), gpu(row["gpu"]), assumed)
        found.append(sum(plan.seconds.values()) / row["seconds"] - 1)
    table = [
        f"{row['system']:22} {row['seconds']:6} s {error:+.2f} (in the table: {row['error']:+.2f})"
        for (row, _), error in zip(ROWS, found, strict=True)
    ]
    assert [row["error"] for row, _ in ROWS] == pytest.approx(found, abs=0.006), "\n".join(["", *table])
    assert max(map(abs, found)) < 0.45  # the plan is too fast for GB200: -43 %


def test_the_rows_are_cited_and_a_plan_prints_their_range():
    assert len(ROWS) >= 6 and len({row["system"].split()[0].strip(",") for row, _ in ROWS}) >= 2
    assert all(row["source"] and row["seconds"] > 0 for row, _ in ROWS)
    errors = [row["error"] for row, _ in ROWS]
    (line,) = [line for line in lines(planned()) if "published step times" in line]
    low, high = re.search(r"error against 9 published step times: (-\d+)% to (\+\d+)%", line).groups()
    assert (int(low), int(high)) == (round(100 * min(errors)), round(100 * max(errors)))


# --- lengths ---


def test_lengths_are_those_that_were_published_for_the_data_and_the_model():
    limits = ("data.max_response_length=8192", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9216")
    dapo = planned(*limits, "data.train_files=/data/dapo_math/train.parquet")
    assert dapo.assumed.mean_length == 2600 and dapo.assumed.prompt_length == 256
    (assumed,) = [line for line in lines(dapo) if line.startswith("Assumed: answers")]
    assert "answers of 2,600 tokens on average (arXiv 2503.14476, figure 7" in assumed and "700 to 4,500" in assumed
    gsm8k = planned(*limits, "data.train_files=/data/gsm8k/train.parquet")
    assert (gsm8k.assumed.mean_length, gsm8k.assumed.prompt_length) == (193, 94)
    other = "actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat"
    assert planned(*limits, "data.train_files=/data/gsm8k/train.parquet", other).assumed.mean_length == 4096
    assert planned("data.train_files=/data/dapo/x.parquet", "data.max_response_length=512").assumed.mean_length == 512
    assert planned(*limits, "data.train_files=/data/dapo/x.parquet", mean_length=77).assumed.mean_length == 77
    told = compose("search_r1", ["data.train_files=/data/gsm8k/x.parquet"], trainer_of("search_r1")[1])
    assert published.lengths_of(told) is None  # an episode's turns are no answers


# --- validations ---


def test_questions_are_counted_or_those_that_the_sets_are_known_to_have(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def count(*keys: str) -> int:
        return published.questions_of(compose("grpo", list(keys)))

    files = ",".join(f"'/none/test/{name}.parquet'" for name in SEVEN)
    assert count(f"data.val_files=[{files}]") == 51_713
    assert count(f"data.val_files=[{files}]", "data.val_max_samples=128") == 6 * 128 + 125
    assert count("data.val_files=/none/aime2024/test.parquet") == 30
    assert count("data.val_files=/none/gsm8k/test.parquet") == 1319
    assert count("data.val_files=/none/mine/test.parquet") == 1000
    pq.write_table(pa.table({"prompt": ["a"] * 7}), tmp_path / "aime.parquet")
    assert count(f"data.val_files={tmp_path}/aime.parquet") == 7
    (tmp_path / "aime.parquet").write_text("not parquet")
    assert count(f"data.val_files={tmp_path}/aime.parquet") == 30


# --- what a step carries ---


def test_a_step_carries_its_share_of_validations_and_checkpoints():
    quiet = ("trainer.test_freq=-1", "trainer.save_freq=-1", "data.val_files=/none/gsm8k/test.parquet")
    none = planned(*quiet)
    assert not {"validation", "checkpoint"} & set(none.seconds)
    ten = planned(*quiet, "trainer.test_freq=10", "trainer.save_freq=20")
    copy, writing = ten.checkpoint_bytes / ten.gpus / 4e9, ten.checkpoint_bytes / 1e9
    assert ten.seconds["checkpoint"] == pytest.approx(copy / 20), "written beside 20 steps"
    each, rest = (planned(*quiet, "trainer.test_freq=10", f"trainer.save_freq={n}") for n in (1, -1))
    wait = writing - sum(rest.seconds.values())
    assert wait > 0 and each.seconds["checkpoint"] == pytest.approx(copy + wait), "a step is shorter than the writing"
    often, more = (planned(*quiet, "trainer.test_freq=1", *keys).seconds["validation"] for keys in ((), SAMPLED))
    assert often == pytest.approx(10 * ten.seconds["validation"]) and more > 2 * often
    text = "\n".join(lines(ten))
    assert "A validation takes about" in text and "(1,319 questions x 1 answer)" in text
    assert f"A checkpoint holds the run up for about {copy:.3g} s and is written in 91.4 s beside it." in text
    assert "Meanwhile its copy takes 85.1 GiB of host memory a node." in text


SAMPLED = (
    "actor_rollout_ref.rollout.val_kwargs.n=8",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
)


def test_weights_are_gathered_once_and_sent_again_to_engines_elsewhere():
    one, four = planned(), planned("trainer.nnodes=4")
    size = 2 * one.shape.parameters
    for plan in (one, four, planned("actor_rollout_ref.actor.fsdp_config.param_offload=True")):
        assert plan.seconds["weight sync"] == pytest.approx(size / 4e9)
    away = planned("actor_rollout_ref.hybrid_engine=False")
    assert away.seconds["weight sync"] == pytest.approx(2 * size / 4e9)
    alone = Plan(compose("grpo", [MODEL, "actor_rollout_ref.rollout.dtype=bfloat16"]), gpu("H100"))
    assert alone.seconds["weight sync"] == pytest.approx(size / 3.35e12)


def test_dynamic_sampling_waits_for_late_refills():
    on, off = (
        planned(f"algorithm.filter_groups.enable={value}", "data.gen_batch_size=1024", recipe="dapo")
        for value in (True, False)
    )
    assert "refills" not in off.seconds
    longest = on.seconds["refills"] / 0.5
    assert on.seconds["generate"] >= longest > 0
    twice = planned("data.gen_batch_size=1024", recipe="dapo", refills=1.0)
    assert twice.seconds["refills"] == pytest.approx(longest)


SEARCH = ("data.train_batch_size=512", "data.val_files=/none/test/bamboogle.parquet", "trainer.test_freq=10")


def test_searches_take_the_time_of_flat_search_over_wikipedia():
    found = planned(*SEARCH, recipe="search_r1")
    flops = found.config.search_flops
    assert 512 * flops == pytest.approx(16.5e12, rel=0.15)  # 512 queries over 21 million vectors, and the encoder
    n = found.config.actor_rollout_ref.rollout.n
    assert found.assumed.turns == 3 and found.seconds["retrieval"] == pytest.approx(512 * n * 2 * flops / 2e12)
    fast = planned(*SEARCH, recipe="search_r1", search_rate=2e15)
    saved = found.seconds["validation"] - fast.seconds["validation"]
    assert saved == pytest.approx(125 * 2 * flops * (1 / 2e12 - 1 / 2e15) / 10)
    assert "2 TFLOP/s of the CPUs that search" in "\n".join(lines(found))
    for without in ("do_search=False", "retriever.url=null"):
        assert "retrieval" not in planned(*SEARCH, without, recipe="search_r1").seconds
    assert dataclasses.replace(found.assumed) == found.assumed and "retrieval" not in planned().seconds
