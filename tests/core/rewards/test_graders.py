"""Graders: what misbehaves costs its own score and no more, and no process outlives anything."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from core.errors import WorkersLost
from core.rewards import graders
from core.rewards.graders import GraderPool, InProcess
from core.rewards.grading import CustomFunction, Job, Scorers
from reward_scores import SCORERS
from reward_scores.score import ScoreStatus
from tests.pools import UNRULY, grade, job, marked, none_left
from tests.unruly_reward import EXPECTED

ROOT = Path(__file__).resolve().parents[3]
MEMORY_MB = 512


@pytest.fixture
def make_pool():
    """Makes pools, and looks whether any of their processes is left."""
    pools = []

    def make(path=None, *, workers=1, timeout_s=20.0, memory_mb=MEMORY_MB, kwargs=None):
        custom = CustomFunction(path, "compute_score", kwargs) if path else None
        limits = {"num_workers": workers, "timeout_s": timeout_s, "memory_limit_mb": memory_mb}
        pools.append(GraderPool(Scorers(custom=custom), **limits))
        return pools[-1]

    with marked() as processes:
        yield make
        for pool in pools:
            pool.close()
        assert none_left(processes), processes()


def statuses(results):
    return [result.status.value for result in results]


# --- what goes wrong ---


def test_what_misbehaves_costs_its_own_score_alone(make_pool):
    pool = make_pool(UNRULY, workers=2, timeout_s=0.3)
    jobs = [
        one for name in EXPECTED for one in (job(f"unruly:{name}"), job("right"), job("not right"))
    ]
    results = grade(pool, jobs)
    found = statuses(results)
    assert dict(zip(EXPECTED, found[::3], strict=True)) == EXPECTED
    assert found[1::3] == ["ok"] * len(EXPECTED) and found[2::3] == ["wrong"] * len(EXPECTED)
    detail = {
        name: getattr(one, "detail", "") for name, one in zip(EXPECTED, results[::3], strict=True)
    }
    assert detail["sleep"] == "killed after 0.3 s (reward_model.timeout_s)"
    assert "SIGSEGV" in detail["segfault"] and "status 0" in detail["leave_at_once"]
    assert (
        "MemoryError" in detail["allocate_at_once"]
        and "in allocate_at_once" in detail["allocate_at_once"]
    )


def test_a_grader_that_is_killed_from_outside_costs_no_score(make_pool, write, tmp_path):
    path = write(f"""
        import os, pathlib, signal
        def compute_score(solution_str, **kwargs):
            seen = pathlib.Path({str(tmp_path)!r}, "seen")
            if solution_str == "kills" or not seen.exists():
                seen.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return 1.0
    """)
    assert statuses(grade(make_pool(path), [job("right"), job("kills"), job("right")])) == [
        "ok",
        "crash",
        "ok",
    ]


def test_what_a_scorer_started_is_killed_with_its_grader(make_pool):
    pool = make_pool(UNRULY, timeout_s=0.3)
    with marked() as processes:
        assert statuses(grade(pool, [job("unruly:start_and_hang")])) == [EXPECTED["start_and_hang"]]
        assert none_left(processes)
        assert statuses(grade(pool, [job("right")])) == ["ok"]


def test_an_alarm_of_one_answer_does_not_end_the_next(make_pool, write):
    path = write("""
        import signal, time
        def compute_score(solution_str, **kwargs):
            if solution_str == "alarm":
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            if solution_str == "slow":
                time.sleep(0.5)
            return 2.0
    """)
    assert statuses(grade(make_pool(path), [job("alarm"), job("slow")])) == ["ok", "ok"]


STUCK = """
    import asyncio, threading, time
    def hog():
        time.sleep(0.2)
        9**9**9**9  # in C: no other thread runs meanwhile
    async def task():
        await asyncio.sleep(0)
        hog()
    async def leaves_a_task():
        asyncio.get_running_loop().create_task(task())
        return 1
    def compute_score(solution_str, **kwargs):
        if solution_str == "thread":
            threading.Thread(target=hog, daemon=True).start()
        elif solution_str == "task":
            return leaves_a_task()
        elif solution_str == "awaits":
            return asyncio.sleep(0, 1)
        elif solution_str == "hangs":
            hog()
        return 1
