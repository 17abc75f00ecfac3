"""Scores of saved answers, without a model: by the reward layer of training, under any scorer or variant of it.

A line a question, in the form of a run's ``validation/<step>.jsonl``, so that what reads the one reads the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from core.config import Config, code_keys, convert, examine, recipes
from core.data.parquet import Example, ExampleFile, Problems, sha256_of
from core.errors import InputError
from core.evaluation.answer_file import FORMAT, complete_answers, manifest_path, prompt_of, trajectory_of
from core.evaluation.summary import refuse_unscored
from core.files.durable_files import write_atomic
from core.rewards.failures import RewardError
from core.rewards.layer import RewardLayer
from core.tracking import run_manifest
from core.tracking.progress import progress
from core.tracking.records import json_line
from core.tracking.validation import ValRecord
from core.types import ScoredGroup
from reward_scores import SCORERS, UnknownDataSource, scorer_for

SECTIONS = ("reward_model.", "custom_reward_function.")
VAL_FILES = "data.val_files"


@dataclass(frozen=True)
class Scored:
    """A written file of scores."""

    path: Path
    records: list[ValRecord]


def score(source: Path, overrides: Sequence[str] = (), scorer: str | None = None, name: str | None = None) -> Scored:
    """Score a complete file of answers and write ``<answers>.scores-<name>.jsonl`` with its manifest.

    ``scorer`` names one of :mod:`reward_scores` for all data sources, in place of each source's own. The settings of
    rewards are those of the call that generated, under ``overrides``.

    Raises:
        InputError: answers that are incomplete or of another data set, a data source without scorer or on whose answers
            it always failed, a wrong option.
    """
    manifest, answers = complete_answers(source)
    config, reward_keys = _configured(source, manifest, overrides)
    if VAL_FILES in reward_keys:
        check_data(source, answers, config)
    names = _scorer_names(source, answers, scorer, config)
    layer = RewardLayer(config)
    try:
        prompts = [prompt_of(answer) for answer in answers]
        if scorer is not None:  # graders look a scorer up by data source
            stand_in = next(key for key, one in SCORERS.items() if one.name == scorer).removesuffix("*")
            asked = [dataclasses.replace(prompt, data_source=stand_in) for prompt in prompts]
        else:
            asked = prompts
        layer.check(asked)
        trajectories = [trajectory_of(answer) for answer in answers]
        with progress("scores", len(asked), "answer") as scored:
            scores = asyncio.run(layer.score_all(list(zip(asked, trajectories, strict=True)), scored))
    except RewardError as error:  # on_error=raise, or a wrong number of results
        raise InputError(f"{source}: {error}") from error
    finally:
        layer.close()
    rated = zip(prompts, trajectories, scores, strict=True)
    records = [ValRecord.of(_group(list(one))) for _, one in groupby(rated, lambda each: each[0].ordinal)]
    refuse_unscored(source, records, layer.failures.first)
    label = re.sub(r"[^\w.+=-]", "_", name or "+".join(names) + _variant(config, names))
    path = source.with_name(f"{source.stem}.scores-{label}.jsonl")
    facts = {
        **{"kind": "scores", "format": FORMAT, "scorer": label, "scorers": names, "answers": source.name},
        **{key: manifest[key] for key in ("recipe", "model", "questions", "samples", "data", "settings")},
        "rewards": {key: value for key, value in convert.as_json(config).items() if key.startswith(SECTIONS)},
        "answers_sha256": sha256_of(source),
        "session": run_manifest.session(None, {}),
    }
    write_atomic(manifest_path(path), json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    write_atomic(path, "".join(json_line(record.to_json()) for record in records))
    return Scored(path, records)


def _group(rated: Sequence[tuple]) -> ScoredGroup:
    prompts, trajectories, scores = zip(*rated, strict=True)
    return ScoredGroup(prompts[0], trajectories, scores)


def _configured(
    source: Path, manifest: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[Config, Mapping[str, Any]]:
    """Return the configuration, and what the overrides set."""
    recipe = manifest.get("recipe")
    if not isinstance(recipe, str) or not isinstance(manifest.get("config"), Mapping):
        raise InputError(f"{manifest_path(source)}: names no recipe, or no configuration; restore it from a copy")
    composed = examine(recipe, overrides, recipes.trainer_of(recipe)[1], manifest["config"])
    problems = list(composed.problems)
    for key in composed.given:
        if not key.startswith(SECTIONS) and key != VAL_FILES:
            problems.append(f"{key}: decides answers, not their scores; leave it out, or generate with it")
    if composed.config.reward_model.uses_model:
        problems.append("reward_model.enable=True: no model is loaded here; set it to False, or validate in a run")
    if problems:
        raise InputError(problems)
    code_keys.refuse(str(manifest_path(source)), composed.config, recipe, overrides, _unread(composed.config))
    return composed.config, composed.given


def _unread(config: Config) -> tuple[str, ...]:
    """Return the keys of which nothing is loaded here: all sections but those of rewards."""
    return tuple(key for key in convert.flat(config) if not key.startswith(SECTIONS))


def _scorer_names(source: Path, answers: Sequence[Mapping[str, Any]], scorer: str | None, config: Config) -> list[str]:
    """Return the names of the scorers in use. Raises InputError for an unknown one, or a data source without any."""
    if config.custom_reward_function.path:
        if scorer is not None:
            rule = "custom_reward_function.path is set too, and one of them scores"
            raise InputError(f"--scorer={scorer}: {rule}; leave one out (custom_reward_function.path=null)")
        function = config.custom_reward_function
        return [Path(function.path).stem + (f"-{function.name}" if function.name != "compute_score" else "")]
    known = sorted({one.name for one in SCORERS.values()})
    if scorer is not None:
        if scorer not in known:
            raise InputError(f"--scorer={scorer}: unknown; choose one of {', '.join(known)}")
        return [scorer]
    names, problems = [], []
    for data_source in dict.fromkeys(answer["data_source"] for answer in answers):
        try:
            names.append(scorer_for(data_source).name)
        except UnknownDataSource as error:
            problems.append(f"{source}: {error}; name one with --scorer, or set custom_reward_function.path")
    if problems:
        raise InputError(problems)
    return sorted(set(names))


def _variant(config: Config, names: Sequence[str]) -> str:
    """Return what the file's name has of the scorers' options."""
    options = [config.reward_model.reward_kwargs.get(name) or {} for name in names]
    options.append(config.custom_reward_function.reward_kwargs if config.custom_reward_function.path else {})
    return "".join(f"-{key}={value}" for one in options for key, value in sorted(one.items()) if value is not None)


def check_data(source: Path, answers: Sequence[Mapping[str, Any]], config: Config) -> None:
    """Check that the answers are to the examples of ``data.val_files``, with their data sources and ground truths.

    Raises InputError with the first of each kind of difference.
    """
    examples: dict[str, Example] = {}
    problems = Problems()
    for path in config.data.val_files:
        for example in ExampleFile(path, config.data.prompt_key, config.data.reward_fn_key).examples(problems):
            both = f"{example.name}/{example.content_hash}"  # where two questions share a name
            examples.update(dict.fromkeys((example.content_hash, both), example))
            examples.setdefault(example.name or example.content_hash, example)
    problems.raise_if_any()
    wrong: dict[str, list[str]] = {}
    for answer in answers:
        example = examples.get(answer["uid"])
        if example is None:
            wrong.setdefault("no such question is there", []).append(answer["uid"])
        elif example.data_source != answer["data_source"]:
            wrong.setdefault(f"data_source is {example.data_source!r} there", []).append(answer["uid"])
        elif json.loads(json.dumps(example.ground_truth, default=dict)) != answer["ground_truth"]:
            wrong.setdefault("another ground truth is there", []).append(answer["uid"])
    if wrong:
        files = ", ".join(config.data.val_files)
        raise InputError(
            [
                f"{source}: {len(set(uids))} questions are not those of {VAL_FILES}={files}: {rule} (uid {uids[0]}); "
                "give the files that were answered"
                for rule, uids in wrong.items()
            ]
        )
