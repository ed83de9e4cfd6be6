"""Sessions that are unused: coded beside their rows, and frozen once these have left for want of space."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from oracle import ask
from services import EmbeddedService, OpenService
from store_tools import OTHER_MODEL, ROW_IDENTITY, turn_of, write_all

from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold import cold_history, freeze, thaw, write_copy
from towerd.errors import DiskFull, SessionFrozen
from towerd.models.bundled import bundled_model
from towerd.store import Store
from towerd.store.maintenance.space import space
from towerd.store.rows.checkpoints import CheckpointTable
from towerd.store.segments.checkpoint_file import CUT_META
from towerd.store.sessions.cold import START, IdleSession
from towerd.store.sessions.frozen import SessionBusy

YEAR_S = 365 * 86400.0
BASE = list(range(100, 140))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY) as opened:
        yield opened


def words(n: int, seed: int) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(300, 440, n).tolist()]


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition, for as long as a test may take."""
    for _ in range(2500):
        if is_so():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came to be")


async def settle(service: EmbeddedService) -> None:
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)


def a_year_passes(root: Path) -> None:
    """Everything in the store is a year older."""
    with Store.open(root, lambda catalog: catalog.row_identities()[0].row_identity) as store:
        catalog = store.state.catalog
        with catalog.transaction():
            for table, column in (
                ("sessions", "updated"),
                ("sessions", "created"),
                ("turns", "created"),
                ("turns", "started"),
                ("segments", "last_used"),
                ("segments", "created"),
                ("files", "created"),
            ):
                catalog.run(f"UPDATE {table} SET {column} = {column} - ?", (YEAR_S,))


def pages(store: Store) -> dict[str, IdleSession]:
    found = store.cold.page(float("inf"), START, 100, lambda node: node.has_rows)
    return {each.id: each for each in found}


@pytest.mark.timeout(60)
async def test_a_year_later_it_resumes_from_its_rows(
    service_on: OpenService, tmp_path: Path
) -> None:
    """A full year of idle time, and room on the disk: no token is evaluated again. Meanwhile the
    chat was coded, and one without rows was frozen, so it was not for want of trying."""
    prompt = words(120, 1)
    async with service_on(bundled_model()) as service:
        first = await ask(service, prompt, session="s")
        await settle(service)
        service.store.commit_turn(turn_of(words(40, 2), [5, 6], session="rowless"))
    a_year_passes(tmp_path / "store")
    async with service_on(bundled_model(), freeze_after_s=0.1) as service:
        await until(lambda: service.cold.stats()["frozen_sessions"] == 1)
        await until(lambda: service.cold.stats()["copied_sessions"] == 1)
        assert service.store.session("rowless").cold_bytes
        again = await ask(service, [*prompt, *first.ids, *words(9, 3)], session="s")
        assert (again.finish.reuse.cold, again.finish.reuse.warm) == (0, first.finish.n_cached)
        assert again.finish.reuse.prefill <= 12


@pytest.mark.timeout(60)
async def test_it_is_frozen_when_its_rows_have_left(service_on: OpenService) -> None:
    """From the copy that it has already; then its ids are nowhere else, and it continues as before."""
    async with service_on(bundled_model(), freeze_after_s=0.1) as service:
        prompts = [words(50, seed) for seed in range(3)]
        first = [await ask(service, prompt) for prompt in prompts]
        await settle(service)
        await until(lambda: service.cold.stats()["copied_sessions"] == 3)
        assert service.cold.stats()["frozen_sessions"] == 0
        whole = service.cold.space()
        assert whole["tokens_to_prefill"] == whole["bytes_wanted"] == 0
        n_bytes = service.store.state.warm_bytes
        for file in service.store.files():
            service.store.rows.drop_file(file)
        for node in service.store.nodes():
            service.store.rows.drop_hot(node)
        await until(
            lambda: service.cold.stats()["freezes"] == 3
        )  # counted after the catalog's turn
        stats = service.cold.stats()
        assert (stats["copies"], stats["frozen_sessions"], stats["copied_sessions"]) == (3, 3, 0)
        with pytest.raises(SessionFrozen):
            service.store.session_ids(first[0].finish.session)
        assert service.store.stats()["tokens"] == 0
        gone = service.cold.space()
        assert gone["tokens_resumable"] == 0
        assert gone["tokens_to_prefill"] == sum(
            len(p) + len(a.ids) for p, a in zip(prompts, first, strict=True)
        )
        assert 0.5 * n_bytes < gone["bytes_wanted"] < 1.5 * n_bytes
        again = await ask(service, [*prompts[1], *first[1].ids, *words(9, 20)])
        assert again.finish.session == first[1].finish.session
        assert service.cold.n_failed == 0


