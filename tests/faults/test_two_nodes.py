"""Runs on two nodes: one that has other code, or no model, is refused with its name; a lost one is
waited for."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.core.two_nodes import TwoNodes, namespaces, two_nodes
from tests.faults.kill_and_resume import ROOT
from tests.faults.ray_runs import Run, Watched, disturbed
from tests.faults.tiny_run import command

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.xdist_group("two_nodes")]
LOSSES = Path("core/algorithm/losses.py")
SCRIPT = "ppo/run_deepseek7b_gsm8k.sh"
NODES = ("trainer.backend=ray", "trainer.nnodes=2", "trainer.n_gpus_per_node=1")


@pytest.fixture(scope="module")
def other_files(tmp_path_factory, files) -> Path:
    """What the second node sees in place of the driver's: copies at first."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copy(ROOT / LOSSES, folder)
    shutil.copytree(files / "model", folder / "model")
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, files, other_files):
    if not namespaces():
        pytest.skip("this user may not have mounts of its own")
    mounts = [(other_files / LOSSES.name, ROOT / LOSSES), (other_files / "model", files / "model")]
    with two_nodes(tmp_path_factory.mktemp("cluster"), mounts) as nodes:
        yield nodes


def started(
    cluster: TwoNodes, files: Path, folder: Path, *overrides: str, steps: int = 1, **options
) -> Run:
    factory = command(files, "ppo", steps, *NODES, *overrides)
    env = {name: value for name, value in cluster.env.items() if name.startswith("RAY_")}
    return disturbed(factory, folder, env={**env, "RAY_ADDRESS": cluster.address}, **options)


def rehearsal(cluster: TwoNodes, files: Path) -> str:
    """Return the page of a rehearsal over the nodes of a cluster."""
    script = ["bash", str(ROOT / "recipes/launch/rehearse.sh"), str(ROOT / "recipes" / SCRIPT)]
    data = [f"data.{name}_files={files / 'train.parquet'}" for name in ("train", "val")]
    env = {**cluster.env, "RAY_ADDRESS": cluster.address}
    done = subprocess.run([*script, *data], cwd=files, env=env, capture_output=True, text=True)
    pages = sorted((files / "outputs/rehearsal").glob("*/page.md"))
    assert pages, done.stderr
    return pages[-1].read_text()


def test_other_code_or_another_model_on_a_node_is_refused_and_equal_ones_are_recorded(
    cluster, files, other_files
):
    """A clone with the gradient's sign turned trained to the end, without a word."""
    losses = other_files / LOSSES.name
    whole = losses.read_text()
    losses.write_text(f"{whole}\n# another version\n")
    run = started(cluster, files, files / "code")
    assert run.status == 2 and f"{LOSSES}: differs from the driver's on node 127.0.0.2" in run.log
    assert "Traceback" not in run.log and run.log.count(" on node ") == 1
    differs = f"| **no** | {LOSSES}: differs from the driver's on node 127.0.0.2"
    assert differs in rehearsal(cluster, files)

    losses.write_text(whole)
    settings = other_files / "model/config.json"
    kept = settings.read_text()
    settings.unlink()
    run = started(cluster, files, files / "model-file")
    assert (
        run.status == 2
        and "model.path=" in run.log
        and ("config.json differs on node 127.0.0.2") in run.log
    )

    settings.write_text(kept)
    run = started(cluster, files, files / "equal")
    assert run.status == 0, run.log
    nodes = json.loads((run.folder / "manifest.json").read_text())["sessions"][-1]["nodes"]
    assert "127.0.0.2" in [node["address"] for node in nodes] and len(nodes) == 2
    assert [sum("learner" in name for name in node["processes"]) for node in nodes] == [1, 1]
    assert len({node["code_sha256"] for node in nodes}) == 1
    assert all({"python", "ray", "torch", "transformers"} <= {*node["packages"]} for node in nodes)


def test_a_lost_node_is_named_and_waited_for_and_its_successor_goes_on(cluster, files):
    """A second run on the full cluster says what it waits for."""
    second: list[subprocess.CompletedProcess] = []

    def lose(run: Watched) -> None:
        more = command(files, "ppo", 1, *NODES, "trainer.wait_for_nodes_s=10")(files / "second")
        env = {**cluster.env, "RAY_ADDRESS": cluster.address}
        second.append(subprocess.run(more, cwd=ROOT, env=env, capture_output=True, text=True))
        cluster.kill("127.0.0.2")
        run.until(lambda: "nodes that have gone: 127.0.0.2" in run.log())
        steps = run.steps()
        cluster.start("127.0.0.2")
        cluster.until_started("127.0.0.2")
        run.until(lambda: run.steps() > steps)
        run.process.terminate()

    wait = "trainer.max_restarts=100", "trainer.wait_for_nodes_s=30", "trainer.save_freq=1"
    endless = {"steps": 100_000, "act": lose, "after": 1}
    run = started(cluster, files, files / "lost", *wait, "trainer.test_freq=-1", **endless)
    assert run.status == 0, run.log
    assert "1 of 2 nodes have room; nodes that have gone: 127.0.0.2; free CPUs by node: " in run.log
    assert "restart 1 of 100, after step" in run.log
    assert second[0].returncode == 2 and "free CPUs by node: " in second[0].stderr
    # While it waited, and at its end
    assert second[0].stderr.count("0 of 2 nodes have room") == 2, second[0].stderr
