"""The server that stages of ``reproduce.sh`` need: found or started, awaited with a limit, and ended, on Ctrl-C too."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from core.errors import InputError
from results import reproduce
from results.reproduction import service as serving
from results.reproduction.commands import Commands
from results.reproduction.rows import Row, read_tables
from results.reproduction.service import Service, service_of
from results.reproduction.stages import Stage, stages

ROOT = Path(__file__).resolve().parents[2]
# It tells its process and that of a child, which a stop has to end too, and answers /health after a while.
SERVER = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(float(sys.argv[2]))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def program(tmp_path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path / "server.py"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(serving, "PAUSE_S", 0.05)


def made(program: Path, port: int, *, after: float = 0.5, wait_s: float = 60.0, **options) -> Service:
    command, log = f"{sys.executable} {program} {port} {after}", program.parent / "retriever.log"
    key = "retriever.url"
    return Service("retriever", command, f"http://127.0.0.1:{port}/health", log, wait_s, key, **options)


@pytest.fixture
def running(program, port) -> Iterator[subprocess.Popen]:
    """A server that somebody else started."""
    theirs = subprocess.Popen([sys.executable, str(program), str(port), "0"], start_new_session=True)
    while not made(program, port).answers():
        time.sleep(0.05)
    yield theirs
    os.killpg(theirs.pid, signal.SIGKILL)
    theirs.wait()


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def child_in(log: Path) -> int:
    return int(re.search(r"child (\d+)", log.read_text())[1])


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not lives(pid)


# --- starting and ending ---


def test_it_is_started_awaited_and_ended_with_its_processes(program, port, capsys):
    one = made(program, port)
    assert not one.answers()
    one.start()
    assert one.answers()
    child = child_in(one.log)
    assert lives(child)
    one.start()  # of the next stage
    assert capsys.readouterr().out.count("answers") == 1 and child_in(one.log) == child
    one.stop()
    assert not one.answers() and gone(child)
    one.stop()


def test_what_answers_already_is_used_and_left_alone(program, port, running, capsys):
    one = made(program, port)
    one.start()
    one.stop()
    assert running.poll() is None and one.answers() and not one.log.exists()
    assert f"retriever: answers at http://127.0.0.1:{port}/health; it is used and left alone" in capsys.readouterr().out


def test_one_that_died_between_two_stages_is_started_again(program, port):
    one = made(program, port)
    one.start()
    first = child_in(one.log)
    os.killpg(one._process.pid, signal.SIGKILL)
    one._process.wait()
    one.start()
    assert one.answers() and child_in(one.log) != first
    one.stop()


def test_a_command_that_ends_is_reported_with_the_end_of_its_log(program, port):
    one = made(program, port)
    one.command = "for n in $(seq 30); do echo line $n; done; echo no index in wiki18 >&2; exit 3"
    with pytest.raises(InputError) as refused:
        one.start()
    first, *quoted = refused.value.problems
    assert "retriever (for n in" in first and "ended with status 3 before it answered; mend what its log names" in first
    assert str(one.log) in first and len(quoted) == serving.QUOTED
    assert quoted[-1] == "    no index in wiki18" and quoted[-2] == "    line 30"


def test_one_that_takes_too_long_is_ended_and_reported(program, port):
    one = made(program, port, after=600, wait_s=1.5)
    with pytest.raises(InputError) as refused:
        one.start()
    first, quoted = refused.value.problems
    assert f"did not answer at http://127.0.0.1:{port}/health within 1.5 s; raise service.wait_minutes" in first
    assert quoted.startswith("    child ") and gone(child_in(one.log))


@pytest.mark.parametrize("act", [Service.answers, Service.start, str])
def test_another_program_at_the_address_is_refused(program, port, running, act):
    one = made(program, port)
    one.url = f"http://127.0.0.1:{port}/elsewhere"
    with pytest.raises(InputError) as refused:
        act(one)
    (line,) = refused.value.problems
    assert line.startswith(f"{one.url}: answered with status 404, so it is not the retriever that listens there; end ")
    assert line.endswith("-- retriever.url=URL") and not one.log.exists()


def test_one_that_speaks_no_http_is_refused(program, port):
    with socket.create_server(("127.0.0.1", port)) as listening:
        one = made(program, port)
        answerer = subprocess.Popen(  # in a process, since the probe waits for it
            [
                sys.executable,
                "-c",
                "import socket; s, _ = socket.socket(fileno=0).accept(); s.sendall(b'+PONG\\r\\n\\r\\n')",
            ],
            stdin=listening.fileno(),
        )
        with pytest.raises(InputError, match="did not answer in HTTP, so it is not the retriever"):
            one.answers()
        answerer.wait()


# --- its address ---


def retriever(*typed: str) -> Service | None:
    return service_of("search_r1", read_tables("search_r1"), typed)


def test_the_retriever_is_waited_for_at_the_address_that_the_recipe_asks(capsys):
    from core.config import compose
    from recipes.search_r1.retrieval_client import ClientOptions

    one, key = retriever(), "retriever.url"
    assert one.own and one.url == compose("search_r1").retriever.url.replace("/retrieve", "/health")
    assert ClientOptions().url.replace("/retrieve", "/health") == one.url
    other = retriever(f"{key}=http://a:1/retrieve", f"{key}='http://node-7:9000/retrieve'")
    assert (other.url, other.own, other.key) == ("http://node-7:9000/health", False, key)
    assert retriever(f"{key}=null") is None and service_of("dapo", read_tables("dapo"), ()) is None


def test_nothing_is_started_at_an_address_that_was_typed(program, port):
    one = made(program, port, own=False)
    with pytest.raises(InputError, match=f"retriever.url: nothing answers at http://127.0.0.1:{port}/health; start "):
        one.start()
    assert not one.log.exists() and str(one).endswith("; start it there")
    one.url = "node-7"
    with pytest.raises(InputError, match="retriever.url: unknown url type: 'node-7'; give an address such as http://"):
        one.start()


def test_its_index_is_a_stage_until_it_is_there_or_it_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    row = Row("search_r1", "a", "bash recipes/search_r1/eval.sh M", "", "", needs_service=True)
    answers = []
    monkeypatch.setattr(Service, "answers", lambda _: bool(answers))
    index, *_ = stages(row, 1, (), retriever())
    assert index.command == "bash recipes/search_r1/download_wiki18.sh --yes flat" and not index.done()
    assert "130 GB of disk" in str(index)
    answers.append(1)
    assert index.done()
    answers.clear()
    (tmp_path / "data/search_r1/wiki18").mkdir(parents=True)
    (tmp_path / "data/search_r1/wiki18/e5_Flat.index").touch()
    assert index.done()
    assert [one.name for one in stages(row, 1, (), retriever("retriever.url=http://a:1/retrieve"))][0] == "evaluate"
    assert not any(one.needs_service for one in stages(row, 1, (), None))


# --- stages ---


def test_a_dry_run_shows_it_once_before_the_first_stage_that_needs_it(program, port, monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    one = made(program, port)
    names = ("data", "train", "generate", "report")
    found = [Stage(name, name, lambda: False, needs_service=name in ("train", "generate")) for name in names]
    monkeypatch.setattr(reproduce, "stages", lambda *_: found)
    assert reproduce.work([Row("search_r1", "a", "", "1.0", "")], [1], (), one) == 0
    printed = capsys.readouterr().out
    shown = re.findall(r"^  (\w+): (.*)$", printed, re.M)
    assert [name for name, _ in shown] == ["data", "retriever", "train", "generate", "report"]
    assert shown[1][1].startswith(f"to do, nothing answers at {one.url}; started for the stages that need it")
    assert f"    {one.command}\n" in printed and not one.log.exists()


def test_it_runs_only_for_stages_that_need_it_and_are_not_done(program, port, tmp_path, monkeypatch):
    one = made(program, port)
    seen = tmp_path / "seen"
    look = f"{sys.executable} -c \"import urllib.request as u; u.urlopen('{one.url}')\" 2>/dev/null"

    def stage(name: str, needs: bool, done: bool = False) -> Stage:
        text = f"if {look}; then echo {name} up >> {seen}; else echo {name} down >> {seen}; fi"
        return Stage(name, text, lambda: done or (seen.exists() and name in seen.read_text()), needs_service=needs)

    found = [stage("old", True, True), stage("data", False), stage("train", True), stage("score", False)]
    monkeypatch.setattr(reproduce, "stages", lambda *_: found)
    row = Row("search_r1", "a", "", "1.0", "")
    assert reproduce.work([row], [1], (), one) == 0
    assert seen.read_text().splitlines() == ["data down", "train up", "score up"]
    assert not one.answers() and gone(child_in(one.log))
    one.log.unlink()
    assert reproduce.work([row], [1], (), one) == 0 and not one.log.exists()  # all is done


def test_a_stage_that_fails_ends_it_too(program, port, monkeypatch):
    one = made(program, port)
    monkeypatch.setattr(reproduce, "stages", lambda *_: [Stage("train", "exit 9", lambda: False, needs_service=True)])
    assert reproduce.work([Row("search_r1", "a", "", "1.0", "")], [1], (), one) == 9
    assert not one.answers() and gone(child_in(one.log))


DRIVER = """
import json, sys
from pathlib import Path
from results import reproduce
from results.reproduction.rows import Row
from results.reproduction.service import Service
from results.reproduction.stages import Stage
told = json.loads(sys.argv[1])
one = Service("retriever", told["command"], told["url"], Path(told["log"]), 60.0, "retriever.url")
found = [Stage("train", told["train"], lambda: False, needs_service=True), Stage("next", told["next"], lambda: False)]
reproduce.stages = lambda *_: found
sys.exit(reproduce.work([Row("search_r1", "a", "", "1.0", "")], [1], (), one))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["training", "waiting"])
def test_a_signal_reaches_the_stage_which_is_waited_for_and_ends_the_service(program, port, tmp_path, number, when):
    one = made(program, port, after=0 if when == "training" else 600)
    train = "trap 'sleep 0.5; echo saved > saved; exit 130' INT; echo > began; while :; do sleep 0.1; done"
    told = {"command": one.command, "url": one.url, "log": str(one.log), "train": train, "next": "echo > next"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(told)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    sign = tmp_path / "began" if when == "training" else one.log
    while not (sign.exists() and "child" in one.log.read_text()):
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(number)
    _, error = driver.communicate(timeout=60)
    assert driver.returncode == 130 and "the same command goes on from here" in error and "Traceback" not in error
    assert (tmp_path / "saved").exists() == (when == "training") and not (tmp_path / "next").exists()
    assert not one.answers() and gone(child_in(one.log))


def test_a_command_that_was_interrupted_is_interrupted_whatever_its_status(tmp_path):
    with Commands() as commands:
        assert commands.run("exit 4") == 4
        command = f"trap 'exit 0' INT; kill -INT {os.getpid()}; while :; do sleep 0.05; done"
        assert commands.run(command) == 130
    with pytest.raises(KeyboardInterrupt):  # the handlers of before are back
        signal.raise_signal(signal.SIGINT)


def test_the_real_retriever_is_known_by_its_health(port, tmp_path, monkeypatch):
    """The start command of the recipe, over a small index: what run_retriever.sh serves is what is waited for."""
    from recipes.search_r1.index.build import build_index

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(n), "contents": f"title {n}\ntext {n}"}) + "\n" for n in range(9)))
    build_index(corpus, tmp_path / "index", ("bm25",))
    monkeypatch.setenv("RETRIEVER_INDEX", str(tmp_path / "index"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)
    one = retriever()
    one.command, one.url, one.log = f"{one.command} --port {port}", f"http://127.0.0.1:{port}/health", tmp_path / "log"
    one.start()
    with urlopen(one.url) as answer:
        assert json.load(answer)["rows"] == 9
    one.stop()
    assert not one.answers()
