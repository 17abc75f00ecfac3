"""The driver's memory and time for one DAPO step on 128 learner ranks: what it does beside waiting for GPUs.

    python -m tests.benchmarks.batches                 an eighth of the step, then the whole step: 3 GB of memory
    python -m tests.benchmarks.batches --parts 8       the eighth alone

Workload: 512 prompts of 160 tokens, 16 answers each, log-normal lengths cut at 20,480 tokens, 41 M real tokens in all;
16 optimizer steps; 16 sequence-parallel groups of 8 ranks. The trainer's own phases run, from collecting to the metrics
of the step. A scripted engine answers, and its trajectories are pickled as Ray would pickle them. Learner ranks are
scripted too: what they would be sent is pickled and kept for as long as the phase lasts, replies are random numbers.

Seconds are the driver's: what the engine and the ranks do is left out, reading their pickles is not. CPU seconds are
those of its one thread, which other programs of the machine hardly lengthen.
Memory is the highest resident memory of the process, which also holds what Ray would have in its object store. Each
size runs in a process of its own. Writes ``results/benchmarks/batches.{json,md}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
import torch

from core.cluster.ray_workers import RayWorkers
from core.config import compose
from core.learner.batching import make_batch, mini_batching
from core.ray_trainer import RayPPOTrainer
from core.tracking.metrics import data_metrics
from core.tracking.run_manifest import hardware
from core.types import Prompt, Segment, StepMetrics, Stop, TrainBatch, Trajectory
from reward_scores.score import Score
from tests import scripted_engine
from tests.benchmarks.head_memory import MIB, _resident

TARGET = Path(__file__).resolve().parents[2] / "results" / "benchmarks" / "batches"
PROMPTS, SAMPLES, PROMPT, LONGEST, MEDIAN, SIGMA = 512, 16, 160, 20480, 2920, 1.1
RANKS, TOGETHER, OPTIMIZER_STEPS = 128, 8, 16
GIB_AT_MOST, SECONDS_AT_MOST, BYTES_AT_MOST = 8.0, 15.0, 1.2
FIELD_BYTES = {  # of a real token, in both directions
    "old_log_prob": 4 + 1 + 4 + 4,  # id, mask; log-prob, entropy
    "update_actor": 4 + 1 + 4 + 4 + 4,  # id, mask, weight, advantage, old log-prob
}


class Stopwatch:
    """The driver's seconds, by phase: of the clock and of all its threads. What others do in a phase is left out."""

    def __init__(self) -> None:
        self.others, self.seconds, self.cpu_seconds = np.zeros(2), {}, {}

    @contextmanager
    def of_others(self) -> Iterator[None]:
        start = self.now()
        yield
        self.others += self.now() - start

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, others = self.now(), self.others.copy()
        yield
        found = self.now() - start - (self.others - others)
        self.seconds[name], self.cpu_seconds[name] = map(float, found)

    @staticmethod
    def now() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])


class LongAnswers(scripted_engine.ScriptedEngine):
    """Answers of the workload's lengths, which arrive as Ray would hand them over."""

    def __init__(self, watch: Stopwatch):
        scripted_engine.TURNS = 1  # turns of the event loop between two ends, which no real engine has
        super().__init__(None, lambda request: ())
        self.watch = watch

    def _response(self, request):
        with self.watch.of_others():
            rng = np.random.default_rng(request.seed)
            length = int(np.clip(rng.lognormal(np.log(MEDIAN), SIGMA), 1, LONGEST))
            return rng.integers(0, 150_000, length, dtype=np.int32), Stop.LENGTH if length == LONGEST else Stop.EOS

    def _tick(self, loop) -> None:
        with self.watch.of_others():
            super()._tick(loop)

    async def sample(self, request) -> Trajectory:
        return pickle.loads(await super().sample(request))

    def _trajectory(self, own) -> bytes:
        count = len(own.ids)
        fields = {
            "prompt_ids": own.record.request.prompt_ids,
            "response_ids": own.ids,
            "response_mask": np.ones(count, bool),
            "logprobs": np.full(count, -0.5, np.float32),
            "segments": (Segment("policy", "text" * count),),  # four characters a token
        }
        made = Trajectory(**fields, stop=own.stop, policy_version=0, seed=own.record.request.seed)
        return pickle.dumps(made, 5)


class Wire:
    """Satisfies :class:`core.cluster.ray_watch.Watch`: counts the bytes, and replies with numbers."""

    def __init__(self, watch: Stopwatch):
        self.watch, self.bytes, self.kept = watch, Counter(), []

    def put(self, value: TrainBatch | list[TrainBatch]) -> SimpleNamespace:
        self.kept.append(pickle.dumps(value, 5))
        asked = int(value.response_mask.sum()) if isinstance(value, TrainBatch) else 0
        return SimpleNamespace(asked=asked)

    def call(self, phase: str, method: str, arguments: dict[str, tuple]) -> list:
        self.bytes[phase] += sum(map(len, self.kept))
        if method == "run_pass":
            with self.watch.of_others():
                found = [self.reply(phase, sent.asked) if replies else None for _, sent, replies in arguments.values()]
            self.kept.clear()
            return [reply and pickle.loads(reply) for reply in found]
        self.kept.clear()
        return [{"actor/grad_norm": 1.0}] * len(arguments)

    def reply(self, phase: str, count: int) -> bytes:
        reply = pickle.dumps([np.full(count, -0.51, np.float32), np.full(count, 0.3, np.float32)], 5)
        self.bytes[phase] += len(reply)
        return reply


