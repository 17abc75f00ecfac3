"""Evaluation without a learner: answers that a kill cannot change, scores without a model, a run's
own numbers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from datetime import date
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core import evaluate
from core.answers import complete_answers, read_answers
from core.config import convert
from core.config.composition import compose, examine
from core.data import vocabulary
from core.errors import InputError
from core.ray_trainer import RayPPOTrainer
from results.reporting import accuracies
from tests.checkpoints import RUN, CheckpointStore
from tests.core.config.test_secret_keys import SECRET, TYPED
from tests.core.scripted_run import configured
from tests.core.test_sequence_lengths import write_lengths
from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, modulus=2):
    acc = float(sum(map(ord, solution_str)) % modulus == 0)
    length = extra_info["rollout"]["response_length"]
    return {"score": acc, "acc": acc, "pred": str(len(set(solution_str)) % 3), "length": length}
"""


MODULUS = "+custom_reward_function.reward_kwargs.modulus=3"


def example(source: str, index: int, truth: str = "a") -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "abcd"[index % 4] * (1 + index % 5) + str(index)}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "split": "test"},
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_model("llama", hidden_size=16, intermediate_size=16).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    for source, count in (("letters", 9), ("digits", 4)):
        rows = [example(f"tests/{source}", index) for index in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{source}.parquet")
    return folder


def keys(files: Path, *overrides: str) -> list[str]:
    settings = {
        "data.val_files": f"[{files}/letters.parquet,{files}/digits.parquet]",
        "data.max_prompt_length": 64,
        "data.max_response_length": 6,
        "data.train_batch_size": 4,
        "custom_reward_function.path": files / "reward.py",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.val_kwargs.n": 4,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "trainer.device": "cpu",
        "trainer.cpu_threads": 1,
        "trainer.n_gpus_per_node": 1,
    }
    return [*(f"{key}={value}" for key, value in settings.items()), *overrides]


def own(files: Path) -> str:
    return f"custom_reward_function.path={files / 'reward.py'}"


def generate(files: Path, out: Path, *overrides: str, model: str = "model") -> int:
    arguments = keys(files, *overrides)
    return evaluate.main(
        ["generate", "grpo", *arguments, "--model", str(files / model), "--out", str(out)]
    )


@pytest.fixture(scope="module")
def answers(files) -> Path:
    assert generate(files, files / "shared.jsonl") == 0
    return files / "shared.jsonl"


def run(files: Path, folder: Path, *overrides: str) -> Path:
    """Train two steps, with a validation and a checkpoint after each."""
    settings = [
        f"data.train_files={files}/letters.parquet",
        f"actor_rollout_ref.model.path={files}/model",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder}",
    ]
    RayPPOTrainer(compose("grpo", keys(files, *settings, *overrides))).init_workers().fit()
    return folder


# --- artefacts from somebody else ---


def test_a_checkpoints_settings_name_no_code(tmp_path):
    model = "actor_rollout_ref.model"
    code = {
        f"{model}.trust_remote_code": True,
        f"{model}.override_config": {"quantization_config": "evil"},
        "ray_kwargs.ray_init": {"namespace": "b"},
    }
    with CheckpointStore(tmp_path / "run").writing(
        1, dataclasses.replace(RUN, config=code)
    ) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "tokenizer_config.json").write_text("{}")
    run, out = str(tmp_path / "run"), tmp_path / "a.jsonl"
    with pytest.raises(
        InputError,
        match=rf"--run={run}: its settings name code .* append "
        rf".*quantization_config=evil",
    ):
        evaluate.request("grpo", [], out, None, run)
    typed = [
        f"{model}.trust_remote_code=True",
        f"+{model}.override_config.quantization_config=evil",
    ]
    with pytest.raises(InputError, match="names? code"):
        evaluate.request("grpo", typed, out, None, run)
    typed += ["ray_kwargs.ray_init.namespace=b"]
    assert evaluate.request(
        "grpo", typed, out, None, run
    ).config.actor_rollout_ref.model.override_config


def test_a_file_of_answers_names_no_code(tmp_path, capsys):
    config = {"custom_reward_function.path": "evil.py"}
    manifest = {
        "kind": "answers",
        "format": 1,
        "recipe": "grpo",
        "questions": 0,
        "samples": 1,
        "config": config,
    }
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "a.manifest.json").write_text(json.dumps(manifest))
    assert "append custom_reward_function.path=evil.py" in refused(
        ["score", str(tmp_path / "a.jsonl")], capsys
    )


