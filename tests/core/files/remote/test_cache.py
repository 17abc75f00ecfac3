import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from core.config.locations import local_path
from core.errors import InputError
from core.files.remote import cache, urls
from core.learner.models import WEIGHT_FILES
from tests.core.files.remote.places import fresh, put


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


def seals(copies: Path) -> list[Path]:
    return sorted(copies.glob("*.json"))


@pytest.mark.parametrize("path", ["a/b", "/a/b.parquet", "~/x", "org/name", "", "C:/x"])
def test_what_is_no_url_stays_as_it_is(path, copies):
    assert local_path(path) == path and not copies.exists()


def test_a_folder_is_copied_once_under_its_name(root, tmp_path, copies):
    url = put(made(tmp_path), f"{root}/org/model")
    found = local_path(url)
    assert Path(found).name == "model" and contents(found) == contents(tmp_path / "model")
    (sealed,) = seals(copies)
    times = {path: path.stat().st_mtime_ns for path in Path(found).rglob("*")}
    cache._copied.cache_clear()  # as in another process
    assert local_path(url) == local_path(f"{url}/") == found
    assert {path: path.stat().st_mtime_ns for path in Path(found).rglob("*")} == times
    assert json.loads(sealed.read_text())["url"] == url


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
    cache._copied.cache_clear()
    second = local_path(url)
    assert second != first and contents(second)["model.safetensors"] == b"v" * 1000
    assert contents(first)["model.safetensors"] == b"w" * 1000


def damage_cut(file: Path, copies: Path):
    file.write_bytes(file.read_bytes()[:-1])


def damage_flipped(file: Path, copies: Path):
    file.write_bytes(b"x" * 1000)


def damage_gone(file: Path, copies: Path):
    file.unlink()


def damage_unsealed(file: Path, copies: Path):
    file.write_bytes(b"half")
    seals(copies)[0].unlink()


def damage_seal(file: Path, copies: Path):
    seals(copies)[0].write_text('{"files": ')


@pytest.mark.parametrize("damage", [damage_cut, damage_flipped, damage_gone, damage_unsealed, damage_seal])
def test_a_damaged_or_half_made_copy_is_made_again(damage, tmp_path, copies):
    url = put(made(tmp_path), "memory://bucket/model")
    found = local_path(url)
    damage(Path(found) / "model.safetensors", copies)
    cache._copied.cache_clear()
    assert local_path(url) == found and contents(found) == contents(tmp_path / "model")


def test_a_copy_with_other_times_and_the_same_bytes_stays(tmp_path, copies):
    url = put(made(tmp_path), "memory://bucket/model")
    file = Path(local_path(url)) / "model.safetensors"
    os.utime(file, (1, 1))
    cache._copied.cache_clear()
    local_path(url)
    assert file.stat().st_mtime == 1


def test_an_interrupted_copy_leaves_no_seal_and_is_made_again(tmp_path, copies, monkeypatch):
    url = put(made(tmp_path), "memory://bucket/model")
    fetch = cache._fetch

    def breaks(fs, path, into, bar):
        if into.name == "model.safetensors":
            into.write_bytes(b"ww")
            raise ConnectionError("reset by peer")
        return fetch(fs, path, into, bar)

    monkeypatch.setattr(cache, "_fetch", breaks)
    with pytest.raises(InputError, match="model.path=memory://bucket/model: cannot be read .ConnectionError: reset"):
        local_path(url, "model.path")
    assert not seals(copies)
    monkeypatch.setattr(cache, "_fetch", fetch)
    assert contents(local_path(url, "model.path")) == contents(tmp_path / "model")


def test_a_file_that_arrives_short_is_refused(tmp_path, copies, monkeypatch):
    url = put(made(tmp_path), "memory://bucket/model")
    monkeypatch.setattr(cache, "_fetch", lambda fs, path, into, bar: into.write_bytes(b"") and "" or "0")
    with pytest.raises(InputError, match="bytes there, and 0 arrived"):
        local_path(url)
    assert not seals(copies)


def test_threads_that_need_a_copy_wait_for_one_that_makes_it(tmp_path, copies, monkeypatch):
    url, made_by = put(made(tmp_path), "memory://bucket/model"), []
    copy = cache._copy
    monkeypatch.setattr(cache, "_copy", lambda *args: (made_by.append(threading.get_ident()), copy(*args)))
    threads = [threading.Thread(target=cache._copied.__wrapped__, args=(url, "k", ())) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made_by) == 1 and len(seals(copies)) == 1


def test_another_process_that_copies_is_waited_for(tmp_path, copies):
    url = put(made(tmp_path), f"file://{tmp_path}/there")
    found = Path(local_path(url))
    entry = found.parent
    entry.with_suffix(".json").unlink()
    program = f"from core.config.locations import local_path; print(local_path({url!r}))"
    with open(entry.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(2)
        assert not seals(copies)
    assert other.communicate(timeout=60)[0].strip() == str(found) and seals(copies)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("memory://bucket/absent", "key=memory://bucket/absent: does not exist"),
        ("nosuch://x/y", "no driver for nosuch:// is known"),
        ("gs://bucket/x", "the driver of gs:// is not installed; pip install gcsfs"),
    ],
)
def test_a_place_that_cannot_be_read_is_one_line(url, rule, copies, monkeypatch):
    monkeypatch.setattr(urls, "find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        local_path(url, "key")
    assert rule in str(caught.value) and "\n" not in str(caught.value) and not copies.exists()


def test_an_empty_folder_is_refused(tmp_path, copies):
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="the folder is empty"):
        local_path(f"file://{tmp_path}/there")


def test_a_name_that_leads_out_of_its_folder_is_refused(copies):
    with pytest.raises(InputError, match="leads out of its folder"):
        cache.listing(urls.Remote(_Listed({"b/m/../../evil": {"size": 1}}), "b/m"))


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
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(InputError, match=f"0.0 GiB are free in .*; set {cache.VARIABLE}"):
        local_path(url)
    assert not list(copies.glob("*.partial"))


def test_a_place_without_rights_is_one_line(tmp_path, copies, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", denied)
    rule, fix = urls.url_problem("memory://bucket/model", "actor_rollout_ref.model.path", True)
    assert rule.startswith("no rights to read there") and fix.startswith("give its login rights")
