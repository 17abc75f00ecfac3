"""Simulated users: the file, who plays in an episode, the frame of a turn, scores, limits, and bad users."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.answers import answer_line, trajectory_of
from core.config import compose, examine
from core.engines import SamplingParams
from core.errors import InputError
from core.rewards.layer import rollout_facts
from core.rollout.agent_loop import Episode, Limits, make_agent_loop
from core.rollout.tool_agent import ToolAgentLoop
from core.rollout.users import BaseInteraction, load_users
from core.types import Stop
from tests.core.rollout.test_agent_loop import prompt
from tests.core.rollout.test_tool_agent import CALCULATOR, MULTI, call, tokenizer
from tests.scripted_engine import ScriptedEngine

CHECKER = f"interaction:\n  - name: checker\n    class_name: {__name__}:Checker\n"
ENDED = []


class Checker(BaseInteraction):
    """Ends the episode at the right number, and asks again at a wrong one."""

    async def generate_response(self, instance_id, messages, gold, **kwargs):
        said = messages[-1]["content"]
        assert [one["role"] for one in messages][:2] == ["user", "assistant"]
        if said == "hang":
            await asyncio.Event().wait()
        if said == "nonsense":
            return "text"
        right = said == str(gold)
        return right, f"not {said}, <eos> again", 1.0 if right else -0.5, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        ENDED.append(instance_id)


class PoliteInteraction(Checker):
    """The same under the name that verl would give it."""


def played(folder, turns, *options, extra=None, length=2000, yaml=CHECKER, words=None):
    """The trajectory of one episode whose turns are these, and the loop."""
    (folder / "users.yaml").write_text(yaml)
    words = words or tokenizer()
    loop = ToolAgentLoop(
        compose("grpo", [f"{MULTI}.enable=True", f"{MULTI}.interaction_config_path={folder}/users.yaml", *options]),
        words,
    )
    left = list(turns)
    extra = {"interaction_kwargs": {"name": "checker", "gold": 4}} if extra is None else extra
    parts = {"engine": ScriptedEngine(words, lambda _: left.pop(0)), "tokenizer": words, "run_seed": 1}
    episode = Episode(
        replace(prompt(), extra_info=extra), 0, SamplingParams(max_tokens=length), Limits(length, length), **parts
    )
    asyncio.run(loop.run(episode))
    return episode.trajectory(), loop


def test_the_user_answers_in_the_template_outside_the_mask_until_the_episode_ends(tmp_path):
    ENDED.clear()
    trajectory, loop = played(tmp_path, ["3", "4"])
    words = tokenizer()
    assert words.decode(trajectory.response_ids) == (
        "3<eos>\n<bos>user\nnot 3, <eos> again<eos>\n<bos>assistant\n4<eos>"
    )
    written = words.decode(trajectory.response_ids[trajectory.response_mask])
    assert written == "3<eos>4<eos>" and trajectory.logprobs[~trajectory.response_mask].sum() == 0
    added = trajectory.response_ids[~trajectory.response_mask].tolist()
    assert added.count(words.eos_token_id) == 1  # the template's own: the user's is text
    assert [segment.role for segment in trajectory.segments] == ["policy", "user", "policy"]
    assert (trajectory.turns, trajectory.tool_calls, trajectory.stop) == (2, 0, Stop.EOS)
    assert trajectory.user_scores == (-0.5, 1.0) == tuple(rollout_facts(trajectory)["user_scores"])
    assert len(ENDED) == 1
    assert loop.metrics()["agent/user_turns"] == 2


def test_tools_and_a_user_in_one_episode(tmp_path):
    (tmp_path / "tools.yaml").write_text(CALCULATOR)
    turns = [call("calculator", expression="2 + 2"), "5", "4"]
    trajectory, _ = played(tmp_path, turns, f"{MULTI}.tool_config_path={tmp_path}/tools.yaml")
    assert [segment.role for segment in trajectory.segments] == ["policy", "tool", "policy", "user", "policy"]
    assert trajectory.tool_calls == 1 and trajectory.user_scores == (-0.5, 1.0)


def test_an_example_without_a_user_has_none(tmp_path):
    trajectory, _ = played(tmp_path, ["3"], extra={})
    assert trajectory.turns == 1 and trajectory.user_scores == ()


@pytest.mark.parametrize("name", ["max_assistant_turns", "max_user_turns"])
def test_turns_are_bounded(tmp_path, name):
    trajectory, _ = played(tmp_path, ["3"] * 9, f"{MULTI}.{name}=3")
    answered = 2 if name == "max_assistant_turns" else 3
    assert len(trajectory.user_scores) == answered == trajectory.turns - 1


def test_a_user_without_room_or_time_ends_the_episode_as_truncated(tmp_path):
    ENDED.clear()
    full, _ = played(tmp_path, ["3"], length=9)
    assert full.truncated and full.turns == 1 and full.user_scores == (-0.5,)
    late, loop = played(tmp_path, ["hang"], f"{MULTI}.tool_timeout_s=0.05")
    assert late.truncated and late.user_scores == () and loop.metrics()["agent/user_timeouts"] == 1
    assert len(ENDED) == 2


def test_what_is_no_reply_is_answered_with_an_error_and_its_state_is_let_go(tmp_path):
    ENDED.clear()
    trajectory, loop = played(tmp_path, ["nonsense", "4"])
    assert "it returned str, not (" in trajectory.segments[1].text
    assert trajectory.turns == 2 and trajectory.user_scores == (1.0,)
    assert loop.metrics()["agent/user_failures"] == 1 and len(ENDED) == 1


def test_scores_survive_a_file_of_answers(tmp_path):
    import json

    trajectory, _ = played(tmp_path, ["3", "4"])
    line = json.loads(json.dumps(answer_line(prompt(), 0, trajectory, "Q")))
    assert trajectory_of(line).user_scores == (-0.5, 1.0)
    line.pop("user_scores")  # as in files that are older
    assert trajectory_of(line).user_scores == ()


def test_a_broken_file_says_everything_that_is_wrong_with_it(tmp_path):
    path = tmp_path / "users.yaml"
    entry = f"  - class_name: {__name__}:PoliteInteraction\n"
    path.write_text(f"interaction:\n{entry}")
    assert list(load_users(path)) == ["polite"]
    bad = "  - name: x\n  - class_name: nowhere:User\n  - class_name: core.rollout.tools.Calculator\n"
    path.write_text(f"interaction:\n{entry}{entry}{bad}")
    with pytest.raises(InputError) as error:
        load_users(path)
    parts = (
        "a second user named 'polite'",
        "must hold class_name",
        "no module 'nowhere'",
        "does not extend",
    )
    for line, part in zip(str(error.value).splitlines(), parts, strict=True):
        assert part in line and "users.yaml: interaction[" in line
    for text, said in (("interaction: []", "must hold a list"), ("[", "cannot be read")):
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            load_users(path)


def test_users_need_a_template_and_examples_need_users_before_a_start(tmp_path):
    with pytest.raises(InputError, match="framed by the chat template, and the tokenizer has none"):
        played(tmp_path, ["3"], words=tokenizer(None))
    chosen = [f"{MULTI}.enable=True", f"{MULTI}.interaction_config_path={tmp_path}/users.yaml"]
    rows = [replace(prompt(), extra_info={"interaction_kwargs": {"name": "nobody"}}), prompt()]
    with pytest.raises(InputError, match="in 1 row .uid q3: extra_info.interaction_kwargs chooses 'nobody'"):
        make_agent_loop(compose("grpo", chosen), tokenizer(), (), rows)
    assert not examine("grpo", chosen).problems
    (problem,) = examine("grpo", chosen[:1]).problems
    assert "tool_config_path=null: or interaction_config_path is needed" in problem
