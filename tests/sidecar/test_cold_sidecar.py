"""Frozen conversations in front of a llama-server continue as in the embedded engine."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import requests
from daemon import Daemon, reuse_of

MakeDaemon = Callable[..., Daemon]


def say(daemon: Daemon, prompt: list[int]) -> tuple[list[int], str, dict[str, int]]:
    """(token ids of the greedy reply, session, where the prompt's tokens came from)."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["tokens"], reply.headers["X-Towerd-Session"], reuse_of(reply.headers)


def test_a_frozen_conversation_goes_on(make_sidecar: MakeDaemon) -> None:
    """Recognised by its tokens after a restart, with the same greedy reply as a twin that was
    never frozen; the header says what was thawed."""
    prompt = [1, *range(300, 380)]
    with make_sidecar(name="frozen") as daemon:
        reply, session, _ = say(daemon, prompt)
        found = daemon.post(f"/towerd/v1/sessions/{session}/freeze", {})
        assert 0 < found["session"]["cold_bytes"] < 400
        assert daemon.stop() == 0, daemon.log
        daemon.start()
        where = f"/towerd/v1/sessions/{session}?ids=1&thaw=0"
        assert daemon.get(where)["ids"] == prompt + reply
        longer = [*prompt, *reply, *range(400, 420)]
        again, same, reuse = say(daemon, longer)
        assert same == session
        assert reuse.get("cold", 0) > 40, reuse
        assert daemon.get(f"/towerd/v1/sessions/{session}")["session"]["cold_bytes"] == 0
    with make_sidecar(name="never") as daemon:
        assert say(daemon, prompt)[0] == reply
        assert say(daemon, longer)[0] == again


def test_a_damaged_conversation_is_continued(make_sidecar: MakeDaemon) -> None:
    """Its coded tokens are damaged in the catalog: nothing of it is lost."""
    prompt = [1, *range(300, 380)]
    with make_sidecar() as daemon:
        reply, session, _ = say(daemon, prompt)
        daemon.post(f"/towerd/v1/sessions/{session}/freeze", {})
        assert daemon.stop() == 0, daemon.log
        with closing(sqlite3.connect(daemon.store_dir / "catalog.sqlite")) as catalog, catalog:
            ((blob,),) = catalog.execute("SELECT blob FROM blobs").fetchall()
            bad = blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:]
            catalog.execute("UPDATE blobs SET blob = ?", (bad,))
        daemon.start()
        longer = [*prompt, *reply, *range(400, 420)]
        again, same, reuse = say(daemon, longer)
        assert same == session
        assert reuse["prefill"] == len(longer)
        found = daemon.get(f"/towerd/v1/sessions/{session}?ids=1")
        assert found["session"]["cold_bytes"] == 0
        assert found["ids"] == [*longer, *again]
