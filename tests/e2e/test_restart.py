"""A conversation continues after the daemon is stopped or killed, without a prefill of its past."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests
from daemon import Daemon, reuse_of, wait_until_written
from waiting import until

MakeDaemon = Callable[..., Daemon]
SYSTEM = "You are a storyteller. " + "You love birds, boats and rain. " * 4
QUESTIONS = ("Who is Lily?", "Where does she live?", "What does she see?", "And then?")


class Chat:
    """A frontend: it keeps the messages and sends all of them every time."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
        self.n_tokens = 0
        self.session = ""

    def say(self, daemon: Daemon, text: str) -> dict[str, int]:
        """One turn; what of its prompt was reused, as the header says."""
        self.messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {
            "messages": self.messages,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = requests.post(daemon.url + "/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        self.messages.append(answer["choices"][0]["message"])
        self.n_tokens = answer["usage"]["total_tokens"]
        self.session = reply.headers["X-Towerd-Session"]
        return reuse_of(reply.headers)


def n_written(daemon: Daemon) -> int:
    """Tokens whose rows have reached the disk."""
    segments = daemon.get("/towerd/v1/segments")["segments"]
    return sum(each["tokens"] for each in segments if each["warm"])


def check_resumed(daemon: Daemon, chat: Chat, text: str) -> dict[str, int]:
    """Say `text`: only the new message (and what the last sampled token left) is evaluated."""
    known = chat.n_tokens
    reuse = chat.say(daemon, text)
    assert reuse["prefill"] < 40, reuse
    # The last token of the reply was never evaluated, and the template's end of turn may
    # re-tokenize what stands around it.
    assert known - 4 <= reuse["live"] + reuse["hot"] + reuse["warm"] <= known
    return reuse


@pytest.mark.parametrize("end", ["SIGTERM", "kill"])
def test_chat_goes_on(make_daemon: MakeDaemon, end: str) -> None:
    """After SIGTERM, and after kill -9 once the rows are written: the next turn's past comes
    from disk, into the same session."""
    chat = Chat()
    with make_daemon() as daemon:
        chat.say(daemon, QUESTIONS[0])
        for text in QUESTIONS[1:3]:
            assert check_resumed(daemon, chat, text)["warm"] == 0
        session = chat.session
        if end == "SIGTERM":
            assert daemon.stop() == 0, daemon.log
        else:
            wait_until_written(daemon)
            daemon.kill()
        daemon.start()
        reuse = check_resumed(daemon, chat, QUESTIONS[3])
        assert reuse["live"] == reuse["hot"] == 0
        assert chat.session == session
        assert len(daemon.get(f"/towerd/v1/sessions/{session}")["turns"]) == 4
        assert daemon.stop() == 0
    with daemon.stored() as store:
        assert len(store.session_ids(session)) == chat.n_tokens


def test_restart_changes_no_word(make_daemon: MakeDaemon) -> None:
    """The continued chat says what an uninterrupted one says."""
    told: list[list[dict[str, str]]] = []
    for restarts in (False, True):
        chat = Chat()
        with make_daemon(name=f"restarts-{restarts}") as daemon:
            for text in QUESTIONS:
                chat.say(daemon, text)
                if restarts:
                    assert daemon.stop() == 0
                    daemon.start()
        told.append(chat.messages)
    assert told[0] == told[1]


def test_kill_right_after_the_reply(make_daemon: MakeDaemon) -> None:
    """The tokens of a reply that arrived are durable, whatever happened to its rows."""
    with make_daemon() as daemon:
        for turn in range(3):
            body = {"content": f"The {turn} bird sang.", "add_special": True}
            ids = daemon.post("/tokenize", body)["tokens"]
            ids += daemon.complete(ids, 24)["tokens"]
            session = daemon.get("/towerd/v1/sessions")["sessions"][0]["id"]
            ids += daemon.complete(ids, 24)["tokens"]
            daemon.kill()
            daemon.start()
            assert daemon.session_ids(session) == ids
            assert daemon.complete(ids, 4)["tokens_evaluated"] == len(ids)
            assert daemon.get("/towerd/v1/sessions")["sessions"][0]["id"] == session


def test_kill_once_the_rows_are_written(make_daemon: MakeDaemon) -> None:
    """Rows are exported without a request, and then a kill costs nothing."""
    chat = Chat()
    with make_daemon() as daemon:
        chat.say(daemon, QUESTIONS[0])
        until(lambda: n_written(daemon) >= chat.n_tokens - 4)
        daemon.kill()
        daemon.start()
        check_resumed(daemon, chat, QUESTIONS[1])


def test_every_cache_of_the_past(make_daemon: MakeDaemon) -> None:
    """Ten chats over one base: after a restart each finds its own rows and the base's, which
    lie on the disk once."""
    chats = [Chat() for _ in range(10)]
    with make_daemon() as daemon:
        for index, chat in enumerate(chats):
            chat.say(daemon, f"{index} little birds, please.")
        assert daemon.stop() == 0
        daemon.start()
        for chat in chats:
            check_resumed(daemon, chat, "More!")
        segments = daemon.get("/towerd/v1/segments?limit=1000")["segments"]
        tokens = sum(segment["tokens"] for segment in segments)
        assert tokens < sum(chat.n_tokens for chat in chats) / 2
