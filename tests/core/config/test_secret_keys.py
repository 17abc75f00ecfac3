"""Secrets: whatever form they are typed in, nothing that a run writes or prints holds them, and the
run itself does."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest

from core.checkpoint.provenance import Provenance, check_resume
from core.config import convert, recipes
from core.config.composition import examine
from core.config.convert import to_yaml
from core.config.section import show
from core.errors import InputError, OutOfMemory, WorkersLost
from core.secret_keys import (
    HIDDEN,
    command_line,
    hidden,
    is_secret,
    without_hidden,
    without_secrets,
)
from core.tracking.tracker import Tracker
from tests.core.synthetic import configured

SECRET = "Xq7rStUvW"
TYPED = (
    f"reward_model.reward_kwargs={{mine:{{token:{SECRET}1,method:flexible}}}}",
    f"+custom_reward_function.reward_kwargs.headers={{Authorization:'Bearer {SECRET}2'}}",
    f"+custom_reward_function.reward_kwargs.api_key={SECRET}3",
    f"+ray_kwargs.ray_init.runtime_env.env_vars.ANY_NAME={SECRET}4",
    f"+custom_reward_function.reward_kwargs.user={{password:{SECRET}5}}",
    f"+custom_reward_function.reward_kwargs.base='http://jane:{SECRET}6@host/x'",
)


SECRETS = """
token hf_token reward_kwargs.token X-Api-Key Authorization openaiApiKey OPENAI_API_KEY db_password user_pwd secret auth
aws_secret_access_key AWSAccessKeyId X-Amz-Signature X-Amz-Security-Token client_secret clientSecret passwd
a.env_vars.ANY runtime_env.env_vars.HF_HOME ssh_private_key credentials cookie account_key
"""
OTHERS = """
eos_token pad_token max_tokens max_token_len token_level tokenizer_path api_key_env prompt_key password_file metric
reward_fn_key author method rollout_token_veto_threshold token_count stop_token
"""


def test_names_of_secrets_and_of_other_things():
    assert [key for key in SECRETS.split() if not is_secret(key)] == []
    assert [key for key in OTHERS.split() if is_secret(key)] == []
    for schema in map(recipes.schema_of, recipes.names()):
        assert [key for key in convert.all_keys(schema) if is_secret(key)] == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://jane:pw@host:80/run_code", "http://***@host:80/run_code"),
        ("https://sometoken@host/x", "https://***@host/x"),
        ("s3://KEY:SECRET@bucket/x.parquet", "s3://***@bucket/x.parquet"),
        ("https://h/x?n=1&X-Amz-Signature=ab", "https://h/x?***"),
        ("https://h/x?n=1&sig=ab", "https://h/x?***"),
        ("http://h/x?n=1", "http://h/x?n=1"),
        ("http://h:80/a@b", "http://h:80/a@b"),
        ("http://[h", "http://[h"),
        ("sftp://jane@host/x", "sftp://jane@host/x"),
        (
            "abfs://container@account.dfs.core.windows.net/x",
            "abfs://container@account.dfs.core.windows.net/x",
        ),
        ("hf://datasets/org/name@main/x", "hf://datasets/org/name@main/x"),
        ("org/name", "org/name"),
    ],
)
def test_logins_in_urls(url, shown):
    assert hidden(url) == hidden(hidden(url)) == shown


def test_commands():
    for words, shown in (
        (["a={m:{token:abc def,n:1}}"], "'a=***'"),
        (["--token=abc", "trainer.seed=1"], "'--token=***' trainer.seed=1"),
        (["r={env_vars:{A:b,C:d},n:1}"], "'r=***'"),
        (
            ["data.train_files=[s3://a:b@c/d]", "trainer.seed=1"],
            "'data.train_files=[s3://***@c/d]' trainer.seed=1",
        ),
        (["a.max_tokens=5", "b=[1,2]"], "a.max_tokens=5 'b=[1,2]'"),
    ):
        assert command_line(words) == shown


def shown(config):
    return "".join(show(value, key) for key, value in convert.flat(config).items())


def test_nothing_that_is_recorded_holds_a_secret_and_the_configuration_does(tmp_path, monkeypatch):
    import wandb

    sent = {}
    run = SimpleNamespace(log=lambda *a, **k: None, finish=lambda exit_code: None)
    monkeypatch.setattr(wandb, "init", lambda **arguments: sent.update(arguments) or run)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "recipes.grpo.main_grpo", *TYPED])
    composed = examine("grpo", [*TYPED, "trainer.logger=[wandb]", "trainer.seed=1"])
    config = configured().replace(
        **{name: getattr(composed.config, name) for name in ("reward_model", "trainer")}
    )
    config = config.replace(custom_reward_function=composed.config.custom_reward_function)
    config = config.replace(ray_kwargs=composed.config.ray_kwargs)
    assert str(convert.as_tree(config)).count(SECRET) == 6, "the run has them"
    tracker = Tracker(tmp_path / "grpo" / "run", config)
    tracker.close("failed")
    written = "".join(path.read_text() for path in tracker.run_dir.rglob("*") if path.is_file())
    for text in (written, str(sent), str(convert.as_json(config)), shown(config)):
        assert SECRET not in text
    assert "method: flexible" in written


def test_no_message_dry_run_or_help_shows_a_secret(monkeypatch, capsys):
    from core.command_line import prepare

    for words in (["--help", "reward_kwargs"], [], ["bogus.key=1"]):
        monkeypatch.setenv("DRY_RUN", "1")
        with pytest.raises(SystemExit):
            prepare("grpo", [*TYPED, *words])
    for line in (*TYPED, f"trainer.bogus={{password:{SECRET}}}", f"+x.token={SECRET}"):
        with pytest.raises(SystemExit):
            prepare("grpo", [line])
    out, err = capsys.readouterr()
    assert SECRET not in out and SECRET not in err and HIDDEN in out and HIDDEN in err


def provenance(config):
    return Provenance(seed=1, ranks=1, threads=1, config=config, versions={})


def test_another_secret_is_the_same_run(tmp_path):
    key = "reward_model.reward_kwargs"
    one, other = (
        provenance(convert.as_json(examine("grpo", [f"{key}={{mine:{{token:{value}}}}}"]).config))
        for value in ("first-one", "second-one")
    )
    assert check_resume(tmp_path, one, other) == []
    another = provenance(
        convert.as_json(examine("grpo", [f"{key}={{mine:{{token:x,method:y}}}}"]).config)
    )
    (change,) = check_resume(tmp_path, one, another, allow=True)
    assert change.refused and "first-one" not in str(change)


def test_what_was_hidden_is_left_out_where_a_configuration_is_read_again():
    config = examine("grpo", TYPED).config
    text = to_yaml(config)
    assert SECRET not in text and HIDDEN in text
    base = {"reward_model.reward_kwargs": {"mine": {"token": HIDDEN, "method": "x"}}}
    composed = examine("grpo", [], base=base)
    assert composed.config.reward_model.reward_kwargs["mine"] == {"method": "x"}
    assert without_hidden({"a": [HIDDEN, 1]}) == {"a": [1]}


# -- what other libraries print


LEAKS = (
    f"ray_kwargs.ray_init={{num_cpu: 1, runtime_env: {{env_vars: {{WANDB_API_KEY: {SECRET}}}}}}}",
    f"+ray_kwargs.ray_init.api_key=[{SECRET}",  # cannot be read
    f"+custom_reward_function.reward_kwargs.token={SECRET},b",  # a sweep
    f"custom_reward_function.reward_kwargs..password={SECRET}",  # no override
    f"trainer.nnodes={{password: {SECRET}}}",
    f"reward_model.judge.url=http://jane:{SECRET}@host/v1",
)


@pytest.mark.parametrize("word", LEAKS, ids=range(len(LEAKS)))
def test_no_refusal_of_what_was_typed_shows_a_secret(monkeypatch, capsys, word):
    from core.command_line import prepare

    monkeypatch.delenv("DRY_RUN", raising=False)
    with pytest.raises(SystemExit):
        prepare("grpo", [word, "trainer.backend=ray", "trainer.bogus=1"])
    out, err = capsys.readouterr()
    assert SECRET not in out + err and "bogus" in err


ERRORS = (ValueError, InputError, OSError, WorkersLost, OutOfMemory)


@pytest.mark.parametrize("error", ERRORS, ids=lambda one: one.__name__)
def test_an_error_in_a_run_that_quotes_a_secret_is_printed_without_it(
    tmp_path, monkeypatch, capsys, error
):
    """A library's error may quote its arguments: the traceback, the line and the manifest have ***
    in their place."""
    from core import command_line

    class Fails:
        def __init__(self, config):
            self.run = SimpleNamespace(
                run_dir=tmp_path, stop=SimpleNamespace(requested=False), saved_step=None
            )

        def init_workers(self):
            raise error(f"refused {{'api_key': '{SECRET}{SECRET}'}} and http://jane:{SECRET}@host")

    key = f"+custom_reward_function.reward_kwargs.api_key={SECRET}{SECRET}"
    monkeypatch.setattr(sys, "argv", ["main", key])
    monkeypatch.setattr(command_line, "all_problems", lambda *_: [])
    monkeypatch.setattr(command_line, "load_trainer", lambda _: Fails)
    with pytest.raises(SystemExit):
        command_line.main("grpo")
    out, err = capsys.readouterr()
    assert SECRET not in out + err and "api_key" in err


def test_a_text_of_another_library_keeps_all_but_the_secrets():
    variables = {"A": "1", "B": "INFO", "C": "/srv/place", "D": 'quote"d secret'}
    tree = {"env_vars": variables, "api_key": "abcdefgh", "n": 2}
    text = (
        f"INFO 1 of 2: {{'A': '1', 'B': 'INFO', 'C': '/srv/place'}} {json.dumps(tree)} "
        f"abcdefgh in /srv/place/x.py"
    )
    shown = without_secrets(text, tree)
    assert shown.startswith("INFO 1 of 2: {'A': '***', 'B': '***', 'C': '***'} ")
    assert shown.endswith("*** in /srv/place/x.py")
    assert not {"abcdefgh", "secret"} & {*re.findall(r"\w+", shown)}
