"""kill -9 at a hundred random moments under load: what was acknowledged is there."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from daemon import Daemon, run_towerctl

from towerd.store import Store

N_KILLS = 100
N_CLIENTS = 6
CHECK_EVERY = 25
TOKENS_MAX = 400
RETRY_S = 0.01
N_VOCAB = 512


@dataclass
class Conversation:
    """What a client knows of one session."""

    name: str | None
    """Sent as X-Towerd-Session; None: the daemon recognises the conversation by its tokens."""
    ids: list[int]
    """Acknowledged: every token of every turn whose final chunk arrived."""
    session: str = ""
    """The session it was recorded under, as the daemon said."""
    pending: list[list[int]] = field(default_factory=list)
    """Prompts of later turns whose end never arrived; each may be stored, or not."""
    left: list[list[int]] = field(default_factory=list)
    """Prompts of turns that the client left: stored whenever the daemon notices."""

    def check(self, stored: list[int]) -> None:
        """`stored` are the tokens of the session's current branch."""
        assert stored == self.ids or any(
            stored[: len(prompt)] == prompt for prompt in (*self.pending, *self.left)
        ), f"session {self.session}"


@dataclass
class Load:
    """Clients that talk without pause, to whatever is there."""

    daemon: Daemon
    random: random.Random
    base: list[int] = field(default_factory=list)
    known: list[Conversation] = field(default_factory=list)
    texts: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    """Session -> prompt and text of a reply whose [DONE] arrived."""
    acknowledged: int = 0
    unfinished: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.random.randrange(3, N_VOCAB) for _ in range(self.random.randint(low, high))]

    async def client(self, http: aiohttp.ClientSession) -> None:
        """Go on with one of a few conversations, or begin one, for ever."""
        mine: list[Conversation] = []
        while True:
            if not self.daemon.find_url():
                await asyncio.sleep(RETRY_S)
                continue
            mine = [each for each in mine if len(each.ids) < TOKENS_MAX][-4:]
            try:
                async with asyncio.timeout(30):
                    if self.random.random() < 0.2:
                        await self.openai_reply(http)
                    else:
                        await self.turn(http, mine)
            except (aiohttp.ClientError, ConnectionError):
                self.unfinished += 1
                await asyncio.sleep(RETRY_S)

    async def turn(self, http: aiohttp.ClientSession, mine: list[Conversation]) -> None:
        """One turn in llama-server's own shape, which names every token."""
        if mine and self.random.random() < 0.7:
            talk = self.random.choice(mine)
        else:
            named = self.random.random() < 0.5
            talk = Conversation(f"talk-{self.random.getrandbits(64):x}" if named else None, [])
        start = talk.ids or [1, *self.random.choice((self.base, self.base[:25], []))]
        prompt = start + self.tokens(2, 40)
        body = {
            "prompt": prompt,
            "n_predict": self.random.randint(1, 50),
            "return_tokens": True,
            "stream": self.random.random() < 0.7,
        }
        headers = {} if talk.name is None else {"X-Towerd-Session": talk.name}
        abandon = self.random.randint(1, 20) if self.random.random() < 0.1 else 0
        (talk.left if abandon else talk.pending).append(prompt)
        reply, session = await self.ask(http, body, headers, abandon)
        if session is None:
            return
        if talk.session:
            assert session == talk.session, "recognised as another session"
        else:
            talk.session = session
            mine.append(talk)
            self.known.append(talk)
        talk.ids, talk.pending = prompt + reply, []
        self.acknowledged += 1

    async def ask(
        self, http: aiohttp.ClientSession, body: Any, headers: dict[str, str], abandon: int
    ) -> tuple[list[int], str | None]:
        """Ids of the reply, and the session once its end has arrived. With `abandon` the client
        leaves after so many events."""
        ids: list[int] = []
        url = self.daemon.url + "/completion"
        async with http.post(url, json=body, headers=headers) as reply:
            if reply.status == 503:  # loading, or leaving
                await asyncio.sleep(RETRY_S)
                return ids, None
            assert reply.status == 200, await reply.text()
            if not body["stream"]:
                whole = await reply.json()
                return whole["tokens"], reply.headers["X-Towerd-Session"]
            async for data in events(reply):
                event = json.loads(data)
                if "error" in event:
                    assert event["error"]["code"] == 503, event
                    return ids, None
                ids += event["tokens"]
                if event["stop"]:
                    return ids, event["towerd"]["session"]
                abandon -= 1
                if abandon == 0:
                    break
        return ids, None

    async def openai_reply(self, http: aiohttp.ClientSession) -> None:
        """One reply in OpenAI's shape, whose end is [DONE]."""
        name = f"done-{self.random.getrandbits(64):x}"
        prompt = [1, *self.base[: self.random.randint(0, 40)], *self.tokens(6, 12)]
        body = {"prompt": prompt, "max_tokens": 20, "stream": True}
        url = self.daemon.url + "/v1/completions"
        text = ""
        async with http.post(url, json=body, headers={"X-Towerd-Session": name}) as reply:
            if reply.status == 503:
                await asyncio.sleep(RETRY_S)
                return
            assert reply.status == 200, await reply.text()
            async for data in events(reply):
                if data == "[DONE]":
                    self.texts[name] = prompt, text
                    self.acknowledged += 1
                elif "error" not in (event := json.loads(data)):
                    text += event["choices"][0]["text"]

    def check(self, store: Store) -> None:
        """Everything acknowledged so far is in the store."""
        for talk in self.known:
            talk.check(store.session_ids(talk.session).tolist())
            # The last sampled token has no rows and is kept apart.
            n_rows = len(talk.ids) - 1
            assert store.match(np.array(talk.ids, np.int32), "local").n >= n_rows, talk.session
        for name, (prompt, _) in self.texts.items():
            assert store.session_ids(name)[: len(prompt)].tolist() == prompt

    def check_over_http(self) -> None:
        """The same through the daemon, texts included."""
        for talk in self.known:
            talk.check(self.daemon.session_ids(talk.session))
        for name, (prompt, text) in self.texts.items():
            ids = self.daemon.session_ids(name)
            reply = [token for token in ids[len(prompt) :] if token > 2]  # EOG has no text
            found = self.daemon.post("/detokenize", {"tokens": [*prompt, *reply]})["content"]
            assert found.endswith(text), f"{name}: {ids}, {len(prompt)} of the prompt"

    def fail_early(self) -> None:
        """Raise what a client found wrong."""
        for task in self.tasks:
            if task.done():
                task.result()


