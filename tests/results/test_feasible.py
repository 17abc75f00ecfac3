"""Which scripts run on what: their settings without starting them, what would do instead, and what has run here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from core.errors import InputError
from results import feasible
from results.reporting import feasibility
from results.reporting.feasibility import nodes_of, verdict
from results.reporting.numbers import duration
from results.reporting.run_scripts import Script, read_script, repeats, scripts, status

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


def script(name: str) -> Script:
    return read_script(ROOT / "recipes" / name)


def rows_of(text: str) -> dict[str, str]:
    """The lines of the command's table by script, each with the note below it."""
    found, name = {}, ""
    for line in text.splitlines():
        name = name if line.startswith("    ") else line.split()[0]
        found[name] = f"{found.get(name, '')}{line}\n"
    return found


def test_every_script_that_trains_is_read_and_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {one.name: one for one in scripts()}
    files = {f"{path.parent.name}/{path.name}" for path in (ROOT / "recipes").glob("*/run_*.sh")}
    assert set(found) == files - {"search_r1/run_retriever.sh"} and not any(tmp_path.iterdir())
    large = found["dapo/run_qwen2.5_32b.sh"]
    assert (large.recipe, large.gpus, large.least, large.model, large.lab) == ("dapo", 128, 8, "Qwen2.5-32B", False)
    nested = found["search_r1/run_qwen2.5_3b_base_ppo.sh"]  # it execs train.sh, which execs Python
    assert nested.method == "search_r1 (PPO)" and "preset=script" in nested.arguments
    on_a_cpu = {name for name in files if name.endswith(("/run_lab.sh", "/run_smollm2_135m.sh"))}
    assert {one.name for one in found.values() if one.lab} == on_a_cpu
    assert found["grpo/run_qwen2.5_0.5b_gsm8k_lora.sh"].method == "GRPO, LoRA"


def test_the_words_are_those_that_the_script_would_start(tmp_path):
    path = tmp_path / "run_own.sh"
    head = "#!/usr/bin/env bash\nset -euo pipefail\nexec python3 -m recipes.grpo.main_grpo preset=lab \\\n"
    path.write_text(head + '    trainer.experiment_name="a b" -- "$@"\n')
    assert read_script(path).arguments == ("preset=lab", "trainer.experiment_name=a b")
    path.write_text("echo hello\n")
    with pytest.raises(InputError, match=r"run_own.sh: its dry run does not end in exec python -m"):
        read_script(path)
    path.write_text("echo no >&2\nexit 3\n")
    with pytest.raises(InputError, match="no"):
        read_script(path)


def test_settings_that_split_over_more_gpus_than_there_are_name_the_number():
    found = verdict(script("dapo/run_qwen2.5_32b.sh"), "H100", 4)
    assert not found.fits and found.note == "its settings need at least 8 GPUs; 16 x H100 would do"
    assert "needs at least" not in verdict(script("dapo/run_qwen2.5_32b.sh"), "H100", 128).note
    uneven = verdict(script("grpo/run_qwen2.5_0.5b_gsm8k_lora.sh"), "H100", 8)
    assert "data.train_batch_size=116" in uneven.note and uneven.note.endswith("; 4 x H100 would do")


def test_what_does_not_fit_names_one_knob_that_would_make_it_fit():
    tight = script("grpo/run_qwen2.5_0.5b_gsm8k.sh")
    assert verdict(tight, "H100", 1).fits
    small = script("dapo/run_qwen2.5_1.5b_1gpu.sh")
    found = verdict(small, "RTX4090", 1)
    assert not found.fits and found.note
    if found.note.startswith("with "):
        knobs = found.note.removeprefix("with ").removesuffix(" it would fit").split()
        assert feasibility._planned(small, "RTX4090", 1, *knobs).fits
    critic = verdict(script("ppo/run_deepseek7b_gsm8k.sh"), "A100-40", 4)
    knobs = critic.note.removeprefix("with ").removesuffix(" it would fit").split()
    assert not critic.fits and feasibility._planned(script("ppo/run_deepseek7b_gsm8k.sh"), "A100-40", 4, *knobs).fits


def test_a_number_is_positive_and_makes_whole_nodes(capsys):
    assert [nodes_of(one) for one in (1, 3, 8, 128)] == [(1, 1), (1, 3), (1, 8), (16, 8)]
    for number in ("0", "-4", "x", "2.5", ""):
        assert feasible.main([f"--number={number}"]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and f"N={number}: must be a whole number of GPUs, at least 1" in err
    assert feasible.main(["-n", "12"]) == 2
    assert "N=12: more than 8 GPUs are nodes of 8" in capsys.readouterr().err
    assert feasible.main(["--gpu", "H999"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "H100, H800, H20, A100" in err


def summary(command: str, **fields) -> dict:
    return {"command": f"python -m recipes.grpo.main_grpo {command}", "seconds": 120.0, **fields}


def test_a_published_run_repeats_a_script_where_only_seed_and_threads_differ():
    lab = script("grpo/run_lab.sh")
    same = [summary("preset=lab trainer.backend=ray -- trainer.seed=2"), summary("preset=lab -- trainer.cpu_threads=1")]
    others = [
        summary("preset=lab -- trainer.seed=1 algorithm.adv_estimator=rloo"),
        summary("preset=lab_tools -- trainer.seed=1"),
        summary("data.seed=1 -- preset=lab"),
        {"command": "python -m recipes.dapo.main_dapo preset=lab -- trainer.seed=1", "seconds": 1.0},
    ]
    assert repeats(lab, [*same, *others]) == same
    assert status(same) == "ran here (2 seeds)" and status([]) == "never run"
    assert feasibility.lab_time(same) == "about 2.0 min" and feasibility.lab_time([]) == "not recorded"
    large = script("grpo/run_qwen2.5_7b_gsm8k.sh")
    words = " ".join(word if "/" not in word else f"{word.partition('=')[0]}=<path>" for word in large.arguments)
    assert len(repeats(large, [summary(f"{words} -- trainer.seed=3")])) == 1
    assert not repeats(script("grpo/run_qwen2.5_0.5b_gsm8k.sh"), [summary(f"{words} -- trainer.seed=3")])


def test_the_command_has_a_line_a_script(capsys):
    assert feasible.main(["--gpu", "H100", "--number", "8"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == len(scripts()) + 2  # header and last line
    assert "ran here (3 seeds)" in rows["grpo/run_lab.sh"] and "a CPU does" in rows["grpo/run_lab.sh"]
    large = rows["dapo/run_qwen2.5_32b.sh"]
    assert "128 GPUs" in large and "NO" in large and "offload_policy=True it would fit" in large
    large = rows["dapo/run_qwen2.5_7b_math.sh"]
    assert "64 GPUs" in large and "fits" in large and " h " in large and "never run" in large
    assert "  NO  " in rows["grpo/run_qwen2.5_0.5b_gsm8k_lora.sh"]
    assert "problem" not in "".join(rows.values()) and "Traceback" not in "".join(rows.values())


def test_make_knows_the_target():
    asked = ["make", "--dry-run", "feasible", "GPU=A100", "N=16"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert '-m results.feasible --gpu "A100" --number "16"' in done.stdout


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (90, "90 s"), (840, "14 min"), (3.5 * 3600, "3.5 h"), (9.5 * 86400, "9.5 days")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
