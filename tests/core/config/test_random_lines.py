"""Whatever is typed behind a main module ends in lines of key, value, rule and fix, and nothing is ignored silently.

A thousand random command lines, the same ones every time: half of them text that hardly is an override (mutated keys,
values with Hydra's and OmegaConf's characters), half values of the right type at its ends. Below them, one example of
each kind of failure that such lines found.
"""

from __future__ import annotations

import functools
import io
import random
import re
import sys
import types
from collections.abc import Mapping
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest

from core.command_line import prepare
from core.config import Config, composition, convert, examine, recipes
from core.config.frozen import thaw
from core.config.problem import one_line

HOOKS = {"ppo": (), "grpo": (), "dapo": (), "search_r1": ("generate",)}
LINES = 250  # a recipe

NAMES = [
    *("a", "seed", "nope", "x y", "ü", "0", "-1", "__class__", "_content", "items", "null", "true", "1.5", "{}", "%s")
]
VALUES = [
    *("1", "-1", "2.5", "1e400", "-inf", "nan", "null", "true", "''", '""', "' '", "x", "", "???", "9" * 400, "1e308"),
    *(
        "yes",
        "é",
        "\u200b",
        "a b",
        "~/x",
        "~no_such_user/x",
        "./x",
        "x:y",
        "x.py:f",
        "token",
        "a,b",
        "1,2",
        "[1,2],[3]",
    ),
    *("choice(a,b)", "choice()", "glob(*)", "range(1,3)", "interval(0,1)", "int(3)", "int(x)", "foo(1)", "cast("),
    *("${trainer.seed}", "${trainer}", "${oc.env:NOT_SET_ANYWHERE}", "${foo:1}", "${}", "${", "$x", "${trainer.seed"),
    *("${.seed}", "${..}", "${...seed}", "${trainer.nope}", "${trainer.logger[7]}", "${oc.decode:'['}", "\\${a}"),
    *("${oc.dict.keys:trainer}", "${${trainer.seed}}", "x${trainer}y", "x${trainer.project_name}", "'${'", "'${foo'"),
    *("[${trainer}]", "{a: ${trainer}}", "{a: ${a}}", "[???]", "{a: ???}", "{a: '${'}", "[choice(a,b)]", "${hydra:x}"),
    *("[", "]", "{", "[]", "{}", "[1", "{a}", "{a:}", "[,]", "{1:2}", "{null:1}", "{'':1}", "{a[0]:1}", "[{a:1}]"),
    *("{a:{b:{c:[1,{d:2}]}}}", "{seed:{x:1}}", "[null]", "[{files:1}]", "[{files: null}]", "'", '"', "'a", "\\", "a\\"),
    *(
        "a=b",
        "=",
        "&a",
        "|",
        "%",
        "@",
        "`",
        "#",
        "a\tb",
        "a\nb",
        "\x1b[0m",
        "\ud800",
        "(",
        ")",
        ":",
        "~null",
        "x" * 400,
    ),
    *("[" * 100 + "]" * 100, "{a:" * 40 + "1" + "}" * 40, "9" * 5000),
]
WHOLE = [  # lines that are no override, or nearly none
    *(
        "-x",
        "--foo",
        "--",
        "--help=1",
        "",
        "=",
        "=1",
        " ",
        "'",
        "~",
        "+",
        "++",
        "~=",
        "+=1",
        "~~a",
        "+++a=1",
        "@",
        "@=1",
    ),
    *("a@b@c=1", "preset", "~preset", "~preset=lab", "+preset=lab", "preset=[lab]", "preset={a:1}", "preset=a,b"),
    *("preset=", "preset=../x", "preset=null", "preset@x=lab", "preset.x=1", "preset=${trainer.seed}", "preset=???"),
]
ODD = {  # values of a type, at its ends
    bool: ["True", "False"],
    int: ["1", "2", "0", "-1", "64", "1e18", "9223372036854775807", "9223372036854775808", "1e400", "9" * 30],
    float: ["0", "1", "0.5", "1e308", "5e-324", "inf", "nan", "-0.0", "0.999999999", "9" * 400, "100"],
    str: [
        *(
            "''",
            "' '",
            "'a\nb'",
            "x",
            "./x",
            "~no_such_user/x",
            "/",
            "é",
            "${trainer.backend}",
            "x.py:f",
            "'a.b:c'",
            "7",
        ),
        *("x" * 300, "'/" + "y/" * 3000 + "'", "'{data.seed}'", "'%s'", "'\ud800'", "file://", "Qwen/Qwen2.5-7B"),
    ],
    Mapping: [
        *("{}", "{a: 1}", "{hf: 1}", "{hf: [1]}", "{hf: {cache_gib: x}}", "{vllm: 3}", "{address: {}}", "{1: 2}"),
        *("{hidden_size: 0}", "{num_attention_heads: x}", "{num_hidden_layers: null}", "{x: ${trainer}}", "{a.b: 1}"),
        *("{x: ${.y}, y: 1}", "{gsm8k: 1}", "{gsm8k: {method: 1}}"),
    ],
    object: ["0.5_2.0", "'nan'", "2.0", "'nan_nan'", "'inf'", "0_0", "5e-324", "1e308", "x"],
}
STAGES = [
    "[]",
    "[{}]",
    "[{files: x}]",
    "[{files: 1}]",
    "[{files: [[1]]}]",
    "[{files: '~no_such_user/x'}]",
    "{files: x}",
]


