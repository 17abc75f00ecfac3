"""The killable pool: what misbehaves costs its own score and no more, and no process outlives anything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from core.config.sections.reward import CustomRewardFunctionConfig, RewardModelConfig
from core.errors import InputError, WorkersLost
from core.rewards import graders
from core.rewards.custom_reward import CustomFunction
from core.rewards.graders import GraderPool
from core.rewards.grading import Failure, InProcess, Job, Scorers
from core.rewards.layer import RewardError, RewardLayer
from core.types import Prompt, Segment, Stop, Trajectory
from reward_scores import SCORERS
from reward_scores.score import ScoreStatus
from tests.pools import UNRULY, grade, job, marked, none_left
from tests.unruly_reward import EXPECTED

ROOT = Path(__file__).resolve().parents[3]
MEMORY_MB = 512


@pytest.fixture
def make_pool():
    pools = []

    def make(path=None, *, workers=2, timeout_s=20.0, memory_mb=MEMORY_MB, kwargs=None, name="compute_score"):
        custom = CustomFunction(path, name, kwargs) if path else None
        pools.append(
            GraderPool(Scorers(custom=custom), num_workers=workers, timeout_s=timeout_s, memory_limit_mb=memory_mb)
        )
        return pools[-1]

    with marked() as processes:
        yield make
        for pool in pools:
            pool.close()
        assert none_left(processes), processes()


def statuses(results):
    return [result.status.value for result in results]


def pids():
    """A reward function's file: the score is the process it was computed in."""
    return "import os\ndef compute_score(**kwargs): return os.getpid()"


# --- what goes wrong ---


def test_what_misbehaves_costs_its_own_score_alone(make_pool):
    with marked() as processes:
        pool = make_pool(UNRULY, timeout_s=0.3)
        names = [*EXPECTED, *EXPECTED]
        jobs = [one for name in names for one in (job(f"unruly:{name}"), job("right"), job("not right"))]
        found = statuses(grade(pool, jobs))
        assert dict(zip(names, found[::3], strict=True)) == EXPECTED
        assert found[1::3] == ["ok"] * len(names) and found[2::3] == ["wrong"] * len(names)
        pool.close()
        assert none_left(processes)


def test_what_a_scorer_leaves_behind_is_killed_with_its_worker(make_pool):
    pool = make_pool(UNRULY, timeout_s=0.3)
    with marked() as processes:
        names = ("fork", "daemon", "daemon_and_segfault", "daemon_and_hang")
        assert statuses(grade(pool, [job(f"unruly:{name}") for name in names])) == [EXPECTED[name] for name in names]
        assert none_left(lambda: processes()[4:])  # two graders and their forks may stay
        assert statuses(grade(pool, [job("right")])) == ["ok"]


@pytest.mark.parametrize("name", ["fork", "daemon"])
def test_what_a_scorer_leaves_behind_does_not_wait_for_another_death(make_pool, name):
    pool = make_pool(UNRULY, workers=1)
    with marked() as processes:
        assert statuses(grade(pool, [job(f"unruly:{name}")])) == ["ok"]
        assert none_left(lambda: processes()[2:])  # the grader, and perhaps a fork


def test_a_failure_says_what_happened(make_pool):
    pool = make_pool(UNRULY, timeout_s=0.2)
    slept, fault, left, raised = grade(
        pool, [job(f"unruly:{name}") for name in ("sleep", "segfault", "leave_at_once", "allocate_at_once")]
    )
    assert "killed after 0.2 s (reward_model.timeout_s)" in slept.detail
    assert "SIGSEGV" in fault.detail and "status 0" in left.detail
    assert "MemoryError" in raised.detail and "allocate_at_once" in raised.detail


def test_the_deadline_is_kept(make_pool):
    pool = make_pool(UNRULY, timeout_s=0.2)
    grade(pool, [job("right")])
    start = time.monotonic()
    assert statuses(grade(pool, [job("unruly:sleep")])) == ["timeout"]
    assert 0.2 <= time.monotonic() - start < 10.0


