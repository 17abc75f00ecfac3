"""The museum's table: by whom each bug is found, in two placements; a run of three steps is not told which it has.

    python -m tests.oracle --work DIR --labs            prepares the base models in DIR, where they are missing
    python -m tests.museum.report --work DIR --forget --runs --twins --tests --clean 25
    python -m tests.museum.report --trl FILE            takes what tests/museum/trl_side.py measured
    python -m tests.museum.report                       writes the page again from what was recorded

What is measured goes into ``results/museum.json``, the page ``results/museum.md`` is made of that and of ``bugs.yaml``.
What is recorded is not measured again, so that the command goes on where it was stopped; ``--forget`` begins anew.
``--twins`` runs the second placements; where a run reports nothing, the bug's test is tried, then the minute (of CPU
time) of ``make check`` for a change in the mutated module. ``--only BUG ...`` measures some bugs. ``--clean N`` runs N
seeds of each lab without a bug: every line that such a run reports is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.check import FIRST, SECONDS, Minute, select_tests
from tests.museum.hacks import room

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "results" / "museum.json", ROOT / "results" / "museum.md"
BUGS = yaml.safe_load((Path(__file__).parent / "bugs.yaml").read_text(encoding="utf-8"))
CLEAN_LINES: dict[tuple[str, ...], list[str]] = {}  # what labs report without a bug, by their keys
RECIPES = ("ppo", "grpo", "dapo", "search_r1")
KINDS = {  # of what a run reports, by a pattern of the line
    "invariant": r"^BrokenInvariant: invariant broken in phase \w+: (?P<found>[^;]*)",
    "probe of the weights": r"^WeightSyncError: (?P<found>[^:]*)",
    "bound": r"^warning: step \d+: (?P<found>.*?) \(trainer\.health",
    "check at the start": r"^(?:error|InputError): (?P<found>[^;]*)",
}


def kind_of(line: str) -> tuple[str, str]:
    """Return what kind of report a line is, and the finding in it."""
    for kind, pattern in KINDS.items():
        if found := re.search(pattern, line):
            return kind, found["found"]
    return "another line", line


def test_fails(bug: str, node: str) -> bool:
    """Run one test with the bug planted, in a process of its own. Raises RuntimeError where the test did not run.

    The process is forked: what takes the time is importing torch and transformers.
    """
    import tests.museum.mutations  # noqa: F401

    child = multiprocessing.get_context("fork").Process(target=_test, args=(bug, node))
    child.start()
    child.join()
    if child.exitcode not in (0, 1):  # 0: passed, 1: failed; others did not collect it
        raise RuntimeError(f"{node} did not run under {bug}: pytest ended with {child.exitcode}")
    return child.exitcode == 1


def _test(bug: str, node: str) -> None:
    _tests(bug, [node])


def _tests(bug: str, nodes: Sequence[str], *plugins: object) -> None:
    import pytest

    os.chdir(ROOT)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    options = ["-p", "no:cacheprovider", "-p", "tests.museum.plugin", "--museum", bug, "-q", "-x", "--tb=line"]
    os._exit(int(pytest.main([*options, *nodes], plugins=list(plugins))))


def run_bug(bug: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Run the bug's lab with it planted, and return what it reported beyond what it reports without the bug.

    The labs themselves report nothing (``--clean``); a run with other keys or one that is resumed is compared.
    """
    from tests.museum import lab
    from tests.museum.mutations import planted

    options = {"resumed_after": 2} if bug["id"] == "resume_repeats_data" else {}
    mutation = bug.get("mutation", bug["id"])
    clean: list[str] = []
    if bug.get("with") or options:
        key = (bug["lab"], *bug.get("with", ()), *options)
        if key not in CLEAN_LINES:
            CLEAN_LINES[key] = lab.run(bug["lab"], work, bug.get("with", ()), **options).lines
        clean = CLEAN_LINES[key]
    with planted(mutation):
        found = lab.run(bug["lab"], work, bug.get("with", ()), **options)
    more = [line for line in found.lines if line not in clean]
    return {
        name: [line.replace(str(work), "WORK") for line in lines] for name, lines in (("run", more), ("clean", clean))
    }


