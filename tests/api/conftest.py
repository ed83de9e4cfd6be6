"""A service with a fake model behind the real API, and guards for the event loop."""

from __future__ import annotations

import asyncio
import asyncio.events
import gc
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from blockbuster import blockbuster_ctx

from towerd.api.limits import Limits
from towerd.app import build_app, tame_collector
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold import Coding, Keeper, source_of
from towerd.cold.coding import tokenizer_of
from towerd.config import Config
from towerd.engine.base import (
    Event,
    Finish,
    GenerateRequest,
    Generation,
    Ids,
    Kept,
    ModelInfo,
    ModuleMaker,
    Piece,
    Progress,
    Reuse,
    SlotView,
    Started,
    Timings,
    TokenProb,
    TokenProbs,
)
from towerd.models.bundled import bundled_model
from towerd.slots.fingerprint import Fingerprint
from towerd.slots.layout import KVLayout, Plane
from towerd.store import Node, Store, Turn
from towerd.tiers.fidelity import Fidelity
from towerd.tiers.ranking import Ranking
from towerd.traffic import Traffic

LOOP_MS_MAX = 5.0
BOS, EOS, N_VOCAB = 256, 257, 258
FINGERPRINT = Fingerprint(
    model_hash="fake", arch="llama", tokenizer="bytes", rope={"freq_base": 1e4}, lora=(),
    layout=KVLayout((Plane(1, 64),), (Plane(1, 64),)), rot_k=False, rot_v=False,
    long_context=False,
)  # fmt: skip

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[..., Awaitable[Client]]


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Any blocking call made from towerd.api on the event loop fails the test."""
    with blockbuster_ctx(scanned_modules=["towerd.api"]):
        yield


class LoopTime:
    """CPU time of the longest single step of any event loop. CPU, not wall: a busy machine must
    not fail a test, and what waits instead of computing is `blockbuster`'s to catch."""

    def __init__(self) -> None:
        self.worst_ms = 0.0
        self.worst = ""

    async def watch(self, work: Callable[[], Awaitable[None]]) -> None:
        """Assert that no step of `work` takes long, in one of three runs: what the code does it
        does in each, what the machine does (a stolen core, a busy sibling) hardly."""
        for _ in range(3):
            self.worst_ms = 0.0
            await work()
            if self.worst_ms <= LOOP_MS_MAX:
                return
        self.assert_never_blocked()

    def assert_never_blocked(self, limit_ms: float = LOOP_MS_MAX) -> None:
        assert self.worst_ms <= limit_ms, f"{self.worst_ms:.1f} ms in {self.worst}"


@pytest.fixture
def loop_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopTime]:
    """Watch every step of every event loop from here on, with the daemon's own settings of the
    cycle collector."""
    thresholds = gc.get_threshold()
    tame_collector()
    record = LoopTime()
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        began = time.thread_time()
        run(handle)
        spent = (time.thread_time() - began) * 1e3
        if spent > record.worst_ms:
            record.worst_ms, record.worst = spent, repr(handle)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    yield record
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@dataclass
class FakeEngine:
    """A model whose tokens are bytes."""

    name: str = "embedded"
    n_ctx: int = 512
    n_slots: int = 4
    info: ModelInfo = field(
        default_factory=lambda: ModelInfo(
            path="/models/fake-7b.gguf",
            alias="fake",
            description="llama 7B Q8_0",
            n_vocab=N_VOCAB,
            n_ctx_train=512,
            n_embd=8,
            n_params=1000,
            size_bytes=2000,
            vocab_type=1,
            bos_token="<s>",
            eos_token="</s>",
            chat_template="{{ messages }}",
            fingerprint=FINGERPRINT,
            kv_bytes_per_token=128,
            metadata={},
        )  # fmt: skip
    )

    modules: ModuleMaker | None = None
    outgrowing: Collection[str] = ("shift",)

    def generate(self, request: GenerateRequest) -> Generation:
        raise NotImplementedError

    async def kept(self, ids: Ids, scope: str) -> Kept | None:
        return None

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Ids:
        return await asyncio.to_thread(self._tokenize, text, add_special)

    def _tokenize(self, text: str, add_special: bool) -> Ids:
        data = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return np.concatenate([[BOS], data]).astype(np.int32) if add_special else data

    async def detokenize(self, ids: Sequence[int] | Ids) -> bytes:
        return b"".join(self.pieces(np.asarray(ids).tolist()))

    async def apply_template(self, body: Mapping[str, Any]) -> str:
        return await asyncio.to_thread(self._render, body["messages"])

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"{message['role']}: {message.get('content')}\n" for message in messages)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        special = {BOS: b"<s>", EOS: b"</s>"}
        return [special.get(i) or bytes([i]) for i in ids]

    def slots(self) -> list[SlotView]:
        return [SlotView(i, self.n_ctx, False, None, 0, 0, None) for i in range(self.n_slots)]

    def stats(self) -> dict[str, Any]:
        return {"live_cells": 1024, "live_cells_used": 7, "running": 0, "waiting": 0}

    async def drain(self, grace_s: float) -> None: ...

    async def close(self) -> None: ...