def test_a_job_does_not_suffer_for_the_one_before_it(make_pool, write):
    path = write("""
        import os, signal, time
        def compute_score(solution_str, **kwargs):
            if solution_str == "alarm":
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            if solution_str == "impostor":  # a score past the grader, and the real one when it is the next job's turn
                os.write(4, b'=[{"value": 0.0, "parts": {}, "status": "ok", "masked": false, "pred": null}]\\n')
                time.sleep(0.3)
            if solution_str == "slow":
                time.sleep(0.6)
            return 2.0 if solution_str == "slow" else 3.0
    """)
    pool = make_pool(path, workers=1)
    for before in ("alarm", "impostor"):
        assert grade(pool, [job(before), job("slow")])[1].value == 2.0


def test_memory_is_limited(make_pool, write):
    path = write(
        "def compute_score(solution_str, **kwargs): return float(len(bytearray(int(solution_str) * 2**20)) > 0)"
    )
    assert statuses(grade(make_pool(path), [job("600"), job("100")])) == ["crash", "ok"]
    assert statuses(grade(make_pool(path, memory_mb=None), [job("600")])) == ["ok"]


def test_the_clock_starts_when_the_worker_does(make_pool, write):
    path = write("""
        import time
        time.sleep(1.5)  # importing is not the answer's time
        def compute_score(solution_str, **kwargs):
            time.sleep(0.3)
            return 1
    """)
    start = time.monotonic()
    assert statuses(grade(make_pool(path, workers=1, timeout_s=1.2), [job("x")] * 5)) == ["ok"] * 5
    assert time.monotonic() - start > 3.0


def test_a_module_that_does_not_load_in_a_worker_says_so(make_pool, write):
    path = write("""
        import os, multiprocessing
        if os.environ.get("IN_WORKER"):
            raise ValueError("only here")
        def compute_score(**kwargs): return 1
    """)
    pool = make_pool(path)
    os.environ["IN_WORKER"] = "1"
    try:
        results = grade(pool, [job("x")] * 3)
    finally:
        del os.environ["IN_WORKER"]
    assert statuses(results) == ["crash"] * 3 and all("ValueError: only here" in result.detail for result in results)


# --- what outlives what ---

DRIVER = """
    import asyncio, sys, os
    from core.rewards.custom_reward import CustomFunction
    from core.rewards.grading import Scorers
    from core.rewards.graders import GraderPool
    from tests.pools import UNRULY, job
    async def main():
        pool = GraderPool(Scorers(custom=CustomFunction(UNRULY)), num_workers=2, timeout_s=600, memory_limit_mb=512)
        await pool.run(job("right"))
        asyncio.get_running_loop().call_later(1, print, "grading")
        asyncio.get_running_loop().call_later(1.1, sys.stdout.flush)
        await asyncio.gather(*(pool.run(job(f"unruly:{name}")) for name in ("daemon_and_hang", "power", "sleep")))
    if __name__ == "__main__":
        asyncio.run(main())
"""


HOLDS = "[__import__('time').sleep(600) for _ in [0] if os.fork() == 0]"


