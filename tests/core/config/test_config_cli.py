"""From the command line: dry runs, problems, paths, the script's own arguments."""

from __future__ import annotations

import pytest

from core.command_line import prepare
from core.config import Config, paths

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model.path"
TEMPLATE, CHAT = "actor_rollout_ref.model.custom_chat_template", "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder; no dry run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRY_RUN", raising=False)
    return tmp_path


@pytest.fixture
def data(here):
    """Overrides with which a start finds everything it looks for."""
    for name in ("train.parquet", "test.parquet"):
        (here / name).touch()
    (here / "model").mkdir()
    return ["data.train_files=train.parquet", "data.val_files=test.parquet", f"{MODEL}=./model"]


def ends(code, *args, capsys, **kwargs):
    """What the process printed, having ended with this code."""
    with pytest.raises(SystemExit) as end:
        prepare(*args, **kwargs)
    assert end.value.code == code
    return capsys.readouterr()


def test_a_start_returns_the_configuration_and_says_what_has_no_effect(data, capsys):
    config = prepare(
        "ppo",
        [
            *data,
            "algorithm.kl_ctrl.kl_coef=0.01",
            f"{ACTOR}.use_kl_loss=True",
        ],
    )
    assert isinstance(config, Config)
    assert capsys.readouterr().err == "no effect: algorithm.kl_ctrl.kl_coef=0.01: needs algorithm.use_kl_in_reward\n"


def test_problems_end_with_2_one_line_each_and_no_traceback(here, capsys):
    out = ends(2, "grpo", ["data.nope=1", "data.train_batch_size=3", f"{MODEL}=./no"], capsys=capsys)
    assert out.out == ""
    begins = ("data.nope=1: ", "data.train_batch_size=3: ", "data.train_files=", "data.val_files=", f"{MODEL}=./no: ")
    lines = out.err.splitlines()
    assert len(lines) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_a_dry_run_prints_and_ends_with_0(data, here, capsys, monkeypatch, value):
    monkeypatch.setenv("DRY_RUN", value)
    before = sorted(here.rglob("*"))
    out = ends(0, "grpo", [*data, "trainer.nnodes=1", "trainer.seed=7"], capsys=capsys)
    assert out.err == "" and sorted(here.rglob("*")) == before
    text = out.out
    assert "the configuration of recipe grpo is valid" in text
    differs, rest = text.split("has no effect in this configuration:")
    idle, at_start = rest.split("checked at start:")
    assert "trainer.seed=7 (default 1)" in differs and "rollout.n=5 (default 1)" in differs
    assert "critic." not in differs  # there is none: what it would inherit is of no interest
    assert "trainer.nnodes=1: needs trainer.backend=ray" in idle
    assert "./model" in at_start and "train.parquet" in at_start and "outputs/grpo/model-seed7" in at_start


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_dry_run_can_be_off(data, monkeypatch, value):
    monkeypatch.setenv("DRY_RUN", value)
    assert isinstance(prepare("ppo", data), Config)


