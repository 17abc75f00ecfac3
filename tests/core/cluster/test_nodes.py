"""What is compared between nodes, how long a phase may take, and what errors and hangs of processes
name: no Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from core import command_line
from core.cluster import node_report, ray_nodes, ray_pools
from core.cluster.ray_nodes import differences, named_files, own_packages, start_problems
from core.cluster.ray_watch import Place, Watch, innermost
from core.config.composition import compose
from core.errors import InputError, NoRoom, WorkersLost, WriteFailed, listed, message_of
from core.secret_keys import HIDDEN
from tests.core.ray_cluster import cluster_config

# -- the same code everywhere


def report(code=(), model=(), host="host", **packages):
    files = {"code": dict(code), "/m": dict(model)}
    return {"host": host, "packages": packages, "files": files}


CODE = {"core/run.py": "1", "core/errors.py": "2", "recipes/x.py": "3"}


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ({}, None),
        (
            {"core/run.py": "other"},
            "core/run.py: differs from the driver's on node 10.0.0.2 (host); ",
        ),
        ({"core/run.py": None}, "core/run.py: differs"),  # not there
        ({"core/left_over.py": "4"}, "core/left_over.py: differs"),
        (
            {"core/run.py": "x", "recipes/x.py": "y"},
            "core/run.py: differs from the driver's on node 10.0.0.2 (host), and "[:-1],
        ),
        (
            dict.fromkeys(CODE),
            "core/errors.py: differs from the driver's on node 10.0.0.2 (host), and so do 2 more",
        ),
    ],
)
def test_other_code_is_named_by_file_and_node(theirs, line):
    code = {name: value for name, value in {**CODE, **theirs}.items() if value is not None}
    found = differences(report(CODE), {"10.0.0.1": report(CODE), "10.0.0.2": report(code)}, {})
    assert [text.startswith(line) for text in found] == [True] * bool(line)


def test_nodes_with_the_same_difference_share_a_line_of_five_at_most():
    reports = {f"10.0.0.{number}": report({"core/run.py": "old"}) for number in range(8)}
    (line,) = differences(report({"core/run.py": "new"}), reports, {})
    assert line.count("10.0.0.") == 5 and " and 3 more" in line


@pytest.mark.parametrize(
    ("driver", "first", "second", "lines"),
    [
        ("2.13.0+cpu", "2.13.0+cu130", "2.13.0+cu130", []),  # the head has no GPU
        (
            "2.13.0+cpu",
            "2.13.0+cu130",
            "2.13.0+cu126",
            ["torch==2.13.0+cu126: is installed on node 10.0.0.2"],
        ),
        ("2.13.0", "2.12.0", "2.13.0", ["torch==2.12.0: is installed on node 10.0.0.1"]),
        (None, "2.13.0", "2.13.0", []),
        (None, "2.13.0", "2.12.0", ["torch==2.12.0: is installed on node 10.0.0.2"]),
    ],
)
def test_other_versions_are_named_by_package_and_node(driver, first, second, lines):
    mine = report(**({"torch": driver} if driver else {}))
    found = differences(
        mine, {"10.0.0.1": report(torch=first), "10.0.0.2": report(torch=second)}, {}
    )
    assert [line.partition(" (")[0] for line in found] == lines


def test_a_model_that_a_node_lacks_or_has_otherwise_is_named_by_its_key():
    model = {"/m/config.json": "1", "/m/model.safetensors": "99999999 bytes"}
    named = {"/m": "actor_rollout_ref.model.path"}
    other = report(model={**model, "/m/config.json": "2", "/m/README.txt": "more"})
    lines = differences(report(model=model), {"10.0.0.1": report(), "10.0.0.2": other}, named)
    assert [line.partition(" (")[0] for line in lines] == [
        "actor_rollout_ref.model.path=/m: is not there on node 10.0.0.1",
        "actor_rollout_ref.model.path=/m: config.json differs on node 10.0.0.2",
    ]


def test_a_report_needs_no_code_of_this_repository_and_sees_a_change(tmp_path):
    """It goes to nodes that have another clone, or none: here a Python without packages runs it."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core/run.py").write_text("1")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    source = Path(node_report.__file__).read_text()
    program = f"{source}\nprint(report(('core', 'absent'), ['model', 'none.py'], 'FOLDER'))"

    def asked():
        env = {"PYTHONPATH": str(tmp_path), "FOLDER": str(tmp_path)}
        command = [sys.executable, "-S", "-c", program]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return eval(done.stdout)

    before = asked()["files"]
    assert [*before["code"]] == ["core/run.py"] and [*before["model"]] == ["model/config.json"]
    assert before["none.py"] == {}
    (tmp_path / "core/run.py").write_text("2")
    after = asked()["files"]
    assert after["code"] != before["code"] and after["model"] == before["model"]


