"""Streams with `X-Conversation-Id` on the embedded engine: the client may leave and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import requests
from daemon import Daemon
from waiting import until

MakeDaemon = Callable[..., Daemon]
Headers: TypeAlias = dict[str, str]
LONG = 300
NONE: Headers = {}


@pytest.fixture(scope="module")
def slow(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose replies take a while."""
    flags = ("-m", str(slow_model), "-c", "2048", "-t", "1")
    with Daemon(tmp_path_factory.mktemp("slow"), *flags) as daemon:
        yield daemon


def begin(
    daemon: Daemon, name: str, n_predict: int = LONG, headers: Headers = NONE
) -> requests.Response:
    """A streamed completion under a conversation id."""
    body: dict[str, Any] = {
        "prompt": "Again",
        "n_predict": n_predict,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    return requests.post(
        daemon.url + "/completion",
        json=body,
        stream=True,
        timeout=60,
        headers={"X-Conversation-Id": name, **headers},
    )


def replay(daemon: Daemon, name: str, start: int = 0, headers: Headers = NONE) -> requests.Response:
    """All of a stream from a byte on."""
    query = {"conv_id": name, "from": str(start)}
    return requests.get(daemon.url + "/v1/stream", query, timeout=60, headers=headers)


def stop(daemon: Daemon, name: str) -> int:
    url = daemon.url + "/v1/stream"
    return requests.delete(url, params={"conv_id": name}, timeout=60).status_code


def test_replayed(slow: Daemon) -> None:
    """Byte for byte, from any byte on."""
    whole = begin(slow, "a/b ?", 20).content
    assert whole.endswith(b"\n\n")
    again = replay(slow, "a/b ?")
    assert again.content == whole
    assert again.headers["Content-Type"] == "text/event-stream"
    assert replay(slow, "a/b ?", 100).content == whole[100:]
    assert replay(slow, "a/b ?", len(whole)).content == b""


def test_client_leaves(slow: Daemon) -> None:
    """The reply continues without it, is followed by whoever comes back, and is recorded."""
    with begin(slow, "conv::model", headers={"X-Towerd-Session": "resumed"}) as reply:
        first = next(reply.iter_content(None))
    (found,) = slow.post("/v1/streams/lookup", {"conversation_ids": ["conv", "", 3, "co"]})
    assert found["conversation_id"] == "conv::model"
    assert found["total_bytes"] >= len(first)
    whole = replay(slow, "conv::model").content
    assert whole.startswith(first)
    assert whole.count(b'"content"') >= LONG
    (found,) = slow.post("/v1/streams/lookup", {"conversation_ids": ["conv"]})
    assert found["is_done"]
    assert found["total_bytes"] == len(whole)
    assert found["completed_at"] >= found["started_at"] > 0
    assert len(slow.session_ids("resumed")) > LONG


def test_stopped(slow: Daemon) -> None:
    """DELETE ends the generation, for its client too; it may be said twice."""
    with begin(slow, "stop", 100_000) as reply:
        chunks = reply.iter_content(None)
        next(chunks)
        assert stop(slow, "stop") == 204
        for _ in chunks:  # it ends
            pass
    until(lambda: slow.n_processing() == 0)
    assert replay(slow, "stop").status_code == 404
    assert stop(slow, "stop") == 204


def test_next_request_takes_its_place(slow: Daemon) -> None:
    with begin(slow, "twice", 100_000) as reply:
        next(reply.iter_content(None))
        whole = begin(slow, "twice", 3).content
        assert replay(slow, "twice").content == whole
    until(lambda: slow.n_processing() == 0)


def test_failed_request_leaves_nothing(slow: Daemon) -> None:
    """What fails before the first event is an ordinary error."""
    url, headers = slow.url + "/completion", {"X-Conversation-Id": "bad"}
    bad: tuple[Any, ...] = ({"prompt": "x", "retention": "h2o"}, {})
    for fields in bad:
        body = {**fields, "stream": True}
        reply = requests.post(url, json=body, headers=headers, timeout=60)
        assert reply.status_code == 400, reply.text
        assert replay(slow, "bad").status_code == 404
    reply = requests.post(url, json={"prompt": "x", "n_predict": 1}, headers=headers, timeout=60)
    assert reply.json()["tokens_predicted"] == 1
    assert replay(slow, "bad").status_code == 404


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("?conv_id=", 400),
        ("?conv_id=none", 404),
        ("?conv_id=here&from=-1", 400),
        ("?conv_id=here&from=x", 400),
    ],
)
def test_bad_questions(slow: Daemon, query: str, status: int) -> None:
    assert begin(slow, "here", 2).content
    reply = requests.get(slow.url + "/v1/stream" + query, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, status)


@pytest.mark.parametrize("name", [b"odd::\xff", b"x" * 2_000])
def test_what_is_no_name(slow: Daemon, name: bytes) -> None:
    """A name that no reply could repeat is refused."""
    body: dict[str, Any] = {"prompt": "x", "n_predict": 1, "stream": True}
    headers = {"X-Conversation-Id": name}
    reply = requests.post(slow.url + "/completion", json=body, headers=headers, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)
    assert slow.post("/v1/streams/lookup", {"conversation_ids": ["odd"]}) == []


def test_too_many_questions(slow: Daemon) -> None:
    """Names are looked up while other requests wait."""
    slow.post("/v1/streams/lookup", {"conversation_ids": ["x"] * 5_000}, status=400)


def test_tenants(make_daemon: MakeDaemon) -> None:
    """Each has its own conversation ids."""
    daemon = make_daemon("-c", "512", "--api-key", "ann:a,bob:b").start()
    ann, bob = ({"Authorization": f"Bearer {key}"} for key in "ab")
    whole = begin(daemon, "mine", 4, ann).content
    assert replay(daemon, "mine", headers=bob).status_code == 404
    begin(daemon, "mine", 2, bob).close()
    assert replay(daemon, "mine", headers=ann).content == whole


def test_shutdown(make_daemon: MakeDaemon) -> None:
    """A reply without a listener does not keep the daemon running."""
    daemon = make_daemon("-c", "512").start()
    begin(daemon, "left", 100_000).close()
    assert daemon.stop() == 0, daemon.log
