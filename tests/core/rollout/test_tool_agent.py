"""The tool agent: calls and users' turns, answered in the chat template's form, within limits,
whatever tools do."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from core.config.composition import compose
from core.data.parquet import Example
from core.data.prompts import PromptFiles, PromptStream
from core.engines.engine import SamplingParams
from core.errors import InputError, Problems
from core.rollout.agent_loop import (
    Episode,
    EpisodeLimits,
    TrajectorySampler,
    check_example,
    make_agent_loop,
)
from core.rollout.tool_agent import ToolAgentLoop, parse_calls
from core.rollout.tools import BaseInteraction, BaseTool, ToolError, ToolResponse
from core.types import Prompt, Stop
from tests.core.data.templates import GEMMA, PHI3, pair_tokenizer_of, tokenizer_of
from tests.core.rollout.test_tools import CALCULATOR
from tests.row_files import data_config, plain_row, write_parquet
from tests.scripted_engine import ScriptedEngine
from tests.tiny import tiny_tokenizer

MULTI = "actor_rollout_ref.rollout.multi_turn"
TEMPLATE = (
    "{% for t in tools or [] %}<tool {{ t.function.name }}>\n{% endfor %}"
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
ONE_AND_ONE = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'


# --- tools and users of the tests ---


def deep(level: int = 0) -> int:
    return deep(level + 1)


def fail(error: Exception) -> None:
    raise error


RAISES = {
    "key": lambda: fail(KeyError("x")),
    "deep": deep,
    "surrogate": lambda: fail(ValueError("\ud800")),
    "exit": lambda: fail(SystemExit(0)),
    "cancelled": lambda: fail(asyncio.CancelledError()),
}
RETURNS = {"none": None, "bytes": b"x", "nan_reward": ("x", float("nan"), {})}
TEXTS = {"huge": "9" * 500_000, "empty": "", "half": "a\ud83d b\udc00\x00", "end": "<eos><bos>"}


class Any(BaseTool):
    """Does what it is asked for by name."""

    tool_schema = {
        "type": "function",
        "function": {"name": "any", "parameters": {"required": ["what"]}},
    }

    async def execute(self, instance_id, parameters, **kwargs):
        what = parameters["what"]
        if what == "hang":
            await asyncio.Event().wait()
        if what == "refuse":
            raise ToolError("not that")
        return RAISES[what]() if what in RAISES else {**RETURNS, **TEXTS}[what]


class Counter(BaseTool):
    """Counts the calls of an episode, from a number of the example's on, and rewards them."""

    tool_schema = {"type": "function", "function": {"name": "counter"}}
    counts: dict[str, int] = {}

    async def create(self, instance_id=None, start=(0,), **kwargs):
        self.counts[instance_id] = list(start).pop()
        if isinstance(start, list):
            start.clear()  # it may change what it is given
        return instance_id, None

    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += 1
        return ToolResponse(text=str(self.counts[instance_id])), 0.5, {}

    async def release(self, instance_id, **kwargs):
        del self.counts[instance_id]


class Checker(BaseInteraction):
    """Ends the episode at the right number, and asks again at a wrong one; fails where the facts
    name how."""

    async def generate_response(self, instance_id, messages, gold=4, **kwargs):
        said = messages[-1]["content"]
        assert [one["role"] for one in messages][:2] == ["user", "assistant"]
        messages.clear()  # what it is given is its own
        if said == "hang":
            await asyncio.Event().wait()
        if said in RAISES:
            RAISES[said]()
        right = said == str(gold)
        replies = {
            "score": (False, "x", float("nan"), {}),
            "text score": (False, "x", "1", {}),
            "none": None,
            "two": (False, "x"),
            "no text": (False, 5, 1.0, {}),
            "no end": ("False", "x", 1.0, {}),
        }
        return replies.get(said, (right, f"not {said}, <eos> again", 1.0 if right else -0.5, {}))