# --- a run's own numbers ---


def test_an_evaluation_of_a_checkpoint_is_the_runs_validation(files, tmp_path, capsys, monkeypatch):
    rounding = ("actor_rollout_ref.rollout.dtype=bfloat16", "trainer.health.logp_diff.bound=null")
    folder = run(files, tmp_path / "run", *rounding)
    newest = evaluate.request("grpo", [], tmp_path / "a.jsonl", None, str(folder))
    # The run's, not the recipe's
    assert newest.checkpoint.step == 2 and newest.config.data.max_response_length == 6
    changed = evaluate.request(
        "grpo", ["data.max_response_length=7"], newest.out, None, f"{folder}/global_step_1"
    )
    assert (
        changed.config.data.max_response_length == 7
        and changed.config.actor_rollout_ref.model.path.endswith("global_step_1/actor")
    )

    def learner(*args, **kwargs):
        raise AssertionError("an evaluation made a learner")

    monkeypatch.setattr("core.learner.learner.Actor.__init__", learner)
    out = tmp_path / "answers.jsonl"
    assert (
        evaluate.main(["generate", "grpo", "--run", f"{folder}/global_step_1", "--out", str(out)])
        == 0
    )
    # A file of answers names no code
    assert "custom_reward_function.path" in refused(["score", str(out)], capsys)
    assert evaluate.main(["score", str(out), own(files)]) == 0
    scores = tmp_path / "answers.scores-reward.jsonl"
    assert scores.read_text() == (folder / "validation" / "1.jsonl").read_text()
    assert scores.read_text() != (folder / "validation" / "2.jsonl").read_text()  # the step decides
    assert accuracies.main([str(scores)]) == 0
    assert f"{folder}, step 1 | reward | T=1 | mean@4" in capsys.readouterr().out
    stored = json.loads((tmp_path / "answers.scores-reward.report.json").read_text())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    logged = next(line for line in lines if line["step"] == 1)
    assert stored["metrics"] == {
        name: logged[name] for name in logged if name.startswith(("val-core/", "val-aux/"))
    }


