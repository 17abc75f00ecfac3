"""The client, beside servers that work, servers that are killed, and servers that misbehave."""

import asyncio
import json
import os
import socket
import threading
import time

import pytest

from recipes.search_r1.index.build import build_index
from recipes.search_r1.index.opening import make_retriever
from recipes.search_r1.index.passages import Passage, RetrievalError, RetrieverOptions
from recipes.search_r1.retrieval_client import ClientOptions, RetrievalClient
from tests.search import PlainServer, Server, answer_for, contents, misbehaving, reply, write_corpus

ROWS = 200


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    build_index(write_corpus(folder / "corpus.jsonl", ROWS), folder / "index")
    return folder / "index"


@pytest.fixture(scope="module")
def server(index):
    with Server(index) as running:
        yield running


@pytest.fixture
def make_client():
    made = []

    def make(url, **options):
        made.append(
            RetrievalClient(
                ClientOptions(url, **{"pause_s": 0.01, "longest_pause_s": 0.2} | options)
            )
        )
        return made[-1]

    yield make
    for client in made:
        client.close()


def ask(client, *queries, topk=2):
    return asyncio.run(client.retrieve(list(queries), topk))


# --- a server that works ---


def test_it_answers_as_the_retriever_in_process_does(index, server, make_client):
    queries = [contents(5), "harbour beside the bridge", "no such word zzzz", ""]
    inside = make_retriever(RetrieverOptions(index)).retrieve(queries, 4)
    client = make_client(server.url)
    assert ask(client, *queries, topk=4) == [
        [Passage(p.id, p.contents, pytest.approx(p.score)) for p in passages] for passages in inside
    ]
    assert ask(client) == []
    metrics = client.metrics()
    assert (
        metrics["retrieval/queries"] == 4
        and metrics["retrieval/searches"] == metrics["retrieval/attempts"] == 1
    )
    assert (
        metrics["retrieval/errors"]
        == metrics["retrieval/retries"]
        == metrics["retrieval/error_rate"]
        == 0
    )
    assert metrics["retrieval/empty"] == 2 and metrics["retrieval/seconds"] > 0
    assert client.metrics()["retrieval/queries"] == 0  # since the last call


def test_cancelling_a_search_leaves_the_client_whole(make_client):
    release = threading.Event()

    def slow(handler, request):
        if request["queries"] == ["slow"]:
            release.wait(20)
        reply(handler, 200, answer_for(request))

    async def cancelled(client):
        task = asyncio.create_task(client.retrieve(["slow"], 1))
        while not asked:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await client.retrieve(["next"], 1)

    with misbehaving(slow) as (url, asked):
        client = make_client(url, connections=1)  # the cancelled search must give its turn back
        assert asyncio.run(cancelled(client))[0][0].contents == "next"
        release.set()


# --- a server that is killed ---


def test_a_restart_costs_retries_and_no_search_however_many_wait(make_client, caplog):
    server, waiting, sockets = PlainServer().start(), 256, []
    client = make_client(server.url, pause_s=0.02)
    ask(client, "before", topk=1)

    async def all_of_them():
        tasks = [
            asyncio.create_task(client.retrieve([str(number)], 1)) for number in range(waiting)
        ]
        for _ in range(10):
            await asyncio.sleep(0.06)
            sockets.append(len(os.listdir("/proc/self/fd")))
        await asyncio.to_thread(server.start)
        return await asyncio.gather(*tasks)

    before = len(os.listdir("/proc/self/fd"))
    server.kill()
    try:
        found = asyncio.run(all_of_them())
    finally:
        server.kill()
    assert [passages[0].contents for (passages,) in found] == list(map(str, range(waiting)))
    assert max(sockets) <= before + client.options.connections + 8
    told = [record.message for record in caplog.records]
    assert sum("ConnectError" in line for line in told) == 1, "once, and not for each of them"
    metrics = client.metrics()
    # Those beyond the connections wait for their turn and may meet no closed port on a busy machine
    assert metrics["retrieval/retries"] == metrics["retrieval/errors"] >= client.options.connections
    assert metrics["retrieval/searches"] == waiting + 1


def test_a_search_that_always_fails_is_an_error_though_others_are_answered(make_client):
    def poisoned(handler, request):
        bad = request["queries"] == ["poison"]
        reply(handler, 500 if bad else 200, {"error": "no"} if bad else answer_for(request))

    async def beside(client):
        task = asyncio.create_task(client.retrieve(["poison"], 1))
        while not task.done():
            await client.retrieve(["good"], 1)
        return await task

    with misbehaving(poisoned) as (url, _):
        client = make_client(url, give_up_s=0.4)
        with pytest.raises(
            RetrievalError,
            match=r"no answer within give_up_s=0.4 s and \d+ "
            r"attempts \(status",
        ):
            asyncio.run(beside(client))


def test_a_server_that_comes_back_with_another_index_ends_the_run(index, tmp_path, make_client):
    build_index(write_corpus(tmp_path / "other.jsonl", 30), tmp_path / "index")
    server = Server(index).start()
    client = make_client(server.url)
    ask(client, "a")
    server.kill()
    server._command[server._command.index(str(index))] = str(tmp_path / "index")
    with server, pytest.raises(RetrievalError, match="the run began with"):
        ask(client, "a")


# --- a server that misbehaves ---


