"""Changes to a session while it is frozen or thawed: the later change wins."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import ask
from seams import connections
from services import OpenService
from store_tools import ROW_IDENTITY, turn_of
from waiting import until_async

from towerd.codec import Codec, container
from towerd.cold import (
    Coding,
    ColdTier,
    IdleFreezer,
    VocabularySource,
    cold_history,
    decode,
    freeze,
    thaw,
)
from towerd.cold.cold_tier import Backoff
from towerd.engine.base import GenerateRequest
from towerd.errors import NotSupported, SessionFrozen, StoreError, ThawError
from towerd.models.bundled import bundled_model
from towerd.store import Store
from towerd.store.sessions import cold as cold_table
from towerd.store.sessions.cold import START
from towerd.store.sessions.frozen import SessionBusy, row_digest
from towerd.tokens import ids_bytes
from towerd.transfer import export_session

BASE = list(range(100, 140))
CHAT = [*BASE, 7, 8, 9, 10]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Store, sqlite3.Connection]]:
    with connections() as found, Store.open(tmp_path / "store", ROW_IDENTITY) as store:
        yield store, found[-1]


@pytest.fixture
def store(opened: tuple[Store, sqlite3.Connection]) -> Store:
    return opened[0]


@pytest.fixture
def db(opened: tuple[Store, sqlite3.Connection]) -> sqlite3.Connection:
    """The connection to the catalog of `store`."""
    return opened[1]


def say(store: Store, prompt: list[int], session: str = "x") -> list[int]:
    """One turn; all its tokens."""
    store.commit_turn(turn_of(prompt, [5, 6], session=session))
    return [*prompt, 5, 6]


def said(store: Store, session: str = "x") -> list[list[int]]:
    history = store.history(session)
    return [history.ids(place).tolist() for place in range(len(history.turns))]


class Disturbed:
    """A codec during whose work something happens."""

    def __init__(
        self,
        codec: Codec,
        on_encode: Callable[[], Any] = lambda: None,
        on_decode: Callable[[], Any] = lambda: None,
    ) -> None:
        self._codec, self._on_encode, self._on_decode = codec, on_encode, on_decode

    def encode(self, *args: Any, **more: Any) -> bytes:
        self._on_encode()
        return self._codec.encode(*args, **more)

    def decode(self, *args: Any, **more: Any) -> Any:
        found = self._codec.decode(*args, **more)
        work, self._on_decode = self._on_decode, lambda: None
        work()
        return found

    def keep(self, blob: bytes) -> None:
        self._codec.keep(blob)


def test_a_slow_thaw_does_not_undo_what_came_after(store: Store, codec: Codec) -> None:
    """Thawed elsewhere, continued and frozen again while one thaw decodes: its tokens are
    those of an older session, and all turns are there at the end."""
    first = say(store, CHAT)

    def meanwhile() -> None:
        assert thaw(store, codec, "x")
        say(store, [*first, 11])
        assert freeze(store, codec, "x", form="packed")

    assert freeze(store, codec, "x", form="packed")
    assert thaw(store, Disturbed(codec, on_decode=meanwhile), "x")  # type: ignore[arg-type]
    assert said(store) == [first, [*first, 11, 5, 6]]
    store.check_integrity(keys=True)


def test_a_removed_session_is_not_thawed_into_the_next_one(store: Store, codec: Codec) -> None:
    """Row ids are used again: tokens that were decoded for a session that was removed meanwhile
    never become those of another."""
    say(store, CHAT)
    assert freeze(store, codec, "x", form="packed")
    old = store.cold.read("x")
    assert old is not None
    history = old.history(decode(codec, old))
    store.delete_session("x")
    other = say(store, [*BASE, 20, 21, 22, 23], session="y")
    assert freeze(store, codec, "y", form="packed")
    found = store.cold.read("y")
    assert found is not None
    assert (found.session.pk, found.turn_ids()) == (old.session.pk, old.turn_ids())
    assert not store.cold.restore(old, history)
    assert thaw(store, codec, "y")
    assert said(store, "y") == [other]


@pytest.mark.parametrize("when", ["on_encode", "on_decode"])
def test_another_session_of_the_name_is_not_frozen(store: Store, codec: Codec, when: str) -> None:
    """Removed and begun anew while its tokens were coded, with the same row ids."""
    say(store, CHAT)

    def meanwhile() -> None:
        store.delete_session("x")
        say(store, [*BASE, 30, 31, 32, 33])

    with pytest.raises(SessionBusy, match="changed meanwhile"):
        freeze(store, Disturbed(codec, **{when: meanwhile}), "x", form="packed")  # type: ignore[arg-type]
    assert said(store) == [[*BASE, 30, 31, 32, 33, 5, 6]]
    store.check_integrity(keys=True)


def test_a_session_continued_while_frozen_is_not_exported_in_part(
    store: Store, codec: Codec
) -> None:
    first = say(store, CHAT)
    freeze(store, codec, "x", form="packed")
    more = say(store, [*first, 12])  # as after a thaw that failed
    coding = Coding(lambda: VocabularySource(bundled_model(), "hash"))
    with pytest.raises(SessionFrozen, match="went on"):
        export_session(store, coding.model(), "x", None)
    with pytest.raises(SessionFrozen, match="went on"):
        cold_history(store, codec, "x")
    thaw(store, codec, "x")
    assert said(store) == [first, more]
    assert export_session(store, coding.model(), "x", None).session
    coding.close()


def test_another_tokenizer_is_refused() -> None:
    """A file that was replaced while its model was served: what it would write could never be
    read with the model's own."""
    coding = Coding(lambda: VocabularySource(bundled_model(), "hash", 512, "of another model"))
    with pytest.raises(NotSupported, match="another tokenizer"):
        coding.model()
    with pytest.raises(NotSupported):
        coding.model()


