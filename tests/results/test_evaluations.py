"""Published evaluations: from answers that were generated to the tables, and what is not published or kept out."""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from core import evaluate
from core.tracking.confidence_intervals import Estimate
from results import publish, report
from results.reporting.accuracies import summary
from results.reporting.evaluations import read_evaluations
from results.reporting.numbers import percent
from results.reporting.pages import markdown_cell
from results.reporting.readme_tables import render
from results.reporting.references import named_runs, read_references, reference_table, set_table
from tests.tiny import tiny_model, tiny_tokenizer

ID = "grpo-deepseek7b-gsm8k"  # of this repository, so that generate accepts it; what it holds here stands below
SIZES = {"nq": 9, "triviaqa": 4}
DECODING = "actor_rollout_ref.rollout.val_kwargs."


HERE = "<path>/model"  # as a published record has the folder of the model


def row(**changes) -> dict:
    found = {
        **{"id": ID, "recipe": "grpo", "model": "a/base", "released": HERE, "method": "GRPO"},
        **{"data_source": ", ".join(SIZES), "value": 40.0, "values": {"nq": 60.0, "triviaqa": 20.0}},
        **{"questions": SIZES, "metric": "mean@2", "source": "a paper", "tag": "R", "command": "bash x.sh"},
        "settings": {"algorithm.adv_estimator": "rloo", f"{DECODING}n": 2, f"{DECODING}do_sample": True},
        "departures": [
            {"what": "prompts occur once", "why": "of training"},
            {"what": "the index differs", "why": "of both", "evaluation": True},
        ],
    }
    return {key: value for key, value in {**found, **changes}.items() if value is not None}


def example(source: str, index: int) -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "abcd"[index % 4] * (1 + index % 5) + str(index)}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["a"]}},
        "extra_info": {"index": index, "split": "test"},
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """An evaluation of a tiny model: generated, given some right answers, and scored."""
    folder = tmp_path_factory.mktemp("evaluated") / "outputs/grpo/released-tiny"
    folder.mkdir(parents=True)
    tiny_model("llama", hidden_size=16, intermediate_size=16).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for source, count in SIZES.items():
        examples = [example(source, index) for index in range(count)]
        pq.write_table(pa.Table.from_pylist(examples), folder / f"{source}.parquet")
    keys = {
        "data.val_files": f"[{','.join(str(folder / f'{source}.parquet') for source in SIZES)}]",
        **{"data.max_prompt_length": 64, "data.max_response_length": 6, "trainer.reference": ID},
        **{f"{DECODING}n": 2, f"{DECODING}do_sample": True, f"{DECODING}temperature": 1.0, "trainer.device": "cpu"},
        **{"actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.dtype": "float32"},
        **{"trainer.cpu_threads": 1, "trainer.n_gpus_per_node": 1},
    }
    out = folder / "evaluation/answers.jsonl"
    words = [f"{key}={value}" for key, value in keys.items()]
    assert evaluate.main(["generate", "grpo", "--model", str(folder / "model"), "--out", str(out), *words]) == 0
    lines = list(map(json.loads, out.read_text().splitlines()))
    for number, line in enumerate(lines):  # a model of 16 dimensions has none right
        if number % 3:
            line["response"] = "<answer>a</answer>"
            line["segments"] = [{"role": "policy", "text": line["response"]}]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evaluate.main(["score", str(out), "--name", "own"]) == 0
    return folder


@pytest.fixture
def folder(shared, tmp_path) -> Path:
    """A copy that a test may damage, of a model at the same place."""
    (tmp_path / "outputs/grpo").mkdir(parents=True)
    return Path(shutil.copytree(shared, tmp_path / "outputs/grpo/released-tiny"))


@pytest.fixture
def scores(folder) -> Path:
    return folder / "evaluation/answers.scores-own.jsonl"


@pytest.fixture
def results(tmp_path) -> Path:
    (tmp_path / "results").mkdir()
    return with_row(tmp_path / "results", row())


def with_row(results: Path, *rows: dict) -> Path:
    table = {"tags": {"R": "read"}, "references": list(rows)}
    (results / "references.yaml").write_text(yaml.safe_dump(table))
    return results


def published(scores: Path, results: Path, *words: str) -> int:
    return publish.main([str(scores), "--results", str(results), *words])


def line_of(results: Path) -> list[str]:
    known = read_references(results)
    (found,) = reference_table(known, named_runs(results, (), known)).rows
    return found


# --- from scores to the tables ---


