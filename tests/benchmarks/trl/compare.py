"""Steps a second beside TRL's GRPOTrainer: same checkpoint, prompts, batch, precision and machine,
turn by turn.

    python -m tests.benchmarks.trl.compare --trl-python PATH [--repeats 5] [--modes fixed,tailed]
    [--dtypes fp32,bf16]

TRL lives in an environment of its own (``python -m venv trl && trl/bin/pip install torch==2.13.0
trl==1.16.0 transformers==5.19.0``). Each repeat runs both sides, in alternating order, in fresh
processes; a run's figure is the median of its steps after the first. The ratio of a repeat is TRL's
seconds over ours.

Workload: prompts of about 30 tokens x 8 answers, one update a step, a Qwen2-shaped model of 3.2 M
parameters, vocabulary 512. *fixed*: 32 prompts a step, every answer has 64 tokens. *tailed*: 8
prompts a step (with 32, TRL takes minutes a step here), the checkpoint ends an answer with
probability 1/64 a token, at most 512: a geometric tail. Ours packs its sequences
(``use_remove_padding``). Micro-batches: *fixed* 32 answers for ours (tried: 32, 64) and 64 for TRL
(three runs each: 7.1 s with 64, 6.7 s with 32; 7.2 s with 16 once; 32 may be a few percent faster,
so the ratio a few percent too high), *tailed* 64 for ours and 16 for TRL (tried: 8, 16, 64). With
``--model real`` both sides train SmolLM2-135M-Instruct of ``outputs/real/model`` (``python -m
recipes.real.prepare``) on texts under ``DATA_DIR``, without a chat template; an answer ends where
the model ends it. *questions*: 2 questions of GSM8K x 8 answers of at most 64 tokens (with 8
questions TRL takes minutes a step here). *passages*: a text of Wikipedia of about 1,000 tokens x 8
answers of at most 32. Micro-batches are of 8 answers. *equal*: the questions x 8 answers of exactly
32 tokens, the end of the sequence forbidden or passed over on both sides. With ``--former FOLDER``
a clone with earlier code takes its turn as well, with its own script of our side. Writes
``results/benchmarks/trl.json`` and ``trl.md``.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from core.tracking.run_manifest import hardware
from core.tracking.validation import t_interval
from tests.benchmarks.model_3m import model_3m
from tests.tiny import tiny_tokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# Mean length by the checkpoint, most new tokens, prompts
MODES = {"fixed": (None, 64, 32), "tailed": (64, 512, 8)}
# The same of --model real
REAL = {"questions": (None, 64, 2), "passages": (None, 32, 1), "equal": (None, 32, 2)}
# Answers a micro-batch
MICRO = {"ours": {"fixed": 32, "tailed": 64}, "trl": {"fixed": 64, "tailed": 16}}
MICRO = {side: {**micro, **dict.fromkeys(REAL, 8)} for side, micro in MICRO.items()}
PASSAGE = 1000  # tokens
GOALS = {("fixed", "fp32"): 1.7, ("tailed", "fp32"): 3.3}


def prepare(folder: Path) -> None:
    """The checkpoints and the prompts, for both sides."""
    for mode, (mean_length, _, _) in MODES.items():
        model_3m(mean_length).save_pretrained(folder / mode)
        tiny_tokenizer().save_pretrained(folder / mode)
    write_prompts(folder, [f"what is {i} + {i * 7 % 31}? the answer is" for i in range(4096)], "")


def prepare_real(folder: Path, model: Path, data: Path) -> None:
    """Write the same for the real model: a link to it for each mode, and its prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    passages = (
        (data / "wiki_passages/flashrag_wiki18_1000.jsonl").read_text(encoding="utf-8").splitlines()
    )
    ids = tokenizer("\n".join(json.loads(line)["contents"] for line in passages))["input_ids"]
    parts = [
        tokenizer.decode(ids[at : at + PASSAGE]) for at in range(0, len(ids) - PASSAGE, PASSAGE)
    ]
    with open(data / "gsm8k/train.jsonl", encoding="utf-8") as file:
        asked = [json.loads(line)["question"] for line, _ in zip(file, range(256), strict=False)]
    passages = [f"{part}\nIn short: " for part in parts]
    for mode, prompts in (("questions", asked), ("passages", passages), ("equal", asked)):
        (folder / mode).symlink_to(model.resolve())
        write_prompts(folder, prompts, f"-{mode}")