def test_a_dry_run_looks_at_typed_paths_only(here, capsys, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")
    ends(0, "ppo", [], capsys=capsys)  # the defaults' paths are checked at start
    ends(0, "ppo", ["data.train_files=no.parquet", f"{MODEL}=./no", "--", "trainer.seed=2"], capsys=capsys)
    out = ends(
        2, "ppo", ["data.train_files=no.parquet", "--", "data.val_files=[no1.parquet,no2.parquet]"], capsys=capsys
    )
    assert [line.split(":")[0] for line in out.err.splitlines()] == [
        "data.val_files=no1.parquet",
        "data.val_files=no2.parquet",
    ]
    out = ends(2, "ppo", ["data.train_files=no.parquet"], capsys=capsys)
    assert "data.train_files=no.parquet: does not exist" in out.err and str(here / "no.parquet") in out.err


def test_typed_arguments_win_over_the_scripts(data):
    assert prepare("ppo", [*data, "trainer.seed=2", "--", "trainer.seed=3"]).trainer.seed == 3
    assert prepare("ppo", [*data, "trainer.seed=2", "--"]).trainer.seed == 2


@pytest.mark.parametrize(
    "key, value",
    [
        (MODEL, "/no/such/model"),
        (MODEL, "~/no-such-model"),
        (TEMPLATE, "/no/such/chat.jinja"),
        (TEMPLATE, "chat.jinja"),
        (TEMPLATE, "~/templates/chat"),
        ("actor_rollout_ref.model.tokenizer_path", "./no"),
        ("critic.model.path", "./no"),
        ("custom_reward_function.path", "no.py"),
        ("custom_reward_function.path", "file://no.py"),
        ("algorithm.adv_estimator", "no.py:estimate"),
        (f"{ACTOR}.policy_loss.loss_mode", "no.py:loss"),
        ("trainer.resume_from_path", "no/global_step_3"),
    ],
)
def test_a_typed_path_has_to_exist(here, capsys, monkeypatch, key, value):
    monkeypatch.setenv("DRY_RUN", "1")
    overrides = [f"{key}={value}", *(["trainer.resume_mode=resume_path"] if "resume" in key else [])]
    (line,) = ends(2, "ppo", overrides, capsys=capsys).err.splitlines()
    assert line.startswith(f"{key}=") and "does not exist" in line


@pytest.mark.parametrize(
    "override", [f"{MODEL}=Qwen/Qwen2.5-0.5B", f"{MODEL}=gpt2", "custom_reward_function.path=pkg.module"]
)
def test_a_hub_id_and_a_module_are_not_paths(here, capsys, monkeypatch, override):
    monkeypatch.setenv("DRY_RUN", "1")
    ends(0, "ppo", [override], capsys=capsys)


def test_paths_that_exist_are_found(data, here):
    (here / "mine.py").touch()
    overrides = ["custom_reward_function.path=file://mine.py", "algorithm.adv_estimator=mine.py:estimate"]
    assert prepare("ppo", [*data, *overrides]).custom_reward_function.path == "file://mine.py"


def test_what_this_version_cannot_start_is_one_line(data, capsys, monkeypatch):
    monkeypatch.setattr("core.command_line.find_spec", lambda name: None)
    cluster = ["trainer.backend=ray", "actor_rollout_ref.rollout.name=vllm"]
    lines = ends(2, "ppo", [*data, *cluster], capsys=capsys).err.splitlines()
    assert lines == [
        "actor_rollout_ref.rollout.name=vllm: vllm is not installed; make setup installs it where it can, or use "
        "actor_rollout_ref.rollout.name=hf",
        "trainer.backend=ray: ray is not installed; pip install 'ray>=2.60,<3', or use local",
    ]
    monkeypatch.setenv("DRY_RUN", "1")
    text = ends(0, "ppo", [*data, *cluster], capsys=capsys).out
    assert "vllm can be imported" in text and "ray can be imported" in text


def test_a_device_that_is_not_here_is_refused(data, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (line,) = ends(2, "ppo", [*data, "trainer.device=cuda", "trainer.backend=local"], capsys=capsys).err.splitlines()
    assert line.startswith("trainer.device=cuda: PyTorch ") and "finds no GPU on this machine; use cpu" in line
    prepare("ppo", [*data, "trainer.device=cuda", "trainer.backend=ray"])  # the cluster's machines may have them


def test_help_lists_every_key(here, capsys):
    text = ends(0, "grpo", ["--help"], capsys=capsys).out
    assert "python -m recipes.grpo.main_grpo" in text and "adv_estimator=grpo" in text


def test_what_is_checked_at_start_names_packages_logins_and_functions(data):
    overrides = ["trainer.logger=[console,wandb,tensorboard]", "custom_reward_function.path=my.rewards"]
    lines = "\n".join(paths.checked_at_start(prepare("ppo", [*data, *overrides])))
    for said in (
        "wandb can be imported",
        "tensorboard can be imported",
        "login: wandb",
        "custom_reward_function.path can be",
    ):
        assert said in lines
    assert "console can be" not in lines


def test_a_file_of_a_chat_template_is_read(data, here, capsys):
    (here / "chat.jinja").write_text(CHAT)
    for value in ("chat.jinja", "./chat.jinja", str(here / "chat.jinja"), f"'{CHAT}'".replace("\n", "\\n")):
        found = prepare("ppo", [*data, f"{TEMPLATE}={value}"]).actor_rollout_ref.model.custom_chat_template
        assert found.replace("\\n", "\n") == CHAT


@pytest.mark.parametrize(
    "text, rule",
    [
        ("Answer the question.", "has no variable: every prompt would be this text"),
        ("", "has no variable"),
        ("{{ bos_token }}Answer:", "does not read messages: every prompt would be the same"),
    ],
)
def test_a_template_that_ignores_the_chat_is_refused(data, here, capsys, text, rule):
    (here / "chat.jinja").write_text(text)
    out = ends(2, "ppo", [*data, f"{TEMPLATE}=chat.jinja"], capsys=capsys)
    assert rule in out.err and out.err.startswith(f"{TEMPLATE}=") and len(out.err.splitlines()) == 1