def test_the_record_has_model_data_settings_and_each_question(scores, results, shared, capsys):
    assert published(scores, results) == 0
    assert "published as" in capsys.readouterr().out
    target = results / "grpo/released-tiny"
    assert sorted(path.name for path in target.iterdir()) == ["evaluation.json", "scores.jsonl.gz"]
    record = json.loads((target / "evaluation.json").read_text())
    weights = record["model"]["weights"]
    assert weights.startswith("sha256:") and record["settings"]["model"] == weights
    assert [len(one["sha256"]) for one in record["data"]] == [64, 64]
    assert record["settings"][f"{DECODING}n"] == 2 and record["scorers"] == ["qa_em"] and record["reference"] == ID
    assert str(shared.parent) not in (target / "evaluation.json").read_text()  # no path of this machine
    rows = list(map(json.loads, gzip.decompress((target / "scores.jsonl.gz").read_bytes()).splitlines()))
    assert len(rows) == 13 and {len(one["acc"]) for one in rows} == {2}
    for source, metrics in summary(scores).sources.items():
        stored = {one["metric"]: one for one in record["results"] if one["data_source"] == source}
        for metric, estimate in metrics.items():
            assert Estimate(**stored[metric]["estimate"]) == estimate and stored[metric]["questions"] == SIZES[source]
        mean = statistics.fmean(x for one in rows if one["data_source"] == source for x in one["acc"])
        assert 0 < mean < 1 and stored["mean@2"]["estimate"]["value"] == pytest.approx(mean)


def test_it_stands_beside_the_number_of_its_row_and_in_the_index(scores, results):
    assert published(scores, results) == 0 == report.main(["--index", "--results", str(results)])
    assert report.main(["--index", "--check", "--results", str(results)]) == 0
    found = summary(scores)
    macro = found.macro["mean@2"]
    line = line_of(results)
    assert line[6] == f"{percent(macro)} (grpo/released-tiny)" and "[" in line[6]
    assert line[7] == f"{100 * macro.value - 40:+.1f}" and line[8] == "the index differs"
    (record,) = read_evaluations(results)
    assert line[9] == f"measured (the released checkpoint evaluated, not trained here, {record['commit']})"
    known = read_references(results)
    sets = set_table(known, named_runs(results, (), known)).rows
    assert [(one[2], one[4]) for one in sets] == [(s, percent(found.sources[s]["mean@2"])) for s in SIZES]
    text = render(results)
    lines = text.split("## Evaluations")[1].split("## Reported")[0].splitlines()
    listed = [line for line in lines if "released-tiny" in line]
    assert len(listed) == sum(map(len, found.sources.values()))
    assert f"| {record['model']['weights']} | nq | mean@2 | 9 | {percent(found.sources['nq']['mean@2'])} |" in listed[0]
    assert f"| T=1 | qa_em | {ID} |" in listed[0]
    shutil.rmtree(results / "grpo")
    assert "## Evaluations" not in render(results)


def test_the_rows_own_model_counts_where_nothing_is_trained(scores, results):
    settings = {"trainer.val_only": True, f"{DECODING}n": 2}
    with_row(results, row(model=HERE, released=None, settings=settings))
    assert published(scores, results, "--as", "grpo/cot") == 0
    line = line_of(results)
    assert line[6].endswith("(grpo/cot)") and line[9].startswith("measured (evaluated, nothing is trained, ")
    assert line[8] == "prompts occur once; the index differs"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"released": "o/m"}, "actor_rollout_ref.model.path is <path>/model here, o/m there"),
        ({"released": None}, "the row is trained, and it names no released checkpoint, which <path>/model could be"),
        ({"recipe": "dapo"}, "the recipe is grpo here, dapo there"),
        ({"settings": {f"{DECODING}top_p": 0.5}}, f"{DECODING}top_p is 1.0 here, 0.5 there"),
        ({"settings": {"data.val_max_samples": 5}}, "data.val_max_samples is -1 here, 5 there"),
        ({"questions": {"nq": 9, "triviaqa": 5}}, "triviaqa has 4 questions here, 5 there"),
        ({"metric": "mean@1"}, "it has no mean@1 on nq; it has no mean@1 on triviaqa"),
        ({"data_source": "nq, popqa"}, "it has no mean@2 on popqa"),
    ],
)
def test_another_evaluation_is_listed_with_the_reason_and_fills_nothing(scores, results, changes, reason):
    assert published(scores, results) == 0
    with_row(results, row(**changes))
    assert line_of(results)[6] == ""
    text = render(results).split("### Runs that name a row and differ")[1]
    assert f"| [grpo/released-tiny](grpo/released-tiny/) | {ID} | {markdown_cell(reason)} |" in text


