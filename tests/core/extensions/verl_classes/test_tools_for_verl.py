"""Tools and simulated users on verl's base classes: loaded from verl's YAML, played, rewarded, and let go."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from core.config.plugins import load_object
from core.errors import InputError
from core.evaluation.answer_file import answer_line, trajectory_of
from core.extensions.verl_classes.shim import MODULES
from core.rewards.layer import verl_facts
from core.rollout.tools.interactions import load_interactions
from core.rollout.tools.tools import load_tools
from tests.core.rollout.test_agent_loop import prompt
from tests.core.rollout.tools.test_interactions import played as conversed
from tests.core.rollout.tools.test_tool_agent import MULTI, call, played, problems_of, tool_text

PUBLIC = Path(__file__).parent / "public"


def entry(name: str, kind: str = "", schema: str = "", config: str = "{type: native}") -> str:
    """The YAML of one tool, in verl's form."""
    function = f"{{name: {schema}, description: d, parameters: {{type: object, properties: {{}}, required: []}}}}"
    tail = f"    tool_schema: {{type: function, function: {function}}}\n" if schema else ""
    return f"  - class_name: {kind or f'{PUBLIC}/{name}'}\n    config: {config}\n{tail}"


def tools(*entries: str) -> str:
    return "tools:\n" + "".join(entries)


NOTEBOOK = tools(entry("notebook_tool.py:NotebookTool", schema="notebook", config="{type: native, step_reward: 0.5}"))
ROW = {"tools_kwargs": {"notebook": {"create_kwargs": {"target": 7}, "execute_kwargs": {"scale": 1}}}}


def test_a_tool_keeps_its_state_for_an_episode_and_its_rewards_reach_the_scorer(tmp_path):
    turns = [call("notebook", number=3), call("notebook", number=4), "7"]
    trajectory, loop = played(tmp_path, turns, yaml=NOTEBOOK, extra=ROW)
    assert "sum 3 of 7" in tool_text(trajectory) and "sum 7 of 7" in tool_text(trajectory)
    facts = verl_facts(trajectory)
    assert facts["tool_rewards"] == [0.5, 0.5] and facts["rollout_reward_scores"] == {"notebook": 1.0}
    tool = loop.tools["notebook"].tool.tool
    assert tool.books == {} and len(tool.released) == 1
    line = json.loads(answer_line(prompt(), 0, trajectory, "Q"))
    assert trajectory_of(line).tool_scores == {"notebook": 1.0}


def test_each_episode_has_an_instance_of_its_own(tmp_path):
    short, loop = played(tmp_path, [call("notebook", number=3), "3"], yaml=NOTEBOOK, extra=ROW)
    assert short.tool_scores == {"notebook": 0.0} and loop.metrics()["agent/tool_state_failures"] == 0
    silent, _ = played(tmp_path, ["7"], yaml=NOTEBOOK, extra=ROW)
    assert silent.tool_scores == {"notebook": 0.0} and silent.tool_rewards == ()


@pytest.mark.parametrize(
    ("kind", "schema", "arguments", "answer"),
    [
        ("OwnSchemaTool", "", {"text": "low"}, "LOW"),
        ("IdOnlyTool", "ids", {}, "mine-"),
        ("PictureTool", "shows", {}, "error: the tool failed: ValueError: the tool returned a picture"),
        ("BrokenTool", "broken", {}, "error: the tool failed: RuntimeError: no room for an instance"),
        ("WordyTool", "wordy", {}, "error: the tool failed: it returned the reward 'much'"),
    ],
)
def test_the_ways_in_which_tools_are_written(tmp_path, kind, schema, arguments, answer):
    turns = [call(schema or "shout", **arguments), "2"]
    yaml = tools(entry(f"more_tools.py:{kind}", schema=schema))
    trajectory, loop = played(tmp_path, turns, f"{MULTI}.max_tool_response_length=500", yaml=yaml)
    assert answer in tool_text(trajectory) and trajectory.turns == 2
    failures = loop.metrics()
    assert failures["agent/failed_calls"] == float("error" in answer)
    assert failures["agent/tool_state_failures"] == float(kind == "BrokenTool")


def test_the_tools_of_verls_own_files(tmp_path):
    yaml = tools(entry("", kind="verl.tools.gsm8k_tool.Gsm8kTool", schema="calc_gsm8k_reward"))
    row = {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}
    turns = [call("calc_gsm8k_reward", answer="24"), call("calc_gsm8k_reward", answer="#### 72"), "72"]
    trajectory, _ = played(tmp_path, turns, yaml=yaml, extra=row)
    assert trajectory.tool_rewards == (-0.05, 0.0) and trajectory.tool_scores == {"calc_gsm8k_reward": 1.0}
    figures = tools(entry("", kind="verl.tools.geo3k_tool.Geo3kTool", schema="calc_geo3k_reward"))
    row = {"tools_kwargs": {"calc_geo3k_reward": {"create_kwargs": {"ground_truth": "8\\sqrt{2}"}}}}
    trajectory, _ = played(tmp_path, [call("calc_geo3k_reward", answer="\\sqrt{128}"), "x"], yaml=figures, extra=row)
    assert trajectory.tool_scores == {"calc_geo3k_reward": 1.0}


