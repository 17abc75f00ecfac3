"""The tools and the simulated user that verl's own YAML files name, with their options; the wording is another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import httpx

from core.extensions.verl_classes.base_interaction import BaseInteraction
from core.extensions.verl_classes.base_tool import BaseTool, ToolResponse
from core.extensions.verl_classes.reward_score import geo3k__compute_score, gsm8k__compute_score

PENALTY = -0.05  # for an answer that is no better than the best one so far


class _AnswerTool(BaseTool):
    """A tool to which the policy shows an answer, and which grades it."""

    def __init__(self, config: dict[str, Any], tool_schema: Any):
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    def grade(self, response: str, ground_truth: Any) -> float:
        raise NotImplementedError

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> tuple[str, Any]:
        instance_id, response = await super().create(instance_id)
        gold = ground_truth if ground_truth is not None else kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instance_dict[instance_id] = {"response": "", "ground_truth": gold, "reward": 0.0}
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        answer, state = str(parameters.get("answer", "")), self._instance_dict[instance_id]
        state["response"] = answer
        reward = await self.calc_reward(instance_id)
        gain = 0.0 if reward > state["reward"] else PENALTY
        state["reward"] = reward
        return ToolResponse(text=f"the answer {answer!r} has a score of {reward}"), gain, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = self._instance_dict[instance_id]
        return self.grade(state["response"], state["ground_truth"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


class Gsm8kTool(_AnswerTool):
    def grade(self, response: str, ground_truth: Any) -> float:
        return gsm8k__compute_score(f"#### {response.removeprefix('#### ')}", ground_truth, "flexible")


class Geo3kTool(_AnswerTool):
    def grade(self, response: str, ground_truth: Any) -> float:
        return geo3k__compute_score(response, ground_truth, use_boxed=False, format_score=0.0)


class _Pool:
    """Runs functions in threads, ``rate_limit`` of them at a time: ``await pool.execute.remote(function, *args)``."""

    def __init__(self, rate_limit: int):
        self._limit, self._free = rate_limit, None
        self.execute = SimpleNamespace(remote=self._run)

    async def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._free is None:  # made on the event loop that it is used on
            self._free = asyncio.Semaphore(self._limit)
        async with self._free:
            return await asyncio.to_thread(function, *args, **kwargs)


class SearchTool(BaseTool):
    """Sends ``query_list`` to a retrieval server of Search-R1's protocol."""

    def __init__(self, config: dict[str, Any], tool_schema: Any):
        super().__init__(config, tool_schema)
        self.retrieval_service_url = config.get("retrieval_service_url")
        if not self.retrieval_service_url:
            raise ValueError("config.retrieval_service_url is missing: the address of a server, with /retrieve")
        self.topk, self.timeout = config.get("topk", 3), config.get("timeout", 30)
        self.execution_pool = _Pool(config.get("rate_limit", 120))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        queries = parameters.get("query_list")
        if not queries or not isinstance(queries, list):
            return ToolResponse(text=json.dumps({"result": "query_list must be a list of queries"})), 0.0, {}
        arguments = (self.retrieval_service_url, queries, self.topk, None, self.timeout)
        text, metadata = await self.execution_pool.execute.remote(perform_single_search_batch, *arguments)
        return ToolResponse(text=text), 0.0, metadata


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: list[str],
    topk: int = 3,
    concurrent_semaphore: Any = None,
    timeout: int = 30,
) -> tuple[str, dict[str, Any]]:
    """Return the passages of all queries as the JSON text ``{"result": ...}``, and what is known of the request.

    Raises httpx.HTTPError where the server does not answer.
    """
    with concurrent_semaphore or nullcontext():
        body = {"queries": query_list, "topk": topk, "return_scores": True}
        reply = httpx.post(retrieval_service_url, json=body, timeout=timeout)
    reply.raise_for_status()
    results = reply.json()["result"]
    pages = ["\n".join(map(_passage, enumerate(passages, 1))).strip() for passages in results]
    text = json.dumps({"result": "\n---\n".join(pages)}, ensure_ascii=False)
    total = sum(map(len, results))
    return text, {
        "query_count": len(query_list),
        "status": "success",
        "total_results": total,
        "api_request_error": None,
    }


def _passage(numbered: tuple[int, dict[str, Any]]) -> str:
    number, one = numbered
    title, _, text = (one.get("document") or one)["contents"].partition("\n")
    return f"Doc {number} (Title: {title.strip()})\n{text.strip()}\n"


class SandboxFusionTool(BaseTool):
    """Runs a program on a Sandbox Fusion server and returns what it printed."""

    def __init__(self, config: dict[str, Any], tool_schema: Any):
        super().__init__(config, tool_schema)
        self.sandbox_fusion_url = config.get("sandbox_fusion_url")
        if not self.sandbox_fusion_url:
            raise ValueError("config.sandbox_fusion_url is missing: the address of a server, with /run_code")
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        self.execution_pool = _Pool(config.get("rate_limit", 10))

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> tuple[str, Any]:
        return await super().create(instance_id)  # tools around this one pass the ground truth by its place

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, None, None]:
        code = str(parameters.get("code", ""))
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        answer = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return answer, None, None

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        place = (self.sandbox_fusion_url, code, timeout, self.memory_limit_mb, language)
        _, ran = _process_single_case(0, None, None, *place)
        return ToolResponse(text=ran["stdout"] + ran["stderr"] if ran["run_status"] == "Finished" else UNFINISHED)


UNFINISHED = "the program did not finish"


def _process_single_case(
    case_index: int,
    stdin_data: Any,
    expected_output: Any,
    sandbox_fusion_url: str,
    generation: str,
    timeout: float,
    memory_limit_mb: int | str,
    language: str | None = None,
    concurrent_semaphore: Any = None,
    fn_name: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Run a program on a server. Return whether it printed what is expected, and its output under verl's names.

    Without an expected output the former is None. Until verl 0.4 the language stood in place of the memory limit.
    Raises httpx.HTTPError where the server does not answer.
    """
    if isinstance(memory_limit_mb, str):
        memory_limit_mb, language = 1024, memory_limit_mb
    if fn_name is not None:
        raise NotImplementedError("fn_name: programs that define a function are run by reward_scores.unit_tests")
    body = {"code": generation, "language": language, "run_timeout": timeout, "compile_timeout": timeout}
    body |= {"memory_limit_MB": memory_limit_mb, "stdin": "" if stdin_data is None else str(stdin_data)}
    with concurrent_semaphore or nullcontext():
        reply = httpx.post(sandbox_fusion_url, json=body, timeout=2 * timeout + 10)
    reply.raise_for_status()
    answer = reply.json()
    ran = answer.get("run_result") or {}
    stdout, stderr = ran.get("stdout") or "", ran.get("stderr") or ""
    right = None if expected_output is None else stdout.rstrip("\n") == str(expected_output).rstrip("\n")
    facts = {"case_index": case_index, "stdout": stdout, "stderr": stderr, "run_status": ran.get("status")}
    return right, {**facts, "exit_code": ran.get("return_code"), "api_status": answer.get("status"), "status": right}


class Gsm8kInteraction(BaseInteraction):
    """Tells the policy whether its last answer is right, and ends the episode if it is."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        instance_id = await super().start_interaction(instance_id)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        written = [message["content"] for message in messages if message["role"] == "assistant"]
        self._instance_dict[instance_id]["response"] = written[-1] if written else ""
        reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "That is right.", reward, {}
        return False, "That is not right. Check your steps and answer again.", reward, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        state = self._instance_dict[instance_id]
        return gsm8k__compute_score(state["response"], state["ground_truth"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]
