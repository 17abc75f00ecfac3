"""Ten steps of each recipe's lab in one process, as hashes: what a change that keeps behaviour must not move by a bit.

    python -m tests.oracle --write tests/oracle.json      before the change
    python -m tests.oracle --check tests/oracle.json      after it, on the same kind of CPU and versions

Each lab runs through its entry point as a user would start it, so the script outlives any move of files. A line per lab
prints the hash of the base model, of the weights after the last step, and of all metrics but times. ``--check`` names
each metric whose series differs and exits with 1. It is no test of ``make test``: the bits belong to one kind of CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT = 8971
TIMES = ("timing_s/", "perf/time", "perf/throughput")  # prefixes of metrics that no two runs share
SHARED = ("trainer.backend=local", "trainer.cpu_threads=1", "trainer.resume_mode=disable", "trainer.test_freq=5")
TOOLS = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={ROOT}/recipes/lab/tools.yaml"
URL = f"retriever.url='http://127.0.0.1:{PORT}/retrieve'"


@dataclass(frozen=True)
class Lab:
    recipe: str
    preset: str
    base: str  # folder of the base model, below outputs/lab
    overrides: tuple[str, ...] = ()


LABS = {
    "ppo": Lab("ppo", "lab", "base"),
    "grpo": Lab("grpo", "lab", "base"),
    "grpo_tools": Lab("grpo", "lab_tools", "sums/base", (TOOLS,)),
    "dapo": Lab("dapo", "lab", "base"),
    "search_r1": Lab("search_r1", "lab", "knowledge/base", (URL,)),
    "search_r1_ppo": Lab(
        "search_r1",
        "lab_ppo",
        "knowledge/base",
        (URL, "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
    ),
}
PREPARE = (("recipes.lab.prepare",), ("recipes.lab.sums",), ("recipes.search_r1.knowledge_model", "--seed", "1"))


def python(work: Path, *arguments: str) -> None:
    """Run ``python -m`` in the work folder. Raises CalledProcessError, with the output shown, where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=work, env=environment(), capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        done.check_returncode()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def retrieval_server(work: Path) -> Iterator[None]:
    """Search over the knowledge of seed 1, for the time of the block."""
    index = "outputs/lab/knowledge/seed-1/index"
    command = [sys.executable, "-m", "recipes.search_r1.retrieval_server", "--index", index, "--port", str(PORT)]
    with open(work / "server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, cwd=work, env=environment(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not listens():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the retrieval server did not start:\n{(work / 'server.log').read_text()}")
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait()


def listens() -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", timeout=1)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def series(run: Path) -> dict[str, str]:
    """Each metric's values over the run as one hash, times left out."""
    values: dict[str, list[tuple[int, float]]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if not name.startswith(TIMES):
                values.setdefault(name, []).append((row.get("step"), value))
    return {name: digest(json.dumps(each).encode()) for name, each in sorted(values.items())}


def measure(name: str, work: Path, steps: int) -> dict:
    """Train the lab for ``steps`` steps and return its hashes."""
    lab, base = LABS[name], (work / "outputs/lab" / LABS[name].base / "current").resolve()
    run = work / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    folder = (f"trainer.default_local_dir={run}", f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}")
    arguments = (f"preset={lab.preset}", *SHARED, *folder, *lab.overrides)
    python(work, f"recipes.{lab.recipe}.main_{lab.recipe}", *arguments)
    models = sorted((run / f"global_step_{steps}").glob("*/model*.safetensors"))
    return {
        "base": digest((base / "model.safetensors").read_bytes()),
        "weights": {path.parent.name: digest(path.read_bytes()) for path in models},
        "metrics": series(run),
    }


def differences(name: str, wanted: dict, found: dict) -> list[str]:
    lines = [
        f"{name}: {part} {wanted[part]} -> {found[part]}" for part in ("base", "weights") if wanted[part] != found[part]
    ]
    for metric in sorted(wanted["metrics"].keys() | found["metrics"].keys()):
        before, after = wanted["metrics"].get(metric, "absent"), found["metrics"].get(metric, "absent")
        if before != after:
            lines.append(f"{name}: {metric} {before} -> {after}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the base models (kept) and the runs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--labs", nargs="*", default=list(LABS), choices=list(LABS))
    parser.add_argument("--write", type=Path, help="JSON file for the hashes")
    parser.add_argument("--check", type=Path, help="JSON file to compare with")
    asked = parser.parse_args()
    work = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for module in PREPARE:
        python(work, *module)
    found = {}
    with retrieval_server(work):
        for name in asked.labs:
            found[name] = measure(name, work, asked.steps)
            weights = " ".join(f"{part} {value}" for part, value in found[name]["weights"].items())
            print(f"{name}: base {found[name]['base']} {weights} ", end="")
            print(f"metrics {digest(json.dumps(found[name]['metrics']).encode())}", flush=True)
    machine = {"cpu": platform.processor() or platform.machine(), "torch": version("torch"), "steps": asked.steps}
    if asked.write:
        asked.write.write_text(json.dumps({"machine": machine, "labs": found}, indent=1) + "\n")
    if asked.check:
        wanted = json.loads(asked.check.read_text())["labs"]
        lines = [line for name in asked.labs for line in differences(name, wanted[name], found[name])]
        print("\n".join(lines) or f"equal to {asked.check}, to the bit")
        return bool(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
