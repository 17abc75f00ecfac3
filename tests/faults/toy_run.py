"""A training run in miniature (linear regression, numpy only) with the phases, checkpoints and metrics of a real one.

``python -m tests.faults.toy_run FOLDER [--steps N] [--bug NAME]``. Every step depends on the global RNG and on the
optimizer's momentum, so whatever a checkpoint forgets shows at the end. The bugs are for testing the harness.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from core.checkpoint.run_state import (
    DriverState,
    load_tensors,
    rng_state,
    save_tensors,
    seed_generators,
    set_rng_state,
)
from core.checkpoint.store import CheckpointStore
from tests.faults.killing import kill_at

BUGS = ("rng", "momentum", "ordinal", "metrics", "counter")
PROMPTS = 4  # ordinals a step


class Toy:
    def __init__(self, folder: Path, bug: str | None):
        self.folder, self.bug = folder, bug
        self.store = CheckpointStore(folder, keep=2)
        self.metrics = folder / "metrics.jsonl"
        self.step, self.next_ordinal, self.seen = 0, 0, 0
        self.weights = {"w": np.zeros(50, np.float32), "momentum": np.zeros(50, np.float32)}
        seed_generators(1)

    def resume(self) -> None:
        self.store.claim()
        checkpoint = self.store.latest(tidy=True)
        if checkpoint is not None:
            state = DriverState.load(checkpoint.folder)
            self.step, self.weights = state.step, load_file(checkpoint.folder / "actor" / "model.safetensors")
            self.next_ordinal = state.next_ordinal + (PROMPTS if self.bug == "ordinal" else 0)
            self.seen = 0 if self.bug == "counter" else state.values["seen"]
            if self.bug == "momentum":
                self.weights["momentum"] *= 0
            if self.bug != "rng":
                set_rng_state(load_tensors(checkpoint.folder / "rng.pt"))
        if self.bug != "metrics" and self.metrics.exists():
            lines = [line for line in self.metrics.read_text().splitlines() if json.loads(line)["step"] <= self.step]
            self.metrics.write_text("".join(f"{line}\n" for line in lines))

    def train(self) -> None:
        start = time.perf_counter()
        step = self.step + 1
        rows = np.random.default_rng(self.next_ordinal).normal(size=(PROMPTS, 50)).astype(np.float32)
        noise = np.random.normal(scale=0.1 + 0.1 * random.random(), size=PROMPTS).astype(np.float32)
        kill_at("rollout", step)
        time.sleep(0.003)
        error = rows @ (self.weights["w"] - 1) + noise
        kill_at("update", step)
        self.weights["momentum"] = np.float32(0.9) * self.weights["momentum"] + rows.T @ error / PROMPTS
        self.weights["w"] = self.weights["w"] - np.float32(0.01) * self.weights["momentum"]
        kill_at("sync", step)
        self.next_ordinal += PROMPTS
        self.seen += PROMPTS
        self.step = step
        values = {"step": step, "loss": float((error**2).mean()), "seen": self.seen}
        with open(self.metrics, "a") as file:
            file.write(json.dumps({**values, "timing_s/step": time.perf_counter() - start}) + "\n")
        kill_at("between", step)

    def save(self) -> None:
        with self.store.writing(self.step) as folder:
            (folder / "actor").mkdir()
            save_file(self.weights, folder / "actor" / "model.safetensors")
            time.sleep(0.002)
            DriverState(self.step, self.next_ordinal, values={"seen": self.seen}).save(folder)
            save_tensors(folder / "rng.pt", rng_state())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bug", choices=BUGS)
    args = parser.parse_args()
    toy = Toy(args.folder, args.bug)
    toy.resume()
    while toy.step < args.steps:
        toy.train()
        if toy.step % 2 == 0:
            toy.save()


if __name__ == "__main__":
    main()
