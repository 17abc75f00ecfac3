"""The agents of recipes/agents play what the loops of this repository play, and runs with agents
resume."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from core.config.composition import compose
from core.engines.engine import SamplingParams
from core.rollout.agent_loop import EpisodeLimits, TrajectorySampler, make_agent_loop
from core.types import Prompt
from recipes.agents import search
from recipes.lab import sums
from results.reporting.run_scripts import read_script
from tests.core.rollout.test_outside_agent import AGENT, Playing
from tests.faults.kill_and_resume import AtPoint, compare_runs, run_uninterrupted, run_with_kills
from tests.faults.tiny_run import command, prepare
from tests.recipes.test_search_r1 import PASSAGES, TOKENIZER, loop, prompt, searching_model
from tests.scripted_engine import ScriptedEngine

FOLDER = Path(search.__file__).parent
TURNS = "actor_rollout_ref.rollout.multi_turn"


# --- Search-R1 ---


class ScoringEngine(ScriptedEngine):
    """Writes scripted texts, with the log-probs that a model gives them in the request's context."""

    def __init__(self, model, tokenizer, respond):
        super().__init__(tokenizer, respond)
        self.model = model

    def _response(self, request):
        answer = super()._response(request)
        ids = [*request.prompt_ids, *answer.response_ids.tolist()]
        logprobs = log_probs_of(self.model, ids)[-len(answer.response_ids) :]
        return dataclasses.replace(answer, logprobs=logprobs)