@pytest.mark.timeout(60)
async def test_rows_of_another_setting_keep_a_chat_from_being_frozen(
    service_on: OpenService,
) -> None:
    """Under another cache type it has no rows, and those of the first stay: only one that no setting
    has rows of is frozen by itself."""
    async with service_on(bundled_model()) as service:
        await ask(service, words(120, 1), session="s")
        await settle(service)
        n_bytes = service.store.state.warm_bytes
    async with service_on(bundled_model(), freeze_after_s=0.1, cache_type_k="f32") as service:
        assert service.store.state.warm_bytes == 0
        service.store.commit_turn(turn_of(words(40, 2), [5, 6], session="rowless"))
        await until(lambda: service.cold.stats()["frozen_sessions"] == 1)
        await until(lambda: service.cold.stats()["copied_sessions"] == 1)
        with pytest.raises(SessionBusy):
            await service.cold.freeze("s", only_without_rows=True)
        assert service.store.session("s").cold_bytes == 0
        assert service.store.stats()["disk_bytes"] == n_bytes
        assert await service.cold.freeze("s") is not None


def test_a_copy_goes_when_its_session_goes_on(store: Store, codec: Codec) -> None:
    store.commit_turn(turn_of(BASE, [5, 6], session="x"))
    assert not pages(store)["x"].has_copy
    assert write_copy(store, codec, "x", form="packed")
    assert not write_copy(store, codec, "x", form="packed")
    assert pages(store)["x"].has_copy
    store.commit_turn(turn_of([*BASE, 5, 6, 7], [8], session="x"))
    assert not pages(store)["x"].has_copy
    assert store.session_ids("x").tolist() == [*BASE, 5, 6, 7, 8]


def test_thawed_it_has_a_copy(store: Store, codec: Codec) -> None:
    """Reading does not cost coding it again. One that went on while it was frozen has none."""
    store.commit_turn(turn_of(BASE, [5, 6], session="x"))
    assert freeze(store, codec, "x", form="packed")
    assert thaw(store, codec, "x")
    assert pages(store)["x"].has_copy
    assert freeze(store, codec, "x")
    store.commit_turn(turn_of([*BASE, 5, 6, 7], [8], session="x"))  # as after a failed thaw
    assert thaw(store, codec, "x")
    assert not pages(store)["x"].has_copy
    assert store.session_ids("x").tolist() == [*BASE, 5, 6, 7, 8]


def test_a_damaged_copy_is_not_relied_on(store: Store, codec: Codec) -> None:
    """The tokens are still there when it is found out, and make another."""
    store.commit_turn(turn_of(BASE, [5, 6], session="x"))
    write_copy(store, codec, "x", form="packed")
    with store.state.catalog.transaction():
        store.state.catalog.run("UPDATE blobs SET blob = x'00'")
    assert freeze(store, codec, "x")
    history = cold_history(store, codec, "x")
    assert history is not None
    assert history.ids(0).tolist() == [*BASE, 5, 6]


def test_what_counts_as_having_rows(store: Store, codec: Codec) -> None:
    """Rows of what others begin with do not, unless the session ends there; those of a branch that
    is not the current one do."""
    ends = {}
    for name, more in (("a", [7, 8, 9]), ("b", [10, 11, 12])):
        store.commit_turn(turn_of([*BASE, *more], [5, 6], session=name))
        ends[name] = store.turns(name)[-1].reply_node
    store.commit_turn(turn_of([*BASE, 7, 9], [3], session="a"))  # the current branch
    write_all(store, store.node(ends["a"]))
    for name in ("a", "b"):
        write_copy(store, codec, name, form="packed")
    assert pages(store)["a"].has_rows
    assert not pages(store)["b"].has_rows
    for file in store.files():
        store.rows.drop_file(file)
    assert not pages(store)["a"].has_rows
    store.commit_turn(turn_of([*BASE, 10, 11, 12, 5, 6, 7], [3], session="longer"))
    write_copy(store, codec, "b", form="packed")
    with store.locked():
        write_all(store, store.node(ends["b"]))
    assert pages(store)["b"].has_rows


