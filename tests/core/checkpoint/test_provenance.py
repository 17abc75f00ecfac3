"""Whose checkpoint it is: what a resumed run may have otherwise than the run that wrote it, and
what it may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.checkpoint.provenance import base_of, check_resume
from core.config.composition import compose
from core.config.convert import as_json
from core.errors import InputError
from tests.checkpoints import RUN

MODEL, N = "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.n"
FOLDER = Path("run/global_step_2")


REWARD, DATA = "custom_reward_function.path", "data.train_files"
OTHERS = {"critic.enable": False, MODEL: "/models/one", REWARD: "r.py", "max_turns": 4}
WRITTEN = replace(
    RUN,
    config={**RUN.config, **OTHERS},
    contents={MODEL: ["a" * 64], DATA: ["1" * 64], REWARD: ["2" * 64]},
)


def changed(**config):
    return {
        "config": {
            **WRITTEN.config,
            **{key.replace("__", "."): value for key, value in config.items()},
        }
    }


def content(key, digit):
    return {"contents": {**WRITTEN.contents, key: [digit * 64]}}


def test_what_may_differ_is_listed_and_what_has_only_moved_is_the_same_run():
    assert check_resume(FOLDER, WRITTEN, WRITTEN) == []
    moved = changed(
        **{
            MODEL: "/elsewhere/one",
            "data.train_files": ["/elsewhere/a"],
            "trainer.logger": ["jsonl"],
        }
    )
    assert check_resume(FOLDER, WRITTEN, replace(WRITTEN, **moved)) == []
    other = changed(trainer__total_training_steps=9, trainer__save_freq=7)
    run = replace(WRITTEN, threads=1, versions={"torch": "2.11.0", "vllm": "0.32.0"}, **other)
    assert list(map(str, check_resume(FOLDER, WRITTEN, run))) == [
        "trainer.total_training_steps was null, is 9",
        "threads was 2, is 1",
        "torch was 2.13.0, is 2.11.0",
        "vllm was null, is 0.32.0",
    ]


def test_another_seed_and_a_checkpoint_of_nobody_knows_what_are_refused_whatever_is_allowed():
    for written, run, said in (
        (RUN, replace(RUN, seed=2), "trainer.seed=2: .* 1"),
        (None, RUN, "does not say which"),
    ):
        with pytest.raises(InputError, match=said):
            check_resume(FOLDER, written, run, allow=True)


REFUSED = {
    "objective": (changed(**{N: 8}), f"{N} was 5, is 8"),
    "estimator": (
        changed(algorithm__adv_estimator="grpo"),
        "algorithm.adv_estimator was gae, is grpo",
    ),
    "data": (
        content(DATA, "3"),
        'data.train_files was ["a"] (SHA-256 111111111111), is ["a"] (SHA-256 333333333333)',
    ),
    "scorer": (
        content(REWARD, "4"),
        "custom_reward_function.path was r.py (SHA-256 222222222222), is r.py (SHA-256 "
        "444444444444)",
    ),
    "base": (
        content(MODEL, "b"),
        f"{MODEL} was /models/one (SHA-256 aaaaaaaaaaaa), is /models/one (SHA-256 bbbbbbbbbbbb)",
    ),
    "a base of no recorded hash": (
        {"contents": {}, **changed(**{MODEL: "/models/two"})},
        f"{MODEL} was /models/one, is /models/two",
    ),
    "a recipe's key": (changed(max_turns=2), "max_turns was 4, is 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_base_data_or_objective_is_refused_unless_it_is_allowed(case):
    changes, line = REFUSED[case]
    run = replace(WRITTEN, **changes)
    with pytest.raises(InputError) as caught:
        check_resume(FOLDER, WRITTEN, run)
    assert line in str(caught.value).splitlines() and "trainer.resume_with_changes=True" in str(
        caught.value
    )
    assert [str(one) for one in check_resume(FOLDER, WRITTEN, run, allow=True)] == [line]


def test_a_checkpoint_of_another_version_resumes():
    """Keys that one of the two schemas lacks count as their defaults: Search-R1's seven were in
    every recipe's."""
    theirs = {"do_search": True, "max_turns": 4, "retriever.url": "http://127.0.0.1:8000/retrieve"}
    theirs |= {
        "retriever.topk": 3,
        "retriever.prefetch": False,
        "retriever.client": {},
        "retriever.local": {},
    }
    now = as_json(compose("grpo", ["trainer.seed=1"]))
    then = {
        key: value for key, value in now.items() if key != "trainer.resume_with_changes"
    } | theirs
    # As if they were new, and followed from others
    del then["critic.ppo_mini_batch_size"], then["data.gen_batch_size"]
    run = replace(RUN, config=now)
    assert check_resume(FOLDER, replace(RUN, config=then), run) == []
    with pytest.raises(InputError, match="do_search was false, is null"):
        check_resume(FOLDER, replace(RUN, config={**then, "do_search": False}), run)


def test_a_base_is_its_tensors_however_they_are_cut_into_files(tmp_path):
    one, two = np.arange(6, dtype=np.float32), np.ones((2, 2), np.float16)
    for name, files in {
        "whole": {"model": {"a": one, "b": two}},
        "parts": {"model-1": {"b": two}, "model-2": {"a": one}},
        "renamed": {"model": {"a": one, "c": two}},
        "changed": {"model": {"a": one, "b": -two}},
    }.items():
        (tmp_path / name).mkdir()
        for file, tensors in files.items():
            save_file(tensors, tmp_path / name / f"{file}.safetensors")
    whole, parts, renamed, other = (
        base_of(str(tmp_path / name)) for name in ("whole", "parts", "renamed", "changed")
    )
    assert whole == parts and len({whole, renamed, other}) == 3
    save_file({"a": one + 1, "b": two}, tmp_path / "whole" / "model.safetensors")
    assert base_of(str(tmp_path / "whole")) != whole, "a file that changes is read again"
    with pytest.raises(FileNotFoundError):
        base_of(str(tmp_path))