async def test_in_use_by_tokens_that_others_keep(store: Store) -> None:
    """A request that continues a session by its tokens finds it when it is recorded, also where
    freezing removes no segment."""
    whole = say(store, CHAT)
    store.pins.add(store.turns("x")[-1].reply_node)
    cold = ColdTier(
        store, Coding(lambda: VocabularySource(bundled_model(), "hash")), freeze_after_s=-1
    )
    request = GenerateRequest(ids=np.array([*whole, 13], np.int32), scope="local")
    use = cold.enter(request)
    with pytest.raises(SessionBusy, match="in use"):
        await cold.freeze("x")
    use.leave()
    assert await cold.freeze("x")
    await cold.close()


async def test_the_watch_continues_after_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog fails once, a callback always: sessions are frozen all the same."""
    say(store, CHAT)
    page, failures = store.cold.page, [StoreError("the catalog failed")]

    def fail_once(*args: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return page(*args, **more)

    def fail(_: Any) -> None:
        raise OSError("a file cannot be deleted")

    monkeypatch.setattr(store.cold, "page", fail_once)
    cold = ColdTier(
        store,
        Coding(lambda: VocabularySource(bundled_model(), "hash")),
        freeze_after_s=0,
        on_frozen=fail,
    )
    freezer = IdleFreezer(cold)
    freezer.start()
    await until_async(lambda: cold.n_frozen > 0)
    assert (cold.n_frozen, cold.n_failed, failures) == (1, 0, [])
    assert store.session("x").cold_bytes
    await freezer.stop()
    await cold.close()


async def test_what_no_session_can_do_without_is_asked_for_once(store: Store) -> None:
    """The model cannot be read: not every idle session finds that out by itself."""
    for number in range(5):
        say(store, CHAT, session=f"s{number}")
    asked: list[int] = []

    def source() -> VocabularySource:
        asked.append(1)
        return VocabularySource(Path("/nowhere/model.gguf"), "hash")

    cold = ColdTier(store, Coding(source), freeze_after_s=0)
    freezer = IdleFreezer(cold)
    freezer.start()
    await until_async(lambda: bool(asked))
    await asyncio.sleep(0.5)
    assert len(asked) == 1
    await freezer.stop()
    await cold.close()


def test_idle_sessions(store: Store) -> None:
    for number in range(6):
        say(store, [*BASE, number], session=f"s{number}")
    found = store.cold.idle(float("inf"), 3)
    assert [info.id for info in found] == ["s0", "s1", "s2"]


def test_backoff() -> None:
    now = [0.0]
    backoff = Backoff(lambda: now[0])
    backoff.delay(("a", "x"), 10)
    backoff.delay(("a", "y"), 5)
    backoff.delay(("a", "z"), -1)
    assert backoff.active() == {("a", "x"), ("a", "y")}
    now[0] = 5.0
    assert backoff.active() == {("a", "x")}
    now[0] = 10.0
    assert backoff.active() == set()


def test_sessions_that_all_begin_alike(
    store: Store, db: sqlite3.Connection, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place, many frozen sessions: a few are looked at, and the last used of them is meant."""
    monkeypatch.setattr(cold_table, "CANDIDATES_MAX", 3)
    (whole, *_) = [say(store, CHAT, session=f"s{number}") for number in range(8)]
    for number in range(8):
        freeze(store, codec, f"s{number}", form="packed")
    seen: list[str] = []
    prompt = ids_bytes(np.array([*whole, 1], np.int32))
    db.set_trace_callback(seen.append)
    found = store.cold.continued_by(prompt, "local")
    db.set_trace_callback(None)
    assert found == "s7"
    assert sum("FROM sessions WHERE pk = " in sql for sql in seen) == 3
    store.delete_session("s7")
    assert store.cold.continued_by(prompt, "local") == "s6"