def mutated(rng: random.Random, key: str) -> str:
    """A key with a mistake in it."""
    at = rng.randrange(len(key) + 1)
    return rng.choice(
        [
            *(
                key + ".",
                "." + key,
                key.replace(".", "..", 1),
                f"{key}[{rng.choice(['0', '-1', 'x', ''])}]",
                key + "@x",
            ),
            *(f"{key}.{rng.choice(NAMES)}", f"{rng.choice(NAMES)}.{key}", key.replace(".", "/", 1), key.upper()),
            *(key.rpartition(".")[2], key.rpartition(".")[0], rng.choice(NAMES), key[:at] + key[at + 1 :]),
            key[:at] + rng.choice(" .[]{}$@/\\'\"=é\n:,*~+-#%") + key[at:],
        ]
    )


@functools.cache
def open_keys(schema: type) -> list[str]:
    """The keys of mappings whose own keys are the user's."""
    return [key for key in convert.all_keys(schema) if convert.known(f"{key}.x", schema)]


def odd_text(rng: random.Random, schema: type) -> str:
    """A line of which nothing is certain."""
    if rng.random() < 0.05:
        return rng.choice(WHOLE)
    key = rng.choice(
        [rng.choice(list(convert.all_keys(schema))), rng.choice(list(convert.sections(schema))), *open_keys(schema)]
    )
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        key = mutated(rng, key)
    value, wrap = rng.choice(VALUES), rng.random()
    if wrap < 0.1:
        value = f"[{value},{rng.choice(VALUES)}]"
    elif wrap < 0.2:
        value = f"{{{rng.choice(NAMES)}: {value}}}"
    elif wrap < 0.25:
        value = f"${{{key}}}"
    return f"{rng.choice(['', '', '', '', '+', '++', '~', ' '])}{key}={value}"


