"""Flat search in slices: what several servers find together is what one finds alone, ties and scores included."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from recipes.search_r1 import retrieval_server
from recipes.search_r1.index import dense, shards
from recipes.search_r1.index.build import build_index
from recipes.search_r1.index.encoder import EncoderSettings, HashingEncoder
from recipes.search_r1.index.opening import make_retriever
from recipes.search_r1.index.passages import RetrievalError, RetrieverOptions
from recipes.search_r1.index.shards import ShardedRetriever, Slice
from recipes.search_r1.wire import to_wire

ROOT = Path(__file__).parents[2]
WORDS = [f"w{number}" for number in range(60)]
QUERIES = ["w1 w2 w3", "w59", "w7 w7 w8 w40", "unknown words", "w12 w13"]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """An index of 4,500 passages (five blocks), in which each text stands several times, far apart: exact ties."""
    folder, rng = tmp_path_factory.mktemp("shards"), random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=24)) for _ in range(700)]
    rows = [{"id": str(number), "contents": f'"T"\n{rng.choice(texts)}'} for number in range(4500)]
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index(folder / "c.jsonl", folder / "index", ("flat", "hnsw"), HashingEncoder(EncoderSettings("hashing:768")))
    return folder / "index"


@pytest.fixture
def in_process(index, monkeypatch):
    """Return a function that opens all slices here, behind addresses that need no network."""

    def opened(count: int, **health) -> list[str]:
        parts = {
            f"http://s{number}": make_retriever(RetrieverOptions(index, backend="flat", shard=f"{number}/{count}"))
            for number in range(1, count + 1)
        }

        def request(url: str, body: bytes | None = None):
            part = parts[url.rpartition("/")[0]]
            if body is None:
                return {"corpus_hash": part.corpus_hash, "fingerprint": part.fingerprint, "rows": len(part)} | health
            asked = json.loads(body)
            wire = to_wire(part.retrieve(asked["queries"], asked["topk"]), asked["return_scores"])
            return json.loads(json.dumps(wire))  # as it travels

        monkeypatch.setattr(shards, "_request", request)
        return list(parts)

    return opened


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_slices_find_together_what_the_whole_index_finds(index, in_process, count):
    whole = make_retriever(RetrieverOptions(index, backend="flat"))
    front = ShardedRetriever(in_process(count))
    assert (len(front), front.corpus_hash, front.fingerprint) == (4500, whole.corpus_hash, whole.fingerprint)
    many = [f"{a} {b}" for a in WORDS[:20] for b in WORDS[:20]]  # beyond 20 queries faiss multiplies blocks
    for queries, topk in ((QUERIES, 3), (QUERIES, 40), (many, 5), (QUERIES[:1], 1)):
        found, expected = front.retrieve(queries, topk), whole.retrieve(queries, topk)
        assert found == expected and all(len(each) == topk for each in found)
    tied = [passage.score for passage in whole.retrieve(QUERIES[:1], 3)[0]]
    assert len(set(tied)) < 3  # the corpus has ties, and the comparison above means something


def test_an_answer_depends_neither_on_the_batch_nor_on_threads(index):
    """A matrix product's last bits do: with 256 queries at once and with one, by one thread and by two."""
    one, two = (make_retriever(RetrieverOptions(index, backend="flat", threads=threads)) for threads in (1, 2))
    many = [" ".join(random.Random(number).choices(WORDS, k=9)) for number in range(256)]
    together = one.retrieve(many, 5)
    assert together == two.retrieve(many, 5) == [two.retrieve([query], 5)[0] for query in many]


def test_equal_scores_are_ordered_by_id_as_a_number(index):
    (found,) = make_retriever(RetrieverOptions(index, backend="flat")).retrieve(["w1 w2 w3"], 40)
    assert found == sorted(found, key=lambda passage: (-passage.score, int(passage.id)))
    last = [int(passage.id) for passage in found if passage.score == found[-1].score]
    (more,) = make_retriever(RetrieverOptions(index, backend="flat")).retrieve(["w1 w2 w3"], 400)
    assert last == [int(passage.id) for passage in more if passage.score == found[-1].score][: len(last)]


