"""Every recipe's study: it is the registered one, its arms are valid, and its report is what its run records give."""

from __future__ import annotations

import hashlib
import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from core.config import examine
from core.config.recipes import trainer_of
from results.reporting import pages
from results.reporting.run_reader import load_run, summarise
from results.reporting.study import Records, load_study

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "recipes").glob("*/study*.yaml"))
REGISTERED = {
    "search_r1/study_conflicts": "650a1459a626da552c1622d96c304a5414e9f97d5fdc972f6dab54122a8d5ddb",
    "lab/study_variants_tallies": "d7d51ae93b989ab341ba1744750b9360dec6816e6ca36a3401c7add53fa5b2e9",
    "lab/study_tallies": "bd48051255ce1e5ca8ff0db55bf53b7aaeef876418dc238371c402f878fa8e86",
    "lab/study_variants": "4fc44443599cf3778a89b294dbc2ba315dd772764205b04b885009d2d6fdd148",
    "lab/study_trails": "48a0fd2b70afda5dd98d047b9765f9b25a75639178dc94c4db6b64baa920f8d8",
    "dapo/study_course": "edb01f128ee7e0d217de4132ac74e39b63407df967991f44eb0d752a01c4183f",
    "dapo/study_edge": "98944b637b8c33cc6df480a6bbfd390fff2bb067e27c7d248fd892719c11d1f1",
    "dapo/study_dose": "5185ca77368e8181deba262e7bd4549d23db7fb02fe8c9aa7edad36d032dce06",
    "dapo/study": "1e2c34ee65ac2771b7714fc700a808576aeac25e097e13837247e37364c774c4",
    "dapo/study_claims": "8334aeb6d9ee6bcdbf363dc6b55c1ea0f07915e5e445786a3fec088234a90d70",
    "dapo/study_mismatch": "e9046538dda044a585592ebe4bebc1910e92759df64313dee0769178a015432d",
    "search_r1/study": "2fd92b7dce1cee1bf30486f53f04b6295340b8c8c19d9a37d057c86f5d0ceec7",
    "search_r1/study_topk": "5dcf87f30a0ad96013beb0b5db449af5aca8db397534af6ab914d4195b57e383",
}
LOOKS = len(pages.COLOURS) * len(pages.DASHES)  # a curve's colour and dash
named = pytest.mark.parametrize("path", STUDIES, ids=lambda path: f"{path.parent.name}-{path.stem}")


def test_no_two_arms_of_a_study_are_drawn_alike():
    assert max(len(load_study(path).arms) for path in STUDIES if load_study(path).curve) <= LOOKS


def test_the_files_are_those_that_were_registered():
    """A study is not changed after its runs; another question is another file."""
    found = {f"{path.parent.name}/{path.stem}": hashlib.sha256(path.read_bytes()).hexdigest() for path in STUDIES}
    assert found == REGISTERED


@named
def test_every_run_record_is_of_the_registered_study(path):
    study = load_study(path)
    folder = ROOT / "results" / study.recipe / study.name
    records = Records(folder).read(study)
    assert {f"{arm}-seed{seed}.json" for arm, seed in records} == {file.name for file in folder.glob("*")}
    for (arm, seed), record in records.items():
        assert (record.arm, record.seed, record.status) == (arm, seed, "finished")
        assert record.registration == REGISTERED[f"{study.recipe}/{study.name}"]
        assert record.metrics.keys() == study.metrics.keys()


PUBLISHED = sorted(path.parent for path in (ROOT / "results").glob("*/*/manifest.json"))


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_every_published_run_loads(folder):
    run = load_run(folder)
    assert run.name == f"{folder.parent.name}/{folder.name}"
    assert run.metrics and run.seed is not None and run.session["git"]["commit"]
    wanted = run.config["trainer.val_before_train"] or run.config["trainer.test_freq"] > 0
    assert bool(run.points()) == bool(wanted and run.config["data.val_files"])
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8")) == summarise(run)


@named
def test_every_arm_is_a_valid_configuration_and_no_two_are_the_same(path):
    study = load_study(path)
    entry = importlib.import_module(study.entry)
    meant = getattr(entry, "settings", lambda arguments: (study.recipe, arguments, None))  # of one with its own
    configs = []
    for name, arm in study.arms.items():
        recipe, arguments, bug = meant([*study.common, *arm.overrides])
        composed = examine(recipe, arguments, trainer_of(recipe)[1])
        assert not composed.problems, name
        assert not [key for override in arm.overrides if (key := override.split("=")[0]) in composed.unused], name
        configs.append((composed.config, bug))
    assert all(a != b for at, a in enumerate(configs) for b in configs[:at])


def test_a_withdrawn_study_exists_and_leads_with_why():
    withdrawn = yaml.safe_load((ROOT / "results" / "withdrawn.yaml").read_text())
    assert withdrawn and withdrawn.keys() <= REGISTERED.keys()
    for name, why in withdrawn.items():
        lead = (ROOT / "results" / f"{name}.md").read_text().splitlines()[2]
        assert lead.startswith("**Withdrawn: this study carries no verdict") and why.strip() in lead


@pytest.mark.parametrize(("part", "needs"), [("", True), ("topk", True), ("conflicts", False)])
def test_a_study_that_names_what_prepares_it_needs_no_knowledge(monkeypatch, part, needs):
    from recipes.search_r1 import knowledge_model
    from results.reporting import study_runs

    prepared, run = [], []
    monkeypatch.setattr(knowledge_model, "prepare", lambda seed, **_: prepared.append(seed))
    monkeypatch.setattr(study_runs, "main", lambda path, arguments: run.append((path.stem, list(arguments))) or 0)
    monkeypatch.setattr(sys, "argv", ["study", *filter(None, [part]), "--jobs", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recipes.search_r1.study", run_name="__main__")
    stem = "_".join(filter(None, ["study", part]))
    seeds = load_study(ROOT / "recipes" / "search_r1" / f"{stem}.yaml").seeds
    assert ended.value.code == 0 and run == [(stem, ["--jobs", "1"])]
    assert prepared == (list(seeds) if needs else [])