USERS = f"interaction:\n  - name: checker\n    class_name: {__name__}:Checker\n"
USER = {"interaction_kwargs": {"name": "checker", "gold": 4}}


def own(kind: str) -> str:
    return f"tools:\n  - class_name: {__name__}:{kind}\n"


# --- playing ---


def tokenizer(template: str | None = TEMPLATE):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def loop_of(folder, *options, tools=CALCULATOR, users=None, words=None) -> ToolAgentLoop:
    chosen = [f"{MULTI}.enable=True", "data.max_prompt_length=2000", *options]
    for name, text in (("tool_config_path", tools), ("interaction_config_path", users)):
        if text:
            (folder / f"{name}.yaml").write_text(text)
            chosen.append(f"{MULTI}.{name}={folder}/{name}.yaml")
    return ToolAgentLoop(compose("grpo", chosen), words or tokenizer())


def played(
    folder, turns, *options, tools=CALCULATOR, users=None, words=None, extra=None, length=3000
):
    """Return the trajectory of one episode whose turns are these, and the loop."""
    loop = loop_of(folder, *options, tools=tools, users=users, words=words)
    return play(loop, turns, extra, length), loop


def play(loop, turns, extra=None, length=3000, opened_tag=None):
    left, words = list(turns), loop.tokenizer
    chat = ({"role": "user", "content": "how much?"},)
    ids = tuple(words.encode("how much?", add_special_tokens=False))
    prompt = Prompt(0, "q", ids, chat, "4", "test", extra or {}, opened_tag=opened_tag)
    sampler = TrajectorySampler(ScriptedEngine(words, lambda _: left.pop(0)), words, run_seed=1)
    episode = Episode(
        prompt, 0, SamplingParams(max_tokens=length), EpisodeLimits(length, length), sampler
    )
    asyncio.run(loop.run(episode))
    return episode.trajectory()


def added(trajectory) -> str:
    return "".join(segment.text for segment in trajectory.segments if segment.role != "policy")


# --- calls ---


@pytest.mark.parametrize(
    ("said", "answer", "made"),
    [
        (call("calculator", expression="(3 + 4) * 12"), "84", 1),
        (
            call("calculator", expression="__import__('os')"),
            "error: cannot compute that: Call is not arithmetic",
            1,
        ),
        (call("calculator", expression=3), "error: 3 is not of type 'string'", 0),
        (call("calculator"), "error: 'expression' is a required property", 0),
        (call("oracle"), "error: there is no tool 'oracle'; there are calculator", 0),
        (call(["calculator"]), "error: there is no tool", 0),
        ("<tool_call>{</tool_call>", "error: the call is not JSON: ", 0),
        ('<tool_call>["f"]</tool_call>', "error: a call is", 0),
        (f"<tool_call>{'[' * 1500}</tool_call>", "error: the call is not JSON: ", 0),
    ],
)
def test_a_call_is_answered_or_told_what_is_wrong_with_it(tmp_path, said, answer, made):
    trajectory, loop = played(tmp_path, [said, "#### 84"])
    assert added(trajectory).startswith(f"\n<bos>tool\n{answer}")
    assert (trajectory.turns, trajectory.stop, trajectory.tool_calls) == (2, Stop.EOS, made)
    assert loop.metrics()["agent/invalid_calls"] == 1 - made


@pytest.mark.parametrize(
    ("text", "thinking", "names"),
    [
        (f"<think>I could write {call('delete')}.</think>The answer is 5.", False, []),
        (f"I could write {call('delete')}.</think>The answer is 5.", True, []),
        (f"I could write {call('delete')}.</think>{call('a')}", False, ["a"]),
        (f"\n<think>so {call('delete')}", False, []),
        (f"so {call('delete')}", True, []),
        (f"<think>no</think>{call('a')}{call('b')}", False, ["a", "b"]),
        (f"<think>a call begins with <tool_call> </think>So: {call('a')}", False, ["a"]),
        (f"it ends with </tool_call></think>\n{call('a')}", True, ["a"]),
        (f"Let me call. {call('a')}", False, ["a"]),
    ],
)
def test_a_call_counts_behind_the_closed_thought(text, thinking, names):
    assert [one.name for one in parse_calls(text, thinking)] == names