def test_slices_cover_the_rows_once_and_begin_at_blocks():
    for rows, count in ((21_015_324, 8), (4500, 5), (1024, 1), (2049, 2)):
        parts = [Slice(number, count).rows(rows) for number in range(1, count + 1)]
        assert (parts[0].start, parts[-1].stop) == (0, rows)
        assert all(one.stop == two.start for one, two in zip(parts, parts[1:], strict=False))
        assert all(part.start % 1024 == 0 for part in parts)
    for text in ("0/2", "3/2", "1", "a/b", "1/0"):
        with pytest.raises(RetrievalError, match="must be I/N"):
            Slice.of(text)
    with pytest.raises(RetrievalError, match="use at most 5 shards"):
        Slice(1, 6).rows(4500)


def test_servers_that_are_not_all_slices_of_one_index_are_refused(index, in_process):
    addresses = in_process(3)
    for wrong in (addresses[:2], [*addresses[:2], addresses[1]]):
        with pytest.raises(RetrievalError, match="not every slice of one index"):
            ShardedRetriever(wrong)
    with pytest.raises(RetrievalError, match="not every slice of one index"):
        ShardedRetriever(in_process(2, fingerprint="other"))
    with pytest.raises(RetrievalError, match="only a flat index can be split"):
        make_retriever(RetrieverOptions(index, backend="hnsw", shard="1/2"))


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(RetrievalError, match=r"http://127.0.0.1:9/health does not answer .*; start that server again"):
        ShardedRetriever(["http://127.0.0.1:9/retrieve"], wait_s=0)


SCRIPT = ("bash", str(ROOT / "recipes/search_r1/run_retriever.sh"))


def test_the_script_starts_slices_and_their_front_and_ends_them(index, tmp_path):
    places = {"RETRIEVER_INDEX": str(index), "RETRIEVER_SHARDS": "2", "TMPDIR": str(tmp_path)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **places, "PATH": path, "DRY_RUN": "0"}
    command = [*SCRIPT, "--backend", "flat", "--port", "0"]
    script = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        front = f"http://127.0.0.1:{int(script.stdout.readline())}"
        (ports,) = tmp_path.iterdir()
        slices = [f"http://127.0.0.1:{int(file.read_text())}" for file in ports.iterdir()]
        assert shards._health(front, 60)["rows"] == 4500 == sum(shards._health(one, 9)["rows"] for one in slices)
        body = json.dumps({"queries": QUERIES, "topk": 4, "return_scores": True}).encode()
        found = shards._request(f"{front}/retrieve", body)
    finally:
        script.terminate()
        script.wait(30)
        script.stdout.close()
    whole = make_retriever(RetrieverOptions(index, backend="flat")).retrieve(QUERIES, 4)
    assert found == json.loads(json.dumps(to_wire(whole, True)))
    for address in (front, *slices):
        with pytest.raises(RetrievalError, match="does not answer"):
            for _ in range(100):  # a server that was asked to end closes its port a moment later
                shards._request(f"{address}/health")
                time.sleep(0.1)
    assert not list(tmp_path.iterdir())


def test_gpus_take_a_flat_index_in_half_precision(index, monkeypatch):
    """faiss' build for CPUs has no GPUs; one that finds some is asked to split the index over them."""
    import faiss

    plain = make_retriever(RetrieverOptions(index, backend="flat"))
    asked = []

    def move(moved, co):
        asked.append((co.shard, co.useFloat16))
        return moved

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", types.SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", move, raising=False)
    on_gpus = make_retriever(RetrieverOptions(index, backend="flat"))
    assert asked == [(True, True)] and on_gpus.fingerprint != plain.fingerprint  # other scores in half precision
    for options in ({"backend": "flat", "gpu": False}, {"backend": "hnsw"}, {"backend": "flat", "shard": "1/2"}):
        make_retriever(RetrieverOptions(index, **options))
    assert len(asked) == 1 and dense._gpus() == 2


def test_a_front_needs_no_index_and_a_server_one(monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    assert retrieval_server.main(["--shards", "http://a:1", "http://b:1"]) == 0
    assert "checked at start: shards http://a:1 http://b:1" in capsys.readouterr().out
    for wrong in ([], ["--index", "x", "--shards", "http://a"]):
        with pytest.raises(SystemExit):
            retrieval_server.main(wrong)
    assert re.search("--index.*--shards", capsys.readouterr().err)