def broken(handler, request):
    reply(handler, 500, {"error": "the disk is gone"})


def hanging(handler, request):
    threading.Event().wait(1.0)


def trickling(handler, request):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(20):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        threading.Event().wait(0.05)


def hanging_up(handler, request):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def with_body(change):
    def behave(handler, request):
        reply(handler, 200, change(answer_for(request)))

    return behave


def scored(answer, score):
    for passages in answer["result"]:
        passages[0]["score"] = score
    return answer


REPLIES = {
    "garbage": (with_body(lambda answer: b"<html>502</html>"), "the reply is not JSON"),
    "no result": (with_body(lambda answer: {"detail": "hm"}), "no list 'result'"),
    "too few results": (
        with_body(lambda answer: {"result": answer["result"][:1]}),
        "1 results for 2 queries",
    ),
    "too many passages": (
        with_body(lambda answer: {"result": [r * 2 for r in answer["result"]]}),
        "has 4 passages",
    ),
    "no scores": (
        with_body(lambda answer: {"result": [[{"contents": "a"}]] * 2}),
        "is not {document",
    ),
    "NaN": (
        with_body(lambda answer: json.dumps(scored(answer, float("nan"))).encode()),
        "NaN is no JSON",
    ),
    "NaN as text": (
        with_body(lambda answer: scored(answer, "nan")),
        "score is 'nan', which is no number",
    ),
    "beyond a float": (with_body(lambda answer: scored(answer, 10**400)), "too large"),
    "too long": (with_body(lambda answer: b" " * 200_000), "more than 100000 bytes"),
}


def test_a_reply_that_does_not_fit_is_an_error_after_a_few_tries(make_client, subtests):
    for name in REPLIES:
        with subtests.test(name=name):
            behave, said = REPLIES[name]
            with misbehaving(behave) as (url, asked):
                client = make_client(url, bad_replies=3, largest_reply=100_000)
                with pytest.raises(RetrievalError, match=said) as raised:
                    ask(client, "a", "b")
                assert "3 times; is it a retrieval server?" in str(raised.value)
                assert len(asked) == 3 and client.metrics()["retrieval/errors/reply"] == 3


def test_a_server_that_is_broken_or_hangs_is_an_error_within_the_bound(make_client, subtests):
    for behave, kind in [
        (broken, "status"),
        (hanging, "timeout"),
        (trickling, "timeout"),
        (hanging_up, "connect"),
    ]:
        with subtests.test(behave=behave, kind=kind), misbehaving(behave) as (url, asked):
            client = make_client(url, timeout_s=0.2, give_up_s=0.8)
            began = time.monotonic()
            with pytest.raises(
                RetrievalError, match=rf"within give_up_s=0.8 s and \d+ attempts \({kind} \d+"
            ) as raised:
                ask(client, "a")
            assert time.monotonic() - began < 10 and len(asked) >= 2
            assert kind != "status" or "the disk is gone" in str(raised.value)


def test_our_own_mistake_is_not_repeated(make_client):
    with misbehaving(lambda handler, _: reply(handler, 422, {"error": "topk: too large"})) as (
        url,
        asked,
    ):
        with pytest.raises(RetrievalError, match="status 422.*topk: too large"):
            ask(make_client(url), "a")
        assert len(asked) == 1


# --- the cache ---


def test_answers_are_kept_and_a_run_can_be_repeated_without_a_server(index, tmp_path, make_client):
    queries = [contents(3), "zzzz", contents(4)]
    with Server(index) as server:
        client = make_client(server.url, cache_dir=tmp_path)
        first = ask(client, *queries)
        assert client.metrics()["retrieval/cache_hit_rate"] == 0
        again = ask(client, contents(4), "zzzz", contents(9))
        assert again[:2] == [first[2], []]
        metrics = client.metrics()
        assert (
            metrics["retrieval/cache_hit_rate"] == pytest.approx(2 / 3)
            and metrics["retrieval/attempts"] == 1
        )
        assert len(ask(client, contents(3), topk=5)[0]) == 5  # another topk is another question
    offline = make_client(server.url, cache_dir=tmp_path, offline=True)
    assert ask(offline, *queries) == first
    assert offline.metrics()["retrieval/attempts"] == 0
    with pytest.raises(RetrievalError, match="offline: .* has no 2 passages for 'unheard of'"):
        ask(offline, contents(3), "unheard of")


def test_a_cache_is_an_index_s_own(index, tmp_path, make_client):
    build_index(write_corpus(tmp_path / "other.jsonl", 30), tmp_path / "other")
    found = []
    for folder in (index, tmp_path / "other"):
        with Server(folder) as server:
            found.append(
                ask(make_client(server.url, cache_dir=tmp_path / "cache"), "district", topk=40)
            )
    assert [len(passages) for (passages,) in found] == [40, 30]
    with Server(index, "--backend", "random") as server:  # the same passages, found in another way
        client = make_client(server.url, cache_dir=tmp_path / "cache")
        (other,) = ask(client, "district", topk=40)
        assert client.metrics()["retrieval/cache_hit_rate"] == 0
    assert {passage.id for passage in other} != {passage.id for passage in found[0][0]}
    with pytest.raises(
        RetrievalError, match="must hold the answers of one index, it has .*, .*; give identity="
    ):
        make_client(server.url, cache_dir=tmp_path / "cache", offline=True)
