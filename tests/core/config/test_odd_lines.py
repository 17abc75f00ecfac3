"""Whatever is typed behind a main module ends in lines of key, value, rule and fix: one example of each kind."""

from __future__ import annotations

import io
import sys

import pytest

from core.command_line import prepare
from core.config import Config, composition, convert, examine, recipes
from core.config.problem import one_line


def enter_dry_run(folder, monkeypatch):
    """Write a model's shape into a folder, and make it the current one of a dry run."""
    (folder / "model").mkdir()
    sizes = '"num_attention_heads":2,"hidden_size":8,"num_hidden_layers":2,"intermediate_size":16,"vocab_size":100'
    (folder / "model/config.json").write_text(f"{{{sizes}}}")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setattr("core.command_line.find_spec", lambda name: True)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    return enter_dry_run(tmp_path, monkeypatch)


def ended(recipe, texts, capsys):
    """The exit code and the lines on standard error; any other end than SystemExit is an error of the test."""
    with pytest.raises(SystemExit) as end:
        prepare(recipe, texts)
    out = capsys.readouterr()
    return end.value.code, out.err.splitlines()


def names_what_was_typed(line: str, texts: list[str], schema: type) -> bool:
    """Whether a line begins with a typed text, or as ``key=value`` with a key of the schema or one typed; then ": "."""
    if any(line.startswith(f"{composition.brief(text) or repr(text)}: ") for text in texts):
        return True
    key, is_one, rest = line.partition("=")
    keys = {*convert.all_keys(schema), *convert.sections(schema), "preset"}
    typed = one_line("\n".join([*texts, *("".join(text.split()) for text in texts)])).lower()
    typed += "none" * ("null" in typed)  # a mapping's key may be null, too
    named = key in keys or all(one_line(part).lower() in typed for part in key.split("."))  # true is True
    return bool(is_one) and ": " in rest and named


EXAMPLES = [  # a text of each kind that once ended in a traceback or was dropped: what its line contains
    (
        "trainer.cpu_threads[0]=1",
        "names joined by single dots; write key=value; the nearest known key is trainer.cpu_t",
    ),
    ("retriever.local..z=1", "does not begin with a key"),
    ("trainer.seed.=1", "the nearest known key is trainer.seed"),
    (".trainer.seed=1", "the nearest known key is trainer.seed"),
    ("trainer.seed =1", "the nearest known key is trainer.seed"),
    ("ü=1", "does not begin with a key"),
    ("=1", "does not begin with a key"),
    ("++=1", "does not begin with a key"),
    ("", "'': is no override; write key=value"),
    ("trainer={}", "is a section"),
    ("trainer=[1]", "is a section"),
    ("~trainer.seed", "takes a key away"),
    ("preset=choice(lab,x)", "is a sweep"),
    ("data.val_files=[choice(a,b)]", "is a sweep"),
    ("trainer.seed=" + "9" * 5000, "cannot be read (Exceeds the limit"),
    ("trainer.seed=" + "[" * 3000, "cannot be read ("),
    ("trainer.seed=" + "9" * 400, "must be a whole number below 2**63"),
    ("trainer.seed=1e300", "must be a whole number below 2**63"),
    ("actor_rollout_ref.actor.optim.lr=" + "9" * 400, "must be a number"),
    ("trainer.logger={a: 1}", "must be one of console"),
    ("trainer.nope='a\nb'", "trainer.nope=a\\nb: unknown key"),
    ("reward_model.reward_kwargs=${..}", "cannot be read ("),
    ("reward_model.reward_kwargs={a: '${'}", "cannot be read ("),
    ("reward_model.reward_kwargs={null: 1}", "cannot be read ("),
    ("reward_model.reward_kwargs={a: ${reward_model.reward_kwargs}}", "cannot be resolved ("),
    ("trainer.seed=${trainer.seed}", "cannot be resolved ("),
    ("trainer.seed=${trainer}", "cannot be resolved ("),
    ("trainer.project_name=${foo:1}", "cannot be resolved (Unsupported interpolation type foo)"),
    ("data.val_files=[???]", "has no default"),
    ("data.val_files=[x${critic.model.path}]", "names a key that is null"),
    ("data.val_files=~no_such_user/x", "does not exist (looked for "),
    ("data.val_files=" + "x" * 300, "does not exist (looked for "),
]


@pytest.mark.parametrize("text, said", EXAMPLES, ids=[text[:40] for text, _ in EXAMPLES])
def test_what_once_ended_in_a_traceback_is_one_line(text, said, here, capsys):
    code, (line,) = ended("ppo", [text], capsys)
    assert code == 2 and said in line and len(line) < 1000
    assert names_what_was_typed(line, [text], recipes.schema_of("ppo"))
    _, lines = ended("ppo", ["data.nope=1", text, "data.shuffle=7"], capsys)
    assert {line, "data.shuffle=7: must be True or False; the default is true"} < {*lines} and len(lines) == 3


def test_a_threshold_that_is_no_number_is_refused(here, capsys):
    section = "algorithm.rollout_correction.rollout_rs"
    code, (line,) = ended("ppo", [f"{section}=token", f"{section}_threshold='nan'"], capsys)
    assert code == 2 and "its thresholds do not fit it" in line


def test_what_looks_odd_and_has_a_meaning_is_kept(here):
    texts = [r"trainer.project_name=\${x}", "reward_model.reward_kwargs.a.0=1"]
    config = examine("grpo", [*texts, "trainer.experiment_name=~a=b, c's"]).config
    assert config.trainer.project_name == "${x}" and config.reward_model.reward_kwargs == {"a": {"0": 1}}
    assert config.trainer.experiment_name == "~a=b, c's"
    assert config.actor_rollout_ref.model.path == Config().actor_rollout_ref.model.path  # no preset


def test_a_dry_run_prints_characters_that_the_terminal_lacks(here, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as end:
        prepare("ppo", ["trainer.project_name=日本"])
    sys.stdout.flush()
    assert end.value.code == 0 and rb"trainer.project_name=\u65e5\u672c" in written.getvalue()