"""


@pytest.mark.parametrize(
    ("left", "innocent"), [("thread", "x"), ("thread", "x" * 200_000), ("task", "awaits")]
)
def test_an_answer_after_one_that_left_its_grader_stuck_is_graded(make_pool, write, left, innocent):
    """One of 200 kB does not fit in the pipe that nobody reads."""
    pool = make_pool(write(STUCK), timeout_s=1.5)
    assert statuses(grade(pool, [job(left)])) == ["ok"]
    time.sleep(0.5)
    assert statuses(grade(pool, [job(innocent)])) == ["ok"]


def test_an_answer_that_hangs_behind_a_crowd_is_given_up_after_its_second_deadline(
    make_pool, write
):
    pool, begun = make_pool(write(STUCK), timeout_s=1.0), time.monotonic()
    assert statuses(grade(pool, [job("thread"), job("hangs"), job("x")])) == ["ok", "timeout", "ok"]
    assert time.monotonic() - begun < 30


def test_memory_is_limited_and_what_a_grader_cannot_load_ends_the_run(make_pool, write):
    body = (
        "def compute_score(solution_str, **kwargs): return len(bytearray(int(solution_str) * "
        "2**20)) > 0"
    )
    assert statuses(grade(make_pool(write(body)), [job("600"), job("100")])) == ["crash", "ok"]
    heavy = write(
        "import os\nif os.environ.get('IN_GRADER'): raise ValueError('only here')\n" + body,
        "heavy.py",
    )
    pool = make_pool(heavy)
    os.environ["IN_GRADER"] = "1"
    try:
        with pytest.raises(WorkersLost, match="exited with status 1 before it was ready"):
            grade(pool, [job("1")])
    finally:
        del os.environ["IN_GRADER"]


def test_importing_is_not_the_answers_time(make_pool, write):
    path = write(
        "import time\ntime.sleep(0.7)\ndef compute_score(**kwargs): return time.sleep(0.2) or 1"
    )
    start = time.monotonic()
    assert statuses(grade(make_pool(path, timeout_s=0.6), [job("x")] * 4)) == ["ok"] * 4
    assert time.monotonic() - start > 1.5


def test_a_result_of_any_length_and_a_job_that_is_not_json_cost_their_own_score(
    make_pool, write, monkeypatch
):
    monkeypatch.setattr(graders, "LONGEST_LINE", 10_000)
    body = (
        "def compute_score(solution_str, **kw): return {'score': 1, "
        "**dict.fromkeys(range(len(solution_str)), 2)}"
    )
    results = grade(
        make_pool(write(body)), [job("x"), job("x" * 50_000), job("x", Path("/x")), job("x")]
    )
    assert statuses(results) == ["ok", "crash", "crash", "ok"] and "PosixPath" in results[2].detail


# --- what outlives what ---

DRIVER = """
    import asyncio, sys, os
    from core.rewards.grading import CustomFunction
    from core.rewards.grading import Scorers
    from core.rewards.graders import GraderPool
    from tests.pools import UNRULY, job
    async def main():
        pool = GraderPool(Scorers(custom=CustomFunction(UNRULY)), num_workers=2, timeout_s=600, memory_limit_mb=512)
        await asyncio.gather(pool.run(job("right")), pool.run(job("right")))
        if "hang" in sys.argv:
            if os.fork() == 0:  # it holds the pipes to the graders
                __import__("time").sleep(600)
            asyncio.get_running_loop().call_later(0.5, lambda: print("grading", flush=True))
            await asyncio.gather(*(pool.run(job(f"unruly:{name}")) for name in ("power", "sleep")))
    if __name__ == "__main__":
        asyncio.run(main())
