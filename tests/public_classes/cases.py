"""The files, and of each what to try: answers and ground truths, or the turns of an episode.

``rewards/tool_score.py`` and ``tools/ray_limited.py`` need Ray: tests/core/extensions/verl_classes/test_ray_classes.py
runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BOX, LINE = "<think>so</think>\n<answer>42</answer> is \\boxed{42}\n#### 42", "openai/gsm8k"


@dataclass(frozen=True)
class Reward:
    """A reward function, the better and the worse of two answers, and the score of the better one.

    ``refused``: what the message of the start holds, of a function that is not taken in.
    """

    path: str
    name: str = "compute_score"
    right: str = BOX
    wrong: str = "no idea"
    score: float = 1.0
    ground_truth: Any = "42"
    data_source: str = LINE
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # reward_kwargs
    lists: bool = False  # reward_manager=batch
    refused: str | None = None


@dataclass(frozen=True)
class Tool:
    """A tool, the arguments of its calls, what its last answer holds, and its reward for the episode."""

    path: str
    name: str
    calls: tuple[Mapping[str, Any], ...] = ()
    answer: str = ""
    reward: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    create_kwargs: Mapping[str, Any] = field(default_factory=dict)
    schema: str | None = "called"  # the name in the YAML file's schema; None: the class has its own
    called: str = "called"
    refused: str | None = None


@dataclass(frozen=True)
class User:
    """A simulated user, the policy's turns, what the user answers, and the scores of the turns."""

    path: str
    name: str
    turns: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None


FORK = "fork/verl/utils/reward_score"
CALLS = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
REWARDS = (
    Reward("all_four_arguments.py", right="it is 42."),
    Reward("answer_and_gold.py"),
    Reward("predicted_string.py"),
    Reward("model_output.py", right="so \\boxed{84/2}"),
    Reward("keywords_alone.py"),
    Reward("verl_default.py"),
    Reward("verl_scorers.py", "reward_func", data_source="HuggingFaceH4/MATH-500"),
    Reward("tool_recipe.py", extra_info={"num_turns": 4}),
    Reward("awaited.py"),
    Reward("parts.py"),
    Reward("numpy_number.py"),
    Reward("truth_value.py", "is_right", right="Answer: 42"),
    Reward("tensor.py", right="it is 42"),
    Reward("lists.py", "compute_score_batched", right="42", wrong="not that", score=0.9, lists=True),
    Reward("options.py", options={"right": 2.0, "limit": 1_000}, score=2.0),
    Reward("facts.py", "compute_reward", extra_info={"question": "How much?", "choices": ["41", "42"]}),
    Reward("neighbours/relative.py", right="elk", wrong="sea", ground_truth="elm"),
    Reward("neighbours/plain.py", right="elk", wrong="rhythm", ground_truth="rain", score=0.75),
    Reward("project/scripts/reward.py", right="oak kite ear", ground_truth="oak"),
    Reward(f"{FORK}/__init__.py", "_default_compute_score", right="I think:\nan owl", ground_truth="An owl",
           data_source="riddles"),
    Reward("passages.py", right="<answer>the tall oak</answer>", ground_truth={"target": ["Tall oak", "oak"]}),
    Reward("numbers_game.py", right="<answer>(9 - 3) * 7</answer>", ground_truth={"target": 42, "numbers": [3, 7, 9]}),
    Reward("calls.py", right=CALLS, ground_truth='[{"name": "look", "arguments": {"at": "sky"}}]', score=3.0),
    Reward("boxes.py", right="[0, 0, 2, 2]", extra_info={"box": [0, 0, 2, 2]}),
    Reward("named_as_here/reward/score.py", right="an oak and an oak", wrong="elm", ground_truth="oak"),
    Reward("mounted/riddle/reward.py", right="It is an owl.", wrong="It is a bat.", ground_truth="owl"),
    Reward("to_be_copied.py", right="so #### 42"),
    Reward("helpers_of_verl.py", right="eel", wrong="oak", ground_truth="e"),
    Reward("time_limit.py", right="(x + 1)**2", wrong="x", ground_truth="x**2 + 2*x + 1"),
    Reward("of_trl.py", "length_reward", refused="TRL calls it with lists of completions and columns"),
    Reward("of_easyr1.py", refused="EasyR1 calls it with dictionaries"),
    Reward("of_a_router.py", refused="set reward_model.judge.url instead"),
)  # fmt: skip

