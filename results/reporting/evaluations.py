"""Published evaluations: models that were answered with and scored, and not trained here (``core.evaluate``).

``results/<recipe>/<name>/`` of an evaluation holds ``evaluation.json`` and ``scores.jsonl.gz``, the accuracies of each
question. An evaluation names a row of ``results/references.yaml`` as a run does, by ``trainer.reference``. It stands
beside the row's number if the model is the row's released checkpoint, or the row's model where nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.data.parquet import sha256_of
from core.errors import InputError
from core.tracking.confidence_intervals import Estimate
from results.reporting.numbers import percent
from results.reporting.pages import Table
from results.reporting.run_reader import scrub
from results.reporting.summaries import commit_of, hardware_of

if TYPE_CHECKING:
    from results.reporting.accuracies import Summary

RECORD, SCORES = "evaluation.json", "scores.jsonl.gz"
FORMAT = 1
KEY = "trainer.reference"
ALSO_DECIDING = ("data.val_max_samples",)  # beside what the files of answers and scores name


def record_of(scores: Path, name: str, rows: Sequence[str]) -> tuple[dict[str, Any], Summary]:
    """Return what is published of a file of scores under ``recipe/name``, with its summary. ``rows`` are known ids.

    Host names and machine paths are left out.

    Raises:
        InputError: the answers or scores are incomplete or damaged, the scores are those of other answers, the model is
            a run's checkpoint, it names a row that does not exist, or the name begins with another recipe.
    """
    from core.answers import complete_answers, read_manifest
    from results.reporting.accuracies import summary

    told = read_manifest(scores, "scores")
    answers = scores.with_name(told["answers"])
    manifest, lines = complete_answers(answers)
    found = summary(scores)
    if told["answers_sha256"] != sha256_of(answers):
        _refuse_other(scores, f"answers_sha256={told['answers_sha256'][:12]}", f"{answers} has another hash")
    if found.questions != {(line["data_source"], line["uid"]) for line in lines}:
        _refuse_other(scores, f"{len(found.questions)} questions", f"they are not those of {answers}")
    model = manifest["model"]
    if "run" in model:
        fix = f"publish the run: python -m results.publish {model['run']}"
        raise InputError(f"{scores}: model={model['path']}: is the checkpoint of a run, which was trained here; {fix}")
    reference = manifest["config"].get(KEY)
    if reference is not None and reference not in rows:
        raise InputError(f"{scores}: {KEY}={reference}: results/references.yaml has no row of this id")
    recipe, _, own = name.partition("/")
    if recipe != manifest["recipe"] or not own or "/" in own:
        rule = f"an evaluation of {manifest['recipe']} is published as {manifest['recipe']}/NAME"
        raise InputError(f"--as={name}: {rule}; give such a name")
    session = manifest["sessions"][-1]
    also = {key: manifest["config"][key] for key in ALSO_DECIDING}
    record = {
        **{"kind": "evaluation", "format": FORMAT, "run": own, "recipe": recipe},
        **({} if reference is None else {"reference": reference}),
        "model": {"path": model["path"], "weights": manifest["settings"]["model"]},
        **{key: manifest[key] for key in ("data", "questions", "samples")},
        "scorers": told["scorers"],
        "decoding": found.decoding,
        "settings": {**manifest["settings"], **told["rewards"], **also},
        "answers_sha256": told["answers_sha256"],
        "scores_sha256": sha256_of(scores),
        "command": session["command"],
        "commit": commit_of(session),
        "hardware": hardware_of(session),
        "results": [
            {"data_source": source, "metric": metric, "questions": one.n, "estimate": asdict(one)}
            for source, metrics in found.sources.items()
            for metric, one in metrics.items()
        ],
    }
    return scrub(record), found


def _refuse_other(scores: Path, value: str, rule: str) -> None:
    fix = "score the answers again: python -m core.evaluate score"
    raise InputError(f"{scores}: {value}: {rule}, so these are scores of another file; {fix}")


def read_evaluations(results: Path) -> list[Mapping[str, Any]]:
    """Return the published evaluations, sorted by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"*/*/{RECORD}"))]


def evaluation_table(evaluations: list[Mapping[str, Any]]) -> Table:
    """Return a line for each accuracy of each evaluation."""
    header = ["evaluation", "model", "weights", "evaluated on", "metric", "questions", "accuracy", "decoding", "scorer"]
    rows = []
    for one in evaluations:
        name = f"{one['recipe']}/{one['run']}"
        for result in one["results"]:
            cells = [f"[{name}]({name}/)", one["model"]["path"], one["model"]["weights"], result["data_source"]]
            cells += [result["metric"], str(result["questions"]), percent(Estimate(**result["estimate"]))]
            rows.append([*cells, one["decoding"], "+".join(one["scorers"]), one.get("reference", ""), one["commit"]])
    return Table([*header, "row", "commit"], rows)
