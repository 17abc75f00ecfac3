"""Stdout and stderr whose reader is gone: the process goes on, and what it prints is in the log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import ROOT

PRINTS = """
import os, subprocess, sys
from pathlib import Path
from core.tracking import outputs
with outputs.kept() as streams:
    print("before the run folder is known", flush=True)
    streams.log_to(Path(sys.argv[1]))
    for line in range(2000):
        print(f"line {line} \\u00e4")
    print("one word", file=sys.stderr)
    sys.stdout.write("an open end")
    sys.stdout.flush()
    os.write(1, b" of a library")
    subprocess.run([sys.executable, "-c", "print(' and of a child')"], check=True)
print("after", flush=True)
"""


def run(tmp_path: Path, **streams) -> tuple[subprocess.CompletedProcess, str]:
    log = tmp_path / "run" / "output.log"
    command = [sys.executable, "-c", PRINTS, str(log)]
    done = subprocess.run(command, cwd=ROOT, timeout=60, **{"stdout": -1, "stderr": -1, **streams})
    return done, log.read_text() if log.exists() else ""


def gone(tmp_path: Path) -> int:
    """Return the writing end of a pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    return writes


def full(tmp_path: Path) -> int:
    return os.open("/dev/full", os.O_WRONLY)


def closed_terminal(tmp_path: Path) -> int:
    """Return the end of a terminal whose other end is closed: writes fail with EIO."""
    ours, theirs = os.openpty()
    os.close(ours)
    return theirs


BROKEN = {"gone": gone, "full": full, "closed_terminal": closed_terminal}


def test_nothing_changes_where_somebody_reads(tmp_path):
    done, log = run(tmp_path)
    assert done.returncode == 0 and log == ""
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "before the run folder is known" and lines[2000] == "line 1999 ä"
    assert lines[2001:] == ["an open end of a library and of a child", "after"]
    assert done.stderr == b"one word\n"


@pytest.mark.parametrize("kind", BROKEN)
def test_what_nobody_can_read_is_in_the_log(kind, tmp_path):
    done, log = run(tmp_path, stdout=BROKEN[kind](tmp_path))
    assert done.returncode == 0, done.stderr
    lines = log.splitlines()
    assert "stdout cannot be written" in lines[0] and lines[1] == "before the run folder is known"
    assert lines[2:2002] == [f"line {number} ä" for number in range(2000)]
    assert lines[2002:] == ["an open end of a library and of a child", "after"]
    err = done.stderr.decode()
    assert "stdout cannot be written" in err and str(tmp_path / "run" / "output.log") in err
    assert err.endswith("one word\n") and "Traceback" not in err


@pytest.mark.parametrize("kind", BROKEN)
def test_both_may_break(kind, tmp_path):
    broken = BROKEN[kind](tmp_path)
    done, log = run(tmp_path, stdout=broken, stderr=broken)
    assert done.returncode == 0
    assert "line 1999 ä" in log and "one word" in log and "stderr cannot be written" in log


def test_a_reader_that_goes_away_in_the_middle_loses_nothing_after_that(tmp_path):
    log = tmp_path / "output.log"
    command = f'{sys.executable} -c "$PRINTS" {log} | head -1'
    environment = {**os.environ, "PRINTS": PRINTS}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"before the run folder is known\n"
    assert "line 1999 ä" in log.read_text()


def test_the_traceback_of_what_ends_the_process_is_in_the_log_too(tmp_path):
    log = tmp_path / "output.log"
    code = """
import sys
from pathlib import Path
from core.tracking import outputs
with outputs.kept() as streams:
    streams.log_to(Path(sys.argv[1]))
    raise ValueError("the end")
"""
    done = subprocess.run([sys.executable, "-c", code, str(log)], cwd=ROOT, stderr=gone(tmp_path), timeout=60)
    assert done.returncode == 1 and log.read_text().endswith("ValueError: the end\n")


def test_streams_that_were_closed_before_the_start_are_in_the_log(tmp_path):
    log = tmp_path / "output.log"
    command = f'{sys.executable} -c "$PRINTS" {log} >&- 2>&-'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env={**os.environ, "PRINTS": PRINTS}, timeout=60)
    assert done.returncode == 0
    assert "line 1999 ä" in log.read_text() and "one word" in log.read_text()


def test_a_log_that_is_full_too_ends_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "output.log").symlink_to("/dev/full")
    code = PRINTS.partition("    os.write")[0]
    command = [sys.executable, "-c", code, str(tmp_path / "run" / "output.log")]
    done = subprocess.run(command, cwd=ROOT, stdout=gone(tmp_path), stderr=gone(tmp_path), timeout=60)
    assert done.returncode == 0


def test_lost_output_is_counted_once_there_is_room(tmp_path):
    code = """
import resource, sys
from pathlib import Path
from core.tracking import outputs
with outputs.kept() as streams:
    streams.log_to(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    print("x" * 5000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("there is room again")
"""
    log = tmp_path / "output.log"
    command = [sys.executable, "-c", code, str(log)]
    done = subprocess.run(command, cwd=ROOT, stdout=gone(tmp_path), stderr=-1, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bytes of output were lost]\nthere is room again\n" in log.read_text()
