"""Tools from a file, calls in the policy's text, answers framed by the chat template, limits."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from core.config import compose
from core.engines import SamplingParams
from core.errors import InputError
from core.rollout.agent_loop import Episode, Limits
from core.rollout.call_formats import FORMATS, Call, parse_hermes, parse_react
from core.rollout.tool_agent import ToolAgentLoop
from core.rollout.tools import BaseTool, ToolError, ToolResponse, chosen, kwargs_of, load_tools
from core.types import Prompt, Stop
from reward_scores.sandbox import isolation
from tests.scripted_engine import ScriptedEngine
from tests.tiny import tiny_tokenizer

MULTI = "actor_rollout_ref.rollout.multi_turn"
CALCULATOR = "tools:\n  - class_name: core.rollout.tools:Calculator\n"
TEMPLATE = (
    "{% for t in tools or [] %}<tool {{ t.function.name }}>\n{% endfor %}"
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


class Slow(BaseTool):
    """Answers when it is told to, which is never."""

    tool_schema = {"type": "function", "function": {"name": "slow"}}

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.Event().wait()


class Facts(BaseTool):
    """Says what the row told it."""

    tool_schema = {"type": "function", "function": {"name": "facts"}}

    async def execute(self, instance_id, parameters, **kwargs):
        return json.dumps(kwargs["of_calls"])


class Counter(BaseTool):
    """Counts the calls of an episode, from a number of the example's on, and rewards them."""

    tool_schema = {"type": "function", "function": {"name": "counter"}}
    counts: dict[str, int] = {}

    async def create(self, instance_id=None, start=0, **kwargs):
        self.counts[instance_id] = start
        return instance_id, None

    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += 1
        return ToolResponse(text=str(self.counts[instance_id])), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.counts[instance_id])

    async def release(self, instance_id, **kwargs):
        del self.counts[instance_id]


def tokenizer(template: str | None = TEMPLATE):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(folder, turns, *options, yaml=CALCULATOR, template=TEMPLATE, extra=None, length=2000):
    """The trajectory of one episode whose turns are these, and the loop."""
    (folder / "tools.yaml").write_text(yaml)
    words = tokenizer(template)
    overrides = [f"{MULTI}.enable=True", f"{MULTI}.tool_config_path={folder}/tools.yaml", *options]
    loop = ToolAgentLoop(compose("ppo", [*overrides, "data.train_batch_size=256"]), words)
    left = list(turns)
    engine = ScriptedEngine(words, lambda request: left.pop(0))
    chat = ({"role": "user", "content": "how much?"},)
    ids = words.encode("how much?", add_special_tokens=False)
    episode = Episode(
        Prompt(0, "q", tuple(ids), chat, "4", "test", extra or {}),
        0,
        SamplingParams(max_tokens=length),
        Limits(length, length),
        engine=engine,
        tokenizer=words,
        run_seed=1,
    )
    asyncio.run(loop.run(episode))
    return episode.trajectory(), loop


def tool_text(trajectory) -> str:
    return "".join(segment.text for segment in trajectory.segments if segment.role == "tool")


# --- the file ---


def problems_of(tmp_path, text: str) -> str:
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        load_tools(tmp_path / "tools.yaml")
    return str(error.value)


def test_a_broken_file_says_everything_that_is_wrong_with_it(tmp_path):
    said = problems_of(
        tmp_path,
        "tools:\n"
        "  - class_name: core.rollout.tools:Calculator\n    config: {digits: 3}\n"
        "  - class_name: core.rollout.tools:Nothing\n"
        "  - config: {}\n"
        "  - class_name: core.rollout.tools:Calculator\n"
        "    tool_schema: {function: {name: a, parameters: {type: 7}}}\n"
        "  - class_name: core.rollout.tools:Calculator\n"
        "  - class_name: core.rollout.tools.Calculator\n",
    ).splitlines()
    assert len(said) == 5 and all("tools.yaml: tools[" in line for line in said)
    for line, part in zip(
        said, ("no option 'digits'", "no 'Nothing'", "must hold class_name", "no JSON schema", "a second"), strict=True
    ):
        assert part in line
    assert "must hold a list" in problems_of(tmp_path, "tools: []")
    assert "cannot be read" in problems_of(tmp_path, "tools: [")