def make_trainer(parts: int, watch: Stopwatch) -> RayPPOTrainer:
    """Return the trainer of the published step, a ``parts``-th of its prompts, over the scripted engine and ranks."""
    prompts = PROMPTS // parts
    trainer = RayPPOTrainer(
        compose(
            "dapo",
            [
                "actor_rollout_ref.model.path=any/model",
                "actor_rollout_ref.model.use_remove_padding=True",
                f"data.train_batch_size={prompts}",
                f"data.gen_batch_size={prompts}",
                f"actor_rollout_ref.rollout.n={SAMPLES}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // OPTIMIZER_STEPS}",
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={TOGETHER}",
                f"trainer.nnodes={RANKS // 8}",
                "trainer.n_gpus_per_node=8",
                "trainer.total_training_steps=1",
            ],
        )
    )
    prompt_ids = tuple(range(1000, 1000 + PROMPT))
    trainer.stream = SimpleNamespace(prompt=lambda ordinal: Prompt(ordinal, str(ordinal), prompt_ids, (), "", "test"))

    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        right = float(trajectory.seed % 2)
        return Score(right, parts={"acc": right})

    never_all = SimpleNamespace(stop_if_all=lambda *_: None)
    trainer.reward = SimpleNamespace(score=score, batched=False, failures=never_all)
    workers = trainer.workers = object.__new__(RayWorkers)
    workers.config, workers.ranks, workers.device = trainer.config, RANKS, torch.device("cpu")
    workers.watch, workers.engine = Wire(watch), LongAnswers(watch)
    actor = trainer.config.actor_rollout_ref.actor
    workers.actor_mini_batches = mini_batching(actor, trainer.config.data.max_response_length, "vanilla")
    trainer.sampler, trainer.rollout = trainer.make_sampler(workers.engine), trainer.make_rollout()
    ray.put = workers.watch.put
    return trainer


def measure(parts: int) -> dict:
    """One step, in this process."""
    torch.set_num_threads(1)
    watch, metrics = Stopwatch(), StepMetrics(1)
    trainer, held = make_trainer(parts, watch), _resident()
    with asyncio.Runner() as trainer.runner:
        with watch.phase("collect"):
            groups = trainer.collect(metrics)
        with watch.phase("make_batch"):
            batch = make_batch(groups, 0, trainer.needs.state_masking)
        with watch.phase("old log-probs"):
            batch = trainer.compute_log_probs(batch, metrics)
            batch = trainer.apply_rollout_correction(batch, metrics)
        with watch.phase("advantages"):
            batch = trainer.compute_advantages(batch, metrics)
        with watch.phase("update"):
            trainer.workers.update_actor(batch, 1.0)
        with watch.phase("metrics"):
            data_metrics(groups, batch)
    sizes = {"sequences": len(batch), "tokens": batch.tokens, "longest": int(batch.lengths.max())}
    sent = {name: count / (batch.tokens * FIELD_BYTES[name]) for name, count in trainer.workers.watch.bytes.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times = {"seconds": watch.seconds, "cpu_seconds": watch.cpu_seconds}
    return {"parts": parts, **sizes, **times, "held": held, "peak": peak, "times_own_bytes": sent}


def table(found: list[dict], machine: str) -> str:
    last, names = found[-1], list(found[0]["seconds"])
    seconds, gib = sum(last["cpu_seconds"].values()), last["peak"] / 2**30
    met = gib <= GIB_AT_MOST and seconds <= SECONDS_AT_MOST and max(last["times_own_bytes"].values()) <= BYTES_AT_MOST
    lines = [
        "# The driver's share of a step",
        "",
        "Generated by `python -m tests.benchmarks.batches`, whose head states the workload and what is counted. "
        f"{machine}, 1 thread.",
        "",
        f"Goals at {last['tokens'] / 1e6:.0f} M tokens: at most {GIB_AT_MOST:g} GiB, {SECONDS_AT_MOST:g} CPU "
        f"seconds beside the engine and the ranks, and {BYTES_AT_MOST} times the tokens' own bytes. "
        f"{'All are met' if met else 'NOT all are met'}.",
        "",
        "| sequences | real tokens | longest | peak, GiB | of it at start | CPU seconds | seconds "
        f"| {' | '.join(names)} "
        "| sent for log-probs, times their own bytes | for the update |",
        "|---" * (9 + len(names)) + "|",
    ]
    for one in found:
        each = " | ".join(f"{one['seconds'][name]:.2f}" for name in names)
        ratios = " | ".join(f"{one['times_own_bytes'][name]:.2f}" for name in FIELD_BYTES)
        lines.append(
            f"| {one['sequences']:,} | {one['tokens']:,} | {one['longest']:,} | {one['peak'] / 2**30:.2f} "
            f"| {one['held'] / 2**30:.2f} | {sum(one['cpu_seconds'].values()):.1f} "
            f"| {sum(one['seconds'].values()):.1f} | {each} | {ratios} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, nargs="+", default=[8, 1], help="an eighth of the step, the whole step")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=TARGET, help="without its ending")
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(*asked.parts)))
        return
    found = []
    for parts in asked.parts:
        command = [sys.executable, "-m", "tests.benchmarks.batches", "--measure", "--parts", str(parts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"1/{parts}: {found[-1]['peak'] / MIB:,.0f} MiB, {sum(found[-1]['seconds'].values()):.1f} s", flush=True)
    machine = hardware()["cpu"]
    asked.out.with_suffix(".json").write_text(json.dumps({"hardware": machine, "sizes": found}, indent=1) + "\n")
    asked.out.with_suffix(".md").write_text(table(found, machine))
    print(table(found, machine))


if __name__ == "__main__":
    main()
