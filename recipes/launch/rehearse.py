"""Rehearse a run script with a tiny model on CPUs, and write a page of what held.

    python -m recipes.launch.rehearse SCRIPT [key=value ...]     which is what rehearse.sh calls

Each run is the script's own command with the keys that make it small behind a ``--``. strikes.py
starts it and does the harm: an actor kills itself, or stops answering, as a phase begins.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from core.checkpoint.store import CheckpointStore
from core.config import paths
from core.config.schema import Config
from core.dry_run import is_dry_run
from core.errors import InputError
from core.tracking.run_manifest import ROOT
from data_preprocess.schema import write_rows
from recipes.lab import hops
from recipes.launch import strikes
from results.reporting.run_scripts import Script, read_script

STEPS = len(strikes.PHASES) + 6  # a step for each strike, and some for the signal and the resume
PATIENCE_S = 1800
MODEL = ROOT / "recipes/lab/hops_base"  # committed, so that every node has it
WEIGHTS = "actor/model.safetensors"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> int:
    """Return a reward that differs between the answers to a prompt."""
    return sum(map(ord, solution_str)) % 2


def shrunk(config: Config, folder: Path, nodes: int) -> dict[str, Any]:
    """Return the keys that make a script small enough for CPUs; its algorithm and pools stay."""
    ranks = min(2, config.trainer.n_gpus_per_node)
    settings: dict[str, Any] = {
        **yaml.safe_load(Path(__file__).with_name("rehearsal.yaml").read_text()),
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "custom_reward_function.path": __file__,
        "actor_rollout_ref.model.path": MODEL,
        "critic.model.path": MODEL,
        "trainer.nnodes": min(nodes, config.trainer.nnodes),
        "trainer.n_gpus_per_node": ranks,
        "trainer.total_training_steps": STEPS,
        "trainer.max_restarts": STEPS,
    }
    for key in ("ulysses_sequence_parallel_size", "tensor_model_parallel_size"):
        size = getattr(config.actor_rollout_ref.actor, key)
        settings[f"actor_rollout_ref.actor.{key}"] = min(ranks, size)
    if hasattr(config.reward_model, "overlong_buffer"):
        settings |= {"reward_model.overlong_buffer.len": 4, "data.gen_batch_size": 8}
    if hasattr(config, "do_search"):  # a retriever is another service, which is not rehearsed
        settings |= {"do_search": False, "data.max_start_length": 64, "data.max_obs_length": 16}
    return settings


class Rehearsal:
    """The runs of one rehearsal in ``folder``, and the rows of its page."""

    def __init__(self, script: Script, folder: Path):
        self.script = script
        self.folder = folder
        self.nodes = 1
        self.rows: list[tuple[str, bool, str]] = []  # what, whether it held, detail

    def check(self, what: str, held: bool, detail: str) -> None:
        """Add a row to the page, and print it."""
        self.rows.append((what, held, detail))
        print(f"{'held' if held else 'DID NOT HOLD'}: {what} ({detail})", flush=True)

    def compare_nodes(self) -> None:
        """Compare code, packages and models of the nodes, and look for the script's files."""
        import ray
        import torch

        from core.cluster.ray_nodes import check_nodes
        from core.cluster.ray_pools import connect

        config = self.script.config
        problems = [str(problem) for problem in paths.missing(config)]
        connect(config, torch.device("cpu"))
        try:
            nodes = {
                node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]
            }
            check_nodes(config, nodes)
        except InputError as error:
            problems += error.problems
        finally:
            ray.shutdown()
        self.nodes = len(nodes)
        addresses = ", ".join(sorted(nodes.values()))
        what = "code, packages and files are the same on every node"
        self.check(what, not problems, "; ".join(problems) or addresses)

    def start(self, name: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a run in the folder ``name``; its output goes to ``name``.log."""
        module = f"recipes.{self.script.recipe}.main_{self.script.recipe}"
        small = shrunk(self.script.config, self.folder, self.nodes)
        small["trainer.default_local_dir"] = self.folder / name
        words = [sys.executable, "-m", strikes.__name__, module, *self.script.arguments, "--"]
        words += [f"{key}={value}" for key, value in small.items()]
        environment = {**os.environ, **environment}
        with open(self.folder / f"{name}.log", "a") as log:
            return subprocess.Popen(words, env=environment, stdout=log, stderr=log)

    def losses_and_signal(self) -> None:
        """Make one run with all strikes, which SIGTERM ends in a step after the hang."""
        journal = self.folder / "struck"
        process = self.start("disturbed", **{strikes.JOURNAL: str(journal)})
        wait(process, lambda: strikes.HANG in strikes.struck(journal))
        before = len(self.steps("disturbed"))
        wait(process, lambda: len(self.steps("disturbed")) > before)
        process.terminate()
        status = wait(process)
        log = (self.folder / "disturbed.log").read_text(errors="replace").strip()
        struck = strikes.struck(journal)
        went_on = log.count("restart ") >= len(struck)
        for strike in dict.fromkeys([*struck, strikes.HANG]):
            what = "a hang in update_actor" if strike == strikes.HANG else f"a loss in {strike}"
            self.check(what, went_on and strike in struck, "continues from the checkpoint before")
        manifest = self.folder / "disturbed" / "manifest.json"
        ended = json.loads(manifest.read_text())["status"] if manifest.exists() else "no manifest"
        held = status == 0 and ended == "stopped"
        detail = f"exit status {status}, {ended}"
        if not held:
            detail += "; " + log.rpartition("\n")[2]
        self.check("SIGTERM saves", held, detail)

    def resume(self) -> None:
        """Repeat the command to its end, and compare its weights with an undisturbed run's."""
        stores = [CheckpointStore(self.folder / name) for name in ("disturbed", "undisturbed")]
        begun = max(stores[0].steps(), default=0)
        status = wait(self.start("disturbed"))
        held = status == 0 and self.steps("disturbed") == [*range(1, STEPS + 1)]
        self.check("resume", held, f"from step {begun}, each step once; exit status {status}")
        wait(self.start("undisturbed"))
        ends = [store.latest() for store in stores]
        equal = None not in ends and ends[0].files[WEIGHTS] == ends[1].files[WEIGHTS]
        self.check("the weights are an undisturbed run's", equal, "to the bit")

    def steps(self, name: str) -> list[int]:
        """Return the steps of which a run has written metrics."""
        metrics = self.folder / name / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def page(self, seconds: float) -> str:
        """Return the page: a table of what held."""
        lines = [f"# Rehearsal of {self.script.path}", ""]
        lines += [f"{seconds:.0f} s, a tiny model on CPUs, nodes: {self.nodes}.", ""]
        lines += ["| what | held | |", "|---|---|---|"]
        for what, held, detail in self.rows:
            lines.append(f"| {what} | {'yes' if held else '**no**'} | {detail} |")
        return "\n".join([*lines, "", f"The logs are in {self.folder}.", ""])


def wait(process: subprocess.Popen[bytes], condition: Callable[[], bool] = lambda: False) -> int:
    """Wait until ``condition`` holds, or else until the process ends; return its exit status.

    It is killed after PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and not condition():
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.2)
    return process.returncode


def main(argv: list[str]) -> None:
    command = "python -m recipes.launch.rehearse"
    parser = argparse.ArgumentParser(command, description="Rehearse a script with a tiny model.")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="The run script.")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="Keys beside the script's.")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    path = arguments.script
    try:
        script = read_script(path, arguments.keys)
        if script is None:
            raise InputError(f"{path}: starts no training run")
        if is_dry_run():
            print(f"dry run: would rehearse {path}")
            return
        name = f"{path.parent.name}-{path.stem}-{time.strftime('%m%d-%H%M%S')}"
        folder = Path("outputs/rehearsal", name).absolute()
        questions = enumerate(hops.draw_many(16, "rehearsal"))
        rows = [hops.RECIPE.row(question, "train", index) for index, question in questions]
        write_rows(folder / "prompts.parquet", rows)
        rehearsal = Rehearsal(script, folder)
        if "RAY_ADDRESS" in os.environ:
            rehearsal.compare_nodes()
        if all(held for _, held, _ in rehearsal.rows):  # a run would refuse nodes that differ
            rehearsal.losses_and_signal()
            rehearsal.resume()
    except InputError as error:
        sys.exit(str(error))
    (folder / "page.md").write_text(rehearsal.page(time.monotonic() - begun))
    print(f"wrote {folder / 'page.md'}")
    sys.exit(not all(held for _, held, _ in rehearsal.rows))


if __name__ == "__main__":
    main(sys.argv[1:])
