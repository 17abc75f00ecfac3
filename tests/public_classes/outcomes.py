"""What becomes of a file: loaded as a run loads it, and then scored with or played."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from core.command_line import all_problems
from core.config import examine
from core.config.schema import Config
from core.errors import InputError
from core.rewards.grading import Failure
from core.rewards.layer import RewardLayer
from core.rollout.tools.interactions import check_interactions
from core.rollout.tools.tools import check_tools
from core.types import Prompt
from tests.core.rollout.tools.test_interactions import played as conversed
from tests.core.rollout.tools.test_tool_agent import MULTI, call, played, tool_text
from tests.public_classes.cases import Reward, Tool, User

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """Whether a file loads, whether it then scores or plays as its case states, and why not."""

    loads: bool
    plays: bool
    reason: str = ""


def outcome(case: Reward | Tool | User) -> Outcome:
    """Return what becomes of a case's file. A refusal is an outcome, and so is a score that is not the stated one."""
    try_it = {Reward: of_reward, Tool: of_tool, User: of_user}[type(case)]
    with served() as url, TemporaryDirectory() as folder:
        try:
            problem = try_it(case, url, Path(folder))
        except InputError as error:
            return Outcome(False, False, str(error).partition("\n")[0])
    return Outcome(True, problem is None, problem or "")


def checked(options: Sequence[str]) -> Config:
    """Return a configuration without problems, as a dry run looks for them. Raises InputError."""
    composed = examine("grpo", options)
    if problems := all_problems(composed, frozenset()):
        raise InputError(problems)
    return composed.config


def of_reward(case: Reward, url: str, folder: Path) -> str | None:
    path, manager = FOLDER / "rewards" / case.path, "batch" if case.lists else "naive"
    key, options = "custom_reward_function", json.dumps(dict(case.options))
    lines = [f"{key}.path={path}", f"{key}.name={case.name}", f"reward_model.reward_manager={manager}"]
    lines += [f"+{key}.reward_kwargs.{name}={value}" for name, value in json.loads(options).items()]
    layer = RewardLayer(checked(lines))
    try:
        chat = ({"role": "user", "content": "q"},)
        row = Prompt(0, "q", (0,), chat, case.ground_truth, case.data_source, dict(case.extra_info))
        layer.check([row])
        scores = [layer.grade_example(row, answer, case.ground_truth) for answer in (case.right, case.wrong)]
    finally:
        layer.close()
    if failed := [one.detail.strip().splitlines()[-1] for one in scores if isinstance(one, Failure)]:
        return failed[0]
    right, wrong = (one.value for one in scores)
    if abs(right - case.score) > 1e-6 or wrong >= right:
        return f"the better answer has {right}, not {case.score}, and the other one {wrong}"
    return None


def of_tool(case: Tool, url: str, folder: Path) -> str | None:
    entry: dict[str, Any] = {"class_name": f"{FOLDER}/tools/{case.path}:{case.name}"}
    entry["config"] = {"type": "native", **_with_url(case.config, url)}
    if case.schema:
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": case.schema, "description": "d", "parameters": parameters}
        entry["tool_schema"] = {"type": "function", "function": function}
    text, file = yaml.safe_dump({"tools": [entry]}), folder / "tools.yaml"
    file.write_text(text)
    checked([f"{MULTI}.enable=True", f"{MULTI}.tool_config_path={file}"])
    check_tools(file)
    turns = [*(call(case.called, **one) for one in case.calls), "done"]
    extra = {"tools_kwargs": {case.called: {"create_kwargs": dict(case.create_kwargs)}}}
    long = f"{MULTI}.max_tool_response_length=2000"
    trajectory, loop = played(folder, turns, long, yaml=text, extra=extra)
    loop.close()
    said, counts = tool_text(trajectory), loop.metrics()
    if counts["agent/failed_calls"] or counts["agent/tool_state_failures"] or counts["agent/invalid_calls"]:
        return said.strip().splitlines()[1].partition("<eos>")[0]
    if case.answer not in said or trajectory.tool_scores.get(case.called) != case.reward:
        return f"it answered {said!r}, and the episode has the rewards {trajectory.tool_scores}"
    return None


def of_user(case: User, url: str, folder: Path) -> str | None:
    entry = {"name": "user", "class_name": f"{FOLDER}/interactions/{case.path}:{case.name}"}
    text = yaml.safe_dump({"interaction": [{**entry, "config": _with_url(case.config, url)}]})
    file = folder / "users.yaml"
    file.write_text(text)
    checked([f"{MULTI}.enable=True", f"{MULTI}.interaction_config_path={file}"])
    check_interactions(file)
    facts = {"interaction_kwargs": {"name": "user", **case.facts}}
    trajectory, loop = conversed(folder, case.turns, extra=facts, yaml=text)
    loop.close()
    said = [one.text for one in trajectory.segments if one.role == "user"]
    if loop.metrics()["agent/user_failures"] or trajectory.turns != len(case.turns):
        return f"it failed, or the episode had {trajectory.turns} turns: {said}"
    answered = len(said) == len(case.answers) and all(map(str.__contains__, said, case.answers))
    if not answered or trajectory.user_scores != case.scores:
        return f"it answered {said} with the scores {trajectory.user_scores}"
    return None


def _with_url(config: Any, url: str) -> dict[str, Any]:
    return {name: url if value == "$URL" else value for name, value in config.items()}


class Server(BaseHTTPRequestHandler):
    """Answers as a retrieval server, a sandbox, and a model that gives in when it is asked with "please"."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "queries" in body:
            reply = {"result": [[{"document": {"contents": f"T\n{one} it is"}}] for one in body["queries"]]}
        elif "code" in body:
            ran = {"status": "Finished", "stdout": body["code"], "stderr": "", "return_code": 0}
            reply = {"status": "Success", "run_result": ran}
        else:
            said = body["messages"][-1]["content"]
            reply = {"choices": [{"message": {"content": "ACCEPT" if said == "please" else f"{said}? no"}}]}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Write nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Yield the address of a server of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