def test_what_is_compared_covers_models_and_a_users_own_loss(tmp_path):
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    config = cluster_config(tmp_path, f"{loss}={tmp_path}/mine.py:loss")
    found = named_files(config)
    assert (
        found[f"{tmp_path}/mine.py"] == loss
        and found[str(tmp_path)].endswith("model.path")
        and len(found) == 2
    )
    assert own_packages(config) == node_report.CODE
    assert own_packages(cluster_config(tmp_path, f"{loss}=mine.losses:loss")) == (
        *node_report.CODE,
        "mine",
    )


# -- before a connection


@pytest.fixture
def no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "num_cpu=3",
            "ray_kwargs.ray_init.num_cpu=3: is no argument of ray.init; the nearest is num_cpus",
        ),
        ("token=Xq7rStUvW", f"ray_kwargs.ray_init.token={HIDDEN}: is no argument of ray.init"),
        ("_temp_dir=/x", None),
        ("runtime_env.env_vars.A=b", None),
    ],
)
def test_unknown_arguments_of_ray_init_are_a_line_each(tmp_path, no_address, override, line):
    found = start_problems(cluster_config(tmp_path, f"+ray_kwargs.ray_init.{override}"))
    assert [text.startswith(line) for text in found] == [True] * bool(line)


def test_what_ray_init_refuses_is_a_line_without_secrets(tmp_path, no_address, monkeypatch):
    def refuse(**options):
        raise RuntimeError(f"Version mismatch: cluster 2.60, here 2.59\n{options}")

    monkeypatch.setattr(ray, "init", refuse)
    secrets = (
        "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY=Xq7rStUvW",
        "+ray_kwargs.ray_init.num_cpus=3",
    )
    with pytest.raises(
        InputError, match="^ray_kwargs.ray_init=.*Version mismatch: cluster 2.60, here 2.59"
    ) as caught:
        ray_pools.connect(cluster_config(tmp_path, *secrets), SimpleNamespace(type="cuda"))
    (line,) = str(caught.value).splitlines()
    assert "Xq7r" not in line and "'num_cpus': 3" in line