TOOLS = (
    Tool("answer_checker.py", "AnswerChecker", ({"answer": "41"}, {"answer": "42"}), "reward 1.0", 1.0,
         create_kwargs={"ground_truth": "42"}),
    Tool("of_version_0_4.py", "Counter", ({"by": 2}, {"by": 3}), "counted to 5", 0.5),
    Tool("schema_of_a_method.py", "Reverser", ({"text": "```owl```"},), "lwo", schema=None, called="reverse"),
    Tool("built_schema.py", "Sorter", ({"numbers": [2, 3, 1], "order": "down"},), "[3, 2, 1]", schema=None,
         called="sort"),
    Tool("memory.py", "Memory", ({"action": "write", "key": "a", "value": "b"}, {"action": "read", "key": "old"}),
         "note", 0.2, create_kwargs={"notes": {"old": "note"}}),
    Tool("calculator.py", "Arithmetic", ({"expression": "6 * 7 / 4"},), "6 * 7 / 4 = 10.5", config={"digits": 2}),
    Tool("python_runner.py", "PythonRunner", ({"code": "print(6 * 7)"},), "42", config={"timeout": 20}),
    Tool("read_only_sql.py", "ReadOnlySQL", ({"query": "select b from t"},), "(7,)",
         create_kwargs={"script": "create table t (b int); insert into t values (7);"}),
    Tool("printing_sandbox.py", "PrintingSandbox", ({"code": "```python\n6 * 7```"},), "print(6 * 7)",
         config={"sandbox_fusion_url": "$URL"}),
    Tool("search_client.py", "SearchClient", ({"query_list": ["who?"]},), "who? it is",
         config={"retrieval_service_url": "$URL"}),
    Tool("without_verl.py", "Dictionary", ({"word": "owl"},), "a bird"),
    Tool("sandbox_of_version_0_4.py", "OldSandbox", ({"code": "6 * 7"},), "6 * 7",
         config={"sandbox_fusion_url": "$URL"}),
    Tool("neighbours/dice.py", "Dice", ({"count": 1},), "]: ", create_kwargs={"seed": 3}),
    Tool("fork/verl/tools/letter_tool.py", "LetterTool", ({"word": "eel"},), "'e': 2"),
    Tool("bound_to_a_loop.py", "PoolTool", ({"text": "owl"}, {"text": "eel"}), "EEL"),
    Tool("picture.py", "Cropper", refused="answer with a text"),
    Tool("of_a_server.py", "ServerSearch", refused="asks the MCP server itself"),
    Tool("lacks_a_package.py", "Absent", refused="install a_package_of_nobody"),
)  # fmt: skip

USERS = (
    User("answer_judge.py", "AnswerJudgeInteraction", ("#### 41", "#### 42"), ("wrong, try again",), (0.0, 1.0),
         facts={"ground_truth": "42"}),
    User("fixed_reply.py", "FixedReplyInteraction", ("hello",), (), (0.0,)),
    User("grid_world.py", "GridWorldInteraction", ("up", "jump", "right"), ("you are at (0, 1)", "no such move"),
         (0.0, -0.1, 1.0), config={"max_steps": 4}, facts={"goal": [1, 1]}),
    User("without_verl.py", "HintInteraction", ("40", "it is 42"), ("larger",), (0.0, 0.5),
         facts={"ground_truth": "42", "hints": ["larger"]}),
    User("model_user.py", "ModelUserInteraction", ("an offer", "please"), ("an offer? no",), (-0.3, 1.0),
         config={"url": "$URL"}),
    User("unscored.py", "UnscoredInteraction", ("a", "b"), ("question 1",)),
    User("mounted/chat/user.py", "MountedInteraction", ("a", "b"), ("and turn 2?",), (0.0, 1.0)),
    User("to_be_copied.py", "CopiedInteraction", ("on", "stop"), ("more?",), (0.0, 1.0)),
    User("of_a_loop.py", "LoopInteraction", refused="verl's server manager is not here"),
)  # fmt: skip
