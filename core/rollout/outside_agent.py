"""Episodes that an agent of others plays: ``actor_rollout_ref.rollout.agent.path`` or ``.command``.

The agent is a function or a program that knows nothing of training. It asks an OpenAI endpoint for
completions, and the policy answers them. It has ``multi_turn.tool_timeout_s`` from one
completion to its next request or its end, and ``multi_turn.max_assistant_turns`` completions. One
that hangs, raises or exits costs its own score.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import shlex
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from core.config.code_by_path import absent, load_object
from core.data.encoder import Encoder
from core.data.vocabulary import template_arguments
from core.errors import InputError
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.chat_frames import ChatFrames
from core.rollout.tool_agent import ToolAgentLoop, parse_number
from core.rollout.tools import one_line_of
from core.rollout.untrusted import UntrustedCalls
from core.types import Prompt, Trajectory
from reward_scores import UnknownDataSource, scorer_for

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.rollout.chat_session import ChatSession

SECTION = "actor_rollout_ref.rollout.agent"
KEPT = 4000  # bytes of the end of what a program prints
LOOK_S = 0.05  # between two looks whether a program has ended
MOST_FILES = 65536
FILES_EACH = 8  # descriptors that an episode may have open: sockets, an event loop's, pipes


class OutsideAgentLoop(AgentLoop):
    """Plays each episode with the user's agent. Raises InputError for one that is not there."""

    tags = ToolAgentLoop.tags
    makes_prompts = True

    def __init__(self, config: Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.options = config.actor_rollout_ref.rollout.agent
        limits = config.actor_rollout_ref.rollout.multi_turn
        self.timeout_s = limits.tool_timeout_s
        self.most_turns = limits.max_assistant_turns
        template_kwargs = template_arguments(config.data)
        self.frames = ChatFrames(tokenizer, template_kwargs)
        self.encoder = Encoder(tokenizer, template_kwargs)
        self.calls = UntrustedCalls()
        self.room = asyncio.Semaphore(most_episodes())
        self.counts: Counter[str] = Counter()
        self.words = shlex.split(self.options.command or "")
        self.function = None
        if self.options.path:
            self.function = load_object(self.options.path, f"{SECTION}.path")
        elif not shutil.which(self.words[0]):
            rule = "there is no such program"
            raise InputError(f"{SECTION}.command={self.options.command}: {rule}; install it")
        try:
            import openai  # noqa: F401  within an agent's deadline its import would take seconds

            from core.rollout.endpoint import Endpoint

            self.endpoint = Endpoint(self.options.host, tokenizer)
        except ModuleNotFoundError as error:
            raise InputError(f"{SECTION}: {absent(error)}; pip install -e '.[openai]'") from error
        except OSError as error:
            fix = "name an address of this machine"
            raise InputError(f"{SECTION}.host={self.options.host}: {error}; {fix}") from error

    async def run(self, episode: Episode) -> Trajectory:
        async with self.room:
            return await self._play(episode)

    async def _play(self, episode: Episode) -> Trajectory:
        from core.rollout.chat_session import ChatSession

        most_tokens = self.config.longest_sequence
        session = ChatSession(episode, self.frames, self.encoder, most_tokens, self.most_turns)
        token = self.endpoint.open(session)
        reward = None
        failure = ""
        try:
            play = self._run_program if self.words else self._call_function
            reward = parse_number(await play(session, token), "reward")
        except Exception as error:
            if not session.is_full:
                failure = f"the agent failed: {one_line_of(error)}"
            elif not self._is_scored(episode.prompt):  # else a scorer reads what the policy wrote
                reward = 0.0
            self.counts["timeouts"] += isinstance(error, TimeoutError)
        finally:
            del self.endpoint.sessions[token]
            await session.close()
        if session.error is not None:  # of the engine: it ends the run
            raise session.error
        trajectory = await session.trajectory(reward, failure)
        self.counts["failed"] += bool(trajectory.failure)
        self.counts["episodes"] += 1
        self.counts["trajectories"] += 1 + len(trajectory.branches)
        self.counts += session.counts
        return trajectory

    def _is_scored(self, prompt: Prompt) -> bool:
        """Return whether another than the agent may score an episode."""
        reward = self.config.reward_model
        by_model = reward.enable and prompt.style == "model"
        by_name = prompt.data_source in reward.scorers
        if by_model or by_name or self.config.custom_reward_function.path:
            return True
        try:
            return bool(scorer_for(prompt.data_source))
        except UnknownDataSource:
            return False

    async def _call_function(self, session: ChatSession, token: str) -> Any:
        """Return what the user's function returns, run in a thread of its own."""
        import openai

        prompt = session.root.prompt
        # The run's deadlines bound a call. The endpoint is plain HTTP on this machine: no proxy is
        # before it, and reading certificates took 20 ms of each episode
        connection = {"trust_env": False, "verify": False, "timeout": None}
        options = {"base_url": self.endpoint.url, "api_key": token}
        options |= {"max_retries": 0, "timeout": None}

        async def call_coroutine() -> Any:
            http = openai.DefaultAsyncHttpxClient(**connection)
            async with openai.AsyncOpenAI(**options, http_client=http) as client:
                return await self.function(prompt, client)

        def call_plain() -> Any:
            http = openai.DefaultHttpxClient(**connection)
            with openai.OpenAI(**options, http_client=http) as client:
                reward = self.function(prompt, client)
            if inspect.iscoroutine(reward):  # its client is closed by now
                reward.close()
                raise TypeError(f"{SECTION}.path returns a coroutine: write it as async def")
            return reward

        is_coroutine = returns_coroutine(self.function)
        call = self.calls.begin(call_coroutine if is_coroutine else call_plain, alone=is_coroutine)
        try:
            await self._wait(call.answer, session)
            return call.result()
        finally:
            call.abandon()

    async def _run_program(self, session: ChatSession, token: str) -> Any:
        """Return the number in the last line that the program prints."""
        quiet_hosts = ",".join(filter(None, (os.environ.get("NO_PROXY"), self.options.host)))
        environment = {"OPENAI_BASE_URL": self.endpoint.url, "OPENAI_API_KEY": token}
        environment |= {"NO_PROXY": quiet_hosts, "no_proxy": quiet_hosts}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        fields = ("messages", "ground_truth", "data_source", "extra_info", "uid")
        example = {name: getattr(session.root.prompt, name) for name in fields}
        process = await asyncio.create_subprocess_exec(
            *self.words, **pipes, env={**os.environ, **environment}, start_new_session=True
        )
        ended = asyncio.ensure_future(_ended(process))
        ends = {name: bytearray() for name in ("stdout", "stderr")}
        reading = [
            asyncio.ensure_future(_read_end(getattr(process, name), ends[name])) for name in ends
        ]
        try:
            process.stdin.write(json.dumps(example, default=str).encode())
            process.stdin.close()
            await self._wait(ended, session)
            code = ended.result()
        finally:
            ended.cancel()
            with suppress(ProcessLookupError):  # the program's own processes end with it
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait(reading, timeout=1.0)  # of one that left its group, no end comes
            for each in reading:
                each.cancel()
        output, errors = (ends[name].decode(errors="replace") for name in ends)
        if code:
            raise RuntimeError(f"{self.words[0]} ended with {code}: {errors[-200:]}")
        return json.loads((output.strip().splitlines() or ["it printed no reward"])[-1])

    async def _wait(self, work: asyncio.Future, session: ChatSession) -> None:
        """Wait for the agent's end, or the engine's error. Raises TimeoutError if it asks nothing
        for too long."""
        while not work.done() and session.error is None:
            left = self.timeout_s - session.idle_seconds()
            if left <= 0:
                raise TimeoutError(f"it neither asked nor ended in {self.timeout_s:g} s")
            await asyncio.wait({work}, timeout=min(left, 1.0))

    def metrics(self) -> Mapping[str, float]:
        counts = self.counts
        self.counts = Counter()
        episodes = max(counts["episodes"], 1)
        later = counts["extended"] + counts["rendered"]
        return {
            "agent/requests": counts["requests"] / episodes,
            "agent/refused_requests": counts["refused"] / episodes,
            "agent/trajectories": counts["trajectories"] / episodes,
            "agent/extended_share": counts["extended"] / later if later else 1.0,
            "agent/tokens_rendered_again": counts["tokens_rendered"] / episodes,
            "agent/failed_rate": counts["failed"] / episodes,
            "agent/timeout_rate": counts["timeouts"] / episodes,
        }

    def close(self) -> None:
        self.endpoint.close()


async def _ended(process: asyncio.subprocess.Process) -> int:
    """Return the status of a program at its end; Process.wait also waits for who has its pipes."""
    while process.returncode is None:
        await asyncio.sleep(LOOK_S)
    return process.returncode


async def _read_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Keep the end of what a program prints, however much that is."""
    while chunk := await stream.read(65536):
        kept += chunk
        del kept[:-KEPT]


def returns_coroutine(function: Any) -> bool:
    """Return whether a function, or an object that is called as one, is ``async def``."""
    plain = inspect.unwrap(function)
    return any(map(inspect.iscoroutinefunction, (plain, type(plain).__call__)))


def most_episodes() -> int:
    """Return how many episodes may play at once by this process's limit of open files.

    The limit is raised as far as a user may raise it: the usual 1,024 hold about a hundred.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft // (2 * FILES_EACH))  # half of them are the run's own
