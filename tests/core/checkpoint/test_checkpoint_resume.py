"""Whose checkpoint it is, and where a run goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.checkpoint import provenance
from core.checkpoint.provenance import Base, ModelFingerprint, Provenance, base_of, check_resume
from core.checkpoint.store import CheckpointStore, DamagedCheckpoint, resolve_resume
from core.config import compose
from core.config.convert import as_json
from core.errors import InputError
from tests.checkpoints import FILES, RUN, Settings, flip_bit, names, run, write


def check(store: CheckpointStore, run: Provenance, *, allow: bool = False) -> list:
    found = store.latest()
    return check_resume(found.folder, found.provenance, run, allow=allow)


def test_the_same_run_is_compatible(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    assert check(store, RUN) == []


def test_what_may_differ_is_listed(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    other = replace(
        RUN,
        threads=1,
        config={**RUN.config, "trainer.total_training_steps": 9, "trainer.save_freq": 7},
        versions={"torch": "2.11.0", "vllm": "0.32.0"},
    )
    assert list(map(str, check(store, other))) == [
        "trainer.total_training_steps was null, is 9",
        "threads was 2, is 1",
        "torch was 2.13.0, is 2.11.0",
        "vllm was null, is 0.32.0",
    ]


def shapes(**sizes: tuple[int, ...]) -> ModelFingerprint:
    return ModelFingerprint("Qwen2ForCausalLM", sizes)


OTHERS = {
    "vocabulary": (
        {"models": {"actor": shapes(embed=(101, 32), head=(101, 32))}},
        r"another model \(actor\): embed is \[100, 32\] there, \[101, 32\] here; head .*actor_rollout_ref.model.path",
    ),
    "architecture": (
        {"models": {"actor": ModelFingerprint("LlamaForCausalLM", {"embed": (100, 32), "head": (100, 32)})}},
        r"architecture Qwen2ForCausalLM there, LlamaForCausalLM here",
    ),
    "tied": ({"models": {"actor": shapes(embed=(100, 32))}}, r"head is \[100, 32\] there, absent here"),
    "critic": (
        {"models": {**RUN.models, "critic": shapes(score=(1, 32))}},
        r"holds no critic, but this run has one .*algorithm.adv_estimator",
    ),
    "deeper": (
        {"models": {"actor": shapes(**{name: (1,) for name in "abcdef"})}},
        r"a is absent there, \[1\] here; b is absent there, \[1\] here; c is absent there, \[1\] here; and 5 more",
    ),
    "seed": ({"seed": 2}, r"trainer.seed=2, but .* was written with seed 1: .*Set trainer.seed=1"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_or_seed_is_refused(other, tmp_path):
    changes, message = OTHERS[other]
    store = CheckpointStore(tmp_path)
    write(store, 1)
    with pytest.raises(InputError, match=message):
        check(store, replace(RUN, **changes))


def test_a_checkpoint_of_nobody_knows_what_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1, provenance=None)
    with pytest.raises(InputError, match="does not say which run"):
        check(store, RUN)


# ---------------------------------------------------------------- where a run goes on


def test_auto_takes_the_newest_or_starts_afresh(tmp_path):
    store = CheckpointStore(tmp_path)
    assert resolve_resume(Settings(), store) is None
    write(store, 2)
    write(store, 4)
    assert resolve_resume(Settings(), store).step == 4


def test_disable_starts_afresh_in_an_empty_folder_only(tmp_path):
    store = CheckpointStore(tmp_path)
    assert resolve_resume(Settings("disable"), store) is None
    flip_bit(write(store, 4) / FILES[0])  # a damaged one can be mended and taken for ours as well
    with pytest.raises(InputError, match="resume_mode=disable starts at step 0, but .* already holds global_step_4"):
        resolve_resume(Settings("disable"), store)
    assert resolve_resume(Settings("disable", val_only=True), store) is None


def test_resume_path_takes_the_one_that_is_named(tmp_path):
    other, store = CheckpointStore(tmp_path / "other"), CheckpointStore(tmp_path / "run")
    for step in (2, 4):
        write(other, step)
    named = Settings("resume_path", str(other.folder(2)))
    assert resolve_resume(named, store).folder == other.folder(2)
    with pytest.raises(InputError, match="starts at step 2, but .*other already holds global_step_4"):
        resolve_resume(named, other)
    flip_bit(other.folder(2) / FILES[1])
    with pytest.raises(DamagedCheckpoint, match="optimizer.pt was altered"):
        resolve_resume(named, store)


def test_a_path_without_a_folder(tmp_path):
    with pytest.raises(InputError, match="resume_from_path=/nowhere/global_step_3: no such folder"):
        resolve_resume(Settings("resume_path", "/nowhere/global_step_3"), CheckpointStore(tmp_path))


def test_a_run_folder_is_not_a_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    folder = write(store, 4)
    (tmp_path / "manifest.json").write_text('{"status": "running"}')  # the run's own
    with pytest.raises(InputError, match=f"a folder of checkpoints; name one of them, such as {folder}"):
        store.at(tmp_path)


def test_looking_only_changes_nothing_and_takes_no_lock(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    write(store, 1)
    flip_bit(write(store, 2) / FILES[0])
    (store.root / ".tmp-global_step_3-1").mkdir()
    before = names(store.root)
    code = (
        "import sys; from tests.checkpoints import LOOKING, CheckpointStore, resolve_resume;"
        "print(resolve_resume(LOOKING, CheckpointStore(sys.argv[1])).step)"
    )
    assert run(code, store.root).stdout == "1\n"  # beside the writer, which is this process
    assert names(store.root) == before


# ---------------------------------------------------------------- another run in the same folder


def of_base(sha256: str, path: str = "/models/one") -> dict[str, ModelFingerprint]:
    return {"actor": replace(RUN.models["actor"], base=Base(path, sha256))}


MODEL, N = "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.n"
WRITTEN = replace(
    RUN,
    models=of_base("a" * 64),
    config={**RUN.config, MODEL: "/models/one", "custom_reward_function.path": "r.py", "max_turns": 4},
    contents={"data.train_files": ["1" * 64], "custom_reward_function.path": ["2" * 64]},
)


def changed(**config):
    return {"config": {**WRITTEN.config, **{key.replace("__", "."): value for key, value in config.items()}}}


REFUSED = {
    "objective": (changed(**{N: 8}), f"{N} was 5, is 8"),
    "estimator": (changed(algorithm__adv_estimator="grpo"), "algorithm.adv_estimator was gae, is grpo"),
    "data": (
        {"contents": {**WRITTEN.contents, "data.train_files": ["3" * 64]}},
        'data.train_files was ["a"] (SHA-256 111111111111), is ["a"] (SHA-256 333333333333)',
    ),
    "scorer": (
        {"contents": {**WRITTEN.contents, "custom_reward_function.path": ["4" * 64]}},
        "custom_reward_function.path was r.py (SHA-256 222222222222), is r.py (SHA-256 444444444444)",
    ),
    "base": (
        {"models": of_base("b" * 64)},
        f"{MODEL} was /models/one (SHA-256 aaaaaaaaaaaa), is /models/one (SHA-256 bbbbbbbbbbbb)",
    ),
    "a base of no recorded hash": (
        {"models": RUN.models, **changed(**{MODEL: "/models/two"})},
        f"{MODEL} was /models/one, is /models/two",
    ),
    "a recipe's key": (changed(max_turns=2), "max_turns was 4, is 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_base_data_or_objective_is_refused_unless_it_is_allowed(case, tmp_path):
    changes, line = REFUSED[case]
    store = CheckpointStore(tmp_path)
    write(store, 1, WRITTEN)
    run = replace(WRITTEN, **changes)
    with pytest.raises(InputError) as caught:
        check(store, run)
    assert line in str(caught.value).splitlines() and "trainer.resume_with_changes=True" in str(caught.value)
    assert [str(one) for one in check(store, run, allow=True)] == [line]


def test_what_has_only_moved_or_cannot_matter_is_the_same_run(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1, WRITTEN)
    moved = changed(**{MODEL: "/elsewhere/one", "data.train_files": ["/elsewhere/a"], "trainer.logger": ["jsonl"]})
    run = replace(WRITTEN, models=of_base("a" * 64, "/elsewhere/one"), **moved)
    assert check(store, run) == []


def test_a_checkpoint_of_another_version_resumes(tmp_path):
    """Keys that one of the two schemas lacks count as their defaults: Search-R1's seven were in every recipe's."""
    theirs = {"do_search": True, "max_turns": 4, "retriever.url": "http://127.0.0.1:8000/retrieve"}
    theirs |= {"retriever.topk": 3, "retriever.prefetch": False, "retriever.client": {}, "retriever.local": {}}
    now = as_json(compose("grpo", ["trainer.seed=1"]))
    then = {key: value for key, value in now.items() if key != "trainer.resume_with_changes"} | theirs
    del then["critic.ppo_mini_batch_size"], then["data.gen_batch_size"]  # as if they were new, and followed from others
    store = CheckpointStore(tmp_path)
    write(store, 1, replace(RUN, config=then))
    assert check(store, replace(RUN, config=now)) == []
    write(store, 2, replace(RUN, config={**then, "do_search": False}))
    with pytest.raises(InputError, match="do_search was false, is null"):
        check(store, replace(RUN, config=now))


def test_an_unchanged_base_is_not_read_again(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    found = base_of(str(tmp_path))
    monkeypatch.setattr(provenance, "_entries", None)  # reading would fail
    assert base_of(str(tmp_path), found) is found
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{  }")
    with pytest.raises(TypeError):
        base_of(str(tmp_path), found)
