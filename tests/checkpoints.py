"""Small checkpoints for tests: ``from tests.checkpoints import write``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.checkpoint.provenance import Provenance
from core.checkpoint.store import CheckpointStore

ROOT = Path(__file__).resolve().parents[1]
FILES = ("actor/model.safetensors", "actor/optimizer.pt", "driver.json")
RUN = Provenance(
    seed=1,
    ranks=1,
    threads=2,
    config={"trainer.seed": 1, "actor_rollout_ref.rollout.n": 5, "data.train_files": ["a"]},
    versions={"torch": "2.13.0"},
)


def write(store: CheckpointStore, step: int, provenance: Provenance | None = RUN) -> Path:
    with store.writing(step, provenance) as folder:
        (folder / "actor").mkdir()
        for name in FILES:
            (folder / name).write_bytes(f"{name} of step {step} ".encode() * 50)
    return store.folder(step)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if not path.name.startswith(".writer")}


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@dataclass(frozen=True)
class Settings:
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    val_only: bool = False


LOOKING = Settings(val_only=True)