@dataclass
class FakeSessions:
    """Answers `reply` token by token and records the turn in a real store."""

    engine: FakeEngine
    store: Store
    reply: str = "Hello!\nYou"
    delay_s: float = 0.0
    error: Exception | None = None
    error_after: int = 0
    seen: list[GenerateRequest] = field(default_factory=list)
    open: int = 0
    produced: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last open run was closed."""
    running: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event | None = None

    async def run(self, request: GenerateRequest) -> AsyncIterator[Event]:
        self.seen.append(request)
        self.open += 1
        self.running.set()
        try:
            async for event in self._events(request):
                yield event
        finally:
            self.open -= 1
            if self.open == 0:
                self.idle.set()

    async def _events(self, request: GenerateRequest) -> AsyncIterator[Event]:
        n = len(request.ids)
        cached = min(3, n - 1)
        reuse = Reuse(int(cached > 0), int(cached > 1), int(cached > 2), prefill=n - cached)
        if self.error is not None and self.error_after == 0:
            raise self.error
        if request.return_progress:
            yield Progress(n, cached, n, 0.5)
        if self.gate is not None:
            await self.gate.wait()
        yield Started(reuse, n)
        ids = list(self.reply.encode()) + [EOS]
        if request.n_predict >= 0:
            ids = ids[: request.n_predict]
        for k, token in enumerate(ids):
            if self.error is not None and k + 1 == self.error_after:
                raise self.error
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            text = "" if token == EOS else chr(token)
            self.produced += 1
            yield Piece(text, (token,), self._probs(token, request))
        yield await self._finish(request, ids, reuse)

    def _probs(self, token: int, request: GenerateRequest) -> tuple[TokenProbs, ...]:
        n = request.sampling.n_probs
        top = tuple(TokenProb(i, b"x", -0.5 - i) for i in range(n))
        return (TokenProbs(TokenProb(token, self.engine.pieces([token])[0], -0.5), top),) * bool(n)

    async def _finish(self, request: GenerateRequest, ids: list[int], reuse: Reuse) -> Finish:
        n = len(request.ids)
        done = bool(ids) and ids[-1] == EOS
        finish = Finish("eos" if done else "limit", "", tuple(ids), n + max(len(ids) - 1, 0),
                        Timings(n - reuse.prefill, reuse.prefill, 2.0, len(ids), 3.0), reuse)  # fmt: skip
        if request.precache is not None or not ids:
            return finish
        turn = Turn(request.scope, request.session, request.ids, np.array(ids, np.int32),
                    finish.n_cached, time.time())  # fmt: skip
        result = await asyncio.to_thread(self.store.commit_turn, turn)
        return replace(finish, session=result.session_id)


class FakeTiers:
    """Sizes of tiers that hold nothing."""

    def __init__(self) -> None:
        self.ranking = Ranking("lru", time.time)
        self.fidelity: Fidelity = "near"

    def visited(self, tip: Node, arrived_s: float, n_rows: int | None = None) -> Node:
        self.ranking.visited(tip.path(), arrived_s, lambda node: 0)
        return tip

    def stats(self) -> dict[str, Any]:
        return {"hot_bytes": 0, "hot_bytes_max": 1, "warm_bytes": 0, "warm_bytes_max": 1}


@dataclass
class FakeService:
    """What `open_service` would give."""

    engine: FakeEngine
    sessions: FakeSessions
    store: Store
    tiers: FakeTiers
    traffic: Traffic
    cold: Keeper


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", FINGERPRINT) as opened:
        yield opened


@pytest.fixture
def service(store: Store) -> FakeService:
    engine = FakeEngine()
    tiers = FakeTiers()
    traffic = Traffic(store, tiers)
    keeper = Keeper(store, Coding(lambda: source_of(engine.info)), freeze_after_s=-1)
    return FakeService(engine, FakeSessions(engine, store), store, tiers, traffic, keeper)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """A Config that touches nothing of the user's."""

    def make(**changes: Any) -> Config:
        paths = {"store_dir": tmp_path / "store", "socket": tmp_path / "towerd.sock"}
        return Config(**{**paths, "port": 0, **changes})

    return make


@pytest.fixture
def make_client(
    aiohttp_client: Callable[..., Awaitable[Client]],
    service: FakeService,
    make_config: Callable[..., Config],
) -> MakeClient:
    """A client of a served app; keywords change the Config, `limits=` the Limits."""

    async def make(limits: Limits | None = None, **changes: Any) -> Client:
        return await aiohttp_client(
            build_app(make_config(**changes), service=service, limits=limits)
        )

    return make


@pytest.fixture
async def client(make_client: MakeClient) -> Client:
    return await make_client()


@pytest.fixture
def sse() -> Callable[[str], list[str]]:
    """Splits a server-sent stream into the data of its events."""

    def split(text: str) -> list[str]:
        return [e.removeprefix("data: ") for e in text.split("\n\n") if e.startswith("data: ")]

    return split


@pytest.fixture
def readable_model(service: Any) -> None:
    """The fake model, with a vocabulary that can be read."""
    with GgufVocabulary(bundled_model()) as vocabulary:
        tokenizer = tokenizer_of(vocabulary)
    fingerprint = replace(service.engine.info.fingerprint, tokenizer=tokenizer)
    service.engine.info = replace(
        service.engine.info, path=str(bundled_model()), n_vocab=512, fingerprint=fingerprint
    )
