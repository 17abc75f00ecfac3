"""The server: the published format, clear refusals, batches across requests."""

import asyncio
import threading
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from recipes.search_r1 import retrieval_server
from recipes.search_r1.index.build import build_index
from recipes.search_r1.index.opening import make_retriever
from recipes.search_r1.index.passages import Passage, RetrieverOptions
from recipes.search_r1.retrieval_server import MOST_QUERIES, make_app
from tests.search import contents, write_corpus


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    build_index(write_corpus(folder / "corpus.jsonl"), folder / "index")
    return folder / "index"


@asynccontextmanager
async def browser(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client


def post(app, body):
    async def once():
        async with browser(app) as client:
            if isinstance(body, bytes):
                headers = {"content-type": "application/json"}
                return await client.post("/retrieve", content=body, headers=headers)
            return await client.post("/retrieve", json=body)

    return asyncio.run(once())


class Recording:
    """A retriever that answers a query with itself, remembers its batches, and can be held."""

    backend, corpus_hash, fingerprint = "recording", "c0", "f0"

    def __init__(self):
        self.batches, self.go = [], threading.Event()
        self.go.set()

    def __len__(self):
        return 7

    def retrieve(self, queries, topk):
        self.batches.append((list(queries), topk))
        assert self.go.wait(20)
        if "break" in queries:
            raise ValueError("the disk is gone")
        if "too few" in queries:
            return [[]]
        return [
            [Passage(f"{query}{n}", query, 1.0 / (n + 1)) for n in range(topk)] for query in queries
        ]


# --- the format ---


def test_the_published_format_with_and_without_scores(index):
    app = make_app(make_retriever(RetrieverOptions(index)))
    queries = [contents(3), contents(11)]
    answer = post(app, {"queries": queries, "topk": 2, "return_scores": True})
    assert answer.status_code == 200
    result = answer.json()["result"]
    assert [len(items) for items in result] == [2, 2]
    assert set(result[0][0]) == {"document", "score"} and isinstance(result[0][0]["score"], float)
    assert result[1][0]["document"] == {"id": "p11", "contents": contents(11)}
    plain = post(app, {"queries": queries, "topk": 2, "return_scores": False}).json()["result"]
    assert plain == [[item["document"] for item in items] for items in result]
    assert post(app, {"queries": queries, "topk": 2}).json()["result"] == plain


# --- refusals ---


def test_a_bad_request_is_refused_and_says_what_is_wanted(subtests):
    for body, said in [
        ({}, "queries: Field required"),
        ({"queries": []}, "queries"),
        ({"queries": "one"}, "queries: Input should be a valid list"),
        ({"queries": [1]}, "queries.0: Input should be a valid string"),
        ({"queries": ["a"] * (MOST_QUERIES + 1)}, f"at most {MOST_QUERIES}"),
        ({"queries": ["x" * 20_000]}, "queries.0"),
        ({"queries": ["a"], "topk": 0}, "topk"),
        ({"queries": ["a"], "topk": 101}, "topk"),
        ({"queries": ["a"], "topk": True}, "topk"),
        ({"queries": ["a"], "return_scores": "yes"}, "return_scores"),
        ({"queries": ["a"], "top_k": 3}, "top_k"),
        ([], "body"),
        (b"{not json", "JSON"),
    ]:
        with subtests.test(body=body, said=said):
            retriever = Recording()
            answer = post(make_app(retriever), body)
            assert answer.status_code == 422
            error = answer.json()["error"]
            assert said in error and 'wanted is {"queries"' in error
            assert retriever.batches == []


# --- batches and the queue ---


async def ask_while_held(app, retriever, bodies):
    """Sends the first body, holds the retriever on it, sends the rest, lets go; all answers, in
    order."""
    async with browser(app) as client:
        retriever.go.clear()
        tasks = [asyncio.create_task(client.post("/retrieve", json=bodies[0]))]
        while not retriever.batches:
            await asyncio.sleep(0.001)
        for body in bodies[1:]:
            tasks.append(asyncio.create_task(client.post("/retrieve", json=body)))
            for _ in range(20):  # let it get into the queue before the next
                await asyncio.sleep(0)
        retriever.go.set()
        return await asyncio.gather(*tasks)


def test_requests_that_wait_are_searched_together_and_get_their_own():
    retriever = Recording()
    bodies = [
        {"queries": [f"q{n}", f"r{n}"][: 1 + n % 2], "topk": 2, "return_scores": True}
        for n in range(40)
    ]
    answers = asyncio.run(ask_while_held(make_app(retriever), retriever, bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert [items[0]["document"]["contents"] for items in answer.json()["result"]] == body[
            "queries"
        ]
    assert len(retriever.batches) == 2 and len(retriever.batches[1][0]) == sum(
        len(b["queries"]) for b in bodies[1:]
    )


def test_a_batch_has_a_largest_size_and_one_topk():
    retriever = Recording()
    bodies = [{"queries": ["first"], "topk": 1}] + [
        {"queries": [f"q{n}"], "topk": 1 + n % 2, "return_scores": True} for n in range(12)
    ]
    answers = asyncio.run(ask_while_held(make_app(retriever, max_batch=4), retriever, bodies))
    assert all(
        len(answer.json()["result"][0]) == body["topk"]
        for body, answer in zip(bodies, answers, strict=True)
    )
    assert all(len(queries) <= 4 for queries, _ in retriever.batches)
    found = [queries for queries, topk in retriever.batches[1:] if topk == 2]
    assert found == [["q1", "q3", "q5", "q7"], ["q9", "q11"]]


def test_a_search_that_fails_is_a_500_for_its_batch_alone(subtests):
    for bad, said in [("break", "the disk is gone"), ("too few", "1 results for 3 items")]:
        with subtests.test(bad=bad, said=said):
            retriever = Recording()
            bodies = [
                {"queries": [*queries]} for queries in (["held"], [bad, "x"], ["beside"], ["y"])
            ]
            bodies[-1]["topk"] = 9
            answers = asyncio.run(ask_while_held(make_app(retriever), retriever, bodies))
            assert [answer.status_code for answer in answers] == [200, 500, 500, 200]
            assert said in answers[1].json()["error"]


# --- the command ---


def test_it_listens_on_the_loopback_unless_told_otherwise(index, monkeypatch, caplog):
    bound = []
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda self, sockets: bound.append(sockets[0].getsockname()[0])
    )
    command = ["--index", str(index), "--port", "0"]
    assert retrieval_server.main(command) == 0
    assert "anyone" not in caplog.text
    assert retrieval_server.main([*command, "--host", "0.0.0.0"]) == 0
    assert (
        bound == ["127.0.0.1", "0.0.0.0"]
        and "anyone who reaches this port can search" in caplog.text
    )
