"""Reports and result tables: generated from recorded runs, self-contained, and with nothing of the machine in them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
import socket
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from core.config import Config, compose, to_yaml
from core.tracking.run_manifest import ROOT
from core.tracking.validation import validation_metrics
from results import publish as publishing
from results import report
from results.publish import publish
from results.reporting import readme_tables as result_tables
from results.reporting import summaries
from results.reporting.comparison import accuracy_by_question, paired_comparison, seed_interval
from results.reporting.run_reader import NotARun, RecordedRun, load_run
from results.reporting.summaries import summarise
from tests.core.synthetic import configured, make_run, records


def seeded(seed: int, **changes) -> Config:
    named = {"trainer.experiment_name": f"lab_s{seed}", "trainer.reference": "grpo-lab"}
    return configured({"trainer.seed": seed, **named, **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """outputs/ with three seeds of one experiment and one run of another, with another clip range."""
    root = tmp_path_factory.mktemp("outputs")
    for seed in (1, 2, 3):
        make_run(root / "grpo" / f"lab_s{seed}", seeded(seed))
    other = seeded(1, **{"actor_rollout_ref.actor.clip_ratio_c": 5.0})
    make_run(root / "ppo" / "lab_s1", other, rate=0.1, critic=True)
    return root


def build(runs: Path, out: Path, *names: str) -> tuple[str, str]:
    assert report.main([*(str(runs / name) for name in names), "--out", str(out)]) == 0
    return (out / "report.md").read_text(), (out / "report.html").read_text()


class Page(HTMLParser):
    """Tags, ids and addresses of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.addresses.append(value)


# --- the page ---


def test_the_page_is_one_file(runs, tmp_path):
    _, text = build(runs, tmp_path, "grpo/lab_s1", "ppo/lab_s1")
    page = Page(text)
    assert page.tags.count("svg") >= 10
    assert not {"link", "iframe", "img", "object"} & set(page.tags) and page.tags.count("script") == 1
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(page.ids) == len(set(page.ids))
    assert len(text) < 600_000


def test_one_run_says_what_was_learnt(runs, tmp_path, capsys):
    md, text = build(runs, tmp_path, "grpo/lab_s1")
    ours = validation_metrics(records(20, 1, 200))
    value, low, high = (
        100 * ours[f"val-{name}"]
        for name in ("core/lab/hops/acc/mean@1", "aux/lab/hops/acc/mean@1/ci_low", "aux/lab/hops/acc/mean@1/ci_high")
    )
    after = f"→ {value:.1f} [{low:.1f}, {high:.1f}] % (mean@1, 200 questions, step 20)"
    assert after in md and after in text and after in capsys.readouterr().out
    before, now = (accuracy_by_question(records(step, 1, 200))["lab/hops"] for step in (0, 20))
    paired = paired_comparison(before, now)
    assert f"{100 * paired.difference.value:+.1f} [" in md
    assert f"{paired.better} up, {paired.worse} down" in md
    for title in ("Validation accuracy", "Reward", "Response length", "Entropy", "Clip fractions", "Time by phase"):
        assert title in md and title in text
    assert "cfkp#p" in text and "greedy, at most 16 tokens" in text
    assert "Explained variance" not in text and "Comparison" not in text


def test_the_last_validation_is_reported_not_the_best(tmp_path):
    folder = make_run(tmp_path / "grpo" / "falls", steps=4, test_every=1, questions=50, rate=2.0)
    tail = records(0, 1, 50)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1].update(validation_metrics(tail))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (result,) = summarise(load_run(folder))["results"]
    accuracies = [value for _, value in result["curve"]]
    assert result["after"]["estimate"]["value"] == accuracies[-1] < max(accuracies)
    assert result["after"]["step"] == 4


def test_seeds_are_one_experiment(runs, tmp_path):
    md, text = build(runs, tmp_path, "grpo/lab_s1", "grpo/lab_s2", "grpo/lab_s3")
    finals = [validation_metrics(records(20, seed, 200))["val-core/lab/hops/acc/mean@1"] for seed in (1, 2, 3)]
    e = seed_interval(finals)
    expected = f"{100 * e.value:.1f} ± {100 * e.sd:.1f} [{100 * e.low:.1f}, {100 * e.high:.1f}] %"
    assert f"{expected} (mean@1, 200 questions, step 20, 3 seeds)" in md
    assert md.startswith("# grpo/lab\n") and "## Comparison" not in md
    assert "Where the runs differ" not in md


