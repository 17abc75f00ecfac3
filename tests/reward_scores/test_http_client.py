"""What every client of a server relies on: a wait that the server names, one deadline an attempt,
an end."""

import concurrent.futures
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from reward_scores import http_client
from reward_scores.http_client import (
    HttpClient,
    HttpOptions,
    Reply,
    RequestFailed,
    retry_after_seconds,
)
from tests.search import misbehaving, reply


def send(client, url):
    return client.submit(client.request("POST", url, {"queries": []}, Reply.json)).result(30)


def test_retry_after_is_read_and_bounded():
    for value, seconds in ((None, 0.0), ("2.5", 2.5), ("-3", 0.0), ("1e9", 120.0), ("soon", 0.0)):
        assert retry_after_seconds(value) == seconds, value


def test_a_server_is_not_asked_before_the_time_that_it_named():
    times = []

    def busy_once(handler, request):
        times.append(time.monotonic())
        if len(times) == 1:
            return reply(handler, 429, {}, [("Retry-After", "0.4")])
        return reply(handler, 200, {"right": True})

    with misbehaving(busy_once) as (url, _):
        client = HttpClient("test", HttpOptions(5.0, give_up_s=5.0, pause_s=0.01))
        assert send(client, url) == {"right": True}
        assert times[1] - times[0] >= 0.4
        assert client.take_counts() == {"attempts": 2, "retries": 1, "busy": 1}
        client.close()


def test_without_a_time_to_give_up_there_is_one_attempt():
    with misbehaving(lambda handler, _: reply(handler, 500, {"error": "full"})) as (url, seen):
        client = HttpClient("test", HttpOptions(5.0))
        with pytest.raises(RequestFailed, match="status 500: .*full") as raised:
            send(client, url)
        assert (raised.value.kind, raised.value.status, len(seen)) == ("status", 500, 1)
        client.close()


def test_a_server_that_failed_before_a_time_without_requests_may_fail_once_more(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    client = HttpClient("test", HttpOptions(5.0, give_up_s=5.0, pause_s=0.01))

    def pause() -> float | None:
        return client._pause(RequestFailed("connect", "away"), Counter(), clock[0])

    assert pause() is not None
    clock[0] = 6.0  # others asked in between, and the server is away for longer than give_up_s
    assert pause() is None
    clock[0] = 3600.0
    assert pause() is not None
    client.close()


def test_closing_ends_what_runs_and_a_later_request_is_refused():
    held = threading.Event()
    with misbehaving(lambda *_: held.wait(20)) as (url, _):
        client = HttpClient("test client", HttpOptions(30.0))
        running = client.submit(client.request("POST", url, {}))
        time.sleep(0.1)
        client.close()
        client.close()
        with pytest.raises(concurrent.futures.CancelledError):
            running.result(5)
        held.set()
    with pytest.raises(RuntimeError, match="the test client is closed"):
        client.submit(client.request("POST", url, {}))