def test_a_thought_that_the_template_opens_holds_no_calls_in_any_turn(tmp_path):
    words = tokenizer(TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%"))
    turns = [f"no</think>{ONE_AND_ONE}", f"so {ONE_AND_ONE}", "2"]
    trajectory, _ = played(tmp_path, turns, words=words)
    assert (trajectory.turns, trajectory.tool_calls) == (2, 1)
    loop = loop_of(tmp_path, words=words)
    assert play(loop, [ONE_AND_ONE, "2"], opened_tag="<think>").turns == 1


# --- the stream of tokens ---


def test_the_answer_is_framed_by_the_chat_template_outside_the_mask(tmp_path):
    words = tokenizer()
    trajectory, _ = played(tmp_path, [ONE_AND_ONE, "2"])
    assert added(trajectory) == "\n<bos>tool\n2<eos>\n<bos>assistant\n"
    text = words.decode(trajectory.response_ids)
    # The end of the turn once
    assert text == f"{ONE_AND_ONE}<eos>\n<bos>tool\n2<eos>\n<bos>assistant\n2<eos>"
    assert (
        words.decode(trajectory.response_ids[trajectory.response_mask])
        == f"{ONE_AND_ONE}<eos>2<eos>"
    )
    assert trajectory.logprobs[~trajectory.response_mask].sum() == 0


def test_without_a_template_the_tags_stand_alone(tmp_path):
    trajectory, _ = played(tmp_path, [ONE_AND_ONE, "2"], words=tokenizer(None))
    assert added(trajectory) == "<tool_response>2</tool_response>"


FRAME = "\n<|im_start|>user{}<|im_end|>\n<|im_start|>assistant\n"
TWO_ANSWERS = "\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>"


@pytest.mark.parametrize(
    ("name", "role", "last", "texts", "expected"),
    [
        (
            "gemma",
            "user",
            "<end_of_turn>",
            "R",
            "\n<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("glm4", "tool", "<|observation|>", "R", "\nR<|assistant|>\n"),
        ("gpt-oss", "user", "<|end|>", "R", "<|start|>user<|message|>R<|end|><|start|>assistant"),
        ("base with chatml", "user", "<|endoftext|>", "R", FRAME.format("\nR")),
        # A turn that was cut gets its end
        ("chatml", "user", "x", "R", f"<|im_end|>{FRAME.format(chr(10) + 'R')}"),
        # Answers of several calls one frame
        ("chatml", "tool", "<|im_end|>", "AB", FRAME.format(TWO_ANSWERS)),
    ],
)
def test_the_end_of_a_turn_is_written_once(tmp_path, name, role, last, texts, expected):
    words, added = tokenizer_of(name), []
    tools, users = (CALCULATOR, None) if role == "tool" else (None, USERS)
    loop = loop_of(
        tmp_path, f"{MULTI}.max_parallel_calls={len(texts)}", tools=tools, users=users, words=words
    )
    parts = {"encode": lambda text: [], "add": lambda text, role, ids: added.append(text)}
    stop = Stop.STOP_STRING if last == "x" else Stop.EOS
    loop.add(
        role,
        list(texts),
        SimpleNamespace(last_id=words.convert_tokens_to_ids(last), stop=stop, **parts),
    )
    assert added == [expected]


PUNCTUATED = ("2", '{"a": 1}', "x.", "foo\n", "\nfoo", "", "\n\n", "a  ", ".\nc", "é\u2028", "<t>")


@pytest.mark.parametrize("name", ["chatml", "base with chatml", "glm4", "mistral", "llama3"])
def test_the_context_behind_a_turn_is_the_chat_template_s_to_the_token(tmp_path, name):
    words = pair_tokenizer_of(name)
    loop = loop_of(tmp_path, f"{MULTI}.max_parallel_calls=2", words=words)
    for texts in [*([text] for text in PUNCTUATED), ["a.", "\nb"]]:
        assert_as_rendered(loop, "tool", texts)


@pytest.mark.parametrize("name", ["gemma", "phi3", "gpt-oss", "llama3", "chatml"])
def test_a_user_s_turn_is_the_chat_template_s_to_the_token(tmp_path, name):
    loop = loop_of(tmp_path, tools=None, users=USERS, words=pair_tokenizer_of(name))
    for text in PUNCTUATED:
        assert_as_rendered(loop, "user", [text])


def assert_as_rendered(loop, role, texts):
    """Compare what follows an answer with the whole chat, encoded by transformers alone."""
    words, added = loop.tokenizer, []
    asked = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "call"}]
    chat = [*asked, *({"role": role, "content": text} for text in texts)]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    whole = words.apply_chat_template(chat, **options)
    end = next(iter(loop.frames.ends), words.eos_token)
    ids = [*words.encode("call", add_special_tokens=False), words.convert_tokens_to_ids(end)]
    loop.add(
        role, texts, SimpleNamespace(last_id=ids[-1], stop=Stop.EOS, add=lambda *a: added.append(a))
    )
    (text, _, ids) = added[0]
    shown = words.convert_ids_to_tokens(whole[-len(ids) :])
    assert words.convert_ids_to_tokens(ids) == shown and words.decode(ids) == text, texts
    assert words.decode(whole[: -len(ids)]).removesuffix(end).rstrip().endswith("call")


