"""From the command line to a start or a dry run: paths, packages and clusters that a configuration
names."""

from __future__ import annotations

import pytest
import torch

from core import command_line
from core.cluster import ray_pools
from core.command_line import prepare
from core.config import paths
from core.config.composition import compose
from core.config.paths import address_problem, cluster_address
from core.config.schema import Config
from core.errors import InputError
from tests.core import scripted_run

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model.path"
RAY, ADDRESS = "trainer.backend=ray", "+ray_kwargs.ray_init.address"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder; no dry run, and no cluster."""
    monkeypatch.chdir(tmp_path)
    for name in ("DRY_RUN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def data(here):
    """Overrides with which a start finds everything it looks for."""
    scripted_run.prepare(here)
    files = [
        "data.train_files=train.parquet",
        "data.val_files=train.parquet",
        "data.max_prompt_length=64",
    ]
    files += ["data.max_response_length=64", "trainer.total_training_steps=1"]
    return [*files, f"{MODEL}=./model", "custom_reward_function.path=reward.py"]


def ends(code, *args, capsys):
    """What the process printed, having ended with this code."""
    with pytest.raises(SystemExit) as end:
        prepare(*args)
    assert end.value.code == code
    return capsys.readouterr()


def test_a_start_returns_the_configuration_and_says_what_has_no_effect(data, capsys):
    config = prepare("ppo", [*data, "algorithm.kl_ctrl.kl_coef=0.01", f"{ACTOR}.use_kl_loss=True"])
    assert isinstance(config, Config)
    told = "no effect: algorithm.kl_ctrl.kl_coef=0.01: needs algorithm.use_kl_in_reward\n"
    assert capsys.readouterr().err == told


def test_problems_end_with_2_one_line_each_and_no_traceback(here, capsys):
    out = ends(
        2, "grpo", ["data.nope=1", "data.train_batch_size=0", f"{MODEL}=./no"], capsys=capsys
    )
    begins = (
        "data.nope=1: ",
        "data.train_batch_size=0: ",
        "data.train_files=",
        "data.val_files=",
        f"{MODEL}=./no: ",
    )
    lines = out.err.splitlines()
    assert out.out == "" and len(lines) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))


def test_a_dry_run_prints_and_ends_with_0(data, here, capsys, monkeypatch):
    before = sorted(here.rglob("*"))
    for value in ("1", "true", "yes"):
        monkeypatch.setenv("DRY_RUN", value)
        out = ends(0, "grpo", [*data, "trainer.nnodes=1", "trainer.seed=7"], capsys=capsys)
    assert (
        out.err == ""
        and [path for path in sorted(here.rglob("*")) if "__pycache__" not in str(path)] == before
    )
    differs, rest = out.out.split("no effect:")
    idle, at_start = rest.split("not checked here:")
    assert "the configuration of recipe grpo is valid" in differs
    assert "trainer.seed=7 (default 1)" in differs and "rollout.n=5 (default 1)" in differs
    assert "critic." not in differs  # there is none: what it would inherit is of no interest
    assert "trainer.nnodes=1: needs trainer.backend=ray" in idle
    assert "not on this machine" not in at_start and "outputs/grpo/model-seed7" in at_start
    for value in ("", "0", "false"):
        monkeypatch.setenv("DRY_RUN", value)
        assert isinstance(prepare("ppo", data), Config)


def test_a_dry_run_looks_at_typed_paths_only(here, capsys, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")
    script = ["data.train_files=no.parquet", "--"]
    # The others are checked at start
    ends(0, "ppo", [f"{MODEL}=./no", *script, "trainer.seed=2"], capsys=capsys)
    out = ends(2, "ppo", [*script, "data.val_files=[no1.parquet,no2.parquet]"], capsys=capsys)
    found = [line.split(":")[0] for line in out.err.splitlines()]
    assert (
        found == ["data.val_files=no1.parquet", "data.val_files=no2.parquet"]
        and str(here / "no1") in out.err
    )


@pytest.mark.parametrize(
    ("path", "script"),
    [
        ("./outputs/real/instructions/train.parquet", "recipes/real/start.sh"),
        ("/data/anywhere/dapo_math/train.parquet", "recipes/dapo/prepare_dapo_data.sh"),
        ("~/x/aime2024/test.parquet", "recipes/dapo/prepare_dapo_data.sh"),
        ("./my/outputs/really/train.parquet", "data_preprocess/"),
    ],
)
def test_a_missing_file_names_the_script_that_makes_it(here, path, script):
    (problem,) = paths.missing(
        compose("grpo", [f"data.train_files={path}", "data.val_files=[]"]), {"data.train_files"}
    )
    assert script in problem.fix
    folder = script.endswith("/")
    assert folder or (command_line.recipes.RECIPES.parent / script).is_file()


def test_a_typed_path_has_to_exist(here, capsys, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")
    for key, value in (
        *(
            (MODEL, "~/no-such-model"),
            ("critic.model.path", "./no"),
            ("custom_reward_function.path", "file://no.py"),
        ),
        *(
            ("algorithm.adv_estimator", "no.py:estimate"),
            ("trainer.resume_from_path", "no/global_step_3"),
        ),
    ):
        overrides = [
            f"{key}={value}",
            *(["trainer.resume_mode=resume_path"] if "resume" in key else []),
        ]
        (line,) = ends(2, "ppo", overrides, capsys=capsys).err.splitlines()
        assert line.startswith(f"{key}=") and "does not exist" in line
    for other in (
        f"{MODEL}=Qwen/Qwen2.5-0.5B",
        f"{MODEL}=gpt2",
        "custom_reward_function.path=pkg.module",
    ):
        ends(0, "ppo", [other], capsys=capsys)  # no paths
    (here / "org" / "name").mkdir(parents=True)
    assert paths.is_local("org/name") and not paths.is_local("org/other")  # with or without ./
    assert paths.is_local("outputs/mine/base") and not paths.is_local("s3://bucket/mine/base")
    (here / "mine.py").write_text("def compute_score(solution_str):\n    return 0\n")
    ends(0, "ppo", ["custom_reward_function.path=file://mine.py"], capsys=capsys)


def test_what_this_machine_cannot_start_is_one_line(data, capsys, monkeypatch):
    monkeypatch.setattr("core.command_line.find_spec", lambda name: None)
    cluster = [RAY, "actor_rollout_ref.rollout.name=vllm"]
    lines = ends(2, "ppo", [*data, *cluster], capsys=capsys).err.splitlines()
    assert [line.split(":")[0] for line in lines] == [RAY, "actor_rollout_ref.rollout.name=vllm"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (line,) = ends(
        2, "ppo", [*data, "trainer.device=cuda", "trainer.backend=local"], capsys=capsys
    ).err.splitlines()
    assert line.startswith("trainer.device=cuda: PyTorch ") and "finds no GPU here; use cpu" in line
    monkeypatch.setenv("DRY_RUN", "1")
    text = ends(0, "ppo", [*data, *cluster], capsys=capsys).out
    assert "vllm can be imported" in text and "ray can be imported" in text


def test_a_run_takes_no_folder_that_no_run_wrote(data, here, capsys, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")
    key = "trainer.default_local_dir"
    for text in ("", "' '"):
        (line,) = ends(2, "ppo", [*data, f"{key}={text}"], capsys=capsys).err.splitlines()
        assert line.startswith(f"{key}=") and "names no folder" in line
    (here / "mine" / "validation").mkdir(parents=True)
    for text in ("mine", f"{here}/mine"):
        (line,) = ends(2, "ppo", [*data, f"{key}={text}"], capsys=capsys).err.splitlines()
        assert line.startswith(f"{key}={text}: ") and "validation" in line
    (here / "mine" / "manifest.json").write_text("{}")
    for fine in ("mine", ".", "new/run"):
        ends(0, "ppo", [*data, f"{key}={fine}"], capsys=capsys)


def test_gpus_that_are_not_there_are_told_once_and_refused_under_a_run_script(
    data, capsys, monkeypatch
):
    key = "trainer.n_gpus_per_node"
    lines = {"typed": [*data, RAY, f"{key}=2"], "scripted": [RAY, f"{key}=8", "--", *data]}
    lines["both"] = [*lines["scripted"], f"{key}=2"]

    def told(line, code=None):
        if code is None:
            prepare("ppo", line)
            text = capsys.readouterr().err
        else:
            out = ends(code, "ppo", line, capsys=capsys)
            text = out.out + out.err
        return [one for one in text.splitlines() if f"{key}=" in one and "no GPU" in one]

    monkeypatch.setattr("core.command_line.has_accelerator", lambda: False)
    assert len(told(lines["typed"])) == 1
    assert len(told(lines["scripted"], 2)) == len(told(lines["both"], 2)) == 1
    for line in lines.values():
        assert told([*line, "trainer.device=cpu"]) == []
    monkeypatch.setenv("DRY_RUN", "1")
    assert [len(told(line, 0)) for line in lines.values()] == [1, 1, 1]
    monkeypatch.delenv("DRY_RUN")
    monkeypatch.setattr("core.command_line.has_accelerator", lambda: True)
    assert [told(line) for line in lines.values()] == [[], [], []]


# --- clusters ---


def problem(*overrides: str) -> str:
    return str(address_problem(compose("grpo", [RAY, *overrides])) or "")


def test_several_nodes_need_an_address(here, monkeypatch):
    apart = ["actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.nnodes=3"]
    apart.append("actor_rollout_ref.rollout.n_gpus_per_node=1")
    text = problem("trainer.nnodes=2")
    assert (
        text.startswith("trainer.nnodes=2: needs a Ray cluster")
        and "`ray start --head" in text
        and "\n" not in text
    )
    assert problem("trainer.nnodes=2", f"{ADDRESS}=local") == text
    assert problem(*apart).startswith("actor_rollout_ref.rollout.nnodes=3: needs a Ray cluster")
    for fine in ([], ["trainer.device=cpu"], [f"{ADDRESS}=auto"]):
        assert not problem(*(["trainer.nnodes=2"] * bool(fine)), *fine)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not problem("trainer.nnodes=2") and not problem(*apart)
    assert problem("trainer.nnodes=2", f"{ADDRESS}=local") == text  # the key wins over the variable
    assert cluster_address(compose("grpo", [RAY, f"{ADDRESS}=10.0.0.2:1"])) == "10.0.0.2:1"


def test_nothing_starts_without_a_cluster_and_a_dry_run_mentions_it(here, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["main_grpo", RAY, "trainer.nnodes=2", f"trainer.default_local_dir={here}"]
    )
    with pytest.raises(SystemExit) as ended:
        command_line.main("grpo", trainer="never.imported:Trainer")
    told = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and any(
        line.startswith("trainer.nnodes=2: needs a Ray cluster") for line in told
    )
    monkeypatch.setattr(ray_pools.ray, "init", lambda **_: pytest.fail("it connects"))
    with pytest.raises(InputError, match="RAY_ADDRESS"):
        ray_pools.connect(compose("grpo", [RAY, "trainer.nnodes=2"]), torch.device("cuda"))
    monkeypatch.setenv("DRY_RUN", "1")
    with pytest.raises(SystemExit) as ended:
        command_line.main("grpo", trainer="never.imported:Trainer")
    assert (
        ended.value.code == 0 and "trainer.nnodes=2: needs a Ray cluster" in capsys.readouterr().out
    )