"""


def drive(file, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, file, *arguments], cwd=ROOT, stdout=subprocess.PIPE, env=environment
    )


def test_nothing_outlives_a_killed_driver(write):
    with marked() as processes:
        driver = drive(write(textwrap.dedent(DRIVER), "driver.py"), "hang")
        assert driver.stdout.readline().startswith(b"grading")
        assert len(processes()) == 4  # driver, its child, two graders
        driver.kill()
        driver.wait()
        assert none_left(lambda: processes()[1:]), processes()
        driver.stdout.close()
        os.kill(*processes(), signal.SIGKILL)  # the driver's own child was let be


def test_closing_ends_running_jobs_and_an_unused_pool_starts_nothing(make_pool):
    unused, pool = make_pool(UNRULY), make_pool(UNRULY)

    async def close_it():
        waiting = asyncio.ensure_future(pool.run(job("unruly:sleep")))
        await asyncio.sleep(0.4)
        pool.close()
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(close_it()).status is ScoreStatus.CRASH
    assert unused.graders[0].process is None


# --- what goes right ---


def test_the_pool_agrees_with_grading_in_process(make_pool):
    jobs = [
        Job(source, response, ground_truth, {"rollout": {"num_turns": 1}})
        for source, scorer in SCORERS.items()
        if not source.endswith("*")
        for response, ground_truth, _ in scorer.examples
    ]
    jobs += [
        Job("openai/gsm8k", text, "72", {})
        for text in ("#### 72\ud800", "é\u2028\n#### 72", "", "\x00")
    ]
    pool = make_pool()
    here, there = grade(InProcess(Scorers(), pool), jobs), grade(pool, jobs)
    assert len(jobs) > 50 and here == there


def test_options_and_arguments_arrive(make_pool, write):
    path = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info, scale):
            assert (data_source, ground_truth) == ("tests/unruly", {"target": [1, None, 0.1], "é": True})
            assert extra_info["rollout"] == {"segments": [{"role": "tool", "text": "t"}]}
            return {"score": scale["by"] * 0.1, "acc": True, "pred": solution_str[:1], "long": 1e-300}
    """)
    pool = make_pool(path, kwargs={"scale": {"by": 3}})
    gold, segments = {"target": [1, None, 0.1], "é": True}, [{"role": "tool", "text": "t"}]
    (result,) = grade(pool, [job("x" * 3_000_000, gold, rollout={"segments": segments})])
    assert (result.value, dict(result.parts), result.pred) == (
        3 * 0.1,
        {"acc": 1.0, "long": 1e-300},
        "x",
    )


def test_graders_are_sessions_of_their_own_that_import_only_scorers_and_all_of_them_serve(
    make_pool, write
):
    path = write("""
        import os, sys, time
        def compute_score(**kwargs):
            assert sys.stdin.read() == ""  # not the next job
            assert not {"torch", "ray", "vllm", "transformers", "hydra", "pyarrow"} & set(sys.modules)
            time.sleep(0.05)
            return {"score": os.getpid(), "session": os.getsid(0), "threads": len(os.listdir("/proc/self/task"))}
    """)
    results = grade(make_pool(path, workers=2), [job("x")] * 20)
    assert {r.parts["session"] - r.value for r in results} == {0} and {
        r.parts["threads"] for r in results
    } == {1}
    assert len({r.value for r in results} - {os.getpid()}) == 2


def test_asynchronous_functions_are_ended_at_the_deadline_too(make_pool, write):
    path = write("""
        import asyncio
        async def compute_score(solution_str, **kwargs):
            await asyncio.sleep(3600 if solution_str == "hang" else 0)
            return 1
    """)
    results = grade(make_pool(path, timeout_s=0.3), [job("x"), job("hang"), job("x")])
    assert statuses(results) == ["ok", "timeout", "ok"]
