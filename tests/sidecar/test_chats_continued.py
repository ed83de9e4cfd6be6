"""Chats that go on, in their slot or another: the replies and the tokens of llama-server alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from daemon import Daemon

from towerd.store import Store, latest_row_identity

MakeDaemon = Callable[..., Daemon]
Messages = list[dict[str, Any]]
N_PREDICT = 6


class Chat:
    """One conversation with a server, through its chat endpoint."""

    def __init__(self, url: str, name: str, *, stream: bool = False) -> None:
        self.url = url
        self.stream = stream
        self.headers = {"X-Towerd-Session": name}
        self.messages: Messages = [{"role": "system", "content": f"You are {name}."}]
        self.reuse = ""

    def say(self, text: str) -> str:
        """Say this; the reply."""
        self.messages.append({"role": "user", "content": text})
        reply = self.ask(self.messages)
        self.messages.append({"role": "assistant", "content": reply})
        return reply

    def ask(self, messages: Messages) -> str:
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": N_PREDICT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.stream,
        }
        url = self.url + "/v1/chat/completions"
        reply = requests.post(url, json=body, headers=self.headers, timeout=60)
        assert reply.status_code == 200, reply.text
        self.reuse = reply.headers.get("X-Towerd-Reuse", "")
        if not self.stream:
            return str(reply.json()["choices"][0]["message"]["content"])
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.fixture
def daemon(make_sidecar: MakeDaemon) -> Iterator[Daemon]:
    with make_sidecar("-np", "1") as daemon:  # with more, speed decides which one is taken
        yield daemon


def nothing_missed(daemon: Daemon) -> None:
    """Every slot held what it was believed to hold."""
    stats = daemon.get("/towerd/v1/stats")["engine"]
    assert stats["live_missed"] == stats["restores_missed"] == 0


def ids_of(url: str, messages: Messages) -> list[int]:
    """The tokens that a chat request is evaluated as, by llama-server itself."""
    text = requests.post(url + "/apply-template", json={"messages": messages}, timeout=30).json()
    body: dict[str, Any] = {"content": text["prompt"], "add_special": True, "parse_special": True}
    ids: list[int] = requests.post(url + "/tokenize", json=body, timeout=30).json()["tokens"]
    return ids


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chat_goes_on(daemon: Daemon, alone: str, stream: bool) -> None:
    """With what llama-server alone says; each turn is recorded with the very tokens that it was
    evaluated as."""
    ours, theirs = (Chat(url, "diary", stream=stream) for url in (daemon.url, alone))
    for turn in range(6):
        said = ours.say(f"What happened on day {turn}?")
        assert said == theirs.say(f"What happened on day {turn}?")
        n_live = int(ours.reuse.partition("live=")[2].partition(",")[0])
        assert (n_live > 0) == (turn > 0)
    nothing_missed(daemon)
    expected = ids_of(alone, ours.messages[:-1])
    assert daemon.stop() == 0
    with Store.open(daemon.store_dir, latest_row_identity) as store:
        assert [turn.n_prompt for turn in store.turns("diary")][-1] == len(expected)
        assert store.session_ids("diary").tolist()[: len(expected)] == expected


def test_edits_and_others(daemon: Daemon, alone: str) -> None:
    """What is edited, asked again, or another user's chat gets its own replies."""
    ours, theirs = Chat(daemon.url, "a"), Chat(alone, "a")
    for turn in range(6):
        assert ours.say(f"Day {turn}?") == theirs.say(f"Day {turn}?")
    edited = [dict(each) for each in ours.messages]
    edited[1]["content"] = "Night 0?"
    other_reply = [dict(each) for each in ours.messages]
    other_reply[-1]["content"] = "Nothing at all"
    for asked in (edited[:-1], ours.messages[:-1], [*other_reply, edited[1]]):
        assert ours.ask(asked) == theirs.ask(asked)
    Chat(daemon.url, "b").say("Day 0?")
    nothing_missed(daemon)


def test_more_chats_than_slots(daemon: Daemon, alone: str) -> None:
    """Three chats, each for some turns at a time, in one slot."""
    pairs = [(Chat(daemon.url, name), Chat(alone, name)) for name in "abc"]
    for turn in range(4):
        for ours, theirs in pairs:
            for half in "xyz":
                text = f"Day {turn}{half}?"
                assert ours.say(text) == theirs.say(text)
    nothing_missed(daemon)
