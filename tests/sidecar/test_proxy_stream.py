"""Streams through the proxy: as they come, ended when the client leaves, honest when they break."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from daemon import Daemon

MakeDaemon = Callable[..., Daemon]
LONG: dict[str, Any] = {"stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": 7000}
WAIT_S = 60.0
LOOKS_S = 1.3


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, slow_model: Path) -> Iterator[Daemon]:
    """A sidecar whose replies take a while."""
    flags = ("--engine", "llama-server", "-m", str(slow_model), "-c", "16384", "-np", "2")
    with Daemon(tmp_path_factory.mktemp("slow"), *flags, "-t", "1") as daemon:
        yield daemon


def events(reply: requests.Response) -> Iterator[Any]:
    """The data of a stream's events as they arrive."""
    for line in reply.iter_lines(chunk_size=1):
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def wait_until(what: Callable[[], bool], poll_s: float = 0.02) -> None:
    """Poll until `what` holds."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(poll_s)


def begin(daemon: Daemon, path: str, body: dict[str, Any], **headers: str) -> requests.Response:
    """A long stream, opened."""
    reply = requests.post(
        daemon.url + path, json={**LONG, **body}, stream=True, timeout=60, headers=headers
    )
    assert reply.status_code == 200, reply.text
    return reply


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "Once"}),
    ("/v1/completions", {"prompt": "Once"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 7000}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_pieces_come_at_once_and_leaving_ends_it(
    slow: Daemon, path: str, body: dict[str, Any]
) -> None:
    """The first pieces are here while the model still generates; when the client closes, the
    slot is free long before the reply would have been complete."""
    with begin(slow, path, body) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert "Content-Length" not in reply.headers
        assert reply.headers["X-Towerd-Reuse"].startswith("live=")
        stream = events(reply)
        for _ in range(6):
            next(stream)
        assert slow.n_processing() == 1
    wait_until(lambda: slow.n_processing() == 0)
    assert all(decoded(slot) < 7000 for slot in slow.get("/slots"))


def decoded(slot: dict[str, Any]) -> int:
    tokens = slot.get("next_token")
    return int(tokens[0]["n_decoded"]) if tokens else 0


def test_leaving_before_the_reply(slow: Daemon) -> None:
    """A client that gives up waiting for an unstreamed reply frees its slot too, and what was
    recorded of it does not disturb the next request."""
    body: dict[str, Any] = {**LONG, "stream": False, "prompt": "Twice"}
    with pytest.raises(requests.ReadTimeout):
        requests.post(slow.url + "/completion", json=body, timeout=(5, 0.3))
    # llama-server looks after its connection when a second went by without a result, of any
    # task: asking it more often would keep it from looking.
    wait_until(lambda: slow.n_processing() == 0, LOOKS_S)
    assert all(decoded(slot) < 7000 for slot in slow.get("/slots"))
    assert slow.complete("Twice", 3)["tokens"]


def test_what_was_said_until_then_is_kept(slow: Daemon) -> None:
    """A turn that its client cut off is in the store with the tokens that were sent."""
    name = {"X-Towerd-Session": "left-early"}
    with begin(slow, "/completion", {"prompt": "Thrice"}, **name) as reply:
        stream = events(reply)
        seen = [token for _ in range(8) for token in next(stream)["tokens"]]

    def turns() -> Any:
        sessions = {each["id"] for each in slow.get("/towerd/v1/sessions")["sessions"]}
        return "left-early" in sessions and slow.get("/towerd/v1/sessions/left-early")["turns"]

    wait_until(lambda: bool(turns()))
    (turn,) = turns()
    assert not turn["finished"]
    assert 8 <= turn["n_reply"] < 7000
    ids = slow.session_ids("left-early")
    assert ids[turn["n_prompt"] :][:8] == seen


def raw_stream(daemon: Daemon, body: dict[str, Any], pause_s: float = 0.0) -> tuple[bytes, Any]:
    """The head and the events that a client of HTTP/1.0 gets, whose system holds little for it
    while it looks elsewhere for `pause_s`."""
    data = json.dumps({**LONG, **body}).encode()
    host, port = daemon.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"POST /completion HTTP/1.0\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        text = connection.recv(65536)
        time.sleep(pause_s)
        while part := connection.recv(65536):
            text += part
    head_back, _, stream = text.partition(b"\r\n\r\n")
    return head_back, [json.loads(line[6:]) for line in stream.split(b"\n\n") if line]


def test_without_chunks(slow: Daemon) -> None:
    """A client of HTTP/1.0 gets the events as they are, and the connection's end as theirs."""
    head, found = raw_stream(slow, {"prompt": "Plainly", "max_tokens": 12})
    assert b"chunked" not in head.lower()
    assert [len(event["tokens"]) for event in found] == [1] * 12 + [0]
    assert found[-1]["stop"]


