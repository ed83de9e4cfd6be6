"""A turn of a long chat costs what it adds: where the tower ends is remembered, not walked to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from store_tools import ids_of, turn_of

from towerd.store import Node, Store
from towerd.store.segments.segment_header import key_hash as key_hash_of
from towerd.store.sessions.sessions import SessionTable
from towerd.store.tree import tower_ends, tree


class Watch:
    """What look-ups walk, and what keys are computed from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_walked = self.n_hashed_anew = 0
        walk, key_hash = tree.walk, key_hash_of

        def walked(node: Node, ids: bytes, *args: Any) -> tuple[Node, int]:
            last, n = walk(node, ids, *args)
            self.n_walked += n - node.p1
            return last, n

        def hashed(*args: Any) -> Any:
            self.n_hashed_anew += 1
            return key_hash(*args)

        monkeypatch.setattr(tree, "walk", walked)
        monkeypatch.setattr("towerd.store.state.state.key_hash", hashed)

    def tokens(self) -> int:
        """Tokens walked since it was asked last."""
        n, self.n_walked = self.n_walked, 0
        return n


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def talk(store: Store, ids: list[int], n_turns: int, scope: str = "local") -> None:
    for turn in range(n_turns):
        ids += [1000 + turn, 3, 4, 5, 6]
        store.commit_turn(turn_of(ids, [7, 8, 9], scope=scope))
        ids += [7, 8, 9]


@pytest.mark.parametrize("scope", ["local", "alice"])
def test_a_turn_is_walked_not_the_chat(store: Store, watch: Watch, scope: str) -> None:
    """Below a base that all share, too. Keys of the whole prefix are made from the last ones."""
    base = np.arange(40, dtype=np.int32)
    store.bases.add("base", base, "local", 0, True)
    ids = base.tolist()
    talk(store, ids, 200, scope)
    watch.tokens()
    watch.n_hashed_anew = 0
    for _ in range(5):
        talk(store, ids, 1, scope)
        assert watch.tokens() < 4 * len(base) + 40
    assert watch.n_hashed_anew == 0
    store.check_integrity(keys=True)


def test_an_edit_is_walked_from_where_it_parts(store: Store, watch: Watch) -> None:
    ids: list[int] = []
    talk(store, ids, 200)
    watch.tokens()
    edited = [*ids[:1200], 77]
    assert store.match(np.array(edited, np.int32), "local").n == 1200
    assert watch.tokens() < 20
    talk(store, edited, 1)
    store.check_integrity(keys=True)
    assert store.match(np.array(ids, np.int32), "local").n == len(ids) - 1
    assert watch.tokens() < 60


def test_other_tenants_do_not_use_it(store: Store) -> None:
    """The same tokens of another tenant are other segments."""
    ids: list[int] = []
    talk(store, ids, 60, "alice")
    assert store.match(np.array(ids, np.int32), "bob").n == 0
    talk(store, list(ids[:300]), 1, "bob")
    assert store.match(np.array(ids, np.int32), "bob").n == 300
    assert {n.scope for n in store.match(np.array(ids, np.int32), "alice").nodes} == {"alice"}


def test_what_was_removed_is_not_found(store: Store) -> None:
    ids: list[int] = []
    talk(store, ids, 60)
    (session,) = store.sessions("local")
    store.delete_session(session.id, "local")
    store.gc()
    assert store.match(np.array(ids, np.int32), "local").n == 0
    talk(store, ids, 1)
    store.check_integrity(keys=True)


def test_a_failed_turn_is_not_remembered(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction is taken back after the tree had grown, and the end with it."""
    ids: list[int] = []
    talk(store, ids, 60)

    def failing(*args: Any) -> None:
        raise RuntimeError("planned")

    with monkeypatch.context() as patch:
        patch.setattr(SessionTable, "record", failing)
        with pytest.raises(RuntimeError, match="planned"):
            store.commit_turn(turn_of([*ids, 50, 51], [52, 53]))
    assert store.match(ids_of(*ids, 50, 51), "local").n == len(ids) - 1
    store.check_integrity(keys=True)
    talk(store, ids, 2)
    store.check_integrity(keys=True)


def test_ends_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chats used last have one each, within the bytes."""
    monkeypatch.setattr(tower_ends, "BYTES_MAX", 4 * 2000)
    for chat in range(12):
        talk(store, [5000 + chat], 50)
    found = store.state.tree.tower_ends
    assert 0 < len(found) <= 6
    assert not list(found.problems())
    store.check_integrity(keys=True)