def test_what_resumes_without_prefill(store: Store) -> None:
    """Rows behind a gap are of no use, and where state checkpoints are needed, those beyond the
    last one; what two sessions share counts once."""
    own = {"a": [7, 8, 9], "b": [10, 11, 12, 13]}
    for name, more in own.items():
        store.commit_turn(turn_of([*BASE, *more], [5], session=name, n_cached=40 + len(more)))
        write_all(store, store.node(store.turns(name)[-1].reply_node))
    report = space(store.state, None)
    assert (report.tokens_resumable, report.tokens_to_prefill) == (47, 0)
    with store.locked():
        ends = {name: store.node(store.turns(name)[-1].reply_node) for name in own}
        base = ends["a"].parent
    assert base is not None
    report = space(store.state, lambda node: node is ends["b"])
    assert (report.tokens_resumable, report.tokens_to_prefill) == (44, 3)
    report = space(store.state, lambda node: node is base)
    assert (report.tokens_resumable, report.tokens_to_prefill) == (40, 7)
    assert base.file is not None
    store.rows.drop_file(base.file)
    assert ends["b"].has_rows
    report = space(store.state, None)
    assert (report.tokens_resumable, report.tokens_to_prefill) == (0, 47)
    assert report.token_bytes == store.state.warm_bytes / 4


def test_a_full_disk_costs_nothing(store: Store, codec: Codec) -> None:
    """No copy is written, none is half written, and what was said stays; with room it is coded."""
    chats = {f"s{n}": [*np.random.default_rng(n).integers(300, 440, 3000)] for n in range(3)}
    for name, prompt in chats.items():
        store.commit_turn(turn_of(prompt, [5, 6], session=name))
    assert write_copy(store, codec, "s0", form="packed")
    ((n_pages,),) = store.state.catalog.rows("PRAGMA page_count")
    store.state.catalog.rows(f"PRAGMA max_page_count = {n_pages}")
    with pytest.raises(DiskFull):
        write_copy(store, codec, "s2", form="packed")
    for name, prompt in chats.items():
        assert store.session_ids(name).tolist() == [*prompt, 5, 6]
    assert pages(store)["s0"].has_copy
    assert not pages(store)["s2"].has_copy
    store.state.catalog.rows(f"PRAGMA max_page_count = {n_pages + 1000}")
    for name in ("s1", "s2"):
        write_copy(store, codec, name, form="packed")
        assert freeze(store, codec, name)
    store.check_integrity(keys=True)
    assert store.verify().ok


def test_a_state_of_another_model_is_no_want_of_rows(tmp_path: Path) -> None:
    """A recurrent model has checkpoints and no rows; the daemon of another one freezes none of its chats."""
    ids = words(60, 1)
    with Store.open(tmp_path, OTHER_MODEL) as store:
        store.set_meta(CUT_META + store.state.digest.hex(), "end")
        store.commit_turn(turn_of(ids, [5, 6], session="s"))
        table = CheckpointTable(store.state)
        states = {len(ids): (np.zeros(64, np.uint8), False)}
        for node in table.attach(np.array(ids, np.int32), "local", states):
            table.write(node)
    with GgufVocabulary(bundled_model()) as vocabulary, Store.open(tmp_path, ROW_IDENTITY) as store:
        assert write_copy(store, Codec(vocabulary), "s", "local")
        assert pages(store)["s"].has_rows
        assert store.gc().bytes_freed == 0
    with Store.open(tmp_path, OTHER_MODEL) as store:
        (found,) = CheckpointTable(store.state).all()
        assert found.position == len(ids)
