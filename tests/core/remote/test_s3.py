"""Against a real S3 server: a run that reads from it, writes through to it and goes on from it; and one without rights.

Each run is a process of its own, because a login is read from the environment once.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core.checkpoint.kill_points import VARIABLE
from tests.core.remote import places
from tests.core.scripted_run import prepare

ROOT = Path(__file__).resolve().parents[3]
BUCKET = "s3://bucket"

PUT = """
import sys, fsspec
from pathlib import Path
from tests.core.remote.places import put
fsspec.filesystem("s3").mkdir("bucket")
for name in ("model", "train.parquet"):
    put(Path(sys.argv[1]) / name, f"s3://bucket/{name}")
"""
RUN = """
import sys, json, fsspec
from pathlib import Path
from core.config import paths
from tests.core.scripted_run import configured, scripted
rows = "s3://bucket/train.parquet"
settings = (f"data.train_files={rows}", f"data.val_files={rows}", "actor_rollout_ref.model.path=s3://bucket/model",
            "trainer.default_local_dir=s3://bucket/grpo/run", "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=2")
config = configured(Path(sys.argv[1]), "x", *settings, steps=int(sys.argv[2]))
problems = list(map(str, paths.missing(config)))
if problems:
    print("\\n".join(problems))
    raise SystemExit(2)
run = scripted()(config, lambda request, version: "12"[request.seed % 2]).init_workers()
began = run.session.step
run.fit()
there = sorted(name.removeprefix("bucket/grpo/run/") for name in fsspec.filesystem("s3").find("bucket/grpo/run"))
print(json.dumps({"began": began, "there": there}))
"""


def start(program: str, cwd: Path, environment: dict[str, str], *arguments) -> subprocess.CompletedProcess:
    cwd.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, **environment, "PYTHONPATH": path, "RLREPRO_CACHE": str(cwd / "cache")}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True
    )


@pytest.mark.skipif(places.skip_reason() is not None, reason=places.skip_reason() or "")
def test_a_run_reads_writes_and_goes_on(tmp_path):
    files = prepare(tmp_path / "files")
    with places.s3_server() as reached:
        assert start(PUT, tmp_path, reached, files).returncode == 0
        first = start(RUN, tmp_path / "one", reached, files, 3)
        assert first.returncode == 0, first.stderr
        second = start(RUN, tmp_path / "two", reached, files, 6)  # another machine: neither cache nor run folder
        assert second.returncode == 0, second.stderr
    first, second = (json.loads(done.stdout.splitlines()[-1]) for done in (first, second))
    assert (first["began"], second["began"]) == (0, 3)
    assert {"global_step_3/manifest.json", "metrics.jsonl", "manifest.json"} <= {*first["there"]}
    complete = [name for name in second["there"] if name.startswith("global_step") and name.count("/") == 1]
    assert {name.split("/")[0] for name in complete} == {"global_step_4", "global_step_6"}


@pytest.mark.skipif(places.skip_reason() is not None, reason=places.skip_reason() or "")
def test_a_run_killed_before_its_manifest_was_sent_goes_on_from_the_one_before(tmp_path):
    files = prepare(tmp_path / "files")
    with places.s3_server() as reached:
        assert start(PUT, tmp_path, reached, files).returncode == 0
        killed = start(RUN, tmp_path / "one", {**reached, VARIABLE: "remote_manifest:4"}, files, 6)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        other = start(RUN, tmp_path / "two", reached, files, 6)
        assert other.returncode == 0, other.stderr
    found = json.loads(other.stdout.splitlines()[-1])
    assert found["began"] == 2 and {"global_step_4/manifest.json", "global_step_6/manifest.json"} <= {*found["there"]}


@pytest.mark.skipif(places.skip_reason() is not None, reason=places.skip_reason() or "")
def test_a_bucket_without_rights_is_one_line_a_key(tmp_path, monkeypatch):
    files = prepare(tmp_path / "files")
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "0")  # the server then checks who asks, and knows nobody
    with places.s3_server() as reached:
        done = start(RUN, tmp_path / "one", reached, files, 3)
    lines = done.stdout.splitlines()
    assert done.returncode == 2 and len(lines) == 3, done.stderr
    assert all(": no rights to read there" in line and line.split("=")[1].startswith(BUCKET) for line in lines)
