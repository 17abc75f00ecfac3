"""Logs of verl and TRL, and CSV files, as runs of a report: names mapped, limits stated, bad files refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import InputError
from results import report
from results.reporting.foreign_logs import _names, read_foreign
from results.reporting.x_axis import positions
from tests.core.synthetic import make_run

CONSOLE = """\
(TaskRunner pid=7) Initial validation
\x1b[36m(TaskRunner pid=7)\x1b[0m step:0 - val-core/openai/gsm8k/acc/mean@1:0.25
\x1b[36m(TaskRunner pid=7)\x1b[0m step:1 - actor/entropy:0.5 - critic/rewards/mean:np.float64(-0.25) - actor/lr:1e-06 \
- perf/total_num_tokens:1000 - timing_s/step:36.0
(WorkerDict pid=9) step: nothing
step:2 - actor/entropy:0.25 - critic/rewards/mean:0.75 - actor/grad_norm:nan - perf/total_num_tokens:3000 \
- timing_s/step:72.0 - val-core/openai/gsm8k/acc/mean@1:0.5
"""
HISTORY = [
    {"step": 10, "epoch": 0.1, "loss": 0.0, "reward": 0.25, "kl": 0.01, "entropy": 0.9, "num_tokens": 5000.0},
    {"step": 20, "reward": 0.5, "kl": 0.02, "entropy": 0.8, "num_tokens": 9000.0, "completions/mean_length": 120.5},
    {"step": 20, "eval_reward": 0.625, "eval_runtime": 3.0},
    {"step": 20, "train_runtime": 99.0, "total_flos": 1.0},
]


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def log(tmp_path: Path, name: str, text: str) -> Path:
    return written(tmp_path / name, text)


# --- what is read ---


def test_verls_console(tmp_path):
    run = read_foreign(log(tmp_path, "train.log", CONSOLE))
    assert run.name == "verl/train" and run.last_step == 2
    assert run.series("actor/entropy") == ([1, 2], [0.5, 0.25])
    assert run.series("critic/rewards/mean")[1] == [-0.25, 0.75] and run.series("actor/lr")[1] == [1e-06]
    assert run.series("actor/grad_norm") == ([], [])  # not a number
    (points,) = run.points().values()
    assert [(point.step, point.estimate.value, point.name) for point in points] == [
        (0, 0.25, "mean@1"),
        (2, 0.5, "mean@1"),
    ]
    assert positions(run, "tokens") == {0: 0, 1: 1000, 2: 4000}
    assert positions(run, "hours")[2] == pytest.approx(0.03)


def test_a_console_line_that_was_cut_is_left_out(tmp_path):
    """0.1 of 0.125 would be a value, and a wrong one."""
    run = read_foreign(log(tmp_path, "train.log", CONSOLE + "step:3 - actor/entropy:0.1"))
    assert run.last_step == 2


def test_a_step_that_was_repeated_after_a_resume_counts_once(tmp_path):
    again = "step:2 - actor/entropy:0.125 - perf/total_num_tokens:2000\n"
    run = read_foreign(log(tmp_path, "train.log", CONSOLE + again))
    assert run.series("actor/entropy") == ([1, 2], [0.5, 0.125]) and positions(run, "tokens")[2] == 3000


def test_verls_file_logger(tmp_path):
    rows = [
        {"step": 1, "data": {"actor/entropy_loss": 0.5}},
        {"step": 2, "data": {"val/test_score/openai/gsm8k": 0.75}},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    run = read_foreign(log(tmp_path, "metrics.jsonl", text + '{"step": 3, "da'))
    assert run.series("actor/entropy") == ([1], [0.5]) and list(run.points()) == ["openai/gsm8k"]
    with pytest.raises(InputError, match=r"bad\.jsonl, line 1: not JSON"):
        read_foreign(log(tmp_path, "bad.jsonl", '{"step": 1, "da\n' + text.splitlines()[0]))
    with pytest.raises(InputError, match="line 2: must be verl's"):
        read_foreign(log(tmp_path, "other.jsonl", text.splitlines()[0] + '\n{"global_step": 2}\n'))


def test_trls_trainer_state(tmp_path):
    path = log(tmp_path, "my-run/checkpoint-20/trainer_state.json", json.dumps({"log_history": HISTORY}))
    run = read_foreign(path, accuracy="eval_reward")
    assert run.name == "trl/my-run"
    assert run.series("critic/rewards/mean") == ([10, 20], [0.25, 0.5])
    assert run.series("actor/kl_loss")[1] == [0.01, 0.02] and run.series("response_length/mean") == ([20], [120.5])
    assert positions(run, "tokens") == {10: 5000, 20: 9000}
    assert [point.estimate.value for point in run.points()["trl"]] == [0.625]


def test_a_line_stands_for_the_steps_since_the_one_before(tmp_path):
    history = [{"step": 10, "reward": 0.5, "step_time": 36.0}, {"step": 20, "reward": 0.5, "step_time": 72.0}]
    path = log(tmp_path, "run/trainer_state.json", json.dumps({"log_history": history}))
    assert positions(read_foreign(path), "hours") == {10: pytest.approx(0.1), 20: pytest.approx(0.3)}


def test_csv(tmp_path):
    run = read_foreign(log(tmp_path, "curve.csv", "step,acc,reward,note\n0,0.1,,start\n5,0.5,0.25,\n10,0.75,0.5,x"))
    assert run.name == "csv/curve" and run.series("critic/rewards/mean") == ([5, 10], [0.25, 0.5])
    assert [point.estimate.value for point in run.points()["csv"]] == [0.1, 0.5, 0.75]
    cut = read_foreign(log(tmp_path, "cut.csv", "step,acc,reward\n0,0.1,0.2\n5,0."))
    assert cut.last_step == 0
    named = read_foreign(log(tmp_path, "own.csv", "Step,EM\n1,0.5\n"), accuracy="EM")
    assert named.points()["csv"][0].estimate.value == 0.5


def test_every_name_is_mapped_to_one_that_is_used_here():
    ours = {name for table in _names().values() for name in table.values()}
    assert ours and all(name.partition("/")[0] in PREFIXES for name in ours)
    for axis in ("tokens", "trajectories", "hours"):
        assert f"total/{axis}" in ours


PREFIXES = {"actor", "critic", "val-core", "response_length", "rollout_corr", "reward", "total", "timing_s"}


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.log", "Epoch 1: loss 0.5\n", "no line is verl's"),
        ("a.log", "", "no line is verl's"),
        ("a.json", "{}", "must be a trainer_state.json"),
        ("a.json", "{", "must be a trainer_state.json"),
        ("a.json", '{"log_history": [{"reward": 1.0}]}', "must be a trainer_state.json"),
        ("a.json", '{"log_history": [{"step": 1, "loss": 0.5}]}', "no metric of it is known, it has loss"),
        ("a.jsonl", '{"step": 1, "data": {}}\n', "no metric of it is known, it has no number at all"),
        ("a.csv", "epoch,acc\n1,0.5\n", "no column is called step"),
        ("a.csv", "", "no column is called step"),
        ("a.csv", "step,acc\nx,0.5\n", "line 2: step is 'x' and must be a number"),
        ("a.csv", "step,acc\n1,56.7\n", "accuracy 56.7 must be a share from 0 to 1"),
        ("a.csv", "step,speed\n1,3\n", "no metric of it is known, it has speed"),
    ],
)
def test_other_forms_are_refused_in_one_line(tmp_path, capsys, name, text, said):
    assert report.main([str(log(tmp_path, name, text)), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error and name in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_is_no_text_and_an_unknown_accuracy_are_refused(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"\xff\xfe\x00step:1 - a:1")
    with pytest.raises(InputError, match="not text"):
        read_foreign(path)
    with pytest.raises(InputError, match="--accuracy EM: .* has no such metric; it has acc"):
        read_foreign(log(tmp_path, "a.csv", "step,acc\n1,0.5\n"), accuracy="EM")


# --- beside a run ---


def test_a_foreign_log_has_curves_and_no_paired_comparison(tmp_path, capsys):
    ours = make_run(tmp_path / "grpo" / "ours", steps=10, questions=50)
    text = CONSOLE.replace("openai/gsm8k", "lab/hops")
    assert report.main([str(ours), str(log(tmp_path, "train.log", text)), "--x", "hours", "--out", str(tmp_path)]) == 0
    assert (
        "verl/train: accuracy on lab/hops 25.0 → 50.0 % (mean@1, uncounted questions, step 2" in capsys.readouterr().out
    )
    md = (tmp_path / "report.md").read_text()
    row = next(line for line in md.splitlines() if line.startswith("| verl/train − grpo/ours | lab/hops |"))
    assert "impossible: a log of another project has no records of questions" in row and "none possible" in row
    assert "| Entropy | verl/train |" in md
    assert "## Configuration" in md and "### Where the runs differ" not in md and "foreign.file" not in md


def test_a_foreign_log_alone_has_a_page(tmp_path):
    path = log(tmp_path, "train.log", CONSOLE)
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert (
        "Commit, configuration, seed and hardware of these runs are not recorded"
        in (tmp_path / "out/report.md").read_text()
    )