def write_prompts(folder: Path, prompts: list[str], ending: str) -> None:
    """Write the prompts as lines for TRL and as rows for ours."""
    (folder / f"prompts{ending}.jsonl").write_text(
        "".join(json.dumps(text) + "\n" for text in prompts)
    )
    rows = [
        {
            "data_source": "benchmark",
            "prompt": text,
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "none"},
            "extra_info": {"split": "train", "index": i},
        }
        for i, text in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"prompts{ending}.parquet")


def run(
    side: str,
    python: str,
    folder: Path,
    mode: str,
    threads: int,
    root: Path = ROOT,
    **options: int | str,
) -> dict:
    """Run one side in a process of its own, in a folder that ``prepare`` has filled, and return
    what it measured.

    ``root`` is the clone whose code our side runs.
    """
    script, kind = ("trl_side.py", "jsonl") if side == "trl" else ("our_side.py", "parquet")
    script = root / HERE.relative_to(ROOT) / script
    rows = folder / f"prompts{f'-{mode}' if mode in REAL else ''}.{kind}"
    command = [python, str(script), "--model", str(folder / mode), "--rows", str(rows)]
    command += [
        part
        for name, value in {**options, "threads": threads}.items()
        for part in (f"--{name}", str(value))
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment["PYTHONPATH"] = "" if side == "trl" else str(root)
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(folder: Path, mode: str, dtype: str, args: argparse.Namespace) -> dict:
    sides = [("ours", sys.executable, ROOT), ("trl", args.trl_python, ROOT)]
    if args.former:
        sides.insert(1, ("former", sys.executable, args.former))
    runs = {side: [] for side, _, _ in sides}
    _, longest, prompts = (MODES | REAL)[mode]
    options = {"max-new": longest, "prompts": prompts, "dtype": dtype, "steps": args.steps}
    options |= {"exact": 1} if mode == "equal" else {}
    for repeat in range(args.repeats):
        for side, python, root in sides if repeat % 2 else sides[::-1]:
            micro = MICRO["trl" if side == "trl" else "ours"][mode]
            runs[side].append(
                run(side, python, folder, mode, args.threads, root, micro=micro, **options)
            )
        last = ", ".join(f"{side} {found[-1]['seconds']:.2f} s" for side, found in runs.items())
        print(f"{mode} {dtype} {repeat + 1}/{args.repeats}: {last}", flush=True)
    ratios = [t["seconds"] / o["seconds"] for t, o in zip(runs["trl"], runs["ours"], strict=True)]
    logs = t_interval([math.log(ratio) for ratio in ratios])
    machine = hardware()
    return {
        "mode": mode,
        "dtype": dtype,
        # One name has had all of AVX2, AVX-512 and AMX
        "machine": f"{machine['cpu']}, {machine['instructions']}",
        "packed": True,  # our sequences; rows from before this was so lack it
        "repeats": args.repeats,
        "timed_steps": args.steps - 1,
        "ratio": math.exp(logs.value),
        "ratio_low": math.exp(logs.low),
        "ratio_high": math.exp(logs.high),
        "ratios": ratios,
        "seconds": {side: statistics.median(r["seconds"] for r in rs) for side, rs in runs.items()},
        "mean_length": {
            side: statistics.mean(r["mean_length"] for r in rs) for side, rs in runs.items()
        },
        "phases": runs["ours"][-1]["phases"],
        "peak_gib": {side: max(r["peak_rss_mib"] for r in rs) / 1024 for side, rs in runs.items()},
    }


def table(report: dict) -> str:
    lines = [
        "# Steps a second beside TRL's GRPOTrainer",
        "",
        "Generated by `python -m tests.benchmarks.trl.compare`, whose head says what is compared "
        "and how.",
        f"Repeats in alternating order, {report['threads']} threads; "
        f"ours: {report['versions']['ours']}; TRL's environment: {report['versions']['trl']}.",
        "",
        "| lengths | precision | answers a step | ours packed | repeats x timed steps | TRL "
        "s/step | ours s/step "
        "| former code s/step | ratio (geometric mean, 95 % interval) | goal "
        "| mean length TRL / ours | GiB TRL / ours / former | machine |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        goal = GOALS.get((row["mode"], row["dtype"]))
        verdict = (
            "reported"
            if goal is None
            else (f"≥ {goal} {'met' if row['ratio_low'] >= goal else 'not met'}")
        )
        lines.append(
            f"| {row['mode']} | {row['dtype']} | {8 * (MODES | REAL)[row['mode']][2]} "
            f"| {'yes' if row.get('packed') else 'no'} | {row['repeats']} x {row['timed_steps']} "
            f"| {row['seconds']['trl']:.2f} | {row['seconds']['ours']:.2f} | {former(row)} "
            f"| {row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}] | {verdict} "
            f"| {row['mean_length']['trl']:.1f} / {row['mean_length']['ours']:.1f} | {memory(row)} "
            f"| {row['machine']} |"
        )
    return "\n".join(lines) + "\n"


def former(row: dict) -> str:
    return f"{row['seconds']['former']:.2f}" if "former" in row["seconds"] else ""


def memory(row: dict) -> str:
    """Return the most memory of each side; rows from before it was measured have none."""
    peak = row.get("peak_gib", {})
    return (
        " / ".join(f"{peak[side]:.1f}" for side in ("trl", "ours", "former") if side in peak)
        or "not measured"
    )


def trl_versions(python: str) -> str:
    names = "('torch', 'transformers', 'trl')"
    program = (
        f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n "
        f"in {names}))"
    )
    return subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def write(row: dict, args: argparse.Namespace) -> None:
    """Adds a case to the report, in the place of an earlier measurement of it."""
    path = args.out / "trl.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    ours = {name: version(name) for name in ("torch", "transformers")}
    report = {
        "threads": args.threads,
        "versions": {
            "ours": f"torch {ours['torch']}, transformers {ours['transformers']}",
            "trl": trl_versions(args.trl_python),
        },
        "rows": [r for r in earlier if (r["mode"], r["dtype"]) != (row["mode"], row["dtype"])]
        + [row],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "trl.md").write_text(table(report))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Not resolved: a venv's is a link
    parser.add_argument("--trl-python", required=True, type=os.path.abspath)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", choices=("tiny", "real"), default="tiny")
    parser.add_argument(
        "--modes",
        help=f"of {', '.join(MODES)}, or with --model real of {', '.join(REAL)} (default: all)",
    )
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument(
        "--former", type=Path, help="a clone with earlier code, which takes its turn too"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    args = parser.parse_args()
    for name, why in (("repeats", "an interval needs two"), ("steps", "the first is not timed")):
        if getattr(args, name) < 2:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 2; {why}")
    if args.model == "real" and not (ROOT / "outputs/real/model/config.json").exists():
        parser.error(
            "--model real: outputs/real/model is missing; make it with python -m "
            "recipes.real.prepare"
        )
    if args.model == "real" and not os.environ.get("DATA_DIR"):
        parser.error("--model real: set DATA_DIR to the folder with gsm8k/ and wiki_passages/")
    args.out.mkdir(parents=True, exist_ok=True)
    modes = args.modes.split(",") if args.modes else list(REAL if args.model == "real" else MODES)
    cases = [(mode, dtype) for dtype in args.dtypes.split(",") for mode in modes]
    with tempfile.TemporaryDirectory() as temporary:
        if args.model == "real":
            prepare_real(Path(temporary), ROOT / "outputs/real/model", Path(os.environ["DATA_DIR"]))
        else:
            prepare(Path(temporary))
        for mode, dtype in cases:
            write(measure(Path(temporary), mode, dtype, args), args)
    print((args.out / "trl.md").read_text())


if __name__ == "__main__":
    main()
