"""Tools and simulated users that raise, return or block what they should not: an answer and a count, never an end."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import pytest

from core.errors import InputError
from core.rollout import outside_code
from core.rollout.tools import BaseTool, Calculator, ToolError, load_tools
from core.rollout.users import BaseInteraction
from tests.core.rollout.test_tool_agent import MULTI, call, played, tool_text
from tests.core.rollout.test_users import played as conversed


class Odd(Exception):
    def __str__(self):
        raise SystemExit("even its text")


async def numbers():
    yield 1


async def cancelled():
    raise asyncio.CancelledError("by the tool")


def raises(error):
    raise error


def deep(level: int = 0) -> int:
    return deep(level + 1)


RAISES = {
    "key": lambda: raises(KeyError("x")),
    "exit": lambda: raises(SystemExit(3)),
    "interrupt": lambda: raises(KeyboardInterrupt()),
    "memory": lambda: raises(MemoryError()),
    "stop": lambda: raises(StopIteration(3)),
    "generator_exit": lambda: raises(GeneratorExit()),
    "timeout": lambda: raises(TimeoutError("of its own")),
    "cancelled": cancelled,
    "cancel": lambda: raises(asyncio.CancelledError()),
    "deep": deep,
    "odd": lambda: raises(Odd()),
    "surrogate": lambda: raises(ValueError("\ud800")),
    "long": lambda: raises(ValueError("x" * 100_000)),
}
RETURNS = {
    "none": None,
    "int": 3,
    "bytes": b"x",
    "dict": {"a": 1},
    "list": ["text"],
    "tuple": ("text", float("nan"), {}),
    "nan": float("nan"),
    "generator": (one for one in "ab"),
    "async_generator": numbers(),
}
TEXTS = {"huge": "9" * 5_000_000, "empty": "", "half": "a\ud83d b\udc00", "nul": "a\x00b", "end": "<eos><bos>"}


class Any(BaseTool):
    """Does what it is asked for by name."""

    tool_schema = {"type": "function", "function": {"name": "any", "parameters": {"required": ["what"]}}}

    async def execute(self, instance_id, parameters, **kwargs):
        what = parameters["what"]
        if what in RAISES:
            found = RAISES[what]()
            return await found if asyncio.iscoroutine(found) else found
        return RETURNS[what] if what in RETURNS else TEXTS[what]


class InTheLoop(Any):
    runs_apart = False


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(outside_code, "GRACE_S", 0.05)


def asked(folder, what, kind="Any", *options):
    yaml = f"tools:\n  - class_name: {__file__}:{kind}\n"
    trajectory, loop = played(folder, [call("any", what=what), "2"], *options, yaml=yaml)
    assert trajectory.turns == 2, "the episode went on"
    return tool_text(trajectory), loop.metrics()


@pytest.mark.parametrize("kind", ["Any", "InTheLoop"])
@pytest.mark.parametrize("what", [*RAISES, *RETURNS])
def test_what_a_tool_raises_or_returns_is_an_error_for_the_policy(tmp_path, caplog, what, kind):
    with caplog.at_level(logging.WARNING):
        text, metrics = asked(tmp_path, what, kind)
    assert "error: the tool failed: " in text and metrics["agent/failed_calls"] == 1
    if what in RETURNS:
        assert "it returned the reward nan" in text if what == "tuple" else "not text" in text
    assert "the tool 'any' failed" in caplog.text and (what in RETURNS or "Traceback" in caplog.text)
    caplog.text.encode()  # a log on disk takes it


@pytest.mark.parametrize(
    ("what", "shown"),
    [("half", "a\ufffd b\ufffd"), ("nul", "a\ufffdb"), ("empty", ""), ("end", "<eos><bos>"), ("huge", "9...(tr")],
)
def test_any_text_is_an_answer(tmp_path, what, shown):
    text, metrics = asked(tmp_path, what)
    assert f"<bos>tool\n{shown}" in text or shown in text
    assert metrics["agent/failed_calls"] == 0 and len(text) < 400
    text.encode()  # as every file of a run will


class Sleeper(BaseTool):
    """Ignores its deadline in one of several ways."""

    tool_schema = {"type": "function", "function": {"name": "any"}}
    slept: list[str] = []

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["what"] == "block":
            time.sleep(3)
        elif parameters["what"] == "spin":
            until = time.monotonic() + 30
            while time.monotonic() < until:
                pass
        elif parameters["what"] == "ignore":
            for _ in range(2):
                try:
                    await asyncio.sleep(3)
                except asyncio.CancelledError:
                    self.slept.append("cancelled")
        return "awake"


@pytest.mark.parametrize("what", ["block", "spin", "ignore"])
def test_a_tool_that_blocks_or_ignores_its_deadline_holds_up_nobody(tmp_path, what):
    started = time.monotonic()
    yaml = f"tools:\n  - class_name: {__file__}:Sleeper\n    timeout_s: 0.1\n"
    turns = [call("any", what=what), "2"]
    trajectory, loop = played(tmp_path, turns, yaml=yaml)
    assert "error: no answer in 0.1 s" in tool_text(trajectory) and time.monotonic() - started < 2.5
    assert loop.metrics()["agent/timeout_calls"] == 1
    time.sleep(0.2)  # the blocked loop is left behind
    assert asyncio.run(loop.apart.run(partial(asyncio.sleep, 0, "next"))) == "next"
    loop.close()


def test_a_failure_of_the_run_s_own_is_none_of_a_tool(tmp_path):
    """A sample that is given up is cancelled, wherever its tool waits."""

    async def give_up(run):
        task = asyncio.create_task(run(partial(asyncio.sleep, 60)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for run in (outside_code.guarded, outside_code.ApartLoop().run):
        asyncio.run(give_up(run))


def test_the_first_failure_of_a_tool_is_logged_and_the_rest_counted(tmp_path, caplog):
    turns = [call("any", what="key"), call("any", what="int"), "2"]
    with caplog.at_level(logging.WARNING):
        _, loop = played(tmp_path, turns, yaml=f"tools:\n  - class_name: {__file__}:Any\n")
    assert caplog.text.count(" failed: ") == 1 and loop.metrics()["agent/failed_calls"] == 1


def test_a_tool_cannot_change_the_data(tmp_path):
    kwargs = {"grabby": {"execute_kwargs": {"left": [1, 2]}}}
    turn = call("grabby")
    yaml = f"tools:\n  - class_name: {__file__}:Grabby\n"
    trajectory, _ = played(tmp_path, [turn, turn, "2"], yaml=yaml, extra={"tools_kwargs": kwargs})
    assert tool_text(trajectory).count("tool\n2<eos>") == 1 and kwargs["grabby"]["execute_kwargs"]["left"] == [1, 2]


class Grabby(BaseTool):
    tool_schema = {"type": "function", "function": {"name": "grabby"}}

    async def execute(self, instance_id, parameters, left):
        return str(left.pop())


class Typed(Any):
    tool_schema = {
        "type": "function",
        "function": {"name": "any", "parameters": {"properties": {"what": {"multipleOf": 0.5}}, "maxProperties": 0}},
    }


def test_arguments_that_break_the_check_of_the_schema_are_invalid_calls(tmp_path):
    huge = call("any", what=10**400)
    nested = huge.replace("1" + "0" * 400, "[" * 900 + "1" + "]" * 900)
    for said in (huge, nested):
        trajectory, loop = played(
            tmp_path, [said, "2"], yaml=f"tools:\n  - class_name: {__file__}:Typed\n", length=4000
        )
        assert trajectory.turns == 2 and loop.metrics()["agent/invalid_calls"] == 1


def test_a_class_that_is_no_tool_is_refused_before_a_start(tmp_path):
    path = tmp_path / "tools.yaml"
    path.write_text(f"tools:\n  - class_name: {__file__}:Odd\n  - class_name: {__file__}:Broken\n")
    with pytest.raises(InputError) as error:
        load_tools(path)
    first, second = str(error.value).splitlines()
    assert "does not extend core.rollout.tools.BaseTool" in first and "ZeroDivisionError" in second


class Broken(Any):
    def __init__(self, config, tool_schema):
        raise ZeroDivisionError("no")


# --- the calculator ---


@pytest.mark.parametrize(
    "text",
    [
        "*".join(["9**999"] * 12),
        "*".join(["2**4000"] * 8),
        "9**9**9",
        "1/0",
        "1<<10**9",
        "-" * 900 + "1",
        "(" * 400,
        "1+\ud800",
        "1\x00",
        "9" * 4400,
        "1e308*10-1e308*10j**0.5",
        "",
    ],
)
def test_the_calculator_computes_or_refuses(text):
    try:
        found = asyncio.run(Calculator({}).execute("0", {"expression": text}))
        assert isinstance(found, str) and len(found) <= 4300
    except ToolError as error:
        assert str(error).startswith("cannot compute that: ")


# --- users ---


class User(BaseInteraction):
    """Fails in the method and way that its facts name."""

    async def start_interaction(self, instance_id, start=None, end=None, **kwargs):
        self.end = end
        if start:
            RAISES[start]()

    async def generate_response(self, instance_id, messages, reply, **kwargs):
        messages.clear()  # what it is given is its own
        what = reply
        if what == "block":
            time.sleep(3)
        found = {**RAISES, **REFUSED}.get(what)
        return found() if found else REPLIES[what]

    async def finalize_interaction(self):
        if self.end:
            RAISES[self.end]()


REFUSED = {"refused": lambda: raises(ToolError("of a tool alone"))}
REPLIES = {
    "none": None,
    "short": (False, "text"),
    "score": (False, "text", float("nan"), {}),
    "score_text": (False, "text", "1", {}),
    "text": (False, 3, 0.0, {}),
    "bytes": (False, b"x", 0.0, {}),
    "half": (False, "a\ud83d", 0.0, {}),
    "good": (False, "go on", None, {}),
    "over": (True, None, 1, {}),
}
USER = f"interaction:\n  - name: user\n    class_name: {__file__}:User\n"


def told(folder, *options, turns=("3", "4"), **facts):
    extra = {"interaction_kwargs": {"name": "user", **facts}}
    trajectory, loop = conversed(folder, turns, f"{MULTI}.max_user_turns=1", *options, extra=extra, yaml=USER)
    return trajectory, loop.metrics()


@pytest.mark.parametrize("reply", ["none", "short", "score", "score_text", "text", "bytes", "exit", "deep", "refused"])
def test_what_is_no_reply_is_an_error_that_the_policy_reads(tmp_path, reply):
    trajectory, metrics = told(tmp_path, reply=reply)
    said = trajectory.segments[1]
    assert said.role == "user" and "<bos>user\nerror: " in said.text and trajectory.turns == 2
    assert metrics["agent/user_failures"] == 1 and trajectory.user_scores == ()


def test_a_user_that_cannot_start_or_end_costs_no_run(tmp_path):
    trajectory, metrics = told(tmp_path, start="key", reply="good")
    assert "error: KeyError" in trajectory.segments[1].text and metrics["agent/user_failures"] == 1
    trajectory, metrics = told(tmp_path, reply="good", end="exit")
    assert "go on" in trajectory.segments[1].text and metrics["agent/user_failures"] == 1
    trajectory, metrics = told(tmp_path, reply="over", turns=("3",))
    assert trajectory.user_scores == (1.0,) and metrics["agent/user_failures"] == 0
    trajectory, _ = told(tmp_path, reply="half")
    assert "<bos>user\na\ufffd<eos>" in trajectory.segments[1].text


def test_a_user_that_blocks_is_late(tmp_path):
    trajectory, metrics = told(tmp_path, f"{MULTI}.tool_timeout_s=0.1", reply="block", turns=("3",))
    assert trajectory.truncated and metrics["agent/user_timeouts"] == 1
