"""What the page of ``python -m results.trace`` holds: recorded steps as JSON, and their numbers as compressed columns.

The page is ``trace.html.jinja`` with ``trace.js`` and ``trace.css`` beside this file, all in one file: nothing is
loaded from anywhere. Texts reach it as JSON and are shown as text alone, so that HTML in an answer stays what it is.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from core.errors import InputError
from core.files import write_atomic
from results.reporting.pages import Block, Link, Text
from results.reporting.run_reader import RecordedRun, load_run
from results.reporting.trace_checks import Finding, Seen, findings
from results.reporting.trace_reader import TracedGroup, TracedStep, TracedTrajectory, chosen_steps, has_traces

HERE = Path(__file__).parent
MOST = 200  # trajectories of a page whose steps are not named: 4 MB with 1,000 tokens each
PAGE = "trace.html"
ERROR = re.compile(r"^\s*(<tool_response>)?\s*error: |My previous action is invalid")
PASSAGE = re.compile(r"Doc \d+\(Title: (.*?)\)")
QUERIES = (re.compile(r"<search>(.*?)</search>", re.DOTALL), re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL))
# Columns of the page: name, and how it is computed. Half precision has three digits at any size, so differences and the
# ratio are kept as distances from 0 and from 1.
NUMBERS = ("engine", "gap", "ratio", "advantage", "entropy", "value", "return", "weight", "reference", "importance")


@dataclass(frozen=True)
class Shown:
    """The recorded steps of a run, as a page shows them, and the run's configuration (flat)."""

    name: str
    steps: Sequence[TracedStep]
    config: Mapping[str, Any]


class Vocabulary:
    """The texts of all tokens of a page, each once."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.texts: list[Any] = []

    def of(self, step: TracedStep, ids: np.ndarray) -> np.ndarray:
        """Return the place of each id's text. Two models may have other texts for an id."""
        unique, places = np.unique(ids, return_inverse=True)
        known = step.meta["tokens"]
        return np.array([self._place(known[str(one)]) for one in unique.tolist()], np.uint32)[places]

    def _place(self, text: Any) -> int:
        key = json.dumps(text)
        if key not in self.number:
            self.number[key] = len(self.texts)
            self.texts.append(text)
        return self.number[key]


def numbers(one: TracedTrajectory) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the columns of a trajectory's response: float, NaN where nothing was recorded."""
    response, learner = slice(one.prompt, None), one.learner()
    sampled = one.arrays["sampled"]
    yield "engine", np.where(sampled, one.arrays["engine"], np.nan)[response]
    if learner is not None:
        yield "gap", np.where(sampled, learner - one.arrays["engine"], np.nan)[response]
    named = {"advantage": "advantages", "entropy": "entropy", "value": "values", "return": "returns"}
    named |= {"weight": "loss_weight", "importance": "rollout_is_weights"}
    if one.field("values") is None:
        del named["return"]  # without a critic it is the advantage, or the reward again
    for name, field in named.items():
        if (value := one.field(field)) is not None:
            yield name, value[response]
    if (value := one.field("ratio")) is not None:
        yield "ratio", (value - 1)[response]
    if (value := one.field("ref_log_prob")) is not None and learner is not None:
        yield "reference", np.where(one.arrays["response_mask"], learner - value, np.nan)[response]


def flags(one: TracedTrajectory, found: Sequence[Finding]) -> np.ndarray:
    """Return a byte a token: in the mask 1, written by the policy 2, carries loss 4, clipped 8 or 16, a finding 32."""
    out = one.arrays["sampled"].astype(np.uint8) * 2
    for name, bit in (("response_mask", 1), ("loss_mask", 4)):
        if name in one.arrays:
            out |= one.arrays[name].astype(np.uint8) * bit
    if (clip := one.field("clip")) is not None:
        out |= np.nan_to_num(clip).astype(np.uint8) * 8
    for each in found:
        out[list(each.tokens)] |= 32
    return out