def test_a_special_token_in_an_answer_is_text_and_its_frame_is_not(tmp_path):
    words, added = pair_tokenizer_of("chatml"), []
    loop = loop_of(tmp_path, words=words)
    end = words.convert_tokens_to_ids("<|im_end|>")
    episode = SimpleNamespace(last_id=end, stop=Stop.EOS, add=lambda *a: added.append(a))
    loop.add("tool", ["a<|im_end|>.\n"], episode)
    text, _, ids = added[0]
    answer = "\n<tool_response>\na<|im_end|>.\n\n</tool_response>"
    assert words.decode(ids) == text == FRAME.format(answer)
    assert ids.count(end) == 1 and ids.count(words.convert_tokens_to_ids("<|im_start|>")) == 2


@pytest.mark.parametrize(
    ("template", "users", "options", "reason"),
    [
        (TEMPLATE, None, [f"{MULTI}.max_parallel_calls=3"], None),
        (GEMMA, USERS, [], None),
        (GEMMA, None, [], "role 'tool' after an answer (roles must alternate"),
        (PHI3, None, [], "role 'tool' after an answer (it writes 0 of the texts"),
        (None, USERS, [], "role 'user' after an answer"),
    ],
)
def test_a_template_that_cannot_write_a_turn_is_refused_at_the_start(
    tmp_path, template, users, options, reason
):
    words, tools = tokenizer(template), None if users else CALCULATOR
    if reason is None:
        return loop_of(tmp_path, *options, tools=tools, users=users, words=words).close()
    with pytest.raises(InputError) as error:
        loop_of(tmp_path, *options, tools=tools, users=users, words=words)
    (line,) = error.value.problems
    assert reason in line and "set actor_rollout_ref.model.custom_chat_template" in line


def test_tags_of_calls_that_are_special_tokens_are_refused_at_the_start(tmp_path):
    for special in (False, True):
        words = tokenizer()
        words.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=special)
        if special:
            with pytest.raises(InputError, match="<tool_call>, </tool_call>"):
                loop_of(tmp_path, words=words)
        else:
            loop_of(tmp_path, words=words).close()