def test_experiments_are_compared_question_by_question(runs, tmp_path):
    md, _ = build(runs, tmp_path, "grpo/lab_s1", "ppo/lab_s1")
    a = accuracy_by_question(records(20, 1, 200))["lab/hops"]
    b = accuracy_by_question(records(20, 1, 200, rate=0.1))["lab/hops"]
    paired = paired_comparison(a, b)
    d = paired.difference
    row = next(line for line in md.splitlines() if line.startswith("| ppo/lab_s1 − grpo/lab_s1 "))
    expected = (
        f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}], {paired.better} up, {paired.worse} down"
    )
    assert expected in row and "| 200 |" in row
    different = md.split("### Where the runs differ")[1].split("###")[0]
    assert "actor_rollout_ref.actor.clip_ratio_c | 3.0 | 5.0" in different
    assert "seed" not in different and len(different.strip().splitlines()) == 3
    assert "Explained variance of the critic" in md


def test_several_seeds_are_compared_with_the_mean_of_each_question(runs, tmp_path):
    md, _ = build(runs, tmp_path, "grpo/lab_s1", "grpo/lab_s2", "grpo/lab_s3", "ppo/lab_s1")
    by_seed = [accuracy_by_question(records(20, seed, 200))["lab/hops"] for seed in (1, 2, 3)]
    mean = {uid: sum(seed[uid] for seed in by_seed) / 3 for uid in by_seed[0]}
    d = paired_comparison(mean, accuracy_by_question(records(20, 1, 200, rate=0.1))["lab/hops"]).difference
    row = next(line for line in md.splitlines() if line.startswith("| ppo/lab_s1 − grpo/lab "))
    assert f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]" in row


def test_an_unfinished_run_is_called_one(tmp_path, capsys):
    folder = make_run(tmp_path / "grpo" / "short", steps=10, status="stopped")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "total_steps": 40}))
    report.main([str(folder)])
    assert "step 10; stopped at step 10 of 40)" in capsys.readouterr().out
    assert (folder / "report.html").exists()