@pytest.mark.parametrize("blocked", [False, True], ids=["alone", "with a child that holds its pipes"])
def test_nothing_outlives_a_killed_driver(write, blocked):
    body = textwrap.dedent(DRIVER)
    if blocked:  # a process that the driver forked keeps the pipe to the supervisor open
        body = body.replace(
            "    asyncio.get_running_loop().call_later(1, ",
            f"    {HOLDS}\n    asyncio.get_running_loop().call_later(1, ",
        )
    with marked() as processes:
        driver = subprocess.Popen(
            [sys.executable, write(body, "driver.py")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert driver.stdout.readline().startswith(b"grading")
        assert len(processes()) >= 6  # driver, two graders, their forks, a daemon
        driver.kill()
        driver.wait()
        assert none_left(lambda: processes()[int(blocked) :]), processes()
        driver.stdout.close()
        for pid in processes():  # the driver's own child was let be
            os.kill(pid, signal.SIGKILL)
        assert none_left(processes)


SLOWLY = """
    import time
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        open(f"{__file__}.{solution_str}", "w").close()
        time.sleep(1.0)
        return float(solution_str == ground_truth)
"""


def keepers(pool):
    return {one.process.pid for one in pool.graders if one.process is not None}


@pytest.mark.parametrize("victim", ["keeper", "fork"])
def test_what_was_in_a_killed_process_is_graded_once_more(make_pool, write, victim):
    """Three answers, two graders: one answer waits. Nothing of a killed grader is left."""
    path = write(SLOWLY)
    pool = make_pool(path)

    async def kill_it():
        with marked() as processes:
            waiting = [asyncio.ensure_future(pool.run(job(text))) for text in ("right", "wrong", "right")]
            while not all(Path(f"{path}.{text}").exists() for text in ("right", "wrong")):  # both workers have begun
                await asyncio.sleep(0.02)
            before = set(processes())
            for pid in keepers(pool) if victim == "keeper" else [max(before - keepers(pool))]:
                os.kill(pid, signal.SIGKILL)
            results = await asyncio.gather(*waiting)
            if victim == "keeper":
                assert none_left(lambda: before & set(processes()))
            return results

    assert statuses(asyncio.run(kill_it())) == ["ok", "wrong", "ok"]


def test_graders_that_die_one_after_another_end_the_run(make_pool, write):
    pool = make_pool(write(SLOWLY), workers=1)

    async def kill_them():
        waiting, killed = asyncio.ensure_future(pool.run(job("right"))), set()
        while not waiting.done():
            await asyncio.sleep(0.02)
            for pid in keepers(pool) - killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        assert len(killed) == 3
        return await waiting

    with pytest.raises(WorkersLost, match="a grader ended with status -9"):
        asyncio.run(kill_them())


def test_close_ends_running_jobs_and_a_later_job_starts_anew(make_pool):
    pool = make_pool(UNRULY)

    async def close_it():
        waiting = asyncio.ensure_future(pool.run(job("unruly:sleep")))
        await asyncio.sleep(0.5)
        pool.close()
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(close_it()).status is ScoreStatus.CRASH
    pool.close()
    assert statuses(grade(pool, [job("right")])) == ["ok"]


# --- what goes right ---


def test_the_pool_agrees_with_grading_in_process(make_pool):
    jobs = [
        Job(source, response, ground_truth, {"rollout": {"num_turns": 1}})
        for source, scorer in SCORERS.items()
        if not source.endswith("*")
        for response, ground_truth, _ in scorer.examples
    ]
    jobs += [Job("openai/gsm8k", text, "72", {}) for text in ("#### 72\ud800", "é\u2028\n#### 72", "", "\x00")]
    here, there = grade(InProcess(Scorers()), jobs), grade(make_pool(), jobs)
    assert len(jobs) > 50 and here == there


def test_options_and_arguments_arrive(make_pool, write):
    path = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info, scale):
            assert (data_source, ground_truth) == ("tests/unruly", {"target": [1, None, 0.1], "é": True})
            assert extra_info["rollout"] == {"segments": [{"role": "tool", "text": "t"}]}
            return {"score": scale["by"] * 0.1, "acc": True, "pred": solution_str, "long": 1e-300}
    """)
    given = job("x", {"target": [1, None, 0.1], "é": True}, rollout={"segments": [{"role": "tool", "text": "t"}]})
    (result,) = grade(make_pool(path, kwargs={"scale": {"by": 3}}), [given])
    assert (result.value, dict(result.parts), result.pred) == (3 * 0.1, {"acc": 1.0, "long": 1e-300}, "x")
    pool = GraderPool(Scorers({"gsm8k": {"method": "flexible"}}), num_workers=1, memory_limit_mb=MEMORY_MB)
    assert statuses(grade(pool, [Job("openai/gsm8k", "so 72", "72", {})])) == ["ok"]
    pool.close()


def test_workers_are_other_processes_that_import_only_scorers(make_pool, write):
    path = write("""
        import os, sys
        def compute_score(**kwargs):
            assert not {"torch", "ray", "vllm", "transformers", "hydra", "pyarrow"} & set(sys.modules)
            return {"score": os.getpid(), "session": os.getsid(0), "threads": len(os.listdir("/proc/self/task"))}
    """)
    results = grade(make_pool(path), [job("x")] * 20)
    assert {r.parts["session"] - r.value for r in results} == {0} and {r.parts["threads"] for r in results} == {1}
    assert 1 <= len({r.value for r in results} - {os.getpid()}) <= 2


def test_a_worker_serves_many_jobs_and_all_workers_serve(make_pool, write):
    path = write("""
        import os, time
        def compute_score(**kwargs):
            time.sleep(0.05)
            return os.getpid()
    """)
    assert len({result.value for result in grade(make_pool(path, workers=3), [job("x")] * 30)}) == 3


def test_asynchronous_functions_run_in_the_workers_own_loop(make_pool, write):
    path = write("""
        import asyncio
        loops = set()
        async def compute_score(solution_str, **kwargs):
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(3600 if solution_str == "hang" else 0)
            return len(loops)
    """)
    results = grade(make_pool(path, workers=1, timeout_s=0.3), [job("x"), job("x"), job("hang"), job("x")])
    assert statuses(results) == ["ok", "ok", "timeout", "ok"]
    assert [results[i].value for i in (0, 1, 3)] == [1, 1, 1]


def test_a_withdrawn_job_is_not_begun(make_pool, write, tmp_path):
    log = tmp_path / "seen"
    path = write(f"""
        import time
        def compute_score(solution_str, **kwargs):
            with open({str(log)!r}, "a") as file:
                file.write(solution_str)
            time.sleep(0.3)
            return 1
    """)
    pool = make_pool(path, workers=1)

    async def withdraw():
        tasks = [asyncio.ensure_future(pool.run(job(name))) for name in "abcd"]
        while not log.exists():
            await asyncio.sleep(0.01)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(withdraw())
    assert log.read_text() == "acd" and isinstance(results[1], asyncio.CancelledError)


def test_many_large_jobs_flow_through(make_pool):
    pool = make_pool(UNRULY)
    long = "x" * 3_000_000
    assert statuses(grade(pool, [job(long, long), job(long, "y")] * 6)) == ["ok", "wrong"] * 6


def test_a_result_of_any_length_costs_its_own_score(make_pool, write, monkeypatch):
    monkeypatch.setattr(graders, "LONGEST_LINE", 10_000)
    path = write(
        "def compute_score(solution_str, **kwargs): return {'score': 1, **dict.fromkeys(range(len(solution_str)), 2)}"
    )
    assert statuses(grade(make_pool(path, workers=1), [job("x"), job("x" * 5_000), job("x")])) == ["ok", "crash", "ok"]


def test_what_is_not_json_is_refused_by_name(make_pool):
    (result,) = grade(make_pool(UNRULY), [job("x", Path("/x"))])
    assert result.status is ScoreStatus.CRASH and "PosixPath" in result.detail
    for body in (b"[]", b"[1]", b"{}", b"9", b'[{"value": 1}]', b"[" * 10**5, b"\xff"):
        from core.rewards.graders import _results

        assert _results("graded", body, 1)[0].status is ScoreStatus.CRASH


# --- in the reward layer ---


def layer(path=None, on_error="zero", **reward_model):
    reward = RewardModelConfig(on_error=on_error, **{"num_workers": 2, "memory_limit_mb": MEMORY_MB, **reward_model})

    class Both:
        reward_model = reward
        custom_reward_function = CustomRewardFunctionConfig(path=path)

    return RewardLayer(Both)


def prompt(data_source="tests/x", ground_truth="right", **extra_info):
    return Prompt(0, "row-7", (1, 2), (), ground_truth, data_source, extra_info)


def trajectory(text):
    return Trajectory([1], [5], [True], [0.0], (Segment("policy", text),), Stop.EOS, 0, 0)


def test_on_error_holds_for_what_was_killed():
    answer = trajectory("unruly:sleep")
    for on_error, masked in (("zero", False), ("mask", True)):
        rewards = layer(UNRULY, on_error, reward_manager="dapo", timeout_s=0.2)
        score = asyncio.run(rewards.score(prompt(), answer))
        assert (score.value, score.acc, score.status, score.masked) == (0.0, 0.0, ScoreStatus.TIMEOUT, masked)
        rewards.close()
    rewards = layer(UNRULY, "raise", reward_manager="prime", timeout_s=0.2)
    with pytest.raises(RewardError, match=r"(?s)timeout.*row-7.*unruly:sleep.*killed after 0.2 s"):
        asyncio.run(rewards.score(prompt(), answer))
    rewards.close()


def test_known_answers_are_graded_in_the_real_worker(write):
    path = write(f"""
        import os
        EXAMPLES = (("here", None, 1.0), ("there", None, 0.0))
        def compute_score(solution_str, **kwargs):
            return float((os.getpid() == {os.getpid()}) == (solution_str == "here"))
    """)
    with pytest.raises(InputError) as caught:
        rewards = layer(path, reward_manager="prime")
        try:
            rewards.check([prompt()])
        finally:
            rewards.close()
    here, there = caught.value.problems
    assert "'here'" in here and "acc=0.0, not 1.0" in here and "'there'" in there
    rewards = layer(reward_manager="prime")
    rewards.check([prompt("openai/gsm8k", "72")])
    rewards.close()


def test_rows_that_cannot_be_sent_are_found_at_start():
    rows = [prompt("openai/gsm8k", "72", when=time), prompt("openai/gsm8k", "72")]
    rewards = layer(reward_manager="prime")
    with pytest.raises(InputError, match=r"as JSON in 1 row \(uid row-7: module is not JSON"):
        rewards.check(rows)
    rewards.close()
    layer(reward_manager="naive").check(rows)


def test_starting_the_layer_starts_no_process():
    with marked() as processes:
        rewards = layer(reward_manager="prime")
        assert processes() == []
        rewards.close()


def test_a_driver_that_never_closes_its_pool_leaves_nothing(write):
    body = textwrap.dedent(DRIVER).replace("await asyncio.gather", "return\n    await asyncio.gather")
    with marked() as processes:
        done = subprocess.run(
            [sys.executable, write(body, "driver.py")],
            cwd=ROOT,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0 and none_left(processes)


def test_settings_with_frozen_mappings_reach_the_worker():
    from core.config.section import freeze

    grader = Scorers(freeze({"gsm8k": {"method": "flexible"}}))
    pool = GraderPool(grader, num_workers=1, memory_limit_mb=MEMORY_MB)
    assert json.dumps(pool.settings)
    assert statuses(grade(pool, [Job("openai/gsm8k", "so 72", "72", {})])) == ["ok"]
    pool.close()


def test_the_signals_of_the_terminal_do_not_reach_the_workers(make_pool, write):
    pool = make_pool(write(pids()))
    (result,) = grade(pool, [job("x")])
    assert os.getpgid(int(result.value)) != os.getpgid(0)
    assert os.getpgid(0) not in map(os.getpgid, keepers(pool))
    os.kill(int(result.value), signal.SIGTERM)  # an administrator's; the pool goes on
    assert not isinstance(grade(pool, [job("x")])[0], Failure)