def odd_value(rng: random.Random, hint: object) -> str:
    """A value of the type, as one would type it."""
    if get_origin(hint) is Annotated:
        return odd_value(rng, get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return rng.choice(["null", *(odd_value(rng, get_args(hint)[0]) for _ in range(5))])
    if get_origin(hint) is Literal:
        return rng.choice(get_args(hint))
    if get_origin(hint) is tuple:
        (item, *_), few = get_args(hint), range(rng.choice([0, 1, 1, 2]))
        return rng.choice(STAGES) if get_origin(item) is Mapping else f"[{','.join(odd_value(rng, item) for _ in few)}]"
    return rng.choice(ODD.get(get_origin(hint) or hint, ODD[object]))


def odd_override(rng: random.Random, schema: type) -> str:
    key, hint = rng.choice(list(convert.all_keys(schema).items()))
    return f"{key}={odd_value(rng, hint)}"


PLANNED = ([], [], ["actor_rollout_ref.model.path=./model"], ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"])


def command_lines(recipe: str) -> list[list[str]]:
    """Random command lines of one to four overrides, LINES overrides in all."""
    rng, schema, made, found = random.Random(f"{recipe}, the same every time"), recipes.schema_of(recipe), 0, []
    while made < LINES:
        kind = odd_text if made % 2 else odd_override
        found.append([kind(rng, schema) for _ in range(rng.choice([1, 1, 1, 2, 4]))])
        made += len(found[-1])
        if kind is odd_override:
            found[-1] = [*rng.choice(PLANNED), *found[-1]]
    return found


def enter_dry_run(folder, monkeypatch):
    """Write a model's shape into a folder, and make it the current one of a dry run."""
    (folder / "model").mkdir()
    sizes = '"num_attention_heads":2,"hidden_size":8,"num_hidden_layers":2,"intermediate_size":16,"vocab_size":100'
    (folder / "model/config.json").write_text(f"{{{sizes}}}")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setattr("core.requirements_check.find_spec", lambda name: True)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    return enter_dry_run(tmp_path, monkeypatch)


def ended(recipe, texts, capsys):
    """The exit code and the lines on standard error; any other end than SystemExit is an error of the test."""
    with pytest.raises(SystemExit) as end:
        prepare(recipe, texts, HOOKS[recipe])
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


def in_the_configuration(text: str, typed: object, held: object) -> bool:
    """Whether a key holds what was typed for it; a null may be filled in, and an interpolation has another text."""
    if typed is None or "${" in text:
        return True
    typed, held = thaw(typed), thaw(held)
    if isinstance(typed, dict):
        return all(in_the_configuration(text, item, (held or {}).get(str(name))) for name, item in typed.items())
    if isinstance(held, list):
        items = typed if isinstance(typed, list) else [typed]
        return len(held) == len(items) and all(map(in_the_configuration, [text] * len(items), items, held))
    return held == typed or held == str(typed)


@pytest.mark.parametrize("recipe", HOOKS)
def test_a_random_line_ends_in_problems_or_is_in_the_configuration(recipe, here, capsys):
    schema, accepted = recipes.schema_of(recipe), 0
    for texts in command_lines(recipe):
        code, lines = ended(recipe, texts, capsys)
        assert code in (0, 2), texts
        if code == 2:
            assert lines and all(names_what_was_typed(line, texts, schema) for line in lines), (texts, lines)
            apart = [
                str(problem) for text in texts if text != "--" for problem in composition.read([text], recipe).problems
            ]
            assert set(apart) <= set(lines), (texts, lines)  # none hides another's
            continue
        accepted += 1
        composed = examine(recipe, texts, HOOKS[recipe])
        found = composed.given.keys() | composed.unused.keys() | composed.read.keys()
        for text in texts:
            key = re.match(r"[+ ~]*([^=]*)", text)[1]
            assert (
                text in ("--", "")
                or key == "preset"
                or text[0] == "~"
                or any(given == key or given.startswith(f"{key}.") for given in found)
            ), (texts, "is nowhere")
        for key, value in composed.given.items():
            base = max((one for one in convert.all_keys(schema) if f"{key}.".startswith(f"{one}.")), key=len)
            held = thaw(convert.get(composed.config, base))
            for name in filter(None, key[len(base) :].split(".")):
                held = held[name]
            assert in_the_configuration("".join(texts), value, held), (texts, key, held)
    assert accepted > 20  # the test is of both


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
    ("", "'': cannot be read; write key=value"),
    ("trainer={}", "is a section"),
    ("trainer=[1]", "is a section"),
    ("~trainer.seed=3", "write ~trainer.seed"),
    ("~preset=lab", "write ~preset"),
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
    ("trainer.project_name=x${data}", "names data, which holds several values; name one of them"),
    ("trainer.project_name=${foo:1}", "cannot be resolved (Unsupported interpolation type foo)"),
    ("data.val_files=[???]", "has no default"),
    ("data.val_files=[x${critic.model.path}]", "names critic.model.path, which is null"),
    ("data.val_files=~no_such_user/x", "does not exist (looked for "),
    ("data.val_files=" + "x" * 300, "does not exist (looked for "),
    ("data.curriculum=[{files: 1}]", "does not exist (looked for "),
]


@pytest.mark.parametrize("text, said", EXAMPLES, ids=[text[:40] for text, _ in EXAMPLES])
def test_what_once_ended_in_a_traceback_is_one_line(text, said, here, capsys):
    code, (line,) = ended("ppo", [text], capsys)
    assert code == 2 and said in line and len(line) < 1000
    assert names_what_was_typed(line, [text], recipes.schema_of("ppo"))
    _, lines = ended("ppo", ["data.nope=1", text, "data.shuffle=7"], capsys)
    assert {line, "data.shuffle=7: must be True or False; the default is true"} < {*lines} and len(lines) == 3


def test_a_key_below_a_value_names_both(here, capsys):
    code, lines = ended("ppo", ["reward_model.reward_kwargs.a=1", "reward_model.reward_kwargs.a.b=2"], capsys)
    rule = "is a key of reward_model.reward_kwargs.a, and reward_model.reward_kwargs.a=1 has no keys"
    assert (code, lines) == (2, [f"reward_model.reward_kwargs.a.b=2: {rule}; leave one of them out"])


def test_a_threshold_that_is_no_number_is_refused(here, capsys):
    section = "algorithm.rollout_correction.rollout_rs"
    code, (line,) = ended("ppo", [f"{section}=token", f"{section}_threshold='nan'"], capsys)
    assert code == 2 and "its thresholds do not fit it" in line


def test_what_looks_odd_and_has_a_meaning_is_kept(here):
    texts = ["preset=lab", "~preset", r"trainer.project_name=\${x}", "reward_model.reward_kwargs.a.0=1"]
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
