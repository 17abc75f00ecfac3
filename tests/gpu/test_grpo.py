"""The GPU's GRPO script, at a tiny size on the CPU; without CUDA it says that it was not run."""

import json

import pytest
import torch

from tests.gpu.grpo import main

TINY = ("--device", "cpu", "--size", "tiny", "--dtype", "fp32")


def test_it_runs_and_writes_what_it_measured(tmp_path):
    shape = ("--steps", "3", "--prompts", "2", "--answers", "2", "--new-tokens", "8", "--cache-gib", "1")
    assert main([*TINY, *shape, "--out", str(tmp_path)]) == 0
    run = json.loads((tmp_path / "gpu_grpo.json").read_text())["run"]
    assert run["new_tokens_per_second"] > 0 and set(run["mfu"]) == {"gen", "update_actor"}
    assert 0 < run["mfu"]["update_actor"] < 1 and run["logp_diff_mean"] < 1e-4
    text = (tmp_path / "gpu_grpo.md").read_text()
    assert "2 prompts x 2 answers of 8 tokens" in text and "| update_actor |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_not_run_and_keeps_an_older_result(tmp_path):
    assert main(["--out", str(tmp_path)]) == 2
    assert "not run: `python -m tests.gpu.grpo`" in (tmp_path / "gpu_grpo.md").read_text()
    (tmp_path / "gpu_grpo.json").write_text("{}")
    (tmp_path / "gpu_grpo.md").write_text("measured")
    assert main(["--out", str(tmp_path)]) == 2
    assert (tmp_path / "gpu_grpo.md").read_text() == "measured"
