"""What ``python -m core.replay`` prints: whether a step repeats, and what another objective makes of its batch."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config import Config, code_keys, convert, examine, recipes, roles
from core.config.unknown_keys import CommandLine, unknown_key
from core.errors import InputError
from core.extensions.capsules.differences import Closeness, Difference
from core.extensions.capsules.phases import (
    WITHOUT_WEIGHTS,
    advantages_phase,
    batch_phase,
    differences,
    log_probs_phase,
    update_phase,
)
from core.extensions.capsules.rebuild import rebuilt
from core.extensions.capsules.stored_step import StoredStep, find, read
from core.launch import TRAINER as LAUNCHED
from core.replay import PHASES
from core.tracking.run_manifest import filled_in

ACTOR = "actor_rollout_ref.actor."
# Keys that act after the answers are there and scored. The others of the objective decide what a capsule begins with.
REPLAYED = (ACTOR, "critic.", "algorithm.", "trainer.critic_warmup")
EARLIER = (f"{ACTOR}overlong_filtering", "algorithm.filter_groups.", "critic.model.", "critic.enable")
SHOWN = 8  # differences after the first one


@dataclass(frozen=True)
class Replay:
    """Outcome of a comparison. ``found`` is empty where the step repeats; its first entry was computed first."""

    stored: StoredStep
    phases: tuple[str, ...]
    rule: Closeness
    found: tuple[Difference, ...]

    def __str__(self) -> str:
        head = [f"{self.stored.folder}: step {self.stored.step}, phases {', '.join(self.phases)}", f"rule: {self.rule}"]
        if not self.found:
            return "\n".join([*head, "every tensor and metric is as recorded"])
        first, *others = self.found
        lines = [*head, f"first difference: {first}"]
        lines += [f"  also: {one}" for one in others[:SHOWN]]
        return "\n".join([*lines, *([f"  and {len(others) - SHOWN} more"] if len(others) > SHOWN else [])])


def replay(
    run: Path,
    step: int | None = None,
    phases: Collection[str] = PHASES,
    *,
    code: Sequence[str] = (),
    trainer: str | None = None,
) -> Replay:
    """Compute a step that was kept again and compare. ``code`` and ``trainer`` are the code that was named for it.

    Raises InputError for what cannot be replayed: see ``stored_step.find`` and ``read``, and for code
    that the capsule alone names.
    """
    stored = _trusted(read(find(run, step)), code, trainer)
    chosen = tuple(name for name in PHASES if name in phases)
    rule = Closeness.of(stored)
    trainer = rebuilt(stored, stored.config, weights=not {*chosen} <= {*WITHOUT_WEIGHTS})
    return Replay(stored, chosen, rule, tuple(differences(trainer, stored, chosen, rule)))


# What a replay loads nothing of: answers are there, and scored
UNREAD = ("custom_reward_function.", "reward_model.", "actor_rollout_ref.rollout.", "trainer.logger", "ray_kwargs.")


def _trusted(stored: StoredStep, code: Sequence[str], trainer: str | None) -> StoredStep:
    """Return the step with the trainer to make, once all the code that it names was named by the caller as well."""
    config, recipe = stored.config, recipe_of(stored.config)
    if strange := [key for key in examine(recipe, code).given if key not in code_keys.named(config)]:
        raise InputError(f"{strange[0]}: names no code of this capsule; --with tries another value of a key")
    code_keys.refuse(str(stored.folder), config, recipe, code, UNREAD)
    known = {LAUNCHED, *(recipes.trainer_of(name)[0] for name in recipes.names())}
    recorded = stored.facts["trainer"]
    if trainer is None and recorded not in known:
        raise InputError(
            f"{stored.folder}: its trainer is {ascii(recorded)[:200]}, which is no recipe's here. The capsule may come "
            "from anybody, and code is named on the command line alone. If you trust that code, append "
            f"--trainer {shlex.quote(str(recorded))}"
        )
    return dataclasses.replace(stored, facts={**stored.facts, "trainer": trainer or recorded})


# ---------------------------------------------------------------- what if


def what_if(
    run: Path, step: int | None, changes: Sequence[str], *, code: Sequence[str] = (), trainer: str | None = None
) -> str:
    """Return a table of metrics of the step as it was, and with other keys of the objective, on the same batch.

    Both columns are computed now, all phases one after the other. Raises InputError for a key that cannot be tried.
    """
    stored = _trusted(read(find(run, step)), code, trainer)
    config = changed(stored, changes)
    as_it_was, with_changes = _metrics(stored, stored.config), _metrics(stored, config)
    names = [*as_it_was, *(name for name in with_changes if name not in as_it_was)]
    rows = [(name, as_it_was.get(name), with_changes.get(name)) for name in names]
    other = [row for row in rows if row[1] != row[2]]
    title = " ".join(changes)
    lines = [f"{stored.folder}: step {stored.step} on the same batch", f"{len(rows) - len(other)} metrics are the same"]
    if not other:
        return "\n".join([*lines, f"{title}: makes no difference to this step"])
    width = max(len(name) for name, *_ in other)
    column = max(12, len(title))
    lines += [f"{'metric':{width}}  {'as it was':>12}  {title:>{column}}"]
    for name, *values in other:
        before, after = ("" if value is None else f"{value:.6g}" for value in values)
        lines.append(f"{name:{width}}  {before:>12}  {after:>{column}}")
    return "\n".join(lines)


def changed(stored: StoredStep, changes: Sequence[str]) -> Config:
    """Return the configuration of the step with these ``key=value``, checked as a run's. Raises InputError."""
    config, schema = stored.config, type(stored.config)
    for text in changes:
        key, sign, value = text.partition("=")
        if not sign:
            raise InputError(f"--with {text}: write key=value, as in {ACTOR}clip_ratio=0.1")
        if not convert.known(key, schema):
            raise InputError(str(unknown_key(key, value, CommandLine("", schema))))
        if (role := roles.role_of(key)) != roles.OBJECTIVE:
            rule = f"is a key of {role} and does not decide what is trained"
            raise InputError(f"{key}={value}: {rule}; --with tries keys of the objective, as {ACTOR}clip_ratio")
        if not key.startswith(REPLAYED) or key.startswith(EARLIER):
            raise InputError(
                f"{key}={value}: decides how models start or answers are drawn and scored, and a capsule begins after "
                "that; try it in a run of its own"
            )
    recipe = recipe_of(config)
    flat = convert.as_json(config)
    base = {key: value for key, value in flat.items() if value is not None and not filled_in(config, recipe, key)}
    composed = examine(recipe, list(changes), (), base)
    if composed.problems:
        raise InputError(composed.problems)
    if composed.unused:
        raise InputError([f"{key}={value}: has no effect: {why}" for key, (value, why) in composed.unused.items()])
    return composed.config


def recipe_of(config: Config) -> str:
    """Return the recipe whose rules hold: the one that the project is named after, or else one with these keys."""
    named = (config.trainer.project_name or "").removeprefix("rlrepro-")
    alike = (name for name in ("ppo", *recipes.names()) if recipes.schema_of(name) is type(config))
    return named if named in recipes.names() else next(alike)


def _metrics(stored: StoredStep, config: Config) -> dict[str, float]:
    """Return the metrics of a whole step, and how far its update moved the weights."""
    run = rebuilt(stored, config, weights=True)
    before = {
        name: {key: value.clone() for key, value in part.module.state_dict().items()}
        for name, part in run.workers.trained.items()
    }
    outcome = batch_phase(run, stored)
    metrics: dict[str, float] = {}
    for phase in (log_probs_phase, advantages_phase, update_phase):
        outcome = phase(run, stored, outcome.batch)
        metrics |= outcome.metrics
    for name, part in run.workers.trained.items():
        weights = part.module.state_dict()
        moved = sum(float((weights[key] - value).double().square().sum()) for key, value in before[name].items())
        metrics[f"{name}/moved"] = moved**0.5
    return metrics