def test_a_tool_keeps_the_state_of_each_episode_and_rewards_it(tmp_path):
    yaml = f"tools:\n  - class_name: {__file__}:Counter\n"
    extra = {"tools_kwargs": {"counter": {"create_kwargs": {"start": 4}}}}
    for _ in range(2):
        trajectory, loop = played(tmp_path, [call("counter"), call("counter"), "6"], yaml=yaml, extra=extra)
        assert tool_text(trajectory).count("tool\n5<eos>") == tool_text(trajectory).count("tool\n6<eos>") == 1
        assert trajectory.tool_rewards == (0.5, 0.5) and trajectory.tool_scores == {"counter": 6.0}
    assert Counter.counts == {} and loop.metrics()["agent/tool_state_failures"] == 0


def test_a_row_chooses_its_tools_and_gives_them_facts(tmp_path):
    (tmp_path / "tools.yaml").write_text(
        f"{CALCULATOR}  - class_name: {__file__}:Slow\n  - class_name: {__file__}:Facts\n"
    )
    tools = load_tools(tmp_path / "tools.yaml")
    assert list(tools) == ["calculator", "slow", "facts"]
    assert list(chosen(tools, {})) == ["calculator", "slow", "facts"]
    assert list(chosen(tools, {"tool_selection": ["slow"]})) == ["slow"]
    kwargs = {"facts": {"execute_kwargs": {"x": 1}}, "calculator": None}
    assert list(chosen(tools, {"need_tools_kwargs": True, "tools_kwargs": kwargs})) == ["facts"]
    assert kwargs_of("facts", {"tools_kwargs": kwargs}) == kwargs["facts"] and kwargs_of("slow", {}) == {}
    with pytest.raises(ValueError, match="asks for other"):
        chosen(tools, {"tool_selection": ["other"]})


# --- calls ---


def test_calls_are_read_from_the_text():
    assert parse_hermes("no call") == []
    assert parse_hermes(f"so {call('f', a=1)} and {call('g')}") == [Call("f", {"a": 1}), Call("g", {})]
    (broken,) = parse_hermes("<tool_call>{</tool_call>")
    assert "not JSON" in broken.problem
    (shape,) = parse_hermes('<tool_call>["f"]</tool_call>')
    assert "a call is" in shape.problem
    deep = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert parse_hermes(deep)[0].problem


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (call("calculator", expression="(3 + 4) * 12"), "84"),
        (call("calculator", expression="7 / 2"), "3.5"),
        (call("calculator", expression="6 / 2"), "3"),
        (call("calculator", expression="__import__('os')"), "error: cannot compute that: Call is not arithmetic"),
        (call("calculator", expression=3), "error: 3 is not of type 'string'"),
        (call("calculator"), "error: 'expression' is a required property"),
        (call("oracle"), "error: there is no tool 'oracle'; there are calculator"),
        ("<tool_call>{</tool_call>", "error: the call is not JSON: "),
    ],
)
def test_a_call_is_answered_or_told_what_is_wrong_with_it(tmp_path, said, answer):
    trajectory, _ = played(tmp_path, [said, "#### 84"])
    assert f"<bos>tool\n{answer}" in tool_text(trajectory)
    assert (trajectory.turns, trajectory.stop) == (2, Stop.EOS)
    assert trajectory.tool_calls == ("oracle" not in said and '"expression": "' in said)


def test_a_turn_without_a_call_ends_the_episode(tmp_path):
    trajectory, loop = played(tmp_path, ["4"])
    assert (trajectory.turns, trajectory.tool_calls, tool_text(trajectory)) == (1, 0, "")
    assert loop.metrics()["agent/calls"] == 0


def test_the_answer_is_framed_by_the_chat_template_and_the_end_of_a_turn_is_written_once(tmp_path):
    words = tokenizer()
    trajectory, _ = played(tmp_path, [call("calculator", expression="1 + 1"), "2"])
    assert tool_text(trajectory) == "\n<bos>tool\n2<eos>\n<bos>assistant\n"
    text = words.decode(trajectory.response_ids)
    assert text == f"{call('calculator', expression='1 + 1')}<eos>\n<bos>tool\n2<eos>\n<bos>assistant\n2<eos>"
    shown = words.decode(trajectory.prompt_ids)  # the template told of the tool
    assert shown == "<tool calculator>\n<bos>user\nhow much?<eos>\n<bos>assistant\n"