def cut(path: Path, count: int, rest: str = "") -> list[str]:
    """Keep the first lines of a file of answers; return all lines."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:count]) + rest)
    return lines


@pytest.fixture
def copied(answers, tmp_path) -> Path:
    for name in ("shared.jsonl", "shared.manifest.json"):
        (tmp_path / name).write_bytes((answers.parent / name).read_bytes())
    return tmp_path / "shared.jsonl"


def test_only_missing_answers_are_made(files, copied, monkeypatch):
    made, lines = [], cut(copied, 50, "\0\0\0")
    original = RayPPOTrainer.generate

    async def generate_one(self, prompt, index, sampling):
        made.append((prompt.ordinal, index))
        return await original(self, prompt, index, sampling)

    monkeypatch.setattr(RayPPOTrainer, "generate", generate_one)
    assert generate(files, copied) == 0
    assert made == [(-13, 2), (-13, 3)] and copied.read_text().startswith("".join(lines[:50]))
    assert generate(files, copied) == 0 and len(made) == 2 and len(read_answers(copied)) == 52


def test_answers_in_the_order_of_their_ends_are_complete(copied):
    """A process that was killed behind its last answer has not put them in order."""
    ordered = complete_answers(copied)[1]
    lines = copied.read_text().splitlines(keepends=True)
    copied.write_text("".join([*lines[::2], *lines[1::2]]))
    assert complete_answers(copied)[1] == ordered


def test_a_complete_file_is_in_the_order_of_the_questions(files, copied):
    lines = copied.read_text().splitlines(keepends=True)
    copied.write_text("".join(lines[::-1]))
    assert generate(files, copied) == 0 and copied.read_text() == "".join(lines)


# --- refusals ---


def refused(arguments: list[str], capsys) -> str:
    assert evaluate.main(arguments) == 2
    said = capsys.readouterr()
    (line,) = (line for line in said.err.splitlines() if not line.startswith("no effect: "))
    return line


def test_answers_of_other_settings_or_of_another_model_do_not_go_into_the_file(
    files, copied, capsys
):
    before = copied.read_bytes(), (copied.parent / "shared.manifest.json").read_bytes()
    pq.write_table(
        pa.Table.from_pylist([example("tests/letters", 0)]), copied.parent / "other.parquet"
    )
    for given, said in (
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0.9", "val_kwargs.top_p was 1.0, is 0.9"),
        ("data.val_max_samples=2", "prompts was"),
        (f"data.val_files=[{copied.parent}/other.parquet]", "data was ["),
    ):
        assert generate(files, copied, given) == 2
        line = capsys.readouterr().err
        assert said in line and "give another --out" in line
    tiny_model("llama", seed=1, hidden_size=16, intermediate_size=16).save_pretrained(
        copied.parent / "other"
    )
    tiny_tokenizer().save_pretrained(copied.parent / "other")
    arguments = ["generate", "grpo", *keys(files), "--out", str(copied), "--model"]
    assert evaluate.main([*arguments, str(copied.parent / "other")]) == 2
    assert "model was sha256:" in capsys.readouterr().err
    assert before == (copied.read_bytes(), (copied.parent / "shared.manifest.json").read_bytes())
    (copied.parent / "moved").symlink_to(files / "model")
    assert evaluate.main([*arguments, str(copied.parent / "moved")]) == 0


def test_models_that_cannot_be_evaluated(files, tmp_path, capsys):
    out = tmp_path / "out" / "a.jsonl"
    base = ["generate", "grpo", *keys(files), "--out", str(out)]
    assert "--model" in refused(base, capsys)
    assert "no config.json there" in refused([*base, "--model", f"{tmp_path}/nope"], capsys)
    assert "either --model" in refused([*base, "--model", "a/b", "--run", "c"], capsys)
    assert f"--run={tmp_path}" in refused([*base, "--run", str(tmp_path)], capsys)
    assert "recipe=nope: has no" in refused(
        ["generate", "nope", *base[2:], "--model", "a/b"], capsys
    )
    assert "must end in .jsonl" in refused([*base[:-1], "answers.json", "--model", "a/b"], capsys)
    assert not out.parent.exists()


# --- scores ---


def test_scores_are_those_of_any_variant_and_carry_its_name(files, copied, capsys):
    assert evaluate.main(["score", str(copied), own(files), "--name", "three", MODULUS]) == 0
    three = [json.loads(line) for line in (copied.parent / "shared.scores-three.jsonl").open()]
    assert len(three) == 13 and set(three[0]) > {
        "uid",
        "data_source",
        "acc",
        "reward",
        "pred",
        "length",
    }
    rows = list(read_answers(copied).values())
    first = [row["response"] for row in rows if row["ordinal"] == -1]
    assert three[0]["acc"] == [float(sum(map(ord, text)) % 3 == 0) for text in first]
    assert three[0]["length"] == [6.0] * 4 or max(three[0]["length"]) <= 6
    told = json.loads((copied.parent / "shared.scores-three.manifest.json").read_text())
    assert (
        told["scorer"] == "three"
        and told["scorers"] == ["reward"]
        and told["settings"]["trainer.seed"] == 1
    )


def failing(folder: Path, condition: str) -> str:
    """Return the override for a function that grades the answers at start and then fails where the
    condition holds."""
    (folder / "failing.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    length, index = extra_info['rollout']['response_length'], extra_info['index']\n"
        f"    if length > 1 and ({condition}):\n        return {{'a': 1.0}}[extra_info['absent']]\n"
        "    return 1.0 if len(solution_str) % 2 else -1.0\n"
    )
    return f"custom_reward_function.path={folder}/failing.py"


def test_failures_stand_beside_an_accuracy_and_negative_scores_are_none(
    files, copied, capsys, caplog
):
    assert evaluate.main(["score", str(copied), failing(copied.parent, "index == 0")]) == 0
    said = capsys.readouterr().out
    scores = copied.with_name("shared.scores-failing.jsonl")
    lost = [sum(json.loads(line)["crash"]) for line in scores.read_text().splitlines()]
    assert (
        0 < sum(lost) <= 8 and f"the scorer failed on {sum(lost) / 52:.1%} of the answers" in said
    )
    assert "KeyError: 'absent'" in caplog.text and caplog.text.count("Traceback") == 1
    assert accuracies.main([str(scores)]) == 0
    table = capsys.readouterr().out
    assert f"the scorer failed on {lost[0] / 36:.1%}" in table and "score -0." in table


def test_where_every_answer_failed_there_is_no_report(files, copied, capsys):
    override = failing(copied.parent, "data_source == 'tests/digits'")
    assert evaluate.main(["score", str(copied), override]) == 2
    said = capsys.readouterr().err
    assert "data_source='tests/digits'" in said and "KeyError: 'absent'" in said
    assert not list(copied.parent.glob("*.scores-*"))


def test_a_wrong_data_set_is_refused(files, copied, capsys):
    none = "custom_reward_function.path=null"
    model = ["reward_model.enable=True", "reward_model.weight=0.5"]
    assert evaluate.main(["score", str(copied), own(files), *model]) == 2
    assert "reward_model.enable=True: " in capsys.readouterr().err  # no model is loaded to score
    assert evaluate.main(["score", str(copied), none]) == 2
    said = capsys.readouterr().err
    assert (
        "no scorer for data_source='tests/letters'" in said and "data_source='tests/digits'" in said
    )
    assert "decides answers" in refused(["score", str(copied), "trainer.seed=3"], capsys)


def test_incomplete_answers_have_no_score(files, copied, capsys):
    cut(copied, 40, '{"half')
    assert "holds 40 of 52 answers; repeat its generate command" in refused(
        ["score", str(copied)], capsys
    )
    (copied.parent / "shared.manifest.json").unlink()
    assert "no shared.manifest.json beside it" in refused(["score", str(copied)], capsys)
    assert generate(files, copied) == 2  # and is no file to go on with


def test_a_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    out = tmp_path / "a.jsonl"
    command = [
        "generate",
        "dapo",
        "preset=script",
        "data.val_files=/nowhere/aime.parquet",
        "--model",
        "org/name",
    ]
    assert evaluate.main([*command, "--out", str(out)]) == 0
    assert "32 answers a question of /nowhere/aime.parquet" in capsys.readouterr().out
    assert evaluate.main(["score", str(out), "--name", "x"]) == 0
    assert not any(tmp_path.iterdir())


# --- other engines ---


@pytest.mark.slow
def test_engines_of_a_cluster_give_the_same_answers(files, answers, tmp_path):
    """Two engine actors and no learner rank: greedy and short, so that rounding cannot show."""
    greedy = (
        "actor_rollout_ref.rollout.val_kwargs.do_sample=False",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
    )
    over = ("trainer.backend=ray", "trainer.n_gpus_per_node=2")
    assert generate(files, tmp_path / "local.jsonl", *greedy) == 0
    assert generate(files, tmp_path / "ray.jsonl", *greedy, *over) == 0
    assert (tmp_path / "ray.jsonl").read_bytes() == (tmp_path / "local.jsonl").read_bytes()


def test_what_decides_on_answers_holds_no_secret():
    config = examine("grpo", TYPED).config
    assert str(convert.as_tree(config)).count(SECRET) == len(TYPED), "the configuration has them"
    assert SECRET not in str(evaluate.deciding(config))


def test_answers_have_to_fit_into_the_models_positions(tmp_path):
    folder = write_lengths(tmp_path)
    config = configured(
        folder,
        "run",
        "data.max_prompt_length=256",
        "data.max_response_length=57",
        f"data.val_files={folder / 'long.parquet'}",
    )
    expected = "data.val_files has 200 tokens and 57 may follow"
    with (
        RayPPOTrainer.for_answering(config) as trainer,
        pytest.raises(InputError, match=expected),
        trainer.answering(),
    ):
        pass


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}:"


def test_a_file_that_was_begun_yesterday_is_completed_with_yesterdays_date(
    files, tmp_path, monkeypatch
):
    """A chat template that writes the date would make other prompts of the same questions."""
    model = tmp_path / "model"
    shutil.copytree(files / "model", model)
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": DATED}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    out = tmp_path / "dated.jsonl"
    for day in (1, 2):
        monkeypatch.setattr(
            vocabulary,
            "date",
            Mock(today=lambda day=day: date(2026, 1, day), fromisoformat=date.fromisoformat),
        )
        assert generate(files, out, model=str(model)) == 0
        assert all(line["prompt"].startswith("01 Jan 2026") for line in read_answers(out).values())
        cut(out, 50)
