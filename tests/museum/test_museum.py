"""The museum is complete, its page is what was recorded, and its bugs are found: a few here, all of them slowly."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from core.errors import InputError
from tests.core.algorithm import test_kl, test_schedules
from tests.core.learner import test_packing
from tests.core.rewards import test_rewards
from tests.faults import tiny_run
from tests.museum import lab, mutations, report
from tests.museum.hacks import HACKS, run_hack
from tests.museum.mutations import MUTATIONS, planted
from tests.museum.report import BUGS, PAGE, RECORD, ROOT, page

IDS = [bug["id"] for bug in BUGS]
TRL_SIDE = Path(report.__file__).parent / "trl_side.py"


def test_each_bug_has_two_placements_and_a_test_that_exists():
    assert len(set(IDS)) == len(IDS) and set(MUTATIONS) == mutations.names()
    assert sum(bool(bug["sources"]) for bug in BUGS) == 30 and sum(not bug["sources"] for bug in BUGS) >= 5
    for bug in BUGS:  # the second placement is another mutation, or the same with other settings
        twin = mutations.twin_of(bug)
        assert twin["mutation"] != bug["id"] or "published" in twin["with"], bug["id"]
    counts = [len(bug["sources"]) for bug in BUGS]
    assert counts == sorted(counts, reverse=True)
    for bug in BUGS:
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source) for source in bug["sources"])
        file, *_, name = bug["test"].split("::")
        assert any(f"def {name}(" in (ROOT / at).read_text() for at in (file, "tests/core/engine_contract.py")), name
        assert {bug["lab"], mutations.twin_of(bug)["lab"]} <= set(lab.LABS)


def test_the_page_is_what_was_recorded():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(record)
    assert set(record["bugs"]) == set(IDS)
    assert sum(bool(found["run"]) for found in record["bugs"].values()) >= 24


def test_what_was_recorded_tells_of_every_hack_and_not_of_the_lab_itself():
    found = json.loads(RECORD.read_text(encoding="utf-8"))["hacks"]
    assert set(found) == set(HACKS)
    for name, one in found.items():
        first, last = one["scores"]
        assert last > first
        assert (one["told_at"] is None and not one["lines"]) if name == "none" else 0 < one["told_at"] <= 15, name


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_hack_is_told_of_while_it_happens(work):
    found = run_hack("short", work, steps=16)
    assert found["told_at"] and "answers are" in found["lines"][0] and "shorter than at the start" in found["lines"][0]


def test_what_a_run_misses_is_written_missed():
    record = {"bugs": {IDS[0]: {"run": [], "test_fails": False}}, "clean": {}}
    first = next(line for line in page(record).splitlines() if IDS[0] in line)
    assert first.count("| missed") == 2 and f"which bug is in it: 0 of {2 * len(IDS)}" in page(record)
    rest = len(IDS) - 1
    assert f"First placements ({len(IDS)}): 1 by no run, {rest} not run." in page(record)
    tried = {"run": [], "test_fails": False}
    found = ({"run": ["x"]}, {**tried, "minute_fails": True}, {"run": [], "test_fails": True})
    assert tuple(map(report.finder, (*found, {**tried, "minute_fails": False}, tried, {}))) == report.FINDERS
    record["bugs"][IDS[0]]["twin"] = {"run": [], "minute_fails": True}
    assert "| **the minute of `make check`** |" in page(record)


def test_every_bug_is_planted_in_trl_or_has_a_reason_why_not():
    trl = json.loads(RECORD.read_text(encoding="utf-8"))["trl"]
    names = {node.name for node in ast.parse(TRL_SIDE.read_text(encoding="utf-8")).body if hasattr(node, "name")}
    threads = {bug["id"] for bug in BUGS if bug["sources"]}  # the others are no bugs of TRL's users
    assert threads == (threads & names) | set(trl["not_applicable"]) and not names & set(trl["not_applicable"])
    assert set(trl["bugs"]) <= names


def test_the_strongest_report_of_trl_is_shown():
    trl = {
        "bugs": {IDS[0]: ["metric: kl is 0", "exception: IndexError"], IDS[1]: []},
        "not_applicable": {IDS[2]: "why"},
    }
    cells = [report.trl_cell(bug, trl) for bug in IDS[:4]]
    assert cells == ["exception: IndexError", "nothing", "not applicable: why", "not run"]


def test_a_mutation_is_gone_after_its_block():
    replaced = {name: vars(owner)[attribute] for name, ((owner, attribute), _) in MUTATIONS.items()}
    for name in MUTATIONS:
        with planted(name):
            owner, attribute = MUTATIONS[name][0]
            assert vars(owner)[attribute] is not replaced[name]
        assert vars(owner)[attribute] is replaced[name]


@pytest.mark.parametrize(
    ("bug", "test"),
    [
        ("kl_sign", test_kl.test_by_hand),
        ("tool_text_scored", test_rewards.test_only_what_the_policy_wrote_is_judged),
        ("packed_sequences_mixed", test_packing.test_a_row_does_not_see_its_neighbours),
        ("learning_rate_zero", test_schedules.test_the_first_step_moves_the_weights_and_the_warm_up_ends_on_time),
    ],
)
def test_a_bug_fails_a_test(bug, test):
    test()
    with planted(bug), pytest.raises((AssertionError, InputError)):
        test()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Data and a random model: a run that learns nothing, and reports as every run does."""
    folder = tmp_path_factory.mktemp("museum")
    tiny_run.prepare(folder)
    return folder


def reported(folder: Path, run: Path) -> list[str]:
    found = lab.Report()
    arguments = tiny_run.command(folder, "grpo", 2, "trainer.logger=[jsonl]", "trainer.test_freq=-1")(run)
    lab.session(lab.LABS["grpo"], folder, arguments[3:], found)
    return found.lines


@pytest.mark.parametrize(
    ("bug", "match"),
    [
        (None, ""),
        ("rewards_of_others", "invariant broken in phase batch: rewards are not the scores"),
        ("gradients_kept", "invariant broken in phase update: gradients of an earlier"),
        ("weights_never_arrive", "some of its weights are stale"),
        ("tokens_encoded_again", "tokens stopped by length"),  # no answer of this model ends; its text encodes shorter
    ],
)
def test_a_run_reports_its_bug_and_nothing_where_there_is_none(bug, match, tiny, tmp_path):
    if bug is None:
        assert reported(tiny, tmp_path) == []
        return
    with planted(bug):
        lines = reported(tiny, tmp_path)
    assert any(match in line for line in lines), lines
    ended = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert ended["status"] != "failed" or match in ended["stopped_because"], "what watch and report show of it"


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=IDS)
def test_every_bug_fails_its_test(bug):
    assert report.test_fails(bug["id"], bug["test"])


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    """The base models and data of the labs, as the oracle prepares them: minutes."""
    from tests import oracle

    folder = tmp_path_factory.mktemp("labs")
    for module in oracle.PREPARE:
        oracle.python(folder, *module)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(2400)  # the base models alone take up to ten minutes
def test_runs_find_most_bugs_and_are_silent_without_one(work):
    for name in report.RECIPES:
        assert lab.run(name, work).lines == [], name
    found = {bug["id"]: report.run_bug(bug, work)["run"] for bug in BUGS}
    assert sum(map(bool, found.values())) >= 24, [name for name, lines in found.items() if not lines]
