"""What a run that resumes has otherwise than the run that wrote the checkpoint.

Whether it may go on is decided in ``core/checkpoint/manifest.py``; what a key's change means, in
``core/config/sections``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.checkpoint.provenance import Provenance
from core.config import records
from core.config.checked import schema_for
from core.config.problem import brief, show
from core.config.secret_keys import hidden
from core.config.section import BOOKKEEPING, FILES, IDENTITY

SEED = "trainer.seed"  # has a refusal of its own, which no flag lifts
MODELS = {"actor_rollout_ref.model.path": "actor", "critic.model.path": "critic"}


@dataclass(frozen=True)
class Change:
    """A key (or ranks, threads, a package) with the value of the checkpoint and that of the run."""

    key: str
    there: Any
    here: Any
    refused: bool = False  # another objective, other data or another base: not without trainer.resume_with_changes

    def __str__(self) -> str:
        return f"{self.key} was {brief(show(self.there, self.key))}, is {brief(show(self.here, self.key))}"


def changes(saved: Provenance, run: Provenance) -> list[Change]:
    """Return every difference that counts, those that are refused first. Bookkeeping does not count."""
    both = [*_settings(saved, run), *_surroundings(saved, run)]
    return sorted(both, key=lambda change: not change.refused)


def _settings(saved: Provenance, run: Provenance) -> Iterator[Change]:
    schema = schema_for(run.config)
    there, here = (records.completed(each.config, schema) for each in (saved, run))
    there = {key: hidden(value, key) for key, value in there.items()}  # older manifests may hold secrets
    keys = there.keys() | here.keys() | saved.contents.keys() | run.contents.keys()
    if "critic" not in {*saved.models, *run.models}:  # its keys follow the policy's, and nothing reads them
        keys = {key for key in keys if not key.startswith("critic.")}
    for key in sorted({*keys} - {SEED}):
        role, old, new = records.role_of(key), there.get(key), here.get(key)
        hashes = _hashes(key, saved), _hashes(key, run)
        known = None not in hashes  # where one is not recorded the names have to do
        same = old == new or known and role == FILES  # a file may have moved
        if known and hashes[0] != hashes[1]:
            same = False
        if not same and role != BOOKKEEPING:
            pair = [_named(old, hashes[0]), _named(new, hashes[1])] if known else [old, new]
            yield Change(key, *pair, refused=role in (IDENTITY, FILES))


def _hashes(key: str, of: Provenance) -> list[str] | None:
    """Return the hashes of what a key names, or None where they are not recorded."""
    if key not in MODELS:
        return of.contents.get(key)
    base = of.bases.get(MODELS[key])
    return [base.sha256] if base is not None else None


def _named(value: Any, hashes: list[str]) -> str:
    return f"{brief(show(value))} (SHA-256 {', '.join(one[:12] for one in hashes)})"


def _surroundings(saved: Provenance, run: Provenance) -> Iterator[Change]:
    pairs = [(name, getattr(saved, name), getattr(run, name)) for name in ("ranks", "threads")]
    names = sorted(saved.versions.keys() | run.versions.keys())
    pairs += [(name, saved.versions.get(name), run.versions.get(name)) for name in names]
    yield from (Change(*pair) for pair in pairs if pair[1] != pair[2])
