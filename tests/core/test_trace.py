"""The dump of tokens: which steps and groups are dumped, what a dump holds, and what a full disk
costs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from core.learner.batching import make_batch
from core.trace import chosen_groups, dump, is_due
from core.types import Prompt, ScoredGroup, Segment, Stop, Trajectory
from results.reporting.trace_page import read_dump, trace_files
from reward_scores.score import Score
from tests.core import scripted_run
from tests.core.scripted_run import configured, scripted
from tests.core.test_run import start


class LetterTokenizer:
    """One token a letter."""

    def batch_decode(self, rows, **_):
        return [chr(token) for (token,) in rows]


def group(number: int, value: float = 1.0, text: str = "ab<i>c") -> ScoredGroup:
    """A group of two answers, of which the second has a tool's answer in the middle."""
    prompt = Prompt(
        number,
        f"uid{number}",
        (63,),
        ({"role": "user", "content": f"question {number}"},),
        "7",
        "letters",
    )
    ids = [ord(letter) for letter in text]
    masks = [True] * len(ids), [place not in (1, 2) for place in range(len(ids))]
    answers = [
        Trajectory(
            (63,), ids, mask, [-0.25] * len(ids), (Segment("policy", text),), Stop.EOS, 0, place
        )
        for place, mask in enumerate(masks)
    ]
    return ScoredGroup(prompt, tuple(answers), (Score(value), Score(0.0)))


@pytest.mark.parametrize(
    ("freq", "steps", "due"),
    [(3, None, [1, 3, 6, 7]), (-1, (4,), [4]), (3, (4,), [1, 3, 4, 6, 7]), (-1, None, [])],
)
def test_every_so_many_steps_the_first_the_last_and_those_that_are_named(freq, steps, due):
    options = SimpleNamespace(freq=freq, steps=steps)
    assert [step for step in range(1, 8) if is_due(options, step, 7)] == due


def test_the_worst_group_is_always_chosen_and_the_same_questions_recur():
    groups = [group(number) for number in range(20)]
    usual = set(chosen_groups(groups, 2)[1:])
    assert len(usual) == 2
    low = next(number for number in range(20) if number not in usual)
    groups[low] = group(low, value=-1.0)
    assert chosen_groups(groups, 2)[0] == low and set(chosen_groups(groups, 2)[1:]) == usual
    assert chosen_groups(groups[:1], 5) == [0]


def test_a_dump_holds_each_token_with_what_the_batch_holds_of_it(tmp_path):
    groups = [group(0), group(1, value=-1.0)]
    batch = make_batch(groups, 0)
    marks = batch.response_mask * np.float32(0.5)
    batch = batch.adding(advantages=marks, old_log_probs=-marks)
    dump(tmp_path, 3, groups, batch, LetterTokenizer(), 1)
    (path,) = trace_files(tmp_path)
    content = read_dump(path)
    assert content["step"] == 3 and [one["uid"] for one in content["groups"]] == ["uid1", "uid0"]
    second = content["groups"][0]["trajectories"][1]
    assert second["tokens"] == list("ab<i>c") and second["response_mask"] == [1, 0, 0, 1, 1, 1]
    assert second["numbers"]["advantages"] == [0.5, 0, 0, 0.5, 0.5, 0.5]
    assert (
        second["numbers"]["rollout_log_probs"] == [-0.25] * 6 and "values" not in second["numbers"]
    )
    assert second["score"] == 0 and content["groups"][0]["trajectories"][0]["score"] == -1


def test_a_run_dumps_the_advantages_that_it_trains_on(tmp_path):
    folder = scripted_run.prepare(tmp_path)
    config = configured(folder, "dumps", "trainer.trace.freq=2", steps=3)
    scripted()(config, lambda request, version: str(request.seed % 4)).init_workers().fit()
    run = Path(config.trainer.default_local_dir)
    assert [path.name for path in trace_files(run)] == [
        f"step_00000{step}.json.gz" for step in (1, 2, 3)
    ]
    for path in trace_files(run):
        for answers in read_dump(path)["groups"]:
            scores = [one["score"] for one in answers["trajectories"]]
            for one in answers["trajectories"]:
                signs = set(np.sign(one["numbers"]["advantages"]))
                assert signs == {np.sign(round(one["score"] - np.mean(scores), 6))}


def test_a_full_trace_folder_ends_no_training(tmp_path, caplog, monkeypatch):
    """The folder is a file: nothing can be written in it."""
    monkeypatch.setattr("core.trace.FOLDER", "config.yaml")
    run = start(tmp_path, "trainer.total_training_steps=2", "trainer.trace.freq=1")
    run.fit()
    assert run.run.step == 2 and caplog.text.count("could not be written") == 2


def test_half_a_surrogate_or_an_odd_truth_is_no_reason_to_lose_the_dump(tmp_path):
    odd = group(0)
    odd = dataclasses.replace(
        odd,
        prompt=dataclasses.replace(odd.prompt, messages=({"content": "\ud800"},), ground_truth={1}),
    )
    dump(tmp_path, 1, [odd], make_batch([odd], 0), LetterTokenizer(), 0)
    assert json.dumps(read_dump(trace_files(tmp_path)[0]))
