"""Whose answers are evaluated: a Hugging Face folder, a hub id, or the checkpoint of a run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.checkpoint.manifest import NAME, Checkpoint
from core.checkpoint.provenance import base_of
from core.checkpoint.store import fetched
from core.config import convert, recipes
from core.config.locations import is_url, name_of
from core.config.paths import is_local
from core.errors import InputError
from core.export import export, find_checkpoint
from core.learner.hf_export import ADAPTERS

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
PATH = "actor_rollout_ref.model.path"
TOKENIZER_PATH = "actor_rollout_ref.model.tokenizer_path"


@dataclass(frozen=True)
class ModelSource:
    """A model, and the ``settings`` by flat key that its run had (none for a model without a run)."""

    path: str
    checkpoint: Checkpoint | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def identity(self) -> str:
        """Return what tells the weights from any others, wherever they lie: a hash, or the commit on the hub.

        Raises InputError for a folder without weights and a hub id that cannot be reached.
        """
        if self.checkpoint is not None and (Path(self.path) / ADAPTERS).exists():
            own = self.checkpoint.files["actor/adapter_model.safetensors"]["sha256"]
            provenance = self.checkpoint.provenance
            base = provenance.models["actor"].base if provenance else None
            return f"adapters sha256:{own} on sha256:{base.sha256 if base else None}"
        if is_local(self.path) or is_url(self.path):
            try:
                return f"sha256:{base_of(os.path.expanduser(self.path)).sha256}"
            except FileNotFoundError as error:
                raise InputError(f"--model={self.path}: {error}; give a folder that core.export wrote") from error
        from transformers.utils import cached_file

        from core.learner.models import readable

        with readable(self.path, "--model"):
            cached = Path(cached_file(self.path, "config.json"))
        return f"{self.path}@{cached.parent.name}"

    def described(self) -> dict[str, Any]:
        """Return what a manifest records of the model."""
        step = (
            {} if self.checkpoint is None else {"run": str(self.checkpoint.folder.parent), "step": self.checkpoint.step}
        )
        return {"path": self.path, **step}

    @contextmanager
    def loadable(self, beside: Path) -> Iterator[str]:
        """Yield a folder or hub id that every engine can load; adapters are merged into their base for the time.

        The merged model lies in a temporary folder ``beside`` the answers, which machines of a cluster share.
        """
        if self.checkpoint is None or not (Path(self.path) / ADAPTERS).exists():
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix=".merged-", dir=beside) as folder:
            export(self.checkpoint.folder, Path(folder) / "model")
            yield str(Path(folder).resolve() / "model")


def of_model(path: str, tokenizer_path: str | None) -> ModelSource:
    """Return the source of ``--model``. Raises InputError for a local folder that lacks a model or a tokenizer."""
    from core.learner.models import resolve_path

    if is_local(path) or is_url(path):
        folder = Path(resolve_path(path, "--model"))
        if (folder / ADAPTERS).exists():
            rule = "holds adapters without their base"
            raise InputError(
                f"--model={path}: {rule}; name the checkpoint with --run, or merge them: python -m core.export"
            )
        _check_tokenizer(folder, f"--model={path}", tokenizer_path)
    return ModelSource(path, settings={PATH: path})


def of_run(source: str, step: int | None, recipe: str, tokenizer_path: str | None) -> ModelSource:
    """Return the source of ``--run``: a run folder (its newest checkpoint, or that of ``step``) or a checkpoint.

    Raises InputError where there is none, it is damaged or lacks a tokenizer, or the run is another recipe's.
    """
    if is_url(source) and step is not None and not NAME.fullmatch(name_of(source)):
        source, step = f"{source.rstrip('/')}/global_step_{step}", None
    folder = fetched(source, "--run").expanduser()
    if step is not None:
        if NAME.fullmatch(folder.name):
            raise InputError(f"--step={step}: --run={source} names a checkpoint already; leave --step out")
        folder = folder / f"global_step_{step}"
        if not folder.is_dir():
            has = sorted(int(match[1]) for path in folder.parent.glob("*") if (match := NAME.fullmatch(path.name)))
            steps = f"it has those of steps {', '.join(map(str, has))}" if has else "it has none"
            raise InputError(f"--step={step}: --run={source} has no checkpoint of that step; {steps}")
    checkpoint = find_checkpoint(folder)
    actor = checkpoint.path("actor")
    _check_tokenizer(actor, f"--run={source}", tokenizer_path)
    settings = dict(checkpoint.provenance.config) if checkpoint.provenance else {}
    _check_recipe(checkpoint.folder.parent, recipe, settings)
    # Of the run's process, not of the model; the tokenizer that trained lies beside the weights
    settings |= {PATH: str(actor.resolve()), TOKENIZER_PATH: None, "trainer.resume_mode": "disable"}
    return ModelSource(str(actor.resolve()), checkpoint, settings)


def _check_tokenizer(folder: Path, named: str, tokenizer_path: str | None) -> None:
    if tokenizer_path is None and not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise InputError(
            f"{named}: {folder} holds no tokenizer ({TOKENIZER_FILES[0]}); copy it there, or set {TOKENIZER_PATH}"
        )


def _check_recipe(run: Path, recipe: str, settings: Mapping[str, Any]) -> None:
    """Check that the run is one of the recipe: its manifest names one, and its keys are the recipe's."""
    path = run / "manifest.json"
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("recipe", recipe) if path.exists() else recipe
    except ValueError:
        named = recipe
    unknown = sorted(settings.keys() - convert.all_keys(recipes.schema_of(recipe)).keys())
    if unknown or (named != recipe and named in recipes.names()):
        has = f"has keys that {recipe} lacks ({', '.join(unknown[:3])})" if unknown else f"is one of {named}"
        raise InputError(f"recipe={recipe}: the run {run} {has}; name its own recipe")
