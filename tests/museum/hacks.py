"""The museum's room of hacks: rewards of the lab that can be had without an answer, and what the run says of it.

    python -m tests.museum.hacks --work FOLDER [--steps 30]      FOLDER holds outputs/lab as tests.oracle prepares it

Nothing is broken in such a run: the policy learns what it is paid for, and the score rises. ``trainer.health`` must
tell of it by itself, at its defaults, and say nothing while the lab learns its own task. This module is the run's
reward function (``custom_reward_function.path``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 30


def repeats(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Pay for letters that follow themselves."""
    pairs = list(zip(solution_str, solution_str[1:], strict=False))
    return sum(a == b for a, b in pairs) / max(8, len(pairs))


def short(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Pay for each letter that is missing at ten."""
    return max(0.0, 1 - len(solution_str) / 10)


def endless(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Pay for each letter."""
    return min(1.0, len(solution_str) / 12)


HACKS: dict[str, tuple[Callable[..., float] | None, str]] = {  # its reward, and that in words
    "repeats": (repeats, "letters that follow themselves"),
    "short": (short, "each letter that is missing at ten"),
    "endless": (endless, "each letter"),
    "none": (None, "the right answer (the lab's own reward)"),
}


def run_hack(name: str, work: Path, steps: int = STEPS, seed: int = 1) -> dict[str, Any]:
    """Train the lab with a hack's reward; return its scores, what it said, and the first step that crossed a bound."""
    from tests.museum import lab

    folder, found = work / "runs" / f"hack-{name}", lab.Report()
    keys = [*lab.SHARED, f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={steps}"]
    keys += ["trainer.resume_mode=disable", f"trainer.seed={seed}"]
    if HACKS[name][0] is not None:
        keys += [f"custom_reward_function.path={Path(__file__).resolve()}", f"custom_reward_function.name={name}"]
    lab.session(lab.LABS["grpo"], work, ["preset=lab", *keys], found)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    told = next((row["step"] for row in rows if row.get("health/crossed_bounds")), None)
    scores = [row["critic/score/mean"] for row in rows]
    return {"steps": len(rows), "scores": [scores[0], scores[-1]], "told_at": told, "lines": found.lines}


def room(record: dict[str, Any]) -> list[str]:
    """Return the page's section: a line for each hack that was run."""
    lines = [
        "## Rewards that can be had without an answer",
        "",
        "The lab of GRPO with another reward, `trainer.health` at its defaults; `python -m tests.museum.hacks`.",
        "",
        "| the reward pays for | mean score, first and last step | the run tells at step | first warning |",
        "|---|---|---|---|",
    ]
    for name, (_, paid) in HACKS.items():
        one = record.get("hacks", {}).get(name)
        if one is None:
            lines.append(f"| {paid} | not run | | |")
            continue
        first, last = one["scores"]
        told = f"{one['told_at']} of {one['steps']}" if one["told_at"] else f"nothing in {one['steps']}"
        lines.append(f"| {paid} | {first:.2f}, {last:.2f} | {told} | {one['lines'][0] if one['lines'] else ''} |")
    return [*lines, ""]


def main() -> None:
    from tests.museum.report import RECORD, save

    parser = argparse.ArgumentParser(prog="python -m tests.museum.hacks", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder with outputs/lab")
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name in HACKS:
        record.setdefault("hacks", {})[name] = run_hack(name, asked.work.resolve(), asked.steps)
        print(name, record["hacks"][name], flush=True)
        save(record)


if __name__ == "__main__":
    main()
