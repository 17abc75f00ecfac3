"""Writes one checkpoint after another until it is killed, and says so after each: ``python -m ...
ROOT FIRST_STEP``."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from core.checkpoint.store import CheckpointStore


def content(step: int, index: int) -> bytes:
    """What file ``index`` of step ``step`` holds: large enough for a kill to fall into its
    writing."""
    return (f"{step}-{index} ".encode() * 4000)[: 20_000 + 1000 * index]


def main() -> None:
    store = CheckpointStore(Path(sys.argv[1]), keep=2)
    for step in itertools.count(int(sys.argv[2])):
        with store.writing(step) as folder:
            (folder / "actor").mkdir()
            for index in range(4):
                (folder / "actor" / f"{index}.bin").write_bytes(content(step, index))
        print(step, flush=True)


if __name__ == "__main__":
    main()