def test_what_is_asked_of_many_sessions_has_an_index(store: Store, db: sqlite3.Connection) -> None:
    """No look-up goes through every session of the store."""
    say(store, CHAT)
    seen: list[str] = []
    db.set_trace_callback(seen.append)
    store.sessions(limit=10)
    store.sessions("local", 10)
    store.session("x")
    store.session("x", "local")
    store.cold.stats()
    store.cold.frozen()
    store.cold.idle(1.0, 10)
    store.cold.page(1.0, START, 10, lambda node: node.has_rows)
    db.set_trace_callback(None)
    whole = "INDEX sqlite_autoindex_sessions_1 (fingerprint=?)"
    for sql in seen:
        plan = [row[3] for row in db.execute("EXPLAIN QUERY PLAN " + sql)]
        assert not any("SCAN sessions" in line or line.endswith(whole) for line in plan), sql
        assert not any("TEMP B-TREE" in line for line in plan), sql
        if "cold_bytes = 0" in sql:  # not by way of all that are frozen
            assert "sessions_warm" in plan[0]
    assert len(seen) >= 7


def n_on_disk(store: Store) -> int:
    return sum(node.file is not None for node in store.nodes())


async def test_the_policy_forgets_the_files_that_go(service_on: OpenService) -> None:
    """Catalog ids of files are used again: a new one must not inherit a removed one's place."""
    prompt = [1, *np.random.default_rng(0).integers(300, 440, 80).tolist()]
    async with service_on(bundled_model()) as service:
        for name in ("x", "y"):
            await ask(service, [*prompt, ord(name)], session=name)
            await service.engine.settle()
            await asyncio.to_thread(service.tiers.flush)
        ranking, root = service.tiers.ranking, service.store.state.tree.root
        assert ranking.explain(root)["n_warm"] == n_on_disk(service.store) > 1
        for name in ("x", "y"):
            await service.cold.freeze(name)
        await asyncio.to_thread(service.tiers.check_integrity)
        assert len(service.store.files()) == 1, "what both begin with"
        assert ranking.explain(root)["n_warm"] == n_on_disk(service.store)


def test_a_damaged_blob_is_passed_over(store: Store, codec: Codec) -> None:
    """Its checksum is right and its ids are not: an error that says so, and it stays frozen."""
    say(store, CHAT)
    freeze(store, codec, "x", form="packed")
    frozen, catalog = store.cold.read("x"), store.state.catalog
    assert frozen is not None
    parsed = container.read(frozen.blob)
    flipped = bytes([parsed.side[0] ^ 1]) + parsed.side[1:] if parsed.side else b""
    chunks = tuple(
        container.CodedChunk(c.n_symbols, bytes([c.bits[0] ^ 1]) + c.bits[1:])
        for c in parsed.chunks
    )
    bad = container.write(
        container.Blob(
            parsed.form,
            parsed.vocabulary,
            parsed.hash,
            parsed.n_ids,
            chunks,
            flipped,
            parsed.base_ids,
            parsed.base_hash,
            parsed.model,
        )
    )
    ((marks,),) = catalog.rows("SELECT marks FROM cold")
    with catalog.transaction():
        catalog.run("UPDATE blobs SET blob = ?", (bad,))
        digest = row_digest(len(frozen.base), frozen.turns, marks, bad)
        catalog.run("UPDATE cold SET digest = ?", (digest,))
    with pytest.raises(ThawError, match="cannot be thawed"):
        thaw(store, codec, "x")
    assert store.session("x").cold_bytes