class Columns:
    """Columns of a step over all its trajectories, as one compressed text."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {}
        self.responses = 0

    def add(self, one: TracedTrajectory, texts: np.ndarray, flags_L: np.ndarray) -> None:
        count = one.length - one.prompt
        for name, value in [("token", texts), ("flags", flags_L), *numbers(one)]:
            if name not in self.parts:
                self.parts[name] = [np.full(self.responses, np.nan)] if name in NUMBERS else []
            self.parts[name].append(value)
        for name in set(self.parts) & set(NUMBERS):
            if sum(map(len, self.parts[name])) == self.responses:
                self.parts[name].append(np.full(count, np.nan))
        self.responses += count

    def packed(self) -> dict[str, Any]:
        """Return ``{"columns": [[name, type, scale, values], ...], "data": base64 of zlib}``.

        Types: u8, u16, u32, f16. The bytes of a column are sorted by their place in a number, which packs better.
        """
        described, data = [], []
        for name, parts in self.parts.items():
            value, scale = np.concatenate(parts), 1.0
            if name == "token":
                value = value.astype(np.uint16 if value.max(initial=0) < 2**16 else np.uint32)
            elif name != "flags":
                largest = float(np.max(np.abs(value[np.isfinite(value)]), initial=0.0))
                scale = largest / 60000 if largest > 60000 or 0 < largest < 0.01 else 1.0
                with np.errstate(over="ignore"):
                    value = (value / scale).astype(np.float16)
            kind = {"u1": "u8", "u2": "u16", "u4": "u32", "f2": "f16"}[value.dtype.str[1:]]
            described.append([name, kind, scale, len(value)])
            data.append(np.ascontiguousarray(value).view(np.uint8).reshape(-1, value.itemsize).T.tobytes())
        return {"columns": described, "data": base64.b64encode(zlib.compress(b"".join(data), 9)).decode()}


def turns(one: TracedTrajectory) -> list[dict[str, Any]]:
    """Return the stretches of a trajectory: who wrote it, where, what was searched for, passages, an error."""
    found, query = [], None
    for role, start, end in one.turns():
        text = one.texts.join(one.arrays["ids"][start:end]) if role != "prompt" else ""
        turn: dict[str, Any] = {"role": role, "start": start, "end": end}
        if role == "policy":
            query = next((match.group(1).strip() for one in QUERIES if (match := one.search(text))), None)
        elif role != "prompt":
            titles = PASSAGE.findall(text)
            turn["role"] = "retrieved" if titles or "<information>" in text else role
            turn |= {"query": query} if query else {}
            turn |= {"passages": titles} if titles else {}
            turn |= {"error": True} if ERROR.search(text) else {}
        found.append(turn)
    return found


def trajectory(one: TracedTrajectory, found: Sequence[Finding], step: int) -> dict[str, Any]:
    about = one.about
    stretches = turns(one)
    return {
        **{
            name: about[name] for name in ("stop", "turns", "tool_calls", "score", "status", "masked", "pred", "reward")
        },
        "parts": {name: round(value, 4) for name, value in about["parts"].items()},
        "skipped": "log_prob" in one.arrays and one.field("log_prob") is None,
        "age": step - 1 - about["version"],
        "prompt": one.prompt,
        "length": one.length - one.prompt,
        "stretches": stretches,
        "error": any("error" in turn for turn in stretches),
        "findings": [asdict(each) for each in found],
    }


def payload(runs: Sequence[Shown], notes: Sequence[str]) -> dict[str, Any]:
    """Return all that a page shows, as it is written into it."""
    vocabulary, steps = Vocabulary(), []
    for index, run in enumerate(runs):
        for step in run.steps:
            columns = Columns()
            groups = [_group(group, step, run, columns, vocabulary) for group in step.groups]
            steps.append(
                {"run": index, "step": step.step, "clip": step.meta["clip"], "groups": groups, **columns.packed()}
            )
    return {"runs": [run.name for run in runs], "notes": [*notes], "tokens": vocabulary.texts, "steps": steps}


def _group(
    group: TracedGroup, step: TracedStep, run: Shown, columns: Columns, vocabulary: Vocabulary
) -> dict[str, Any]:
    rows = []
    for one in group.trajectories:
        found = findings(Seen(one, group, step, run.config))
        columns.add(one, vocabulary.of(step, one.arrays["ids"]), flags(one, found))
        rows.append(trajectory(one, found, step.step))
    about = group.about
    named = {name: about[name] for name in ("uid", "ordinal", "data_source", "question", "chosen")}
    return {**named, "truth": about["ground_truth"], "trajectories": rows}


def in_script(value: Any) -> Markup:
    """Return JSON that no text in it can end: it stands in a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text.encode("utf-8", "replace").decode())


def page(title: str, runs: Sequence[Shown], notes: Sequence[str]) -> str:
    """Return the web page of these runs."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    files = {name: Markup((HERE / f"trace.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    data = in_script(payload(runs, notes))
    return environment.get_template("trace.html.jinja").render(title=title, data=data, **files) + "\n"


def write_trace(
    runs: Sequence[Path], out: Path | None = None, steps: Sequence[int] | None = None, most: int = MOST
) -> tuple[Path, str]:
    """Write the page of these run folders and return its path, and what it shows in a few words.

    Raises:
        InputError: a folder is no run, or has no record that can be read.
    """
    shown, notes = [], []
    for folder in runs:
        run = load_run(folder)
        found, said = chosen_steps(folder, steps, most // len(runs))
        shown.append(Shown(run.name, found, run.config))
        notes += said
    path = out or runs[0] / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    title = "Tokens of " + " and ".join(one.name for one in shown)
    write_atomic(path, page(title, shown, notes))
    count = sum(step.count for one in shown for step in one.steps)
    return path, "\n".join([f"{count} trajectories of {sum(len(one.steps) for one in shown)} steps", *notes])


def trace_links(runs: Sequence[RecordedRun], out: Path) -> list[Block]:
    """Write the pages of the runs that recorded tokens into ``out`` and return links to them.

    Two such runs share a page. Records that cannot be read are a sentence of the report, and no reason to have none.
    """
    traced = [run.folder for run in runs if has_traces(run.folder)]
    pages = [(traced, PAGE)] if len(traced) < 3 else [([folder], f"trace_{folder.name}.html") for folder in traced]
    found: list[Block] = []
    for folders, name in pages if traced else ():
        try:
            write_trace(folders, out / name)
            text = f"Tokens of recorded steps: {' and '.join(folder.name for folder in folders)}"
            found.append(Link(text, name))
        except InputError as error:
            found.append(Text(f"The recorded tokens cannot be shown: {error}"))
    return found