def log_probs_of(model, ids) -> np.ndarray:
    """Return the log-prob of every token but the first."""
    ids = torch.tensor([ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


EPISODES = [
    ["<search>who</search>", "<search> where </search> ", "<answer>Paris</answer>"],
    ["I do not know", "<answer> Rome </answer> or so"],
    ["<search>a</search>"] * 3 + ["no more <search>b</search>"],
    ["<answer>x</answer>"],
]


def first_step(agent_loop, limits):
    """Return the trajectories of a step: one prompt, and an episode of each script."""
    left = {}

    def respond(request):
        # The first request of an episode has the longest way to go: scripts go by its seed
        turns = left.setdefault(request.episode, list(EPISODES[len(left) % len(EPISODES)]))
        return turns.pop(0)

    engine = ScoringEngine(searching_model(), TOKENIZER, respond)
    sampler = TrajectorySampler(engine, TOKENIZER, 1, agent_loop)

    async def play():
        sampling = SamplingParams(max_tokens=limits.turn)
        return [await sampler.sample(prompt(), i, sampling, limits) for i in range(len(EPISODES))]

    try:
        return asyncio.run(play())
    finally:
        agent_loop.close()


def test_the_first_step_of_search_r1_is_the_same_whoever_plays_it(monkeypatch):
    """Ids, masks and seeds are equal, and log-probs agree to 1e-4, also with the learner's."""

    async def retrieve(query):
        return [PASSAGES[0].contents]

    monkeypatch.setattr(search, "retrieve", retrieve)
    lengths = ["data.max_prompt_length=380", "data.max_response_length=60", "max_turns=3"]
    lengths += ["data.max_start_length=100", "data.max_obs_length=100"]
    inside = loop(*lengths, passages=PASSAGES[:1])
    outside = make_agent_loop(
        compose(
            "search_r1",
            [
                "data.train_batch_size=256",
                *lengths,
                "actor_rollout_ref.rollout.agent_loop=outside_agent",
                f"{AGENT}.path=recipes.agents.search:run",
            ],
        ),
        TOKENIZER,
    )
    limits = EpisodeLimits(440 - len(prompt().token_ids), 60)
    expected = first_step(inside, limits)
    played = first_step(outside, limits)
    model = searching_model()
    for mine, theirs in zip(played, expected, strict=True):
        assert mine.failure == "" and mine.branches == () and mine.seed == theirs.seed
        assert mine.response_ids.tolist() == theirs.response_ids.tolist()
        assert mine.response_mask.tolist() == theirs.response_mask.tolist()
        assert mine.response_text == theirs.response_text
        assert np.abs(mine.logprobs - theirs.logprobs).max() < 1e-4
        ids = [*mine.prompt_ids.tolist(), *mine.response_ids.tolist()]
        by_learner = log_probs_of(model, ids)[-len(mine.response_ids) :]
        assert np.abs((mine.logprobs - by_learner)[mine.response_mask]).max() < 1e-4


# --- the lab of sums ---


def test_the_plain_client_plays_what_the_tool_agent_plays(tmp_path):
    question = next(sums.sums(1, "test"))
    words = sums.RECIPE.new_tokenizer()
    turns = [text for text, by_policy in sums.calling(question, "") if by_policy]
    ids = tuple(words.encode(question.prompt, add_special_tokens=False))
    chat = ({"role": "user", "content": question.prompt},)
    facts = {"tool_selection": ["calculator"]}
    asked = Prompt(0, "q", ids, chat, str(question.value), sums.DATA_SOURCE, facts)
    tools = [f"{TURNS}.enable=True", f"{TURNS}.tool_config_path={FOLDER.parent}/lab/tools.yaml"]
    agent = [f"{AGENT}.path={FOLDER}/react.py:run"]
    played = []
    for options in (tools, agent):
        left = list(turns)
        engine = ScriptedEngine(words, lambda _, left=left: left.pop(0))
        made = make_agent_loop(compose("grpo", options), words)
        sampler = TrajectorySampler(engine, words, 1, made)
        sampling = SamplingParams(max_tokens=200)
        limits = EpisodeLimits(200, 200)
        played.append(asyncio.run(sampler.sample(asked, 0, sampling, limits)))
        made.close()
    inside, outside = played
    assert outside.response_ids.tolist() == inside.response_ids.tolist()
    assert outside.response_mask.tolist() == inside.response_mask.tolist()
    assert f"#### {question.value}" in outside.response_text and outside.tool_calls == 1


def test_the_page_shows_the_agent_as_it_is():
    code = (FOLDER / "react.py").read_text().partition("\n\n")[2]
    assert f"```python\n{code}```" in (FOLDER / "README.md").read_text()


PROGRAMS = ("openai_agents", "verifiers")


@pytest.mark.parametrize("kind", ["react", *PROGRAMS, "search"])
def test_each_lab_has_an_agent(kind):
    agent = read_script(FOLDER / "run_lab.sh", (kind,)).config.actor_rollout_ref.rollout.agent
    assert agent.plays and bool(agent.command) == (kind in PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_agent_of_a_library_plays_in_an_environment_of_its_own(tmp_path, kind):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    requirements = FOLDER / f"requirements_{kind}.txt"
    subprocess.run([python, "-m", "pip", "--quiet", "install", "-r", requirements], check=True)
    check_sums_program(f"{python} {FOLDER}/{kind}_sums.py")
    with resident(python, FOLDER / f"{kind}_sums.py", tmp_path / "socket"):
        check_sums_program(f"{python} {FOLDER}/resident.py play {tmp_path}/socket")


def check_sums_program(program: str) -> None:
    call = json.dumps({"name": "calculator", "arguments": {"expression": "2*3+4"}})
    chat = ({"role": "user", "content": "2*3+4="},)
    for said, reward in (("10", 1.0), ("11", 0.0)):
        turns = [f"<tool_call>{call}</tool_call>", f"#### {said}"]
        options = [f"{AGENT}.command={program}", f"{TURNS}.tool_timeout_s=100"]
        playing = Playing(None, turns, *options, chat=chat, ground_truth="10")
        (trajectory,) = playing.trajectories()
        assert (trajectory.failure, trajectory.reward) == ("", reward)
        assert "10" in "".join(part.text for part in trajectory.segments if part.role == "tool")
        assert (trajectory.branches, playing.metrics["agent/extended_share"]) == ((), 1)


@contextmanager
def resident(python, agent: Path, address: Path):
    """Keep an agent resident. It answers when its socket is there."""
    server = subprocess.Popen([python, FOLDER / "resident.py", "serve", address, agent])
    try:
        for _ in range(600):
            if address.exists() or server.poll() is not None:
                break
            time.sleep(0.1)
        assert address.exists()
        yield
    finally:
        server.kill()
        server.wait()


RESIDENT = """
import asyncio, json, os, sys, urllib.request
from pathlib import Path
FOLDER = Path(__file__).parent
imports = FOLDER / "imports"
imports.write_text(f"{imports.read_text() if imports.exists() else ''}{os.getpid()} ")

async def main():
    example = json.load(sys.stdin)
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": example["messages"]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if answer == "fails":
        raise ValueError("it makes no sense")
    if answer == "hangs":
        (FOLDER / "hangs").write_text(str(os.getpid()))
        await asyncio.sleep(3600)
    return float(answer)
"""


def test_a_resident_agent_is_imported_once_and_each_episode_is_a_process_that_ends(tmp_path):
    (tmp_path / "agent.py").write_text(RESIDENT)
    play = f"{sys.executable} {FOLDER}/resident.py play {tmp_path}/socket"
    options = (f"{AGENT}.command={play}", f"{TURNS}.tool_timeout_s=20")
    with resident(sys.executable, tmp_path / "agent.py", tmp_path / "socket"):
        several = Playing(None, ["0.5"] * 4, *options).trajectories(4)
        assert [(each.reward, each.failure) for each in several] == [(0.5, "")] * 4
        (failed,) = Playing(None, ["fails"], *options).trajectories()
        assert "it makes no sense" in failed.failure and failed.reward is None
        options = (*options[:1], f"{TURNS}.tool_timeout_s=8")
        (hung,) = Playing(None, ["hangs"], *options).trajectories()
        assert "neither asked nor ended" in hung.failure
        fork = int((tmp_path / "hangs").read_text())
        assert wait_for_end(fork)
    assert len((tmp_path / "imports").read_text().split()) == 1


def wait_for_end(process: int) -> bool:
    """Return whether a process ends within 30 s."""
    for _ in range(300):
        if not Path(f"/proc/{process}").exists():
            return True
        time.sleep(0.1)
    return False


# --- whole runs ---

BRANCHING = """
async def run(prompt, client):
    messages = list(prompt.messages)
    texts = []
    for number in range(3):
        answer = await client.chat.completions.create(model="p", messages=messages)
        texts.append(answer.choices[0].message.content or "")
        behind = [answer.choices[0].message, {"role": "user", "content": "go on"}]
        messages = [*messages, *behind] if number == 0 else [messages[0], *behind[1:]]
    return sum(map(ord, "".join(texts))) % 5 / 4
"""


@pytest.mark.slow
def test_a_run_with_an_agent_that_branches_is_resumed_to_the_bit(tmp_path):
    prepare(tmp_path)
    (tmp_path / "agent.py").write_text(BRANCHING)
    options = [
        f"{AGENT}.path={tmp_path}/agent.py:run",
        f"{TURNS}.deterministic_tools=True",
        "data.max_prompt_length=150",
        "algorithm.adv_estimator=grpo",
    ]
    start = command(tmp_path, "grpo", 4, *options)
    whole = run_uninterrupted(start, tmp_path / "whole")
    kills = [AtPoint("rollout", 3)]
    killed = run_with_kills(start, tmp_path / "killed", kills, random.Random(0))
    assert len(killed.landed) == 1 and compare_runs(whole.folder, killed.folder) == []
    last = json.loads((whole.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["agent/failed_rate"] == 0 and last["agent/trajectories"] == 2
    assert last["rollout_corr/logp_diff_max"] < 1e-4