def minute_fails(mutation: str) -> bool:
    """Return whether the minute of ``make check``, for a change in the mutated module, fails with the bug planted."""
    from tests.museum.mutations import MUTATIONS

    owner = MUTATIONS[mutation][0][0]
    module = owner.__module__ if isinstance(owner, type) else owner.__name__
    files = select_tests([module.replace(".", "/") + ".py"])
    child = multiprocessing.get_context("fork").Process(target=_minute, args=(mutation, files))
    child.start()
    child.join()
    return child.exitcode == 1


class CPUMinute(Minute):
    """A minute of CPU time, whatever else the machine does."""

    clock = staticmethod(time.process_time)


def _minute(mutation: str, files: Sequence[str]) -> None:
    _tests(mutation, files, CPUMinute(SECONDS, FIRST))


def test_twin(bug: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Add to the record of a second placement that no run reported which tests fail: its own, those of the minute."""
    from tests.museum.mutations import twin_of

    twin = twin_of(bug)
    if "test_fails" not in found:
        found["test_fails"] = test_fails(twin["mutation"], twin["test"])
    elif "minute_fails" not in found:
        found["minute_fails"] = minute_fails(twin["mutation"])


def run_clean(name: str, seed: int, work: Path) -> dict[str, Any]:
    from tests.museum import lab

    found = lab.run(name, work, seed=seed)
    return {"lines": found.lines, "steps": found.steps, "share": round(found.share, 5)}


def caught(record: Mapping[str, Any]) -> bool:
    return bool(record.get("run"))


def shown(text: str, width: int = 170) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= width else text[: width - 1] + "…"


# "no run" stands for: by no run, and the tests were not tried, or not the minute's. The first four are findings.
FINDERS = ("the run", "the minute of `make check`", "the suite", "nobody", "no run", "not run")


def finder(found: Mapping[str, Any]) -> str:
    """Return by whom a bug was found: the first of :data:`FINDERS` that did."""
    if "run" not in found:
        return "not run"
    if found["run"]:
        return "the run"
    if found.get("minute_fails"):
        return "the minute of `make check`"
    if found.get("test_fails"):
        return "the suite"
    return "nobody" if {"minute_fails", "test_fails"} <= found.keys() else "no run"


def counted(finders: Sequence[str]) -> str:
    """Return how many were found by whom, the finders in their order."""
    counts = Counter(finders)
    return ", ".join(f"{counts[name]} {'' if name == 'not run' else 'by '}{name}" for name in FINDERS if counts[name])


def placements(record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return by whom each bug was found, in its first and in its second placement."""
    each = [record["bugs"].get(bug["id"], {}) for bug in BUGS]
    return [finder(found) for found in each], [finder(found.get("twin", {})) for found in each]


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a record."""
    bugs, clean, trl = record["bugs"], record["clean"], record.get("trl", {})
    first, second = placements(record)
    both = [*first, *second]
    blind = sum(not bug["sources"] for bug in BUGS)
    lines = [
        "# Bug museum",
        "",
        f"{len(BUGS)} bugs, each planted in this repository by mutations of a few lines (`tests/museum/`), in two",
        "placements: where a check was written for it, and one phase later or with the settings of published scripts",
        "(bf16, a learning rate of 1e-6, one optimizer step a batch). Trainers of language models really had the first",
        f"{len(BUGS) - blind}; the last {blind} are of kinds that somebody who did not write this repository planted",
        "here. The page is generated: `python -m tests.museum.report`.",
        "",
        f"- **By a run of three steps, not told which bug is in it: {both.count('the run')} of {len(both)}.**",
        f"- First placements ({len(first)}): {counted(first)}.",
        f"- Second placements ({len(second)}): {counted(second)}.",
        "- The checks were written for these kinds of bugs, the second placements with the checks known: that they",
        "  are found says little about others. What was planted blind before the checks at the point of use were",
        "  written (14 bugs): 7 found by the run, 5 by a test alone, 2 by nothing that was tried.",
        clean_line(clean, record.get("before")),
        share_line(clean, record.get("before")),
        *trl_lines(trl),
        "",
        "| bug | threads | test that fails | first placement: what the run reports | second placement | found by "
        "| TRL |",
        "|---|---|---|---|---|---|---|",
    ]
    for bug in BUGS:
        found = bugs.get(bug["id"], {})
        lines.append(
            f"| **{bug['id']}**<br>{bug['title']} | {' '.join(map(linked, bug['sources']))} | {test_cell(bug, found)} "
            f"| {run_cell(bug, found)} | {twin_cell(bug, found.get('twin', {}))} | {trl_cell(bug['id'], trl)} |"
        )
    return "\n".join([*lines, "", *room(record)])


def twin_cell(bug: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return two cells: what the second placement is, with the keys of its run, and by whom it was found."""
    twin = bug["twin"]
    keys = ", ".join(f"`{key}`" for key in (twin.get("lab"), *twin.get("with", ())) if key)
    said = f": {shown(': '.join(kind_of(found['run'][0])), 120)}" if found.get("run") else ""
    return f"{twin['mutates']}{f' ({keys})' if keys else ''} | **{finder(found)}**{said}"


def linked(source: str) -> str:
    repository, _, number = source.partition("#")
    return f"[{repository.rpartition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"


def test_cell(bug: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if "test_fails" not in found:
        return "not run"
    return f"`{bug['test']}`" if found["test_fails"] else "missed"


def run_cell(bug: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if "run" not in found:
        return "not run"
    keys = f" (`{bug['lab']}`{''.join(f', `{key}`' for key in bug.get('with', ()))})"
    if not found["run"]:
        return "missed" + keys
    kind, text = kind_of(found["run"][0])
    return f"{kind}: {shown(text)}{keys}"


TRL_KINDS = ("exception", "warning", "metric")  # what TRL may report: the strongest first


def trl_kind(told: Sequence[str]) -> tuple[str, str]:
    """Return the strongest kind of what TRL reported, with its first line, or "nothing"."""
    for kind in TRL_KINDS:
        if found := [line for line in told if line.startswith(f"{kind}: ")]:
            return kind, found[0]
    return "nothing", "nothing"


def trl_lines(trl: Mapping[str, Any]) -> list[str]:
    if not trl:
        return ["- **TRL**: not run."]
    kinds = Counter(trl_kind(told)[0] for told in trl["bugs"].values())
    alarms = sum(bool(told) for told in trl["others"].values())
    return [
        f"- **TRL {trl['version']}** (`GRPOTrainer` on a CPU, without vLLM, same base and task, three generations): "
        f"{len(trl['bugs'])} bugs have a counterpart and were planted by mutations of TRL. "
        f"{kinds['exception']} ended in an exception and {kinds['warning']} in a warning. "
        f"{kinds['metric']} moved a logged metric out of the widened range of {trl['clean']} clean runs; TRL raises no "
        f"alarm for that, and of {len(trl['others'])} other clean runs {alarms} left the range as well. "
        f"{kinds['nothing']} showed nowhere. The rule, and what stands for an engine, is in "
        "`tests/museum/trl_side.py`. With vLLM TRL logs the difference of log-probs as well; that was not run."
    ]


def trl_cell(bug: str, trl: Mapping[str, Any]) -> str:
    if bug in trl.get("not_applicable", {}):
        return f"not applicable: {trl['not_applicable'][bug]}"
    return shown(trl_kind(trl["bugs"][bug])[1]) if bug in trl.get("bugs", {}) else "not run"


Clean = Mapping[str, Sequence[Mapping[str, Any]]]  # recipe -> its runs without a bug


def clean_line(clean: Clean, before: Mapping[str, Any] | None) -> str:
    counts = {name: len(clean.get(name, ())) for name in RECIPES}
    each = ", ".join(f"{name} {count}" for name, count in counts.items())
    runs, alarms = sum(counts.values()), alarms_of(clean)
    line = f"- **False alarms: {alarms} in {runs} clean runs** of three steps ({each}; one seed a run)."
    if before:
        runs, alarms = sum(map(len, before["clean"].values())), alarms_of(before["clean"])
        line += f" At commit {before['commit']}: {alarms} in {runs}."
    return line


def alarms_of(clean: Clean) -> int:
    return sum(bool(one["lines"]) for runs in clean.values() for one in runs)


def share_line(clean: Clean, before: Mapping[str, Any] | None) -> str:
    line = (
        f"- **Cost of all invariants together**: CPU seconds inside them over CPU seconds of the loop, median of the "
        f"clean runs: {shares(clean) or 'not run'}"
    )
    if before:
        line += f"; at commit {before['commit']}, on a machine with less other work: {shares(before['clean'])}"
    return f"{line}."


def shares(clean: Clean) -> str:
    values = {name: sorted(one["share"] for one in clean.get(name, ())) for name in RECIPES}
    return ", ".join(f"{name} {found[len(found) // 2]:.2%}" for name, found in values.items() if found)


def save(record: Mapping[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def forget(record: dict[str, Any], bugs: Sequence[str], *, runs: bool, twins: bool, tests: bool, clean: bool) -> None:
    """Take out of the record what is to be measured anew."""
    for bug in bugs:
        for name, named in (("run", runs), ("clean", runs), ("test_fails", tests), ("twin", twins)):
            if named:
                record["bugs"].get(bug, {}).pop(name, None)
    if clean:
        record["clean"] = {}


def measure_clean(record: dict[str, Any], seeds: int, work: Path) -> None:
    """Run the labs without a bug, recipe by recipe, so that an early end has some of each."""
    for seed in range(1, seeds + 1):
        for name in RECIPES:
            known = record["clean"].setdefault(name, [])
            if seed not in [one["seed"] for one in known]:
                known.append({"seed": seed, **run_clean(name, seed, work.resolve())})
                print(name, known[-1], flush=True)
                save(record)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.museum.report", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, help="folder with outputs/lab as python -m tests.oracle prepares it")
    parser.add_argument("--only", nargs="*", metavar="BUG", choices=[bug["id"] for bug in BUGS])
    parser.add_argument("--runs", action="store_true", help="run the lab of each bug")
    parser.add_argument("--twins", action="store_true", help="run the second placement of each bug")
    parser.add_argument("--tests", action="store_true", help="run the test of each bug")
    parser.add_argument("--forget", action="store_true", help="measure what is named also where it is recorded")
    parser.add_argument("--trl", type=Path, metavar="FILE", help="what tests/museum/trl_side.py wrote")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="runs without a bug, of each recipe")
    asked = parser.parse_args()
    if (asked.runs or asked.twins or asked.clean) and asked.work is None:
        parser.error("--runs, --twins and --clean need --work")
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"bugs": {}, "clean": {}}
    asked_bugs = [bug for bug in BUGS if asked.only is None or bug["id"] in asked.only]
    if asked.forget:
        forget(
            record,
            [bug["id"] for bug in asked_bugs],
            runs=asked.runs,
            twins=asked.twins,
            tests=asked.tests,
            clean=bool(asked.clean),
        )
    if asked.trl:
        measured = json.loads(asked.trl.read_text(encoding="utf-8"))
        record["trl"] = {name: found for name, found in measured.items() if name != "runs"}  # those are megabytes
    measure_clean(record, asked.clean, asked.work)
    for bug in asked_bugs if asked.runs or asked.twins or asked.tests else ():
        found = record["bugs"].setdefault(bug["id"], {})
        if asked.runs and "run" not in found:
            found.update(run_bug(bug, asked.work.resolve()))
        if asked.tests and "test_fails" not in found:
            found["test_fails"] = test_fails(bug["id"], bug["test"])
        if asked.twins and "twin" not in found:
            from tests.museum.mutations import twin_of

            found["twin"] = run_bug(twin_of(bug), asked.work.resolve())
            print(bug["id"], "second placement:", finder(found["twin"]), found["twin"]["run"][:1], flush=True)
        print(bug["id"], found.get("test_fails"), [kind_of(line)[0] for line in found.get("run", ())], flush=True)
        save(record)
    for _ in range(2 if asked.twins else 0):  # each bug's own test first: seconds, where the minute takes one
        for bug in asked_bugs:
            if finder(twin := record["bugs"][bug["id"]].get("twin", {})) not in ("the run", "not run"):
                test_twin(bug, twin)
                print(bug["id"], "second placement:", finder(twin), flush=True)
                save(record)
    save(record)


if __name__ == "__main__":
    main()
