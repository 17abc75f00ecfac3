import fcntl
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from core import files
from core.errors import InputError
from core.files import local_path
from core.learner.models import WEIGHT_FILES
from tests.core.files.places import fresh, put


@pytest.fixture
def copies(monkeypatch, tmp_path):
    fsspec.filesystem("memory").store.clear()
    return fresh(monkeypatch, tmp_path)


@pytest.fixture(params=["memory", "file"])
def root(request, tmp_path, copies):
    return "memory://bucket" if request.param == "memory" else f"file://{tmp_path}/there"


def made(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    (folder / "part" / "more.txt").write_text("more")
    return folder


def contents(folder) -> dict[str, bytes]:
    folder = Path(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("path", ["a/b", "/a/b.parquet", "~/x", "org/name", "", "C:/x"])
def test_what_is_no_url_stays_as_it_is(path, copies):
    assert local_path(path) == path and not copies.exists()


def test_a_folder_is_copied_once_under_its_name(root, tmp_path, copies):
    url = put(made(tmp_path), f"{root}/org/model")
    found = local_path(url)
    assert Path(found).name == "model" and contents(found) == contents(tmp_path / "model")
    times = {path: path.stat().st_mtime_ns for path in Path(found).rglob("*")}
    files._copied.cache_clear()  # as in another process
    assert local_path(url) == local_path(f"{url}/") == found
    assert {path: path.stat().st_mtime_ns for path in Path(found).rglob("*")} == times


def test_a_file_is_copied_as_a_file(root, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"rows")
    found = Path(local_path(put(tmp_path / "a.parquet", f"{root}/data/a.parquet")))
    assert found.name == "a.parquet" and found.read_bytes() == b"rows"


def test_without_weights_the_rest_is_copied(root, tmp_path):
    url = put(made(tmp_path), f"{root}/model")
    assert contents(local_path(url, without=WEIGHT_FILES)).keys() == {"config.json", "part/more.txt"}
    assert contents(local_path(url)).keys() == {"config.json", "part/more.txt", "model.safetensors"}


def test_a_change_there_is_another_copy_for_the_next_process(root, tmp_path):
    url = put(made(tmp_path), f"{root}/model")
    first = local_path(url)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"v" * 1000)
    put(tmp_path / "model", url)
    assert local_path(url) == first  # all of one process is of one state
    files._copied.cache_clear()
    second = local_path(url)
    assert second != first and contents(second)["model.safetensors"] == b"v" * 1000
    assert contents(first)["model.safetensors"] == b"w" * 1000


def test_an_interrupted_copy_is_made_again(tmp_path, copies, monkeypatch):
    url, memory = put(made(tmp_path), "memory://bucket/model"), type(fsspec.filesystem("memory"))
    get_file = memory.get_file

    def breaks(self, path, into, **options):
        if into.endswith("model.safetensors"):
            Path(into).write_bytes(b"ww")
            raise ConnectionError("reset by peer")
        return get_file(self, path, into, **options)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "get_file", breaks)
        with pytest.raises(InputError, match="model.path=memory:.*cannot be read .ConnectionError: reset"):
            local_path(url, "model.path")
    assert contents(local_path(url, "model.path")) == contents(tmp_path / "model")


def test_a_file_that_arrives_short_is_refused(tmp_path, copies, monkeypatch):
    url, memory = put(made(tmp_path), "memory://bucket/model"), type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "get_file", lambda self, path, into, **_: Path(into).write_bytes(b""))
    with pytest.raises(InputError, match="bytes there, and 0 arrived"):
        local_path(url)


def test_threads_that_need_a_copy_wait_for_one_that_makes_it(tmp_path, copies, monkeypatch):
    url, made_by = put(made(tmp_path), "memory://bucket/model"), []
    copy = files._copy
    monkeypatch.setattr(files, "_copy", lambda *args: (made_by.append(threading.get_ident()), copy(*args)))
    threads = [threading.Thread(target=files._copied.__wrapped__, args=(url, "k", ())) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made_by) == 1


def test_another_process_that_copies_is_waited_for(tmp_path, copies):
    url = put(made(tmp_path), f"file://{tmp_path}/there")
    found = Path(local_path(url))
    entry = found.parent
    shutil.rmtree(entry)
    program = f"from core.files import local_path; print(local_path({url!r}))"
    with open(entry.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(2)
        assert not entry.exists()
    assert other.communicate(timeout=60)[0].strip() == str(found) and found.exists()


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("memory://bucket/absent", "key=memory://bucket/absent: does not exist"),
        ("nosuch://x/y", "no driver for nosuch:// is known"),
        ("gs://bucket/x", "the driver of gs:// is not installed; "),
    ],
)
def test_a_place_that_cannot_be_read_is_one_line(url, rule, copies):
    with pytest.raises(InputError) as caught:
        local_path(url, "key")
    assert rule in str(caught.value) and "\n" not in str(caught.value) and not copies.exists()


def test_an_empty_folder_is_refused(tmp_path, copies):
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="the folder is empty"):
        local_path(f"file://{tmp_path}/there")


@pytest.mark.parametrize("name", ["b/m/../../evil", "b/m//etc/passwd", "other/file", "b/m/a\\b"])
def test_a_name_that_leads_out_of_its_folder_is_refused(name, copies):
    with pytest.raises(InputError, match="leads out of its folder"):
        files.listing(files.RemotePlace(_Listed({name: {"size": 1}}), "b/m"))


class _Listed:
    def __init__(self, found):
        self.found = found

    def invalidate_cache(self):
        pass

    def info(self, path):
        return {"type": "directory"}

    def find(self, path, detail):
        return self.found


def test_a_disk_without_room_is_named_before_anything_is_copied(tmp_path, copies, monkeypatch):
    url = put(made(tmp_path), "memory://bucket/model")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(InputError, match=f"0.0 GiB are free in .*; set {files.CACHE}"):
        local_path(url)
    assert not list(copies.glob("*.partial"))


def test_a_place_without_rights_is_one_line(tmp_path, copies, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", denied)
    rule, fix = files.url_problem("memory://bucket/model", "actor_rollout_ref.model.path", look=True)
    assert rule.startswith("no rights to read there") and fix.startswith("give its login rights")