@pytest.mark.processes
@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "http://127.0.0.1:8265", "no-such-host.invalid:6379"]
)
def test_a_wrong_address_is_refused_by_its_name_in_seconds(tmp_path, monkeypatch, address):
    """Ray itself waits for 14 minutes."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    start = time.monotonic()
    (line,) = start_problems(compose("grpo", ["trainer.backend=ray"]))
    assert line.startswith(f"RAY_ADDRESS={address}: no Ray head answers there (")
    assert time.monotonic() - start < ray_nodes.HEALTH_S


# -- deadlines, errors and hangs


def test_a_phase_may_take_ten_times_its_longest_and_ten_minutes_at_least():
    watch = Watch(None)
    assert watch.limit("update_actor") == 3600
    watch.took("update_actor", 1.0)
    assert watch.limit("update_actor") == 600 and watch.limit("update_critic") == 3600
    for seconds in (90.0, 30.0):
        watch.took("update_actor", seconds)
    assert watch.limit("update_actor") == 900
    watch.took("load", 2.0)  # of the engines, and the ranks load after them
    assert watch.limit("load") == 3600
    watch = Watch(7.0)
    watch.took("update_actor", 90.0)
    assert watch.limit("update_actor") == 7


@pytest.fixture
def watch():
    watch = Watch(5.0)
    watch.places["learner rank 3"] = Place("id", "10.0.0.2", 77)
    return watch


def test_an_error_of_a_process_has_its_name_node_and_pid(watch):
    place = "(on learner rank 3 (node 10.0.0.2, pid 77))"
    error = watch.located(InputError(["model.path=/m: no config.json", "second"]), "learner rank 3")
    assert error.problems == [f"model.path=/m: no config.json {place}", f"second {place}"]
    assert isinstance(watch.located(WriteFailed("x"), "learner rank 3"), WriteFailed)
    assert message_of(watch.located(ValueError("shape"), "learner rank 3")) == f"shape {place}"
    assert message_of(watch.located(ValueError("shape"), "engine 0")) == "shape (on engine 0)"


def test_a_hang_names_five_processes_the_one_that_others_wait_for_first(monkeypatch):
    watch = Watch(5.0)
    names = [f"learner rank {rank}" for rank in range(9)]
    for rank, name in enumerate(names):
        watch.places[name] = Place("id", "10.0.0.2", 100 + rank)
    waiting = 'Thread 1 (idle): "MainThread"\n    all_reduce (torch/distributed.py:1)'
    busy = 'Thread 1 (active): "MainThread"\n    tokenize (mine.py:7)'
    monkeypatch.setattr(
        watch, "stacks", lambda asked: {**dict.fromkeys(asked, waiting), names[6]: busy}
    )
    text = str(watch.timeout("update_actor", names))
    assert text.startswith("learner rank 6 (node 10.0.0.2, pid 106), learner rank 0 (")
    assert " and 4 more did not finish phase update_actor" in text.splitlines()[0]
    assert (
        text.count("stack of ") == 5
        and "stack of learner rank 6 (node 10.0.0.2, pid 106):\nThread 1 (active)" in text
    )
    assert innermost(busy) == "tokenize (mine.py:7)"


@pytest.mark.parametrize("count", [1, 5, 6])
def test_a_list_of_names_is_cut_at_five(count):
    assert (
        listed(map(str, range(count)))
        == {1: "0", 5: "0, 1, 2, 3, 4", 6: "0, 1, 2, 3, 4 and 1 more"}[count]
    )


def test_the_stack_of_a_process_is_that_of_its_work():
    """Of py-spy's threads the one in this repository's code, and not the one that only shows that
    the process lives."""
    if not (tool := node_report.py_spy()):
        pytest.skip("py-spy is not installed")
    assert os.path.exists(tool)
    program = "import time, threading\ndef hang():\n    time.sleep(60)\nhang()"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            for _ in range(50):
                time.sleep(0.1)
                if "hang (" in (stack := node_report.stacks([process.pid], 10.0)[process.pid]):
                    break
        finally:
            process.kill()
    assert "hang (<string>:3)" in stack


# -- restarts


def trained(tmp_path, errors):
    """Train with these errors, one an attempt, and return how often it was begun."""
    attempts = []

    class Trainer:
        def __init__(self, config):
            attempts.append(config)
            self.run = SimpleNamespace(
                run_dir=tmp_path,
                stop=SimpleNamespace(requested=False),
                saved_step=2 if len(attempts) == 1 else None,  # no room: no checkpoint is read
                has_own_checkpoint=False,
            )

        def init_workers(self):
            if len(attempts) <= len(errors):
                raise errors[len(attempts) - 1]

        def fit(self):
            pass

    config = compose("grpo", ["trainer.max_restarts=2"])
    try:
        command_line.train(Trainer, config)
        return len(attempts), 0
    except SystemExit as end:
        return len(attempts), end.code


def test_a_restart_that_finds_no_room_counts_and_a_start_that_does_is_refused(tmp_path):
    lost, room = WorkersLost("died"), NoRoom("no room")
    assert trained(tmp_path, [room]) == (1, 2)
    assert trained(tmp_path, [lost, room]) == (3, 0)
    assert trained(tmp_path, [lost, room, room]) == (3, 1)


def test_a_restart_that_found_no_room_names_the_step_of_the_newest_checkpoint(tmp_path, caplog):
    trained(tmp_path, [WorkersLost("died"), NoRoom("no room")])
    assert "restart 2 of 2, after step 2" in caplog.text