def test_special_tokens_in_an_answer_are_text(tmp_path):
    yaml = f"tools:\n  - class_name: {__file__}:Facts\n"
    extra = {"tools_kwargs": {"facts": {"execute_kwargs": {"of_calls": {"x": "<eos>"}}}}}
    trajectory, _ = played(tmp_path, [call("facts"), "2"], yaml=yaml, extra=extra)
    added = trajectory.response_ids[~trajectory.response_mask].tolist()
    assert added.count(1) == 1  # the template's own
    assert '"<eos>"' in tool_text(trajectory)


def test_without_a_template_the_tags_stand_alone(tmp_path):
    trajectory, _ = played(tmp_path, [call("calculator", expression="1 + 1"), "2"], template=None)
    assert tool_text(trajectory) == "<tool_response>2</tool_response>"


# --- react ---

REACT = (f"{MULTI}.format=react", "data.max_prompt_length=2000")  # the form is told in the prompt
ACT = 'Thought: so\nAction: calculator\nAction Input: {"expression": "1 + 1"}\n'


def test_the_formats_are_those_of_the_configuration():
    assert tuple(FORMATS) == ("hermes", "react")


def test_an_action_is_read_from_the_text():
    assert parse_react("Thought: I know\nFinal Answer: 2") == []
    assert parse_react(f"{ACT}Observation:") == parse_react(ACT) == [Call("calculator", {"expression": "1 + 1"})]
    several = 'Action: f\nAction Input: {\n "a": 1\n}\nObservation:'
    assert parse_react(several) == [Call("f", {"a": 1})]
    for text, said in (
        ("Action: f", "one line Action: and one Action Input:.*1 and 0"),
        ("Action Input: {}", "without a line Action:"),
        ("Action: f\nAction Input: 1 + 1", "not JSON"),
        ("Action: f\nAction Input: [1]", "a JSON object"),
        (f"{ACT}Final Answer: 2", "not both"),
        (ACT + ACT, "2 and 2"),
        ("Action: f\nAction Input: " + "[" * 100_000, "not JSON"),
    ):
        (bad,) = parse_react(text)
        assert re.search(said, bad.problem), text


def test_an_observation_follows_what_the_policy_began(tmp_path):
    words = tokenizer()
    trajectory, _ = played(tmp_path, [f"{ACT}Observation: 3\nFinal Answer: 3", "Final Answer: 2"], *REACT)
    text = words.decode(trajectory.response_ids)
    assert text.startswith(f"{ACT}Observation:") and text.endswith("Final Answer: 2<eos>")
    assert tool_text(trajectory) == " 2\n" and (trajectory.turns, trajectory.tool_calls) == (2, 1)
    assert "Final Answer: 3" not in text  # the turn ended where the tool begins
    shown = words.decode(trajectory.prompt_ids)
    assert '{"name": "calculator", "description"' in shown and "<tool calculator>" not in shown
    assert shown.endswith("Final Answer: the answer\n\nhow much?<eos>\n<bos>assistant\n")


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_an_action_that_ends_its_message_is_answered_too(tmp_path, template):
    trajectory, _ = played(tmp_path, [ACT, "Final Answer: 2"], *REACT, template=template)
    framed = "\n<bos>user\nObservation: 2<eos>\n<bos>assistant\n" if template else "\nObservation: 2\n"
    assert tool_text(trajectory) == framed and trajectory.turns == 2


def test_an_action_that_is_none_is_told_what_is_wrong(tmp_path):
    trajectory, loop = played(tmp_path, ["Action: oracle\nAction Input: {}\nObservation:", "Final Answer: 2"], *REACT)
    assert tool_text(trajectory) == " error: there is no tool 'oracle'; there are calculator\n"
    assert loop.metrics()["agent/invalid_calls"] == 1


# --- limits ---


def test_no_more_calls_are_made_than_an_episode_has(tmp_path):
    turn = call("calculator", expression="1 + 1")
    trajectory, loop = played(tmp_path, [turn, turn, "2"], f"{MULTI}.max_tool_calls=1")
    assert trajectory.tool_calls == 1
    assert "error: no call is left: an episode has 1" in tool_text(trajectory)
    assert loop.metrics() == {
        "agent/calls": 2,
        "agent/invalid_calls": 0.5,
        "agent/refused_calls": 0.0,
        "agent/timeout_calls": 0.0,
        "agent/failed_calls": 0.0,
    }


