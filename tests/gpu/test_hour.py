"""The GPU hour, rehearsed on the CPU at a tiny size: every step runs, and is repeated only where it is not done."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.gpu import hour
from tests.gpu.hour import ROOT, main

TINY = ("--device", "cpu", "--size", "tiny")


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_rehearsal_writes_a_file_a_step_and_repeats_none(tmp_path, capsys):
    chosen = ("rank", "copies")
    assert main(["a", *chosen, *TINY, "--out", str(tmp_path)]) == 0
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in chosen}
    assert {one["status"] for one in found.values()} == {"measured"}
    assert found["rank"]["measured"]["update, s"] > 0 and found["rank"]["measured"]["optimizer, GiB"] > 0
    assert [row["copy"] for row in found["copies"]["measured"]["rows"]][-1].startswith(
        "as a bucket into another process"
    )
    page = (tmp_path / "README.md").read_text()
    assert (
        "| optimizer read, s |" in page
        and page.count("not run") == len(hour.steps_of("a")) + len(hour.steps_of("b")) - 2
    )
    capsys.readouterr()
    assert main(["a", "rank", *TINY, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "rank: done before\n"


def test_part_a_and_its_page_need_neither_ray_nor_vllm(tmp_path):
    code = (
        "import sys; sys.modules |= {'ray': None, 'vllm': None}\nfrom pathlib import Path\nfrom tests.gpu import hour\n"
    )
    code += f"assert hour.steps_of('a')\nprint(hour.table(Path({str(tmp_path)!r})))"
    page = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert page.returncode == 0 and "## b: killed" in page.stdout, page.stderr[-2000:]


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_layers_of_a_large_model_and_its_head(tmp_path):
    assert main(["a", "layers", "head", *TINY, "--out", str(tmp_path)]) == 0
    measured = json.loads((tmp_path / "layers.json").read_text())["measured"]
    assert 0 < measured["update, share of the measured peak"] < 1.5 and measured["the plan says, GiB"] > 0
    rows = json.loads((tmp_path / "head.json").read_text())["measured"]["rows"]
    assert len(rows) == 3 and all(row["difference"] < 1e-4 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_second_part(tmp_path):
    pytest.importorskip("vllm")
    pytest.importorskip("ray")
    assert main(["b", *TINY, "--out", str(tmp_path)]) == 0
    found = {name: json.loads((tmp_path / f"{name}.json").read_text())["measured"] for name in hour.steps_of("b")}
    assert all(row["probe"] < 1e-5 for row in found["sync"]["rows"])
    assert found["mismatch"]["beyond the probe's bound for bf16"] == 0.0
    assert found["decode"]["ours / alone"] > 0  # a number to read, not to pass: it depends on the machine and its load
    assert found["killed"]["losses equal to the bit"] == "5 of 5"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_and_the_run(tmp_path):
    assert main(["a", "kernels", "grpo", *TINY, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "kernels.json").read_text())["measured"]["tests"] > 5


def test_a_step_that_fails_or_is_late_is_recorded_with_its_output_and_run_again(tmp_path, capsys):
    assert main(["a", "copies", *TINY, "--out", str(tmp_path), "--limit", "0.01"]) == 1
    found = json.loads((tmp_path / "copies.json").read_text())
    assert found["status"] == "failed" and "ended after 0.01 s" in found["error"]
    assert "failed: ended after 0.01 s" in (tmp_path / "README.md").read_text()
    assert not hour.is_done(tmp_path / "copies.json", found["commit"])


def test_another_commit_is_not_done(tmp_path):
    path = tmp_path / "rank.json"
    path.write_text(json.dumps({"status": "measured", "commit": "a"}))
    assert hour.is_done(path, "a") and not hour.is_done(path, "b") and not hour.is_done(tmp_path / "no.json", "a")


def test_a_step_that_is_not_known_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["a", "ranc", *TINY, "--out", str(tmp_path)])
    assert "ranc: no step of part a; choose from kernels, head" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written():
    before = sorted((ROOT / "results").glob("gpu/*"))
    done = subprocess.run(["bash", "tests/gpu/hour_a.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("not run: no CUDA device")
    assert sorted((ROOT / "results").glob("gpu/*")) == before