def test_prompts_tell_of_the_tools_that_their_example_has(tmp_path):
    loop, words = loop_of(tmp_path), tokenizer()
    chat, told = (
        [{"role": "user", "content": "1+1"}],
        "<tool calculator>\n<bos>user\n1+1<eos>\n<bos>assistant\n",
    )
    files = []
    for number, selected in enumerate((None, [])):
        row = plain_row(
            number, prompt=chat, extra_info={"index": number, "tool_selection": selected}
        )
        files.append(write_parquet(tmp_path / f"{number}.parquet", [row]))
    config = data_config(train_files=files, shuffle=False)
    stream = PromptStream(config, PromptFiles(config, words, tools_of=loop.tools_of), 1)
    shown = [words.decode(stream.prompt(n).token_ids) for n in range(2)]
    assert shown == [told, told.removeprefix("<tool calculator>\n")]
    config.max_prompt_length = len(stream.prompt(0).token_ids) - 1
    with pytest.raises(InputError, match="is longer than data.max_prompt_length"):
        PromptStream(config, PromptFiles(config, words, tools_of=loop.tools_of), 1)


def test_examples_that_choose_what_is_not_there_are_refused_before_a_start(tmp_path):
    loop = loop_of(tmp_path, users=USERS)
    problems = Problems()
    for extra in ({"interaction_kwargs": {"name": "nobody"}}, {"tool_selection": ["other"]}, USER):
        check_example(loop, Example("file", 3, "test", "q3", "4", extra), problems)
    (line,) = problems.lines()
    assert "in 2 rows" in line and "chooses 'nobody'" in line and "asks for other" in line
    options = [f"{MULTI}.enable=True", f"{MULTI}.tool_config_path={tmp_path}/tool_config_path.yaml"]
    assert isinstance(make_agent_loop(compose("grpo", options), tokenizer()), ToolAgentLoop)


# --- limits ---


def test_calls_are_bounded_in_a_turn_and_in_an_episode(tmp_path):
    turn = ONE_AND_ONE + call("calculator", expression="2 + 2")
    one, _ = played(tmp_path, [turn, "2"])
    both, _ = played(tmp_path, [turn, "2"], f"{MULTI}.max_parallel_calls=2")
    assert added(one) == "\n<bos>tool\n2<eos>\n<bos>assistant\n"
    assert added(both) == "\n<bos>tool\n2<eos>\n<bos>tool\n4<eos>\n<bos>assistant\n"
    assert (one.tool_calls, both.tool_calls) == (1, 2)
    trajectory, loop = played(
        tmp_path, [ONE_AND_ONE, ONE_AND_ONE, "2"], f"{MULTI}.max_tool_calls=1"
    )
    metrics = loop.metrics()
    assert (trajectory.tool_calls, metrics["agent/calls"], metrics["agent/invalid_calls"]) == (
        1,
        2,
        0.5,
    )
    assert "error: no call is left: an episode has 1" in added(trajectory)


def test_turns_and_answers_are_bounded(tmp_path):
    with_tools, _ = played(tmp_path, [ONE_AND_ONE] * 9, f"{MULTI}.max_assistant_turns=3")
    with_user, _ = played(
        tmp_path, ["3"] * 9, f"{MULTI}.max_assistant_turns=3", users=USERS, extra=USER
    )
    for trajectory in (with_tools, with_user):
        assert added(trajectory).count("<bos>assistant") == 2 == trajectory.turns - 1
    cut_off, _ = played(tmp_path, [ONE_AND_ONE], length=len(ONE_AND_ONE) + 10)
    assert cut_off.truncated and cut_off.turns == 1 and added(cut_off) == ""
    for side, kept in (
        ("left", "123456...(truncated)"),
        ("right", "(truncated)...567890"),
        ("middle", "123...(truncated)...890"),
    ):
        options = (
            f"{MULTI}.max_tool_response_length=6",
            f"{MULTI}.tool_response_truncate_side={side}",
        )
        trajectory, _ = played(
            tmp_path, [call("calculator", expression="1234567890"), "2"], *options
        )
        assert f"<bos>tool\n{kept}<eos>" in added(trajectory)


