"""Chats whose requests are sent on before their tokens are known: the same replies, the same
records, and only where nothing is to be decided."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon
from sidecar_tools import OpenSidecar, prompt

from towerd.engine.llama_server.slots.chat_text import ChatText, chat_text_of
from towerd.store import Store, latest_fingerprint

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


def counted(daemon: Daemon) -> int:
    """How many requests were sent on early; none was found to be wrong."""
    stats = daemon.get("/towerd/v1/stats")["engine"]
    assert stats["live_missed"] == stats["restores_missed"] == 0
    return int(stats["chats_gone_on"])


def ids_of(url: str, messages: Messages) -> list[int]:
    """The tokens that a chat request is evaluated as, by llama-server itself."""
    text = requests.post(url + "/apply-template", json={"messages": messages}, timeout=30).json()
    body: dict[str, Any] = {"content": text["prompt"], "add_special": True, "parse_special": True}
    ids: list[int] = requests.post(url + "/tokenize", json=body, timeout=30).json()["tokens"]
    return ids


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chat_goes_on(daemon: Daemon, alone: str, stream: bool) -> None:
    """From its third turn on where it stayed in its slot (what is cheaper at the speeds measured
    so far may be another way), with what llama-server alone says; each turn is recorded with the
    very tokens that it was evaluated as."""
    ours, theirs = (Chat(url, "diary", stream=stream) for url in (daemon.url, alone))
    n = 0
    for turn in range(6):
        said = ours.say(f"What happened on day {turn}?")
        assert said == theirs.say(f"What happened on day {turn}?")
        before, n = n, counted(daemon)
        assert n <= max(0, turn - 1)
        n_live = int(ours.reuse.partition("live=")[2].partition(",")[0])
        assert n_live > 0 if n > before else turn > 0 or n_live == 0
    assert n > 0
    expected = ids_of(alone, ours.messages[:-1])
    assert daemon.stop() == 0
    with Store.open(daemon.store_dir, latest_fingerprint) as store:
        assert [turn.n_prompt for turn in store.turns("diary")][-1] == len(expected)
        assert store.session_ids("diary").tolist()[: len(expected)] == expected


def test_edits_and_others_do_not(daemon: Daemon, alone: str) -> None:
    """What is edited, asked again, or another user's chat is placed as usual."""
    ours, theirs = Chat(daemon.url, "a"), Chat(alone, "a")
    for turn in range(6):
        assert ours.say(f"Day {turn}?") == theirs.say(f"Day {turn}?")
    n = counted(daemon)
    assert n > 0
    edited = [dict(each) for each in ours.messages]
    edited[1]["content"] = "Night 0?"
    other_reply = [dict(each) for each in ours.messages]
    other_reply[-1]["content"] = "Nothing at all"
    for asked in (edited[:-1], ours.messages[:-1], [*other_reply, edited[1]]):
        assert ours.ask(asked) == theirs.ask(asked)
        assert counted(daemon) == n
    stranger = Chat(daemon.url, "b")
    stranger.say("Day 0?")
    assert counted(daemon) == n


def test_more_chats_than_slots(daemon: Daemon, alone: str) -> None:
    """Three chats, each for some turns at a time, in one slot."""
    pairs = [(Chat(daemon.url, name), Chat(alone, name)) for name in "abc"]
    for turn in range(4):
        for ours, theirs in pairs:
            for half in "xyz":
                text = f"Day {turn}{half}?"
                assert ours.say(text) == theirs.say(text)
    assert counted(daemon) > 0


def test_whoever_leaves(daemon: Daemon) -> None:
    """A client that leaves a chat that went on loses nothing: the next turn finds it."""
    chat = Chat(daemon.url, "left")
    for turn in range(6):
        chat.say(f"Day {turn}?")
    before = counted(daemon)
    body: dict[str, Any] = {
        "messages": [*chat.messages, {"role": "user", "content": "Day 6?"}],
        "stream": True,
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = daemon.url + "/v1/chat/completions"
    with requests.post(url, json=body, headers=chat.headers, stream=True, timeout=60) as reply:
        next(reply.iter_lines(chunk_size=1))
    assert before > 0
    assert counted(daemon) - before <= 1
    chat.messages.append({"role": "user", "content": "Day 6?"})
    chat.ask([*chat.messages, {"role": "user", "content": "Day 7?"}])
    n_live = int(chat.reuse.partition("live=")[2].partition(",")[0])
    assert n_live > 0


def test_a_request_that_is_refused(daemon: Daemon) -> None:
    """Its error is llama-server's own, and the chat continues."""
    chat = Chat(daemon.url, "bad")
    for turn in range(3):
        chat.say(f"Day {turn}?")
    more = [*chat.messages, {"role": "user", "content": "x", "tool_calls": "none"}]
    for messages in (more, [*chat.messages, {"role": 7, "content": "x"}]):
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": N_PREDICT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": False,
        }
        reply = requests.post(daemon.url + "/v1/chat/completions", json=body, timeout=60)
        if reply.status_code != 200:
            assert reply.json()["error"]["message"]
    assert chat.say("Day 3?")


# --- when there is something to decide ----------------------------------------------------


def chat_text(*texts: str) -> ChatText:
    """A chat of these messages, the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    found = chat_text_of({"messages": messages})
    assert found is not None
    return found


async def test_when_a_slot_is_not_given_early(sidecar_on: OpenSidecar, tmp_path: Path) -> None:
    async with sidecar_on(ctx_size=1024) as sidecar:
        engine = sidecar.engine
        slot = engine.table.slots[0]
        more = chat_text("a", "b", "c")

        def there() -> None:
            slot.hold(prompt(50), "local")
            slot.chat, slot.is_continued = chat_text("a").answered("b"), True

        there()
        assert engine.lease_chat(chat_text("a", "x", "c"), "local", None) is None
        assert engine.lease_chat(more, "other", None) is None
        for name, value in (("is_continued", False), ("sure", False), ("busy", True)):
            setattr(slot, name, value)
            assert engine.lease_chat(more, "local", None) is None
            setattr(slot, name, not value)
        too_long = chat_text("a", "b", "c" * 1000)
        assert engine.lease_chat(too_long, "local", None) is None
        engine.table.slots[1].hold(prompt(700, 1), "local")
        assert engine.lease_chat(more, "local", None) is None  # the others would have to leave
        engine.table.slots[1].forget()
        async with engine.unpinned():
            there()
            assert engine.lease_chat(more, "local", None) is None
        there()
        lease = engine.lease_chat(more, "local", None)
        assert lease is not None
        assert (lease.slot, slot.busy, lease.ids) == (0, True, None)
        lease.learn(prompt(50)[:40])
        assert (lease.reuse.live, lease.reuse.prefill) == (39, 1)
        assert not slot.is_continued
        await lease.launched()
        lease.release()
        assert not slot.busy
        assert slot.chat is None
        assert engine.lease_chat(more, "local", None) is None
        slot.forget()
