"""The record of a deletion is lost, and a later session has the row id of the deleted one, which was another
tenant's: neither has anything of the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from encrypted_stores import chain_of, connect
from store_tools import ROW_IDENTITY, turn_of
from ten_sessions import DATABASE, flip, remove

from towerd.codec import Codec
from towerd.cold import freeze, thaw, write_copy
from towerd.errors import NotFound, TokensLost
from towerd.store import Store
from towerd.store.catalog.journal.frames import HEAD_BYTES
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.sessions.conversations import ContextItem, ResponseContext
from towerd.store.sessions.responses import NewResponse

BOTH_KINDS = True
SECRET = list(range(30))
MINE = list(range(30, 45))
CODEC = Codec(KeptVocabulary([b"a"] * 60, [b""] * 60))


def commit(
    store: Store, ids: list[int], name: str, tenant: str, n_cached: int | None = None
) -> None:
    store.commit_turn(turn_of(ids[:-1], ids[-1:], session=name, scope=tenant, n_cached=n_cached))


def respond(store: Store, name: str, session: str, tenant: str) -> None:
    item = ContextItem(f"q-{name}", b'{"id": "q-%s"}' % name.encode())
    body = b'{"id": "%s", "output": []}' % name.encode()
    new = NewResponse(tenant, name, ResponseContext(), [item], [], body)
    assert store.keep_response(new, session, tenant)


def commit_secret(store: Store) -> None:
    for n in (10, 20, 30):
        commit(store, SECRET[:n], "secret", "alice")


def freeze_secret(store: Store) -> None:
    commit_secret(store)
    freeze(store, CODEC, "secret", "alice", form="packed")


def copy_secret(store: Store) -> None:
    commit_secret(store)
    assert write_copy(store, CODEC, "secret", "alice", form="packed")


def delete_secret(store: Store) -> None:
    store.delete_session("secret", "alice")


def commit_mine(store: Store) -> None:
    commit(store, MINE, "mine", "bob")


def damage_records(
    root: Path,
    kept: Callable[[Store], object],
    lost: Callable[[Store], object],
    then: Callable[[Store], object],
) -> None:
    """The journal has what `kept` and `then` did, and nothing of `lost`."""
    with Store.open(root, ROW_IDENTITY) as store:
        kept(store)
        store.flush()
        before = chain_of(root).last
        lost(store)
        after = chain_of(root).last
        then(store)
        store.flush()
    for record in chain_of(root).records:
        if before < record.seq <= after:
            flip(record.path, record.start + HEAD_BYTES + 5)


def is_only_mine(store: Store) -> None:
    """bob has his tokens, in one turn, and nothing is left of what alice deleted."""
    assert store.session_ids("mine", "bob").tolist() == MINE
    assert len(store.turns("mine", "bob")) == 1
    assert [(each.id, each.scope) for each in store.sessions()] == [("mine", "bob")]
    assert store.verify().problems == ()


@pytest.mark.parametrize("kept", [commit_secret, freeze_secret, copy_secret])
def test_a_deleted_conversation_is_not_the_next_tenants(
    root: Path, kept: Callable[[Store], None]
) -> None:
    damage_records(root, kept, delete_secret, commit_mine)
    remove(DATABASE)(root)
    with Store.open(root, ROW_IDENTITY) as store:
        is_only_mine(store)
        assert store.cold.coded(0, 10) == []


def test_a_conversation_that_was_frozen_since(root: Path) -> None:
    """The record of its blob does not say whose it is: that of its freezing does, and it is kept."""

    def replaced(store: Store) -> None:
        delete_secret(store)
        commit_mine(store)

    def frozen(store: Store) -> None:
        freeze(store, CODEC, "mine", "bob", form="packed")

    damage_records(root, commit_secret, replaced, frozen)
    remove(DATABASE)(root)
    with Store.open(root, ROW_IDENTITY) as store:
        assert thaw(store, CODEC, "mine", "bob")
        is_only_mine(store)


def test_a_copy_of_one_that_nothing_else_tells_of(root: Path) -> None:
    """The deleted conversation is back without it."""

    def replaced(store: Store) -> None:
        delete_secret(store)
        commit_mine(store)

    def copied(store: Store) -> None:
        assert write_copy(store, CODEC, "mine", "bob", form="packed")

    damage_records(root, commit_secret, replaced, copied)
    remove(DATABASE)(root)
    with Store.open(root, ROW_IDENTITY) as store:
        assert store.session_ids("secret", "alice").tolist() == SECRET
        assert store.cold.coded(0, 10) == []


def test_the_last_turn_before_the_lost_one_is_ones_own(root: Path) -> None:
    """A conversation that lost its tokens does not end with what was left under its row id."""
    beginning = list(range(100, 120))

    def kept(store: Store) -> None:
        commit(store, [7, 8, 9, 10] * 3, "short", "alice")
        commit_secret(store)

    def lost(store: Store) -> None:
        delete_secret(store)
        store.delete_session("short", "alice")
        commit(store, beginning, "other", "bob")

    damage_records(
        root, kept, lost, lambda store: commit(store, [*beginning, 50, 51, 52], "mine", "bob")
    )
    remove(DATABASE)(root)
    with Store.open(root, ROW_IDENTITY) as store:
        assert len(store.turns("mine", "bob")) == 1
        with pytest.raises(TokensLost):
            store.session_ids("mine", "bob")


def test_responses_go_with_a_deleted_conversation(root: Path) -> None:
    def kept(store: Store) -> None:
        commit_secret(store)
        respond(store, "hers", "secret", "alice")

    def then(store: Store) -> None:
        commit_mine(store)
        respond(store, "his", "mine", "bob")

    damage_records(root, kept, delete_secret, then)
    remove(DATABASE)(root)
    with Store.open(root, ROW_IDENTITY) as store:
        is_only_mine(store)
        with pytest.raises(NotFound):
            store.responses.body("alice", "hers")
        assert store.responses.body("bob", "his")
        assert store.state.catalog.rows("SELECT name, session FROM responses") == [("his", 1)]


@pytest.mark.parametrize("table", ["sessions", "turns", "segments", "meta"])
@pytest.mark.parametrize("n_cached", [0, None])
def test_a_damaged_catalog_beside_it(root: Path, table: str, n_cached: int | None) -> None:
    """It lacks a row of the new conversation, or another one, and the journal all of it: whichever of the
    two conversations there is has its own tokens, or none."""

    def kept(store: Store) -> None:
        store.set_meta("mark", "1")
        commit_secret(store)

    def lost(store: Store) -> None:
        delete_secret(store)
        commit(store, MINE, "mine", "bob", n_cached)

    damage_records(root, kept, lost, lambda store: store.set_meta("mark", "2"))
    with closing(connect(root)) as db:
        last = f"(SELECT max(rowid) FROM {table})" if table != "meta" else "'mark'"
        key = "key" if table == "meta" else "rowid"
        db.execute(f"UPDATE {table} SET seal = seal + 1 WHERE {key} = {last}")
    with Store.open(root, ROW_IDENTITY) as store:
        found = {each.id: each.scope for each in store.sessions()}
        for id, tenant, own in (("secret", "alice", SECRET), ("mine", "bob", MINE)):
            if id in found:
                assert found[id] == tenant
                assert len(store.turns(id, tenant)) <= (3 if id == "secret" else 1)
                try:
                    ids = store.session_ids(id, tenant).tolist()
                except TokensLost:
                    ids = []
                assert ids == own[: len(ids)]
        assert len(found) == 1
        assert table == "sessions" or "mine" in found