def test_search_and_sandbox_tools_ask_their_servers(tmp_path, monkeypatch):
    seen = []

    def post(url, json, timeout):
        seen.append((url, json))
        found = {"result": [[{"document": {"contents": '"A title"\nA text.'}, "score": 1.0}]]}
        ran = {"status": "Success", "run_result": {"status": "Finished", "stdout": "4\n", "stderr": ""}}
        reply = found if "queries" in json else ran
        return httpx.Response(200, json=reply, request=httpx.Request("POST", url))

    monkeypatch.setattr(httpx, "post", post)
    search = entry(
        "", "verl.tools.search_tool.SearchTool", "search", "{type: native, retrieval_service_url: 'http://r/x'}"
    )
    sandbox = entry(
        "more_tools.py:PrintingSandboxTool", schema="run", config="{sandbox_fusion_url: 'http://s/run_code'}"
    )
    turns = [call("search", query_list=["who?"]), call("run", code="2 + 2"), "4"]
    trajectory, _ = played(tmp_path, turns, yaml=tools(search, sandbox))
    text = tool_text(trajectory)
    assert "Doc 1 (Title:" in text and "A text." in text
    assert "4\n" in text and trajectory.tool_scores == {}
    assert [url for url, _ in seen] == ["http://r/x", "http://s/run_code"]
    assert seen[0][1]["queries"] == ["who?"] and seen[1][1]["code"] == "print(2 + 2)"


def test_the_helpers_of_search_and_sandbox_tools(monkeypatch):
    def post(url, json, timeout):
        found = {"result": [[{"contents": "T\nx"}], []]}
        ran = {"status": "Success", "run_result": {"status": "Finished", "stdout": json.get("stdin"), "return_code": 0}}
        request = httpx.Request("POST", url)
        return httpx.Response(200, json=found if "queries" in json else ran, request=request)

    monkeypatch.setattr(httpx, "post", post)
    utils = MODULES["verl.tools.utils.search_r1_like_utils"]
    text, facts = load_object(utils["perform_single_search_batch"])("http://r", ["a", "b"], 2)
    assert json.loads(text)["result"] == "Doc 1 (Title: T)\nx\n---\n" and facts["total_results"] == 1
    run = load_object(MODULES["verl.utils.reward_score.sandbox_fusion.utils"]["_process_single_case"])
    assert [run(0, "5", gold, "http://s", "c", 1, 64, "python")[0] for gold in ("5\n", "6", None)] == [
        True,
        False,
        None,
    ]


def test_what_is_wrong_with_a_file_is_said_at_start(tmp_path):
    mcp = entry("more_tools.py:IdOnlyTool", schema="a", config="{type: mcp}")
    lines = problems_of(
        tmp_path,
        tools(
            mcp,
            entry("more_tools.py:NoExecuteTool", schema="b"),
            entry("more_tools.py:IdOnlyTool"),
            entry("", "verl.tools.mcp_search_tool.MCPSearchTool", "c"),
            entry("", "verl.tools.search_tool.SearchTool", "d"),
        ),
    ).splitlines()
    parts = (
        "with the package mcp",
        "no execute of its own",
        "give the entry tool_schema",
        "asks the MCP server itself",
        "retrieval_service_url is missing",
    )
    for line, part in zip(lines, parts, strict=True):
        assert part in line and "tools.yaml: tools[" in line


USERS = (
    f"interaction:\n  - name: guess\n    class_name: {PUBLIC}/guess_interaction.py:GuessInteraction\n    config: {{}}\n"
)


def test_a_user_for_verl_plays_an_episode(tmp_path):
    row = {"interaction_kwargs": {"name": "guess", "ground_truth": 5}}
    trajectory, loop = conversed(tmp_path, ["3", "8", "5"], extra=row, yaml=USERS)
    texts = [segment.text for segment in trajectory.segments if segment.role == "user"]
    assert "higher" in texts[0] and "lower" in texts[1] and len(texts) == 2
    assert verl_facts(trajectory)["turn_scores"] == [-0.1, -0.1, 1.0]
    assert verl_facts(trajectory)["rollout_reward_scores"] == {"user_turn_rewards": [-0.1, -0.1, 1.0]}
    user = loop.users["guess"].user
    assert user._instance_dict == {} and len(user.finalized) == 1 and loop.metrics()["agent/user_failures"] == 0


def test_a_user_without_scores_and_the_user_of_verls_own_file(tmp_path):
    plain = USERS.replace("GuessInteraction", "UnscoredInteraction")
    row = {"interaction_kwargs": {"name": "guess"}}
    trajectory, loop = conversed(tmp_path, ["a", "b"], extra=row, yaml=plain)
    assert trajectory.turns == 2 and trajectory.user_scores == () and loop.metrics()["agent/user_failures"] == 0
    own = "interaction:\n  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n    config: {}\n"
    row = {"interaction_kwargs": {"name": "gsm8k", "query": "q", "ground_truth": "4"}}
    trajectory, _ = conversed(tmp_path, ["#### 3", "#### 4"], extra=row, yaml=own)
    assert trajectory.user_scores == (0.0, 1.0) and trajectory.turns == 2


def test_an_instance_without_a_start_is_not_rewarded_or_released(tmp_path):
    yaml = tools(entry("more_tools.py:BrokenTool", schema="broken"))
    trajectory, loop = played(tmp_path, ["2"], yaml=yaml)
    assert trajectory.tool_scores == {} and loop.metrics()["agent/tool_state_failures"] == 1


def test_files_load_more_than_once(tmp_path):
    (tmp_path / "tools.yaml").write_text(NOTEBOOK)
    (tmp_path / "users.yaml").write_text(USERS)
    for _ in range(2):
        assert list(load_tools(tmp_path / "tools.yaml")) == ["notebook"]
        assert list(load_interactions(tmp_path / "users.yaml")) == ["guess"]
    with pytest.raises(InputError, match="a second tool named 'notebook'"):
        (tmp_path / "tools.yaml").write_text(NOTEBOOK + NOTEBOOK.removeprefix("tools:\n"))
        load_tools(tmp_path / "tools.yaml")
