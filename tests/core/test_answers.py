"""Files of answers: what a line keeps of an episode, and what a scorer reads of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.answers import answer_line, prompt_of, trajectory_of
from core.data.parquet import ExampleFile
from core.rewards.layer import facts
from core.tracking.json_lines import json_line
from core.types import Prompt, Segment, Stop, Trajectory


def test_an_episode_comes_back_with_its_mask_and_segments():
    segments = (
        Segment("tool", "seen"),
        Segment("policy", "ask"),
        Segment("tool", "told"),
        Segment("policy", "say"),
    )
    mask = [False, False, True, True, True, False, True]
    trajectory = Trajectory(
        np.array([3]),
        np.arange(7),
        np.array(mask),
        np.zeros(7),
        segments,
        Stop.EOS,
        2,
        5,
        turns=2,
        tool_calls=1,
    )
    prompt = Prompt(
        -1, "u", (3,), (), {"target": ["x"]}, "nq", {"index": 1}, "rule", opened_tag="<think>"
    )
    row = json.loads(json.dumps(answer_line(prompt, 0, trajectory, "text")))
    back = trajectory_of(row)
    assert row["mask_runs"] == [0, 2, 3, 1, 1] and row["response"] == "asksay"
    assert back.response_mask.tolist() == mask and back.response_ids.tolist() == list(range(7))
    assert facts(back) == facts(trajectory) and back.response_text == "asksay"
    assert prompt_of(row).ground_truth == {"target": ["x"]} and prompt_of(row).uid == "u"
    assert prompt_of(row).opened_tag == "<think>"


def test_a_scorer_of_recorded_answers_gets_the_values_that_training_gives(tmp_path):
    """Parquet holds bytes, dates and decimals, which the lines of a file of answers do not."""
    day = datetime(2020, 1, 5, 10, tzinfo=UTC)
    facts = {
        "nanoseconds": pa.array([day.replace(tzinfo=None)], pa.timestamp("ns")),
        "span": pa.array([timedelta(1, 2, 3)], pa.duration("ns")),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        **{
            name: [value]
            for name, value in {"time": day.time(), "date": day.date(), "at": day}.items()
        },
        **{
            "text": ["2020-01-05"],
            "money": [Decimal("1.10")],
            "spent": [timedelta(-1, 5)],
            "none": [None],
        },
    }
    gold = pa.StructArray.from_arrays([pa.array([b"\x00\xff"])], ["ground_truth"])
    extra = pa.StructArray.from_arrays([pa.array(value) for value in facts.values()], [*facts])
    columns = {"data_source": ["s"], "prompt": ["q"], "reward_model": gold, "extra_info": extra}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    example = ExampleFile(tmp_path / "a.parquet").example(0)
    prompt = Prompt(-1, "u", (3,), (), example.ground_truth, "s", example.extra_info)
    trajectory = Trajectory(*np.zeros((4, 0)), (), Stop.EOS, 0, 0)
    read = prompt_of(json.loads(json_line(answer_line(prompt, 0, trajectory, ""))))
    assert (read.ground_truth, read.extra_info) == (b"\x00\xff", example.extra_info)
    assert list(map(type, read.extra_info.values())) == list(map(type, example.extra_info.values()))