def test_a_run_without_validation_still_has_a_page(tmp_path):
    folder = make_run(tmp_path / "grpo" / "blind", steps=10, test_every=1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not k.startswith("val-")} for line in lines[1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    shutil.rmtree(folder / "validation")
    (folder / "samples.jsonl").unlink()
    md, _ = build(folder.parent, tmp_path / "out", "blind")
    rewards = [line["critic/rewards/mean"] for line in kept]
    assert f"{sum(rewards[:2]) / 2:.3f} in the first 2 steps, {sum(rewards[-2:]) / 2:.3f} in the last 2 steps" in md
    assert "no validation was recorded" in md and "Reward" in md and "Samples" not in md
    assert "Accuracy in percent" not in md and "| experiment |" not in md
    assert re.search(r"\| grpo/blind \| .* \| no validation \|", md)


def test_generated_text_cannot_act_as_markup(tmp_path):
    folder = make_run(tmp_path / "grpo" / "evil", steps=1, test_every=1, questions=5)
    rows = [{"input": "a | b", "output": "<script>alert(1)</script>\n| x", "gts": "<b>", "score": 0.0, "step": 0}]
    (folder / "samples.jsonl").write_text(json.dumps(rows[0]) + "\n")
    md, text = build(folder.parent, tmp_path / "out", "evil")
    assert text.count("<script") == 1 and "<script>alert" not in text and "&lt;script&gt;alert(1)" in text
    assert "<script" not in md and "a \\| b" in md
    assert "&lt;script&gt;alert(1)&lt;/script&gt;<br>\\| x" in md


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def test_a_page_loads_nothing_and_says_so(runs, tmp_path):
    """Texts of a run may be anybody's."""
    folder = tmp_path / "grpo" / "run"
    shutil.copytree(runs / "grpo" / "lab_s1", folder)
    row = {"uid": "q", "data_source": "lab", "input": "<img src=//evil.example>", "output": "b", "gts": "c", "score": 0}
    (folder / "samples.jsonl").write_text("".join(json.dumps({**row, "step": step}) + "\n" for step in (0, 20)))
    _, text = build(folder.parent, tmp_path / "out", "run")
    assert "evil" in text and "<img" not in text
    assert POLICY in text and text.index(POLICY) < text.index("<style")


def test_data_that_is_drawn_from_the_seed_makes_no_other_experiment(tmp_path):
    def group(seed, files):
        config = {"trainer.seed": seed, "data.train_files": [files], "trainer.experiment_name": f"lab{seed}"}
        return RecordedRun(tmp_path, config, {"recipe": "search_r1"}, (), {}, ()).experiment

    assert group(1, "./kb/seed-1/train.parquet") == group(12, "./kb/seed-12/train.parquet")
    assert group(1, "./kb/seed-12/train.parquet") != group(12, "./kb/seed-12/train.parquet")
    assert group(1, "./kb/seed-1/train.parquet") != group(1, "./kb/seed-1/other.parquet")


LAB = ROOT / "results" / "grpo"
RECORDED = json.loads((LAB / "lab-seed1/manifest.json").read_text())["models"]["actor"]["sha256"]  # of the base weights


def another_seed(folder: Path, seed: int, *changes: str, drop: str = "") -> Path:
    """What this version would have written of another seed of the published lab runs, with their outcome."""
    shutil.copytree(LAB / "lab-seed1", folder)
    config = compose("grpo", ["preset=lab", f"trainer.seed={seed}", "trainer.backend=ray", *changes])
    tree = yaml.safe_load(to_yaml(config))
    tree["trainer"].pop(drop, None)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    manifest = json.loads((folder / "manifest.json").read_text()) | {"run": folder.name}
    manifest["models"] = {"actor": {"path": "p", "sha256": RECORDED}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "summary.json").write_text(json.dumps(summarise(load_run(folder))))
    return folder


def test_a_new_seed_joins_published_ones_that_another_version_wrote(tmp_path):
    """It has a key that theirs lack, or lacks one that they have."""
    results = tmp_path / "results"
    for seed in (1, 2, 3):
        shutil.copytree(LAB / f"lab-seed{seed}", results / "grpo" / f"lab-seed{seed}")
    another_seed(results / "grpo" / "lab-seed4", 4, "trainer.test_freq=10")
    another_seed(results / "grpo" / "lab-seed5", 5, "actor_rollout_ref.actor.clip_ratio_high=0.28")
    another_seed(results / "grpo" / "lab-seed6", 6, drop="resume_with_changes")  # a key of a later version, say
    runs = [load_run(path) for path in sorted((results / "grpo").iterdir())]
    assert [[run.seed for run in group] for group in summaries.group_runs(runs)] == [[1, 2, 3, 4, 6], [5]]
    found = result_tables.experiments(result_tables.read_summaries(results))
    assert [[run["seed"] for run in each.runs] for each in found] == [[1, 2, 3, 4, 6], [5]]
    table = result_tables.run_table(result_tables.read_summaries(results))
    assert [row[-1] for row in table.rows] == [RECORDED[:12]] * 6


def test_runs_of_two_bases_are_two_experiments():
    """One whose base is not recorded is of neither."""
    one = load_run(LAB / "lab-seed1")

    def run(seed: int, base: str | None) -> RecordedRun:
        models = {"actor": {"path": "p", "sha256": base}} if base else {}
        config = {**one.config, "trainer.seed": seed}
        return dataclasses.replace(one, config=config, manifest={**one.manifest, "models": models})

    runs = [run(seed, base) for seed, base in {1: "a" * 64, 2: "a" * 64, 3: "b" * 64, 4: None}.items()]
    assert [[run.seed for run in group] for group in summaries.group_runs(runs)] == [[1, 2], [3], [4]]


def test_names_of_experiments():
    for names, expected in (
        (["grpo/lab_s1", "grpo/lab_s2"], "grpo/lab"),
        (["grpo/qwen2.5-0.5b-seed1", "grpo/qwen2.5-0.5b-seed12"], "grpo/qwen2.5-0.5b"),
        (["grpo/lab_s1"], "grpo/lab_s1"),
        (["ppo/runs", "ppo/runs2"], "ppo/runs"),
        (["ppo/lab1", "ppo/lab2"], "ppo/lab"),
    ):
        assert summaries.group_name(names) == expected


# --- bad input ---


def test_bad_folders_end_in_one_line(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "is not a run folder: it has no config.yaml, manifest.json, metrics.jsonl" in capsys.readouterr().err
    folder = make_run(tmp_path / "grpo" / "run", steps=2, questions=5)
    (folder / "manifest.json").write_text("{")
    assert report.main([str(folder)]) == 2
    assert "damaged" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        report.main([])


def without(*keys: str):
    def change(text: str) -> str:
        tree = json.loads(text)
        part = tree
        for key in keys[:-1]:
            part = part[key]
        del part[keys[-1]]
        return json.dumps(tree)

    return change


MALFORMED = {
    "config.yaml": (
        "- 1\n- 2\n",
        "",
        "a: [",
        "a: !!python/object/apply:os.system [ls]",
        "- " * 3000 + "1",
        b"\xff\xfe\0",
    ),
    "manifest.json": (
        *(without("run"), without("sessions"), without("sessions", 0, "hardware"), without("sessions", 0, "git")),
        lambda text: json.dumps({**json.loads(text), "sessions": []}),
        lambda text: json.dumps({**json.loads(text), "run": ["a"]}),
        lambda text: json.dumps({**json.loads(text), "total_steps": "9"}),
        "[" * 100_000,
    ),
    "metrics.jsonl": (
        *("7\n", '{"a": 1}\n', '{"step": 1, "a": "high"}\n', '{"step": 1, "a": NaN}\n'),
        b'{"step": 1, "\xff": 1}\n{"step": 2}\n',
    ),
    "samples.jsonl": (
        '{"input": "a", "output": "b", "score": 1}\n',
        '{"step": 1, "input": "a", "output": "b", "score": "1"}\n',
        "[1]\n",
    ),
    "validation/0.jsonl": (
        '{"acc": [1]}\n',
        '{"uid": "a", "data_source": "b", "acc": ["right"]}\n',
        '{"uid": "a", "data_source": "b", "acc": 1}\n',
    ),
}


def test_a_malformed_run_is_named_and_the_others_are_reported(tmp_path, capsys, monkeypatch):
    reported = []
    monkeypatch.setattr(report, "write_report", lambda runs, out, *_: reported.extend(runs) or out)
    bad, good = (make_run(tmp_path / "grpo" / name, steps=2, test_every=1, questions=3) for name in ("bad", "good"))
    for file, contents in MALFORMED.items():
        right = (bad / file).read_bytes()
        for content in contents:
            content = content(right.decode()) if callable(content) else content
            (bad / file).write_bytes(content.encode() if isinstance(content, str) else content)
            with pytest.raises(NotARun, match=re.escape(str(bad / file.partition("/")[0]))):
                load_run(bad)
        (bad / file).write_bytes(right)
    load_run(bad)
    (bad / "metrics.jsonl").unlink()
    (bad / "metrics.jsonl").mkdir()
    assert report.main([str(bad), str(good), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith("error: ") and str(bad / "metrics.jsonl") in err
    assert "report: " in out and [run.folder.name for run in reported] == ["good"]


# --- publishing ---


def test_a_published_run_tells_the_same(runs, tmp_path, capsys):
    results = tmp_path / "results"
    assert publishing.main([str(runs / "grpo/lab_s1"), "--results", str(results)]) == 0
    copy = results / "grpo" / "lab_s1"
    assert sorted(path.name for path in copy.iterdir()) == [
        "config.yaml",
        "manifest.json",
        "metrics.csv",
        "samples.jsonl.gz",
        "summary.json",
        "validation.jsonl.gz",
    ]
    capsys.readouterr()
    lines = []
    for folder in (runs / "grpo/lab_s1", copy):
        report.main([str(folder), "--out", str(tmp_path / "out")])
        lines.append(capsys.readouterr().out.splitlines()[0])
    assert lines[0] == lines[1]
    original, copied = (summarise(load_run(folder)) for folder in (runs / "grpo/lab_s1", copy))
    assert copied["results"][0]["change"] == original["results"][0]["change"]
    assert json.loads((copy / "summary.json").read_text()) == copied


def test_a_copy_may_have_another_name(runs, tmp_path, capsys):
    arguments = [str(runs / "grpo/lab_s1"), "--as", "ppo/other", "--results", str(tmp_path)]
    assert publishing.main(arguments) == 0
    assert f"published as {tmp_path}/ppo/other" in capsys.readouterr().out
    assert load_run(tmp_path / "ppo" / "other").name == "ppo/other"
    assert publishing.main([str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_nothing_of_the_machine_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.cluster")
    monkeypatch.setattr(
        "sys.orig_argv", ["/home/jane/venv/bin/python", "-m", "x", "a=/scratch/jane/d.parquet", "on=node-17.cluster"]
    )
    files = ("/home/jane/data/gsm8k/train.parquet",)
    config = configured({"data.train_files": files, "actor_rollout_ref.model.path": f"{ROOT}/outputs/m"})
    folder = make_run(tmp_path / "grpo" / "run", config, steps=2, questions=5)
    copy = publish(folder, tmp_path / "results" / "grpo" / "run")
    text = "".join(path.read_text() for path in copy.iterdir() if path.suffix != ".gz")
    text += "".join(gzip.decompress(path.read_bytes()).decode() for path in copy.glob("*.gz"))
    for secret in ("jane", "/home", "/scratch", "node-17", str(ROOT), str(tmp_path)):
        assert secret not in text, secret
    assert "<path>/train.parquet" in text and "a=<path>/d.parquet" in text and "on=<host>" in text
    assert yaml.safe_load((copy / "config.yaml").read_text())["actor_rollout_ref"]["model"]["path"] == "outputs/m"


def test_long_runs_are_thinned_and_large_validations_keep_their_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "METRICS_ROWS", 10)
    monkeypatch.setattr(publishing, "VALIDATION_BYTES", 100)
    folder = make_run(tmp_path / "grpo" / "run", steps=60, test_every=7, questions=20)
    copy = publish(folder, tmp_path / "results" / "grpo" / "long")
    steps = [row["step"] for row in load_run(copy).metrics]
    assert len(steps) < 22 and steps[-1] == 60 and set(range(0, 60, 7)) <= set(steps)
    assert list(load_run(copy).validation) == [0, 56]
    summary = json.loads((copy / "summary.json").read_text())
    assert summary["run"] == "long" and summary["results"][0]["change"]["difference"]["n"] == 20


# --- result tables ---

ROW = {"recipe": "grpo", "model": "outputs/lab/base", "method": "GRPO", "data_source": "lab/hops", "tag": "R"}
LAB_ROW = {
    **ROW,
    "id": "grpo-lab",
    "value": 98,
    "source": "a paper, table 1",
    "command": "bash recipes/grpo/run_lab.sh",
}
OTHER_ROW = {**ROW, "id": "ppo-other", "value": 69.5, "source": "a page", "command": "bash run.sh", "note": "strict"}
REFERENCES = {"tags": {"R": "read"}, "references": [LAB_ROW, OTHER_ROW]}


@pytest.fixture
def repository(runs, tmp_path) -> Path:
    results = tmp_path / "results"
    for seed in (1, 2, 3):
        publish(runs / f"grpo/lab_s{seed}", results / "grpo" / f"lab_s{seed}")
    (results / "references.yaml").write_text(yaml.safe_dump(REFERENCES))
    (tmp_path / "README.md").write_text(f"# Top\n\n{result_tables.BEGIN}\nold\n{result_tables.END}\n\nrest\n")
    return tmp_path


def test_tables_are_generated_from_the_summaries(repository, capsys):
    results = repository / "results"
    assert report.main(["--index", "--results", str(results)]) == 0
    text, top = (results / "README.md").read_text(), (repository / "README.md").read_text()
    finals = [validation_metrics(records(20, seed, 200))["val-core/lab/hops/acc/mean@1"] for seed in (1, 2, 3)]
    e = seed_interval(finals)
    after = f"{100 * e.value:.1f} ± {100 * e.sd:.1f} [{100 * e.low:.1f}, {100 * e.high:.1f}]"
    for table, facts in ((text, ("| 200 | 3 |", "greedy, at most 16 tokens")), (top, ("| 200 questions of ", "| 3 |"))):
        row = next(line for line in table.splitlines() if line.startswith("| grpo/lab |"))
        assert after in row and all(fact in row for fact in facts)
    reference = next(line for line in text.splitlines() if "a paper, table 1 [R]" in line)
    assert "| 98.0 |" in reference and f"{after} (grpo/lab)" in reference
    assert "not run (`bash run.sh`)" in text
    assert "[grpo/lab_s2](grpo/lab_s2/)" in text and "- ppo-other: strict" in text
    assert top.startswith("# Top\n") and top.endswith("\n\nrest\n") and "\nold\n" not in top


def test_what_joins_an_experiment_and_what_is_another(repository, runs):
    """A headline has several seeds; other settings are another experiment, and the same seed again is no other draw."""
    results = repository / "results"
    for name, target in (("ppo/lab_s1", "ppo/lab_s1"), ("ppo/lab_s1", "grpo/lab_s4"), ("grpo/lab_s2", "grpo/rerun")):
        publish(runs / name, results / target)
    report.main(["--index", "--results", str(results)])
    assert "| ppo/lab_s1 |" in (results / "README.md").read_text()
    assert "ppo/lab_s1" not in (repository / "README.md").read_text()
    found = {each.name: len(each.runs) for each in result_tables.experiments(result_tables.read_summaries(results))}
    assert found == {"grpo/lab": 3, "grpo/lab_s4": 1, "grpo/rerun": 1, "ppo/lab_s1": 1}


def test_a_recorded_command_is_shown_as_the_script_that_was_typed():
    recorded = (
        "/x/python -m recipes.grpo.main_grpo preset=lab trainer.backend=ray -- trainer.seed=3 trainer.cpu_threads=1"
    )
    assert result_tables.short_command(recorded) == "bash recipes/grpo/run_lab.sh trainer.cpu_threads=1"
    assert result_tables.short_command("python -m recipes.ppo.main_ppo a=1") == "python -m recipes.ppo.main_ppo a=1"