async def events(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of every event that arrived whole; ClientError when the stream breaks off."""
    buffer = b""
    async for chunk in reply.content.iter_any():
        *whole, buffer = (buffer + chunk).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ").decode()


async def kill_somewhere(daemon: Daemon, chance: random.Random) -> str:
    """Start the daemon and kill it at a random moment: while it starts, at work, or while it
    leaves. Returns which."""
    kind = chance.choices(("start", "work", "leave"), (12, 75, 13))[0]
    daemon.spawn()
    if kind == "start":
        await asyncio.sleep(chance.uniform(0, 0.6))
    else:
        await asyncio.to_thread(daemon.wait_ready)
        await asyncio.sleep(chance.uniform(0, 0.5))
        if kind == "leave":
            daemon.signal(signal.SIGTERM)
            await asyncio.sleep(chance.uniform(0, 0.25))
    await asyncio.to_thread(daemon.kill)
    return kind


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed",
    [1, pytest.param(random.SystemRandom().getrandbits(32), marks=pytest.mark.soak, id="soak")],
)
async def test_kill_at_a_hundred_moments(tmp_path: Path, seed: int) -> None:
    """Every reply whose end arrived is stored with exactly its tokens, after every kill the
    daemon starts on the same store, and the store is sound."""
    print(f"seed {seed}")  # shown when the test fails
    chance = random.Random(seed)
    daemon = Daemon(tmp_path)
    load = Load(daemon, random.Random(seed + 1))
    load.base = load.tokens(60, 60)
    kinds = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        load.tasks = [asyncio.create_task(load.client(http)) for _ in range(N_CLIENTS)]
        try:
            for n in range(1, N_KILLS + 1):
                kinds.append(await kill_somewhere(daemon, chance))
                load.fail_early()
                if n % CHECK_EVERY == 0:
                    await asyncio.to_thread(check_store, daemon, load)
        finally:
            for task in load.tasks:
                task.cancel()
            await asyncio.gather(*load.tasks, return_exceptions=True)
            if daemon.process is not None:
                daemon.kill()
    print(f"{load.acknowledged} replies, {load.unfinished} broken off")
    # Otherwise nothing was killed at work, or nothing got done.
    assert load.acknowledged > N_KILLS / 10
    assert load.unfinished > N_KILLS
    assert set(kinds) == {"start", "work", "leave"}
    check_store(daemon, load)
    with daemon.start():
        load.check_over_http()
        assert daemon.stop() == 0
    done = run_towerctl(daemon, "verify")
    assert done.returncode == 0, done.stdout + done.stderr


def check_store(daemon: Daemon, load: Load) -> None:
    """The store as the kill left it."""
    with daemon.stored() as store:
        load.check(store)