def test_calls_of_a_turn_beyond_the_limit_are_not_answered(tmp_path):
    turn = call("calculator", expression="1 + 1") + call("calculator", expression="2 + 2")
    one, _ = played(tmp_path, [turn, "2"])
    both, _ = played(tmp_path, [turn, "2"], f"{MULTI}.max_parallel_calls=2")
    assert tool_text(one) == "\n<bos>tool\n2<eos>\n<bos>assistant\n"
    assert tool_text(both) == "\n<bos>tool\n2<eos>\n<bos>tool\n4<eos>\n<bos>assistant\n"
    assert (one.tool_calls, both.tool_calls) == (1, 2)


@pytest.mark.parametrize("name", ["max_assistant_turns", "max_user_turns"])
def test_turns_are_bounded(tmp_path, name):
    turn = call("calculator", expression="1 + 1")
    trajectory, _ = played(tmp_path, [turn] * 9, f"{MULTI}.{name}=3")
    answered = 2 if name == "max_assistant_turns" else 3
    assert tool_text(trajectory).count("<bos>tool") == answered
    assert trajectory.turns == answered + 1


def test_a_tool_that_does_not_answer_costs_its_time_and_no_episode(tmp_path):
    yaml = f"tools:\n  - class_name: {__file__}:Slow\n"
    trajectory, loop = played(tmp_path, [call("slow"), "2"], f"{MULTI}.tool_timeout_s=0.05", yaml=yaml)
    assert "error: no answer in 0.05 s" in tool_text(trajectory)
    assert trajectory.turns == 2 and loop.metrics()["agent/timeout_calls"] == 1


@pytest.mark.parametrize(
    "yaml",
    [
        f"tools:\n  - class_name: {__file__}:Slow\n    config: {{type: native}}\n    timeout_s: 0.05\n",
        f"- class_name: {__file__}:Slow\n  timeout_s: 0.05\n",
    ],
)
def test_a_tool_may_have_a_time_of_its_own(tmp_path, yaml):
    trajectory, _ = played(tmp_path, [call("slow"), "2"], f"{MULTI}.tool_timeout_s=600", yaml=yaml)
    assert "error: no answer in 0.05 s" in tool_text(trajectory)


def test_a_time_that_is_none_is_refused(tmp_path):
    entry = "- {{class_name: core.rollout.tools.Calculator, {}}}\n"
    said = problems_of(
        tmp_path, "".join(map(entry.format, ("timeout_s: 0", "timeout_s: soon", "timeout_s: .inf", "timeout_s: true")))
    )
    assert [line.partition("timeout_s=")[2][:4] for line in said.splitlines()] == ["0 mu", "'soo", "inf ", "True"]
    assert "'mcp' is not supported" in problems_of(tmp_path, f"{CALCULATOR}    config: {{type: mcp}}\n")


@pytest.mark.parametrize(
    ("side", "kept"),
    [("left", "123456...(truncated)"), ("right", "(truncated)...567890"), ("middle", "123...(truncated)...890")],
)
def test_a_long_answer_is_cut_on_one_side(tmp_path, side, kept):
    options = (f"{MULTI}.max_tool_response_length=6", f"{MULTI}.tool_response_truncate_side={side}")
    trajectory, _ = played(tmp_path, [call("calculator", expression="1234567890"), "2"], *options)
    assert f"<bos>tool\n{kept}<eos>" in tool_text(trajectory)


def test_an_answer_without_room_ends_the_episode_as_truncated(tmp_path):
    turn = call("calculator", expression="1 + 1")
    trajectory, _ = played(tmp_path, [turn], length=len(turn) + 10)
    assert trajectory.truncated and trajectory.turns == 1 and tool_text(trajectory) == ""


# --- the sandboxed Python tool ---


@pytest.mark.skipif(isolation().mode == "none", reason="programs cannot be isolated here")
def test_a_script_runs_in_the_sandbox_and_its_output_comes_back(tmp_path):
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: core.rollout.tools:PythonSandbox\n    config: {seconds: 2, memory_mb: 256}\n"
    )
    tool = load_tools(tmp_path / "tools.yaml")["python"].tool

    def run(code: str) -> str:
        return asyncio.run(tool.execute("0", {"code": code}))

    assert run("print(sum(range(10)))") == "45\n"
    for code, said in (
        ("1 / 0", "ZeroDivisionError"),
        ("while True: pass", "too long"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "Error"),
        ("print(open('/etc/passwd').read())", "Error"),
    ):
        with pytest.raises(ToolError, match=said):
            run(code)