# --- tools that fail, and their state ---


def test_what_a_tool_raises_or_returns_is_an_error_for_the_policy(tmp_path, caplog):
    turns = [call("any", what=what) for what in (*RAISES, *RETURNS)]
    with caplog.at_level(logging.WARNING):
        trajectory, loop = played(tmp_path, [*turns, "2"], tools=own("Any"), length=9000)
    assert added(trajectory).count("error: the tool failed: ") == len(turns) == trajectory.turns - 1
    assert added(trajectory).count("not text alone") == 2 and "nan as reward" in added(trajectory)
    assert loop.metrics()["agent/failed_calls"] == 1 and trajectory.tool_rewards == ()
    assert caplog.text.count("any failed") == 1 and "Traceback" in caplog.text  # then counted alone
    caplog.text.encode()  # a log on disk takes it


def test_any_text_is_an_answer_and_a_refusal_is_counted(tmp_path):
    turns = [call("any", what=what) for what in (*TEXTS, "refuse")]
    trajectory, loop = played(tmp_path, [*turns, "2"], tools=own("Any"))
    shown = [
        text.partition("<eos>\n<bos>assistant")[0]
        for text in added(trajectory).split("<bos>tool\n")[1:]
    ]
    assert (
        shown[1:] == ["", "a\ufffd b\ufffd\ufffd", "<eos><bos>", "error: not that"]
        and len(shown[0]) < 300
    )
    metrics = loop.metrics()
    assert metrics["agent/refused_calls"] == 1 / 5 and metrics["agent/failed_calls"] == 0


def test_a_tool_that_does_not_answer_costs_its_time_and_no_episode(tmp_path):
    turns = [call("any", what="hang"), call("any", what="empty"), "2"]
    trajectory, loop = played(tmp_path, turns, f"{MULTI}.tool_timeout_s=0.2", tools=own("Any"))
    assert "no answer in 0.2 s" in added(trajectory) and trajectory.turns == 3
    assert loop.metrics()["agent/failed_calls"] == 1 / 2


def test_a_tool_keeps_the_state_of_each_episode_and_rewards_it(tmp_path):
    extra = {"tools_kwargs": {"counter": {"create_kwargs": {"start": [4]}}}}
    for _ in range(2):  # the tool cannot change the data
        trajectory, loop = played(
            tmp_path, [call("counter"), call("counter"), "6"], tools=own("Counter"), extra=extra
        )
        assert (
            added(trajectory).count("tool\n5<eos>") == added(trajectory).count("tool\n6<eos>") == 1
        )
        assert trajectory.tool_rewards == (0.5, 0.5)
    assert Counter.counts == {} and loop.metrics()["agent/tool_state_failures"] == 0


@pytest.mark.parametrize(
    ("method", "answer"), [("create", "error: the tool failed: KeyError"), ("release", "1")]
)
def test_a_tool_that_cannot_begin_or_end_costs_no_run(tmp_path, monkeypatch, method, answer):
    monkeypatch.setattr(Counter, method, lambda self, *_, **__: {}["x"])
    trajectory, loop = played(tmp_path, [call("counter"), "2"], tools=own("Counter"))
    assert (
        f"<bos>tool\n{answer}" in added(trajectory)
        and loop.metrics()["agent/tool_state_failures"] == 1
    )