def test_another_scorer_keeps_it_out(folder, results):
    answers = folder / "evaluation/answers.jsonl"
    assert evaluate.main(["score", str(answers), "--scorer", "qa_em_format"]) == 0
    assert published(answers.with_name("answers.scores-qa_em_format.jsonl"), results) == 0
    assert line_of(results)[6] == ""
    assert f"| {ID} | it is scored by qa_em_format here, qa_em there |" in render(results)


# --- what is refused ---


def drop_an_answer(scores: Path) -> None:
    answers = scores.with_name("answers.jsonl")
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:-1]))


def change_an_answer(scores: Path) -> None:
    answers = scores.with_name("answers.jsonl")
    answers.write_text(answers.read_text().replace("<answer>a</answer>", "<answer>b</answer>", 1))


def swap_the_scores(scores: Path) -> None:
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    scores.write_text("".join(json.dumps({**line, "uid": f"other/{line['uid']}"}) + "\n" for line in lines))


def drop_a_score(scores: Path) -> None:
    scores.write_text("".join(scores.read_text().splitlines(keepends=True)[:-1]))


def change_manifest(scores: Path, **changes) -> None:
    path = scores.with_name("answers.manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


REFUSED = {
    "unfinished": (drop_an_answer, (), "answers.jsonl: holds 25 of 26 answers; repeat its generate command"),
    "unscored": (Path.unlink, (), "answers.scores-own.jsonl: does not exist; python -m core.evaluate makes one"),
    "scores that are cut": (drop_a_score, (), "holds 12 of 13 questions; score the answers again"),
    "other answers": (change_an_answer, (), "so these are scores of another file; score the answers again: python -m"),
    "other questions": (swap_the_scores, (), "13 questions: they are not those of "),
    "a run": (
        lambda scores: change_manifest(scores, model={"path": "a/global_step_2/actor", "run": "outputs/a", "step": 2}),
        (),
        "model=a/global_step_2/actor: is the checkpoint of a run, which was trained here; publish the run: python -m "
        "results.publish outputs/a",
    ),
    "another recipe": (
        lambda scores: None,
        ("--as", "dapo/tiny"),
        "--as=dapo/tiny: an evaluation of grpo is published as grpo/NAME; give such a name",
    ),
    "a name of three": (lambda scores: None, ("--as", "grpo/a/b"), "--as=grpo/a/b: an evaluation of grpo is published"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_published_is_one_line_and_writes_nothing(scores, results, case, capsys):
    damage, words, message = REFUSED[case]
    damage(scores)
    before = sorted(results.rglob("*"))
    assert published(scores, results, *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and sorted(results.rglob("*")) == before


def test_an_id_that_no_row_has_is_refused_at_publishing_and_in_the_index(scores, results, capsys):
    other = row(id="grpo-deepseek8b")
    with_row(results, other)
    assert published(scores, results) == 2
    error = capsys.readouterr().err
    assert f"trainer.reference={ID}: results/references.yaml has no row of this id" in error
    assert error.count("\n") == 1 and not (results / "grpo").exists()
    with_row(results, row())
    assert published(scores, results) == 0
    with_row(results, other)
    assert report.main(["--index", "--results", str(results)]) == 2
    assert f"grpo/released-tiny: trainer.reference={ID}: results/references.yaml has no row" in capsys.readouterr().err


def test_a_folder_that_exists_is_not_replaced(scores, results, capsys):
    assert published(scores, results) == 0
    before = (results / "grpo/released-tiny/evaluation.json").read_bytes()
    capsys.readouterr()
    assert published(scores, results) == 2
    error = capsys.readouterr().err
    assert "--as=grpo/released-tiny: " in error and "released-tiny exists, and an evaluation does not replace" in error
    assert error.endswith("give another name, or remove that folder first\n") and error.count("\n") == 1
    assert (results / "grpo/released-tiny/evaluation.json").read_bytes() == before
    assert published(scores, results, "--as", "grpo/second") == 0


def test_the_folder_of_an_evaluation_names_its_scores(folder, results, capsys):
    assert published(folder, results) == 2
    error = capsys.readouterr().err
    assert "is not a run folder" in error and error.count("\n") == 1
    assert error.endswith(
        f"an evaluation is published by its file of scores: {folder}/evaluation/answers.scores-own.jsonl\n"
    )


def test_one_without_a_row_is_listed_only(scores, results):
    manifest = json.loads(scores.with_name("answers.manifest.json").read_text())
    change_manifest(scores, config={**manifest["config"], "trainer.reference": None})
    assert published(scores, results) == 0
    assert line_of(results)[6] == "" and "| T=1 | qa_em |  | " in render(results)
    assert "### Runs that name a row and differ" not in render(results)
