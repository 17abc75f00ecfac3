"""A published model: its card has the run's own numbers and nothing of this machine; the hub gets every byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from results.model_card import main, write_model
from results.reporting.run_reader import load_run
from tests.core.learner.test_saving import save
from tests.core.synthetic import configured, make_run
from tests.hub_server import TOKEN, hub
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path) -> Path:
    """A recorded run of 20 steps with a checkpoint of its last one."""
    folder = make_run(
        tmp_path / "outputs/grpo/run", configured({"actor_rollout_ref.model.path": "org/Base-7B"}), questions=50
    )
    save(folder, tiny_model("llama"), step=20)
    return folder


def test_a_card_has_the_numbers_of_the_exported_step_with_their_intervals(run, tmp_path):
    text = write_model(str(run), tmp_path / "model", "apache-2.0").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert (head["base_model"], head["license"], head["library_name"]) == ("org/Base-7B", "apache-2.0", "transformers")
    (source, points), *_ = load_run(run).points().items()
    last, first = points[-1], points[0]
    assert last.step == 20 and first.step == 0

    def shown(point):
        return f"{100 * point.estimate.value:.1f} [{100 * point.estimate.low:.1f}, {100 * point.estimate.high:.1f}]"

    assert f"| {source} | {last.name} | 50 | {shown(first)} | {shown(last)} |" in text
    (result,) = [one for one in head["model-index"][0]["results"] if one["metrics"][0]["type"] == last.name]
    assert result["metrics"][0]["value"] == round(100 * last.estimate.value, 1)
    assert "after step 20" in text and "| commit | " in text and "algorithm.adv_estimator" in text
    assert str(tmp_path) not in text and str(Path.home()) not in text


def test_weights_are_safetensors_and_load(run, tmp_path):
    write_model(str(run), tmp_path / "model", "apache-2.0")
    assert (tmp_path / "model/model.safetensors").exists() and not list((tmp_path / "model").glob("*.bin"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.state_dict()["lm_head.weight"], tiny_model("llama").state_dict()["lm_head.weight"])


def test_a_checkpoint_without_a_validation_has_no_number(run, tmp_path):
    save(run, tiny_model("llama"), step=13)
    text = write_model(str(run / "global_step_13"), tmp_path / "model", "mit").read_text()
    assert "no validation at step 13" in text and "model-index" not in text and "| step 20 |" not in text


def command(*arguments: str, endpoint: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": token, "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    line = [sys.executable, "-m", "results.model_card", *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)


def test_a_push_brings_every_file_to_the_hub(run, tmp_path):
    out = tmp_path / "model"
    with hub() as server:
        line = [str(run), str(out), "--licence", "apache-2.0", "--push", "org/tiny"]
        done = command(*line, endpoint=server.url)
        assert done.returncode == 0, done.stderr
        assert server.repositories == {"org/tiny": True} and f"{server.url}/org/tiny" in done.stdout
        assert server.files == {path.name: path.read_bytes() for path in out.iterdir()}
        assert "PUT blob" in server.calls and b"# org/tiny" in server.files["README.md"]


def test_a_hub_that_refuses_or_is_not_there_is_one_line_and_the_folder_stays(run, tmp_path):
    line = ["--licence", "apache-2.0", "--push", "org/tiny"]
    with hub() as server:
        refused = command(str(run), str(tmp_path / "a"), *line, endpoint=server.url, token="hf_other")
    absent = command(str(run), str(tmp_path / "b"), *line, endpoint="http://127.0.0.1:9")
    for done, folder in ((refused, "a"), (absent, "b")):
        assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("results.model_card: --push=org/tiny: ")
        assert "Traceback" not in done.stderr and (tmp_path / folder / "README.md").exists()


def test_a_folder_that_is_no_run_and_a_licence_that_is_absent_are_refused(run, tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "out"), "--licence", "mit"]) == 2
    assert "is not a run folder" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main([str(run), str(tmp_path / "out")])
    assert main([str(run), str(tmp_path / "out"), "--licence", "mit", "--public"]) == 2
    assert "--public: concerns --push" in capsys.readouterr().err and not (tmp_path / "out").exists()
