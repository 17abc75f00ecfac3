"""Composing, typing, resolving, writing and comparing configurations."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from core.config import convert, recipes, recorded, registry
from core.config.code_by_path import load_object
from core.config.composition import compose, examine
from core.config.convert import to_yaml
from core.config.defaults import resolve
from core.config.schema import Config
from core.config.section import BOOKKEEPING, EXECUTION, FILES, IDENTITY
from core.errors import InputError
from results.reporting.run_reader import read_yaml

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "core/config/README.md"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = yaml.safe_load((Path(__file__).parent / "verl_defaults.yaml").read_text())


def test_every_key_and_default_is_verls_or_listed_with_a_reason():
    rows = re.findall(
        r"^\| `([\w.]+)` \| `(.+?)` \| `(.+?)` \| .+ \|$", README.read_text(), re.MULTILINE
    )
    changed = {
        key: tuple(value if "$" in value else yaml.safe_load(value) for value in both)
        for key, *both in rows
    }
    mine = convert.as_json(Config())
    for key in set(VERL) & set(mine):
        value, here = VERL[key], mine[key]
        assert (
            (changed[key] == (value, here) and value != here) if key in changed else here == value
        ), key
    assert set(changed) <= set(VERL)


def test_the_tables_of_implementations_name_functions_and_keys_that_exist():
    sections = {
        "algorithm": registry.ESTIMATORS,
        ACTOR: registry.POLICY_LOSSES,
        ROLLOUT: registry.ENGINES,
    }
    for section, table in sections.items():
        assert all(
            convert.known(f"{section}.{key}") for entry in table.values() for key in entry.reads
        ), section
        assert all(
            callable(load_object(entry.function)) for entry in table.values() if entry.function
        )


def test_roles_of_keys():
    expected = {
        f"{ACTOR}.clip_ratio_high": IDENTITY,
        "retriever.topk": IDENTITY,
        "retriever.url": EXECUTION,
        "reward_model.reward_kwargs.gsm8k.method": IDENTITY,  # inside a mapping of the user's own
        "not.a.key": IDENTITY,
        "data.train_files": FILES,
        f"{ACTOR}.ppo_max_token_len_per_gpu": EXECUTION,
        "trainer.health.entropy.bound": BOOKKEEPING,  # the section's
    }
    assert {key: recorded.role_of(key) for key in expected} == expected


def test_no_key_can_be_changed_and_a_copy_is_equal():
    config = compose(
        "ppo", [f"{ACTOR}.clip_ratio=0.1", "+actor_rollout_ref.model.override_config.a={b: [1]}"]
    )
    with pytest.raises(ValidationError, match="frozen"):
        config.trainer.seed = 2
    assert config.actor_rollout_ref.model.override_config == {"a": {"b": [1]}}
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config


def test_a_recipe_may_have_keys_of_its_own():
    config = compose(
        "search_r1", ["max_turns=2", "retriever.topk=5", "+retriever.client.timeout_s=3"]
    )
    assert type(config) is recipes.schema_of("search_r1") and isinstance(config, Config)
    assert (config.max_turns, config.do_search, config.retriever.topk) == (2, True, 5)
    own = {
        "max_turns",
        "do_search",
        "data.max_start_length",
        "data.max_obs_length",
        "actor_rollout_ref.actor.state_masking",
        *(f"retriever.{name}" for name in ("url", "topk", "prefetch", "client", "local")),
    }
    assert convert.flat(config).keys() - convert.flat(Config()).keys() == own
    changed = convert.replaced(config, {"retriever.topk": 3, "trainer.seed": 7})
    values, changed_values = convert.flat(config), convert.flat(changed)
    assert {key: value for key, value in changed_values.items() if value != values[key]} == {
        "retriever.topk": 3,
        "trainer.seed": 7,
    }
    assert convert.as_json(config)["retriever.client"] == {"timeout_s": 3}
    assert recipes.schema_of("grpo") is Config
    # As in an actor of Ray
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).retriever.topk)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(config), capture_output=True, cwd=ROOT
    )
    assert done.stdout.strip() == b"5", done.stderr


def test_layers_win_in_order():
    for typed, n in (
        ([], 5),
        (["preset=paper"], 64),
        ([f"{ROLLOUT}.n=7", "preset=paper"], 7),
        (["preset=script", "preset=paper"], 64),
        # What stands before -- is a script's
        (["preset=script", f"{ROLLOUT}.n=4", "--", "preset=paper"], 64),
        (["preset=script", f"{ROLLOUT}.n=4", "--", "preset=paper", f"{ROLLOUT}.n=8"], 8),
        ([f"{ROLLOUT}.n=4", "--", f"{ROLLOUT}.n=8"], 8),
    ):
        assert compose("grpo", typed).actor_rollout_ref.rollout.n == n, typed
    assert compose("grpo", ["trainer.nnodes=2", "--", "preset=paper"]).trainer.nnodes == 2


def test_of_two_values_of_a_key_the_last_counts_and_a_line_tells():
    line = ["trainer.seed=2", "data.shuffle=True", "trainer={seed: 3}", "data.shuffle=True"]
    told = "trainer.seed=3: is given twice, before as 2; this last one counts"
    for typed in (line, ["--", *line]):
        found = examine("grpo", typed)
        assert (found.config.trainer.seed, found.problems, found.warnings) == (3, (), (told,))
    assert not examine("grpo", ["trainer.seed=2", "--", "trainer.seed=3"]).warnings
    found = examine("grpo", ["preset=script", "preset=paper"])
    assert [one.partition(":")[0] for one in found.warnings] == ["preset=paper"]
    assert not examine("grpo", ["preset=paper", "preset=paper"]).warnings


def test_a_second_file_in_place_of_the_recipe_s_is_refused():
    with pytest.raises(InputError, match="^--config-name=b: names a second file"):
        examine("grpo", ["--config-name=a", "--config-name=b"])


def test_a_number_in_quotes_is_told_to_be_text():
    (problem,) = examine("grpo", ['data.seed="1"']).problems
    assert problem.startswith("data.seed=1: must be a valid integer, and is text: take the quotes")


def test_a_preset_that_a_file_names_lies_under_the_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("preset: paper\ntrainer: {seed: 4}\n")
    file = [f"--config-path={tmp_path}", "--config-name=mine"]
    composed = examine("grpo", file)
    assert (composed.config.actor_rollout_ref.rollout.n, composed.config.trainer.seed) == (64, 4)
    assert not composed.problems and not composed.warnings
    composed = examine("grpo", [*file, "preset=script"])
    assert (
        composed.config.actor_rollout_ref.rollout.n
        == compose("grpo", ["preset=script"]).actor_rollout_ref.rollout.n
    )
    assert composed.config.trainer.seed == 4
    assert [warning.partition(":")[0] for warning in composed.warnings] == ["preset=script"]


def test_an_error_of_yaml_has_its_line(tmp_path):
    (tmp_path / "bad.yaml").write_text("trainer:\n  seed: 1\n  nnodes: [1\ndata: 2\n")
    (tmp_path / "twice.yaml").write_text("trainer:\n  seed: 1\n  seed: 2\n")
    for name, line in (("bad", 4), ("twice", 3)):
        problems = examine("grpo", [f"--config-path={tmp_path}", f"--config-name={name}"]).problems
        assert f"line {line}, " in problems[0] and "\n" not in problems[0]


def test_a_slash_in_the_name_of_a_run_is_read_as_a_dash():
    found = examine("grpo", ["trainer.experiment_name=qwen//grpo/1", "trainer.project_name=a/b"])
    trainer = found.config.trainer
    assert (trainer.experiment_name, trainer.project_name) == ("qwen-grpo-1", "a-b")
    assert trainer.default_local_dir == "outputs/grpo/qwen-grpo-1"
    keys = [one.partition("=")[0] for one in found.warnings]
    assert keys == ["trainer.experiment_name", "trainer.project_name"] and not found.problems
    model = "actor_rollout_ref.model.path=org/name"
    found = examine("grpo", [model, "trainer.experiment_name=${actor_rollout_ref.model.path}-2"])
    assert found.config.trainer.experiment_name == "org-name-2"


def test_plus_signs_and_sections():
    config = compose(
        "ppo",
        ["+data.seed=3", "++trainer.seed=4", "critic.optim={lr: 1e-4}", "data={shuffle: False}"],
    )
    assert (config.data.seed, config.trainer.seed, config.critic.optim.lr, config.data.shuffle) == (
        3,
        4,
        1e-4,
        False,
    )
    assert config.critic.optim.weight_decay == 0.01


def test_values_are_read_as_meant(monkeypatch):
    monkeypatch.setenv("SOMEWHERE", "/data")
    expected = {
        "data.train_files=~/a.parquet": ("~/a.parquet",),
        "data.val_files=['${oc.env:SOMEWHERE}/b.parquet', c.parquet]": (
            "/data/b.parquet",
            "c.parquet",
        ),
        "trainer.experiment_name=lr=1e-6 (it's)": "lr=1e-6 (it's)",
        "data.max_prompt_length=1e3": 1000,
        "critic.optim.lr=1": 1.0,
        "trainer.logger=wandb": ("wandb",),
        "trainer.project_name=7": "7",
        "trainer.rollout_data_dir=${trainer.project_name}/${data.max_response_length}": "7/512",
        "critic.model.path=${actor_rollout_ref.model.path}": Config().actor_rollout_ref.model.path,
        f"{ACTOR}.optim.betas=[0.9, 0.95]": (0.9, 0.95),
    }
    config = compose("ppo", list(expected))
    found = {text: convert.get(config, text.partition("=")[0]) for text in expected}
    assert found == expected and [*map(type, found.values())] == [*map(type, expected.values())]


def test_an_unknown_recipe_and_an_unknown_preset_name_the_known_ones(tmp_path, monkeypatch):
    folder = tmp_path / "plain" / "config"
    folder.mkdir(parents=True)
    (folder / "plain.yaml").write_text("data: {seed: 3, nope: 4}\ntrainer: {seed: '???'}\n")
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    assert examine("nope", ()).problems == ("recipe=nope: has no config file; choose one of plain",)
    lines = examine("plain", ["preset=x"]).problems
    # A recipe's file is held to the same rules
    assert lines[0].startswith("data.nope=4: unknown key")
    assert lines[1:] == (
        "preset=x: unknown preset; leave it out: this recipe has none",
        "trainer.seed=???: cannot be read (Missing mandatory value: seed); give it a value, or "
        "mend it",
    )
    (folder / "preset").mkdir()
    (folder / "preset" / "one.yaml").touch()
    assert examine("plain", ["preset=x"]).problems[1] == (
        "preset=x: unknown preset; choose one of one"
    )


def test_a_users_file_takes_the_recipes_place_and_typed_keys_win(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\ndefaults: [ppo_trainer, _self_]\n"
        "data: {max_prompt_length: 1024, return_raw_chat: True}\n"
        "actor_rollout_ref: {rollout: {n: 6, n_val: 4, val_temperature: 0.7, temperature: 0.9}}\n"
        "trainer: {experiment_name: '${data.max_prompt_length}-tokens'}\n"
    )
    (tmp_path / "over_recipe.yaml").write_text(
        "defaults: [grpo, _self_]\ndata: {max_prompt_length: 99}\n"
    )
    options = [f"--config-path={tmp_path}", "--config-name=mine"]
    composed = examine(
        "grpo", [*options, f"{ROLLOUT}.temperature=0.8", "algorithm.adv_estimator=gae"]
    )
    rollout = composed.config.actor_rollout_ref.rollout
    assert composed.problems == () and composed.config.data.max_prompt_length == 1024
    assert (rollout.n, rollout.temperature, rollout.val_kwargs.n) == (6, 0.8, 4)
    assert composed.config.trainer.experiment_name == "1024-tokens"
    # Keys of other versions are read as typed ones are
    assert "data.return_raw_chat" in composed.unused
    # The recipe's grpo is not named
    assert examine("grpo", options).config.algorithm.adv_estimator == "gae"
    (line,) = examine("grpo", [options[0], "--config-name=over_recipe.yaml"]).problems
    assert "its defaults list names grpo" in line
    (tmp_path / "list.yaml").write_text("- data\n")
    (line,) = examine("grpo", [options[0], "--config-name=list"]).problems
    assert "list.yaml: cannot be read" in line
    (line,) = examine("grpo", ["--config-path=nowhere/at/all", "--config-name=x"]).problems
    assert (
        line.startswith("--config-name=nowhere/at/all/x.yaml: cannot be read") and "\n" not in line
    )


def test_nulls_follow_other_keys(monkeypatch):
    config = compose(
        "ppo",
        ["actor_rollout_ref.model.path=org/My-Model", "trainer.seed=3", f"{ACTOR}.clip_ratio=0.1"],
    )
    actor, critic, trainer = config.actor_rollout_ref.actor, config.critic, config.trainer
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.1)
    assert critic.model.path == "org/My-Model" and critic.enable is True
    assert (critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle) == (256, 1, False)
    assert config.data.gen_batch_size == 1024 and config.data.seed is None
    assert (trainer.project_name, trainer.experiment_name) == ("rlrepro-ppo", "My-Model-seed3")
    assert trainer.default_local_dir == "outputs/ppo/My-Model-seed3"
    assert compose("grpo").critic.enable is False and resolve(config, "ppo") == config
    one = compose(
        "ppo", [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.28"]
    ).actor_rollout_ref.actor
    assert (one.clip_ratio_low, one.clip_ratio_high) == (0.1, 0.28)
    for typed, backend in (("trainer.nnodes=2", "ray"), ("trainer.n_gpus_per_node=1", "local")):
        assert examine("ppo", [typed]).config.trainer.backend == backend
    monkeypatch.setattr("core.config.defaults.find_spec", lambda name: name == "vllm")
    for gpu, engine in ((True, "vllm"), (False, "hf")):
        monkeypatch.setattr("core.config.defaults.has_accelerator", lambda gpu=gpu: gpu)
        assert compose("ppo").actor_rollout_ref.rollout.name == engine


@pytest.mark.parametrize(
    "overrides, actor, critic",
    [
        ([], (True, None), (True, None)),
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=16"], (False, 16), (False, 16)),
        (["critic.ppo_micro_batch_size_per_gpu=8"], (True, None), (False, 8)),
        (
            [
                f"{ACTOR}.use_dynamic_bsz=True",
                "critic.use_dynamic_bsz=False",
                "critic.ppo_micro_batch_size_per_gpu=8",
            ],
            *((True, None), (False, 8)),
        ),
    ],
)
def test_passes_are_packed_by_tokens_unless_a_micro_batch_is_given(overrides, actor, critic):
    config = compose("ppo", overrides)
    for part, expected in ((config.actor_rollout_ref.actor, actor), (config.critic, critic)):
        assert (part.use_dynamic_bsz, part.ppo_micro_batch_size_per_gpu) == expected


def test_what_is_recorded_is_the_same_when_it_is_completed():
    config = compose("grpo", ["preset=script", "data.seed=0"])
    tree = yaml.safe_load(to_yaml(config))
    del tree["trainer"]["trace"]  # newer than the run
    tree["data"]["custom_cls"] = {"path": None}  # gone since
    assert recorded.completed(tree, Config) == convert.as_json(config)
    tree["retriever"] = {"topk": 4}
    assert recorded.completed(tree, Config)["retriever.topk"] == 4


def test_composing_and_help_import_nothing_heavy():
    code = (
        "import sys\nfrom core.command_line import help_text\nfrom core.config.composition import compose\n"
        "compose('grpo', ['data.seed=1']); help_text('grpo', [], ['clip'])\n"
        "print([m for m in ('torch','ray','vllm','transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("key", ["trainer.experiment_name", "trainer.project_name"])
def test_a_name_is_one_part_of_a_path(key):
    for name in (
        "../../etc",
        "a\\\\b",
        "..",
        ".hidden",
        "-rf",
        "''",
        "' a'",
        '"a\\nb"',
        "\x1b[2J",
        "a" * 300,
    ):
        with pytest.raises(InputError) as raised:
            compose("grpo", [f"{key}={name}"])
        (problem,) = raised.value.problems
        assert problem.startswith(f"{key}=") and "a name of at most 200 bytes without /" in problem
    for name in ("a", "7", "qwen2.5_7b-seed1", "'a b'", "a$b", "a:b", "实验", "~a", "null"):
        compose("grpo", [f"{key}={name}"])


def test_aliases_of_an_ordinary_file_are_read():
    text = to_yaml(Config())
    anchored = text.replace("data:", "data: &data", 1) + "data_again: *data\n"
    assert read_yaml(anchored)["data_again"] == yaml.safe_load(text)["data"]
    for broken in ("a: [", "a: !!python/name:os.system"):
        with pytest.raises(ValueError, match="no YAML"):
            read_yaml(broken)


def test_a_template_of_the_data_is_the_tokenizer_s_so_that_engines_know_its_ends():
    data = "data.apply_chat_template_kwargs={chat_template: '{{ messages }}'}"
    model = "actor_rollout_ref.model.custom_chat_template"
    assert convert.get(compose("grpo", [data]), model) == "{{ messages }}"
    assert convert.get(compose("grpo", [data, f"{model}=own"]), model) == "own"