def test_a_client_that_stops_reading_for_a_while_gets_it_all(slow: Daemon) -> None:
    """What waits for it and what comes when it reads again is one stream in order."""
    body = {"prompt": "Slowly", "max_tokens": 200, "n_probs": 100}
    _, found = raw_stream(slow, body, pause_s=2.0)
    assert [event["tokens_predicted"] for event in found[:-1]] == list(range(1, 201))
    assert found[-1]["stop"]


def test_turn_is_durable_before_the_end_is_sent(sidecar: Daemon) -> None:
    """When a client sees the end of a stream, its session is there."""
    name = {"X-Towerd-Session": "durable"}
    body: dict[str, Any] = {"prompt": "A dog", "stream": True, "n_predict": 4, "temperature": 0}
    with requests.post(
        sidecar.url + "/completion", json=body, stream=True, headers=name, timeout=30
    ) as reply:
        *pieces, last = events(reply)
        assert last["stop"]
        ids = sidecar.session_ids("durable")
    said = [token for piece in pieces for token in piece["tokens"]]
    assert ids[-len(said) :] == said


def test_resumable_stream(slow: Daemon) -> None:
    """With X-Conversation-Id llama-server continues without its client, who may come back; the
    whole turn is recorded."""
    body: dict[str, Any] = {"prompt": "Again", "max_tokens": 300}
    names = {"X-Conversation-Id": "conv::model", "X-Towerd-Session": "resumed"}
    with begin(slow, "/completion", body, **names) as reply:
        next(events(reply))
    (found,) = slow.post("/v1/streams/lookup", {"conversation_ids": ["conv"]})
    assert found["conversation_id"] == "conv::model"
    url = slow.url + "/v1/stream?conv_id=conv%3A%3Amodel&from=0"
    with requests.get(url, stream=True, timeout=60) as reply:
        said = [token for event in events(reply) for token in event["tokens"]]
    assert len(said) == 300
    wait_until(lambda: slow.n_processing() == 0)
    wait_until(
        lambda: any(s["id"] == "resumed" for s in slow.get("/towerd/v1/sessions")["sessions"])
    )
    assert slow.session_ids("resumed")[-300:] == said
    assert requests.delete(url, timeout=30).status_code == 204
    assert requests.get(url, timeout=30).status_code == 404


def llama_server_of(daemon: Daemon) -> psutil.Process:
    """The child of a towerd that serves; one that only told its version may not be reaped yet."""
    for child in psutil.Process(daemon.pid).children(recursive=True):
        if child.name() == "llama-server" and child.status() != psutil.STATUS_ZOMBIE:
            return child
    raise AssertionError("it has no llama-server")


def test_llama_server_dies_in_mid_stream(make_sidecar: MakeDaemon, slow_model: Path) -> None:
    """Each dialect's client is told in its own way; the next request works; what was stored
    is still there."""
    daemon = make_sidecar("-m", str(slow_model), "-c", "16384", "-np", "5").start()
    daemon.post(
        "/completion", {"prompt": "kept", "n_predict": 4}, headers={"X-Towerd-Session": "k"}
    )
    kept = daemon.session_ids("k")
    replies = [begin(daemon, path, body) for path, body in BODIES]
    streams = [reply.iter_lines(chunk_size=1) for reply in replies]
    for stream in streams:
        for line in stream:
            if line.startswith(b"data: {"):
                break
    llama_server_of(daemon).kill()
    for (path, _), stream in zip(BODIES, streams, strict=True):
        *_, before, last = [line for line in stream if line]
        event = json.loads(last.removeprefix(b"data: "))
        kind = "overloaded_error" if path == "/v1/messages" else "unavailable_error"
        assert event["error"]["type"] == kind, path
        assert "llama-server ended" in event["error"]["message"]
        assert (before == b"event: error") == (path in ("/v1/messages", "/v1/responses"))
    wait_until(lambda: requests.get(daemon.url + "/health", timeout=30).status_code == 200)
    assert daemon.complete("another", 4)["tokens"]
    assert daemon.session_ids("k") == kept
    assert daemon.stop() == 0
    with daemon.stored() as store:
        assert store.session_ids("k").tolist() == kept


def test_llama_server_dies_before_the_reply(make_sidecar: MakeDaemon, slow_model: Path) -> None:
    """Without a stream it is a 503, which clients try again."""
    daemon = make_sidecar("-m", str(slow_model), "-c", "16384").start()
    child = llama_server_of(daemon)
    child.suspend()
    asked = requests.Session()
    with pytest.raises(requests.ReadTimeout):
        asked.get(daemon.url + "/props", timeout=(5, 0.3))
    child.kill()
    wait_until(lambda: requests.get(daemon.url + "/health", timeout=30).status_code == 200)
    assert llama_server_of(daemon).pid != child.pid