def test_an_episode_that_is_cancelled_ends_at_once_and_lets_its_tools_go(tmp_path):
    loop, released = loop_of(tmp_path, tools=own("Any")), threading.Event()

    def release(instance_id):
        released.set()
        time.sleep(2)  # nobody waits for it

    loop.tools["any"].release = release

    async def main():
        engine = ScriptedEngine(loop.tokenizer, lambda _: call("any", what="hang"))
        sampler = TrajectorySampler(engine, loop.tokenizer, run_seed=1)
        prompt = Prompt(0, "q", (1,), ({"role": "user", "content": "?"},), "4", "test", {})
        episode = Episode(
            prompt, 0, SamplingParams(max_tokens=300), EpisodeLimits(300, 300), sampler
        )
        task = asyncio.create_task(loop.run(episode))
        await asyncio.sleep(0.3)
        task.cancel()
        begun = time.monotonic()
        await asyncio.wait({task})
        return task.cancelled(), time.monotonic() - begun

    cancelled, seconds = asyncio.run(main())
    assert cancelled and seconds < 1 and released.wait(5)


def test_a_tool_that_cannot_be_closed_holds_up_no_end(tmp_path):
    loop = loop_of(tmp_path, f"{MULTI}.tool_timeout_s=0.2", tools=own("Any"))
    for close in (lambda: threading.Event().wait(60), lambda: fail(SystemExit(0))):
        loop.tools["any"].close = close
        loop.close()


# --- simulated users ---


def with_user(folder, turns, *options, length=2000, **facts):
    extra = {"interaction_kwargs": {**USER["interaction_kwargs"], **facts}}
    return played(folder, turns, *options, users=USERS, extra=extra, length=length)


def test_the_user_answers_in_the_template_outside_the_mask_until_the_episode_ends(tmp_path):
    trajectory, loop = with_user(tmp_path, ["3", "4"])
    words, expected = (
        tokenizer(),
        ("3<eos>\n<bos>user\nnot 3, <eos> again<eos>\n<bos>assistant\n4<eos>"),
    )
    assert words.decode(trajectory.response_ids) == expected
    assert words.decode(trajectory.response_ids[trajectory.response_mask]) == "3<eos>4<eos>"
    ids = trajectory.response_ids[~trajectory.response_mask].tolist()
    assert ids.count(words.eos_token_id) == 1  # the template's own: the user's is text
    assert [segment.role for segment in trajectory.segments] == ["policy", "user", "policy"]
    assert (trajectory.turns, trajectory.tool_calls, trajectory.stop) == (2, 0, Stop.EOS)
    assert trajectory.user_scores == (-0.5, 1.0)
    assert loop.metrics()["agent/user_turns"] == 2


def test_tools_and_a_user_in_one_episode_and_an_example_without_a_user(tmp_path):
    trajectory, loop = with_user(tmp_path, [call("calculator", expression="2 + 2"), "5", "4"])
    assert [segment.role for segment in trajectory.segments] == [
        "policy",
        "tool",
        "policy",
        "user",
        "policy",
    ]
    assert trajectory.tool_calls == 1 and trajectory.user_scores == (-0.5, 1.0)
    assert play(loop, ["3"]).turns == 1
    full, _ = with_user(tmp_path, ["3"], length=9)
    assert full.truncated and full.turns == 1 and full.user_scores == (-0.5,)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("key", "KeyError"),
        ("exit", "SystemExit"),
        ("hang", "no answer in 0.2 s"),
        ("score", "nan as score"),
        ("text score", "'1' as score"),
        ("none", "it returned None; generate_response returns (ends: bool"),
        ("two", "it returned (False, 'x')"),
        ("no text", "it returned 5 as text"),
        ("no end", "it returned 'False' for whether the episode ends"),
    ],
)
def test_a_user_who_fails_ends_the_episode_which_has_no_score(tmp_path, said, cause):
    trajectory, loop = with_user(tmp_path, ["3", said, "4"], f"{MULTI}.tool_timeout_s=0.2")
    assert (
        trajectory.failure.startswith("the simulated user checker failed: ")
        and cause in trajectory.failure
    )
    assert trajectory.turns == 2 and trajectory.user_scores == (-0.5,)
    metrics = loop.metrics()
    assert (metrics["agent/user_turns"], metrics["agent/failed_user_turns"]) == (2, 0.5)
