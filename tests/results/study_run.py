"""A run that takes no time: writes the folder that a study reads. The override ``test.lift`` raises its accuracy."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path


def main(overrides: list[str]) -> None:
    given = dict(override.split("=", 1) for override in overrides)
    seed, folder = int(given["trainer.seed"]), Path(given["trainer.default_local_dir"])
    if given.get("test.fails") == str(seed):
        print("the data are missing")
        raise SystemExit(2)
    noise = random.Random(seed)
    end = 0.5 + float(given.get("test.lift", 0)) + noise.uniform(-0.05, 0.05)
    rows = [{"step": step, "acc": end * step / 10, "clip": 0.01} for step in range(11)]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"trainer: {{seed: {seed}}}\n")
    git = {"commit": "0123456789abcdef", "dirty": False}
    session = {"command": "python -m toy", "git": git, "hardware": {"gpus": []}}
    manifest = {"recipe": "toy", "run": folder.name, "run_id": "0a1b2c3d", "status": "finished", "sessions": [session]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(os.environ["OMP_NUM_THREADS"], given["trainer.cpu_threads"], *sys.orig_argv[1:3])


if __name__ == "__main__":
    main(sys.argv[1:])
