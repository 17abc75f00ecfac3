"""Reports and result tables: generated from recorded runs, self-contained, and with nothing of the
machine in them."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
import re
import shutil
import socket
from pathlib import Path

import pytest
import yaml

from core.config.composition import compose
from core.config.convert import to_yaml
from core.config.schema import Config
from core.tracking.metrics import PARTS, REST
from core.tracking.run_manifest import ROOT
from core.tracking.validation import validation_metrics
from results import publish as publishing
from results import report
from results.publish import publish
from results.reporting import readme_tables as result_tables
from results.reporting import real_pages, summaries
from results.reporting.comparison import accuracy_by_question, paired_comparison, seed_interval
from results.reporting.curves import PANELS, _metric_panel
from results.reporting.pages import PHASE_COLOURS
from results.reporting.run_reader import NotARun, RecordedRun, load_run, scrub
from results.reporting.run_report import headline
from results.reporting.summaries import summarise
from tests.core.synthetic import configured, make_run, records

LAB = ROOT / "results" / "grpo"
ACCURACY = "val-core/lab/hops/acc/mean@1"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def seeded(seed: int, **changes) -> Config:
    named = {"trainer.experiment_name": f"lab_s{seed}"}
    return configured({"trainer.seed": seed, **named, **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """outputs/ with three seeds of one experiment and one run of another, with another clip
    range."""
    root = tmp_path_factory.mktemp("outputs")
    for seed in (1, 2, 3):
        make_run(root / "grpo" / f"lab_s{seed}", seeded(seed))
    other = seeded(1, **{"actor_rollout_ref.actor.clip_ratio_c": 5.0})
    make_run(root / "ppo" / "lab_s1", other, rate=0.1, critic=True)
    return root


def build(runs: Path, out: Path, *names: str) -> tuple[str, str]:
    assert report.main([*(str(runs / name) for name in names), "--out", str(out)]) == 0
    return (out / "report.md").read_text(), (out / "report.html").read_text()


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def interval_of_seeds() -> str:
    """What a table has for the three seeds of ``runs``."""
    e = seed_interval([validation_metrics(records(20, seed, 200))[ACCURACY] for seed in (1, 2, 3)])
    return f"{100 * e.value:.1f} ± {100 * e.sd:.1f} [{100 * e.low:.1f}, {100 * e.high:.1f}]"


# --- the page ---


def test_one_run_says_what_was_learnt_in_one_file(runs, tmp_path, capsys):
    md, text = build(runs, tmp_path, "grpo/lab_s1")
    ours = validation_metrics(records(20, 1, 200))
    low, high = (100 * ours[f"val-aux/lab/hops/acc/mean@1/ci_{end}"] for end in ("low", "high"))
    after = (
        f"→ {100 * ours[ACCURACY]:.1f} [{low:.1f}, {high:.1f}] % (mean@1, 200 questions, step 20)"
    )
    assert after in md and after in text and after in capsys.readouterr().out
    paired = paired_comparison(
        *(accuracy_by_question(records(step, 1, 200))["lab/hops"] for step in (0, 20))
    )
    assert (
        f"{100 * paired.difference.value:+.1f} [" in md
        and (f"{paired.better} up, {paired.worse} down") in md
    )
    for title in (
        "Validation accuracy",
        "Reward",
        "Response length",
        "Entropy",
        "Clip fractions",
        "Time by phase",
    ):
        assert title in md and title in text
    assert (
        "greedy, at most 16 tokens" in text
        and "Explained variance" not in text
        and "Comparison" not in text
    )
    assert text.count("<svg") >= 10 and text.count("<script") == 1 and len(text) < 600_000
    assert not re.search(
        r"<(link|iframe|img|object)\b|url\((?!#)|@import|(?:src|href)=\"(?!#)", text
    )
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_the_last_validation_is_reported_not_the_best(tmp_path):
    folder = make_run(tmp_path / "grpo" / "falls", steps=4, test_every=1, questions=50, rate=2.0)
    lines = lines_of(folder / "metrics.jsonl")
    lines[-1].update(validation_metrics(records(0, 1, 50)))
    write_lines(folder / "metrics.jsonl", lines)
    (result,) = summarise(load_run(folder))["results"]
    accuracies = [value for _, value in result["curve"]]
    assert (
        result["after"]["estimate"]["value"] == accuracies[-1] < max(accuracies)
        and result["after"]["step"] == 4
    )


def test_seeds_are_one_experiment(runs, tmp_path):
    md, _ = build(runs, tmp_path, "grpo/lab_s1", "grpo/lab_s2", "grpo/lab_s3")
    assert f"{interval_of_seeds()} % (mean@1, 200 questions, step 20, 3 seeds)" in md
    assert (
        md.startswith("# grpo/lab\n")
        and "## Comparison" not in md
        and "Where the runs differ" not in md
    )


def test_an_unfinished_run_and_one_without_validation_are_called_so(tmp_path, capsys):
    folder = make_run(tmp_path / "grpo" / "short", steps=10, test_every=1, status="stopped")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "total_steps": 40}))
    report.main([str(folder)])
    assert "step 10; stopped at step 10 of 40)" in capsys.readouterr().out
    kept = [
        {k: v for k, v in line.items() if not k.startswith("val-")}
        for line in lines_of(folder / "metrics.jsonl")
    ]
    write_lines(folder / "metrics.jsonl", kept[1:])
    shutil.rmtree(folder / "validation")
    md, _ = build(folder.parent, tmp_path / "out", "short")
    assert "no validation was recorded" in md and "| experiment |" not in md


def test_generated_text_cannot_act_as_markup_and_the_page_loads_nothing(tmp_path):
    folder = make_run(tmp_path / "grpo" / "evil", steps=1, test_every=1, questions=5)
    row = {
        "output": "<script>alert(1)</script>\n| x",
        "gts": "<img src=//evil.example>",
        "score": 0.0,
        "step": 0,
    }
    write_lines(folder / "samples.jsonl", [{"input": "a | b", **row}])
    md, text = build(folder.parent, tmp_path / "out", "evil")
    assert text.count("<script") == 1 and "&lt;script&gt;alert(1)" in text and "<img" not in text
    assert (
        "<script" not in md
        and "a \\| b" in md
        and "&lt;script&gt;alert(1)&lt;/script&gt;<br>\\| x" in md
    )
    assert POLICY in text and text.index(POLICY) < text.index("<style")


def test_data_that_is_drawn_from_the_seed_makes_no_other_experiment(tmp_path):
    def group(seed, files):
        config = {
            "trainer.seed": seed,
            "data.train_files": [files],
            "trainer.experiment_name": f"lab{seed}",
        }
        data = [{"path": files, "sha256": f"{seed}"}]
        manifest = {"recipe": "search_r1", "data": data}
        return RecordedRun(tmp_path, config, manifest, (), {}, ()).experiment

    assert group(1, "./kb/seed-1/train.parquet") == group(12, "./kb/seed-12/train.parquet")
    assert group(1, "./kb/seed-12/train.parquet") != group(12, "./kb/seed-12/train.parquet")
    assert group(1, "./kb/seed-1/train.parquet") != group(1, "./kb/seed-1/other.parquet")


def test_seeds_on_other_files_of_one_name_are_another_experiment(tmp_path):
    """What is published of a path outside of the clone is its last step alone."""
    found = []
    for seed, content in ((1, "a"), (2, "a"), (3, "b")):
        file = tmp_path / f"node{seed}" / "train.parquet"
        file.parent.mkdir()
        file.write_text(content)
        folder = make_run(
            tmp_path / "grpo" / f"lab_s{seed}", seeded(seed, **{"data.train_files": (str(file),)})
        )
        found += [folder, publish(folder, tmp_path / "results" / "grpo" / f"lab_s{seed}")]
    groups = summaries.group_runs(list(map(load_run, found[1::2])))
    assert [[run.seed for run in group] for group in groups] == [[1, 2], [3]]
    assert len({load_run(folder).experiment for folder in found[:4]}) == 1
    assert load_run(found[0]).experiment != load_run(found[5]).experiment


def another_seed(folder: Path, seed: int, *changes: str, drop: str = "") -> None:
    """Write what this version would have written of another seed of the published lab runs, with
    their outcome."""
    shutil.copytree(LAB / "lab-seed1", folder)
    config = compose(
        "grpo", ["preset=lab", f"trainer.seed={seed}", "trainer.backend=ray", *changes]
    )
    tree = yaml.safe_load(to_yaml(config))
    tree["trainer"].pop(drop, None)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    manifest = json.loads((folder / "manifest.json").read_text()) | {"run": folder.name}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "summary.json").write_text(json.dumps(summarise(load_run(folder))))


def test_a_new_seed_joins_published_ones_that_another_version_wrote(tmp_path):
    """It has a key that theirs lack, or lacks one that they have."""
    results = tmp_path / "results"
    for seed in (1, 2, 3):
        shutil.copytree(LAB / f"lab-seed{seed}", results / "grpo" / f"lab-seed{seed}")
    another_seed(results / "grpo" / "lab-seed4", 4, "trainer.test_freq=10")
    another_seed(results / "grpo" / "lab-seed5", 5, "actor_rollout_ref.actor.clip_ratio_high=0.28")
    another_seed(results / "grpo" / "lab-seed7", 7, "actor_rollout_ref.actor.clip_ratio_high=0.28")
    # A key of a later version, say
    another_seed(results / "grpo" / "lab-seed6", 6, drop="resume_with_changes")
    runs = [load_run(path) for path in sorted((results / "grpo").iterdir())]
    assert [[run.seed for run in group] for group in summaries.group_runs(runs)] == [
        [1, 2, 3, 4, 6],
        [5, 7],
    ]
    found = result_tables.experiments(result_tables.read_summaries(results))
    assert [[run["seed"] for run in each.runs] for each in found] == [[1, 2, 3, 4, 6], [5, 7]]
    assert len({each.name for each in found}) == 1
    assert len(result_tables.by_hardest_source(result_tables.read_summaries(results))) == 2


def test_runs_of_two_bases_are_two_experiments():
    """One whose base is not recorded is of neither."""
    one = load_run(LAB / "lab-seed1")

    def run(seed: int, base: str | None) -> RecordedRun:
        models = {"actor": {"path": "p", "sha256": base}} if base else {}
        config = {**one.config, "trainer.seed": seed}
        return dataclasses.replace(one, config=config, manifest={**one.manifest, "models": models})

    runs = [
        run(seed, base) for seed, base in {1: "a" * 64, 2: "a" * 64, 3: "b" * 64, 4: None}.items()
    ]
    assert [[run.seed for run in group] for group in summaries.group_runs(runs)] == [
        [1, 2],
        [3],
        [4],
    ]


# --- bad input ---

MALFORMED = {
    "config.yaml": (
        "- 1\n- 2\n",
        "",
        "a: [",
        "a: !!python/object/apply:os.system [ls]",
        b"\xff\xfe\0",
    ),
    "manifest.json": ("{", "{}", "[" * 100_000),
    "metrics.jsonl": ("7\n", '{"a": 1}\n', '{"step": 1, "a": "high"}\n', '{"step": 1, "a": NaN}\n'),
    "samples.jsonl": ('{"input": "a", "output": "b", "score": 1}\n', "[1]\n"),
    "validation/0.jsonl": (
        '{"acc": [1]}\n',
        '{"uid": "a", "data_source": "b", "acc": ["right"]}\n',
    ),
}


def test_a_malformed_run_is_named_and_the_others_are_reported(tmp_path, capsys, monkeypatch):
    assert report.main([str(tmp_path)]) == 2
    assert (
        "is not a run folder: it has no config.yaml, manifest.json, metrics.jsonl"
        in capsys.readouterr().err
    )
    reported = []
    monkeypatch.setattr(report, "write_report", lambda runs, out, *_: reported.extend(runs) or out)
    bad, good = (
        make_run(tmp_path / "grpo" / name, steps=2, test_every=1, questions=3)
        for name in ("bad", "good")
    )
    manifest = json.loads((bad / "manifest.json").read_text())
    changed = ({"sessions": []}, {"run": ["a"]}, {"total_steps": "9"})
    more = {"manifest.json": tuple(json.dumps(manifest | change) for change in changed)}
    for file, contents in MALFORMED.items():
        right = (bad / file).read_bytes()
        for content in contents + more.get(file, ()):
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
    assert "\nagain: " in out


# --- publishing ---


def test_a_published_run_tells_the_same_under_its_name_or_another(runs, tmp_path, capsys):
    run = runs / "grpo/lab_s1"
    for more, name in (((), "grpo/lab_s1"), (("--as", "ppo/other"), "ppo/other")):
        assert publishing.main([str(run), *more, "--results", str(tmp_path)]) == 0
        copy = load_run(tmp_path / name)
        assert copy.name == name and json.loads(
            (tmp_path / name / "summary.json").read_text()
        ) == summarise(copy)
        assert (
            summarise(copy)["results"][0]["change"]
            == summarise(load_run(run))["results"][0]["change"]
        )
    names = (
        "config.yaml manifest.json metrics.csv samples.jsonl.gz summary.json validation.jsonl.gz"
    )
    assert sorted(path.name for path in (tmp_path / "grpo/lab_s1").iterdir()) == names.split()
    assert (
        publishing.main([str(tmp_path)]) == 2 and "is not a run folder" in capsys.readouterr().err
    )


def test_nothing_of_the_machine_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.cluster")
    typed = [
        "/home/jane/venv/bin/python",
        "-m",
        "x",
        "a=/scratch/jane/d.parquet",
        "on=node-17.cluster",
    ]
    monkeypatch.setattr("sys.orig_argv", typed)
    files = ("/home/jane/data/gsm8k/train.parquet",)
    config = configured(
        {"data.train_files": files, "actor_rollout_ref.model.path": f"{ROOT}/outputs/m"}
    )
    run = make_run(tmp_path / "grpo" / "run", config, steps=2, questions=5)
    copy = publish(run, tmp_path / "results" / "grpo" / "run")
    text = "".join(path.read_text() for path in copy.iterdir() if path.suffix != ".gz")
    text += "".join(gzip.decompress(path.read_bytes()).decode() for path in copy.glob("*.gz"))
    for secret in ("jane", "/home", "/scratch", "node-17", str(ROOT), str(tmp_path)):
        assert secret not in text, secret
    assert "<path>/train.parquet" in text and "a=<path>/d.parquet" in text and "on=<host>" in text
    assert (
        yaml.safe_load((copy / "config.yaml").read_text())["actor_rollout_ref"]["model"]["path"]
        == "outputs/m"
    )


def test_long_runs_are_thinned_and_large_validations_keep_their_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "METRICS_ROWS", 10)
    monkeypatch.setattr(publishing, "VALIDATION_BYTES", 100)
    folder = make_run(tmp_path / "grpo" / "run", steps=60, test_every=7, questions=20)
    copy = load_run(publish(folder, tmp_path / "results" / "grpo" / "long"))
    steps = [row["step"] for row in copy.metrics]
    assert len(steps) < 22 and steps[-1] == 60 and set(range(0, 60, 7)) <= set(steps)
    assert list(copy.validation) == [0, 56] and copy.name == "grpo/long"
    assert copy.seconds == pytest.approx(load_run(folder).seconds, abs=1e-3)
    again = load_run(publish(copy.folder, tmp_path / "results" / "grpo" / "again"))
    assert again.seconds == copy.seconds


def test_tags_of_a_configuration_are_no_paths():
    texts = [
        "</think>",
        "a</answer>",
        "<think>/a/b</think>",
        "[/INST]",
        "<</SYS>>",
        "be brief /no_think",
        "1/2",
    ]
    kept = [scrub(text) for text in texts]
    assert kept == [text.replace("/a/b", "<path>/b") for text in texts]
    paths = [
        "/data",
        "a=/data",
        "~/jane",
        "x /home/jane",
        "[/home/jane,/a/b]",
        "file:///home/jane/x",
    ]
    for text in paths:
        assert "jane" not in scrub(text).replace("<path>/jane", "") and "<path>" in scrub(text), (
            text
        )


def test_the_first_and_the_last_fifth_of_a_thinned_run_are_of_its_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "METRICS_ROWS", 10)
    folder = make_run(tmp_path / "grpo" / "run", steps=100, test_every=200)
    shutil.rmtree(folder / "validation")
    rows = [row for row in lines_of(folder / "metrics.jsonl") if row["step"]]
    write_lines(folder / "metrics.jsonl", rows)
    for run in (folder, publish(folder, tmp_path / "results" / "grpo" / "run")):
        assert headline([load_run(run)]).count("20 steps") == 2


# --- result tables ---


@pytest.fixture
def repository(runs, tmp_path) -> Path:
    results = tmp_path / "results"
    for seed in (1, 2, 3):
        publish(runs / f"grpo/lab_s{seed}", results / "grpo" / f"lab_s{seed}")
    (tmp_path / "README.md").write_text(
        "# Top\n\n<!-- results:begin -->\nold\n<!-- results:end -->\n\nrest\n"
    )
    return tmp_path


def test_tables_are_generated_from_the_summaries(repository):
    results, after = repository / "results", interval_of_seeds()
    assert report.main(["--index", "--results", str(results)]) == 0
    text, top = (results / "README.md").read_text(), (repository / "README.md").read_text()
    for table, link in ((text, "grpo/lab_s1/"), (top, "results/grpo/lab_s1/")):
        start = f"| [grpo/lab]({link}) |"
        row = next(line for line in table.splitlines() if line.startswith(start))
        assert after in row and "| 3 |" in row
    assert top.startswith("# Top\n") and top.endswith("\n\nrest\n") and "\nold\n" not in top


def test_what_joins_an_experiment_and_what_is_another(repository, runs):
    """A headline has several seeds; other settings are another experiment, and the same seed again
    is no other draw."""
    results = repository / "results"
    for name, target in (
        ("ppo/lab_s1", "ppo/lab_s1"),
        ("ppo/lab_s1", "grpo/lab_s4"),
        ("grpo/lab_s2", "grpo/rerun"),
    ):
        publish(runs / name, results / target)
    report.main(["--index", "--results", str(results)])
    assert "| [ppo/lab_s1](" in (results / "README.md").read_text()
    assert "ppo/lab_s1" not in (repository / "README.md").read_text()
    found = {
        each.name: len(each.runs)
        for each in result_tables.experiments(result_tables.read_summaries(results))
    }
    assert found == {"grpo/lab": 3, "grpo/lab_s4": 1, "grpo/rerun": 1, "ppo/lab_s1": 1}


def test_a_page_of_the_real_model_compares_the_runs_of_one_start(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(real_pages.TITLES, "lab/hops", "Hops")
    results = tmp_path / "results"
    starts = {"ppo/lab_s1": "a" * 64, "grpo/lab_s1": "a" * 64, "grpo/lab_s2": "b" * 64}
    for name, base in starts.items():
        target = publish(runs / name, results / name)
        manifest = json.loads((target / "manifest.json").read_text())
        manifest["models"] = {"actor": {"path": "p", "sha256": base}}
        (target / "manifest.json").write_text(json.dumps(manifest))
    text = dict(real_pages.generated(results))[results / "lab/hops.md"]
    first, second = text.split("## From the weights ")[1:]
    assert first.startswith("a" * 12) and second.startswith("b" * 12)
    compared = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(compared) == 1 and compared[0] in first
    assert compared[0].startswith("- ppo/lab_s1 − grpo/lab_s1 on lab/hops: ")
    assert "| [grpo/lab_s2](../grpo/lab_s2/) | 1 |" in second
    assert "In all rows: seeds 1, " in first
    assert "Of grpo/lab_s1, before and after." in second


def test_a_curve_of_kl_says_from_which_policy(runs):
    """A run without a reference had a panel KL, which was read as the distance from the start."""
    (panel,) = [panel for panel in PANELS if panel[0] == "KL"]
    run = load_run(runs / "grpo" / "lab_s1")
    alone = dataclasses.replace(
        run, metrics=[{"step": row["step"], "actor/ppo_kl": 0.1} for row in run.metrics]
    )
    assert _metric_panel([[alone]], *panel).note == "to the old policy, nats a token"


def test_each_phase_has_a_colour_of_its_own():
    """Decode and validation once shared one, as did log-probs and the rest; on a dark page three
    were white."""
    assert len(PHASE_COLOURS) >= len({*PARTS, REST})
    dark = re.search(
        r"filter: brightness\(([\d.]+)\)", (ROOT / "results/reporting/page.html.jinja").read_text()
    )
    for factor in (1.0, float(dark[1])):
        shown = [
            [min(255, factor * int(colour[at : at + 2], 16)) for at in (1, 3, 5)]
            for colour in PHASE_COLOURS
        ]
        assert min(math.dist(*pair) for pair in itertools.combinations(shown, 2)) > 40
