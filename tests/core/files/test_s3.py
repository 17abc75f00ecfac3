"""Against a real S3 server: a run that reads from it, writes through to it and goes on from it; and one without rights.

A run is another machine's: it has neither the cache nor the run folder of an earlier one.
"""

from pathlib import Path
from urllib.request import Request, urlopen

import fsspec
import pytest

from core import files as core_files
from core.checkpoint.remote_copy import RemoteCopy
from core.config import paths
from core.files import local_path
from tests.core.files import places
from tests.core.scripted_run import configured, prepare, scripted

BUCKET = "s3://bucket"


def driver() -> fsspec.AbstractFileSystem:
    """The driver, which reads login and address from the environment once and keeps both."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    return fsspec.filesystem("s3")


def tell(server: dict[str, str], command: str, text: str = ""):
    """Gives the server a command of its own."""
    url, plain = f"{server['AWS_ENDPOINT_URL']}/moto-api/{command}", {"Content-Type": "text/plain"}
    urlopen(Request(url, text.encode(), plain, method="POST")).close()


@pytest.fixture(scope="module")
def server():
    with places.s3_server() as reached:
        yield reached


@pytest.fixture
def reached(server, monkeypatch):
    """The environment of the server, which is this process's too; the server is empty."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    yield server
    tell(server, "reset")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def files(reached, tmp_path):
    made = prepare(tmp_path / "files")
    driver().mkdir("bucket")
    for name in ("model", "train.parquet"):
        places.put(made / name, f"{BUCKET}/{name}")
    return made


def config_of(files: Path, steps: int):
    rows = f"{BUCKET}/train.parquet"
    keys = [f"data.train_files={rows}", f"data.val_files={rows}", f"actor_rollout_ref.model.path={BUCKET}/model"]
    keys += [f"trainer.default_local_dir={BUCKET}/grpo/run", "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=2"]
    return configured(files, "x", *keys, steps=steps)


def run(files: Path, steps: int, folder: Path, monkeypatch) -> int:
    """Trains on a machine that has nothing, in its folder; returns the step from which the run went on."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    places.fresh(monkeypatch, folder)
    config = config_of(files, steps)
    assert paths.missing(config) == []
    trainer = scripted()(config, lambda request, version: "12"[request.seed % 2]).init_workers()
    began = trainer.run.step
    trainer.fit()
    return began


def there() -> set[str]:
    return {name.removeprefix("bucket/grpo/run/") for name in driver().find("bucket/grpo/run")}


def test_a_run_reads_writes_and_goes_on(files, tmp_path, monkeypatch):
    assert run(files, 3, tmp_path / "one", monkeypatch) == 0
    assert {"global_step_3/manifest.json", "metrics.jsonl", "manifest.json"} <= there()
    assert run(files, 6, tmp_path / "two", monkeypatch) == 3
    complete = [name for name in there() if name.startswith("global_step") and name.count("/") == 1]
    assert {name.split("/")[0] for name in complete} == {"global_step_4", "global_step_6"}


def test_a_run_that_ends_before_its_manifest_was_sent_goes_on_from_the_one_before(files, tmp_path, monkeypatch):
    """As a kill would leave it; ``tests/core/checkpoint/test_remote_copy.py`` kills processes."""

    put = RemoteCopy._put

    def end(self, file, target):
        if target.endswith("global_step_4/manifest.json"):
            raise KeyboardInterrupt
        put(self, file, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RemoteCopy, "_put", end)
        run(files, 6, tmp_path / "one", monkeypatch)
    assert "global_step_4/manifest.json" not in there() and "global_step_4/actor/version.json" in there()
    assert run(files, 6, tmp_path / "two", monkeypatch) == 2
    assert {"global_step_4/manifest.json", "global_step_6/manifest.json"} <= there()


def test_a_change_within_a_second_is_another_copy(reached, tmp_path, monkeypatch):
    """The time that S3 gives has whole seconds: what tells two states apart is the hash that it gives beside it."""
    driver().mkdir("bucket")
    (tmp_path / "a.txt").write_text("old")
    url = places.put(tmp_path / "a.txt", f"{BUCKET}/a.txt")
    places.fresh(monkeypatch, tmp_path)
    assert Path(local_path(url)).read_text() == "old"
    driver().pipe_file("bucket/a.txt", b"new")
    core_files._copied.cache_clear()
    assert Path(local_path(url)).read_text() == "new"


def test_a_bucket_without_rights_is_one_line_a_key(files, reached):
    tell(reached, "reset-auth", "0")
    try:  # the server now checks who asks, and knows nobody
        driver()
        lines = list(map(str, paths.missing(config_of(files, 3))))
    finally:
        tell(reached, "reset-auth", "inf")
    assert len(lines) == 3
    assert all(": no rights to read there" in line and line.split("=")[1].startswith(BUCKET) for line in lines)
