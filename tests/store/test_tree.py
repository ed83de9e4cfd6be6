"""Matching, insertion and splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from store_tools import OTHER_TOKENIZER, ROW_IDENTITY, ids_of, make_hot

from towerd.errors import NotFound
from towerd.store import Node, SegmentFile, Store
from towerd.store.tree.tree import Listener


def test_empty_store_matches_nothing(store: Store) -> None:
    """No tokens, no nodes."""
    assert store.match(ids_of(1, 2), "local").n == 0
    assert store.match(ids_of(), "local").nodes == ()


def test_insert_puts_ends_exactly(store: Store) -> None:
    """A node ends at each requested end, and inserting again changes nothing."""
    ids = np.arange(20, dtype=np.int32)
    path = store.insert(ids, "local", [5, 12, 20])
    assert [node.p1 for node in path] == [5, 12, 20]
    assert store.insert(ids, "local", [5, 12, 20]) == path
    assert [node.p1 for node in store.insert(ids, "local", [7])] == [5, 7]
    assert [node.p1 for node in path[-1].path()] == [5, 7, 12, 20]
    np.testing.assert_array_equal(path[-1].prefix_ids(), ids)
    store.check_integrity(keys=True)


def test_split_keeps_the_lower_nodes_identity(store: Store) -> None:
    """The upper part is new; the lower keeps id, object, pins and key."""
    (leaf,) = store.insert(np.arange(10, dtype=np.int32), "local", [10])
    store.pins.add(leaf.id)
    upper, branch = store.insert(ids_of(0, 1, 2, 9, 9), "local", [5])
    assert (upper.p0, upper.p1) == (0, 3)
    assert (leaf.p0, leaf.p1) == (3, 10)
    assert leaf.parent is upper
    assert branch.parent is upper
    assert upper.pinned
    assert leaf.pinned
    assert not branch.pinned
    assert store.node(leaf.id) is leaf
    store.check_integrity(keys=True)


def test_partial_match(store: Store) -> None:
    """The last node may be matched in part, and tokens are compared, not hashes."""
    store.insert(np.arange(10, dtype=np.int32), "local", [4, 10])
    match = store.match(ids_of(0, 1, 2, 3, 4, 5, 99), "local")
    assert match.n == 6
    assert [node.p1 for node in match.nodes] == [4, 10]


def test_scopes_are_separate_unless_public(store: Store) -> None:
    """One tenant never sees another's tokens; every tenant sees public ones."""
    ids = np.arange(8, dtype=np.int32)
    store.insert(ids, "alice", [8])
    assert store.match(ids, "bob").n == 0
    store.insert(ids[:6], "public", [6])
    assert store.match(ids, "bob").n == 6
    assert store.match(ids, "alice").n == 8
    (public,) = store.insert(ids[:6], "public", [6])
    path = store.insert(ids, "bob", [8])
    assert path[0] is public
    assert [node.scope for node in path] == ["public", "bob"]
    assert store.match(ids, "public").n == 6
    assert store.match(ids, "carol").n == 6
    store.check_integrity(keys=True)


def test_scope_and_ids_cannot_be_confused(store: Store) -> None:
    """Odd ids and scopes work: negative tokens, non-ASCII scopes, shared first tokens."""
    for scope in ("a", "é", "aa"):
        store.insert(ids_of(-1, 2**31 - 1, 0), scope, [1, 3])
    assert len(store.state.tree.root.children) == 3
    store.check_integrity(keys=True)


@pytest.mark.parametrize("ends", [[], [0], [3, 3], [4, 2], [6]])
def test_impossible_ends_are_refused(store: Store, ends: list[int]) -> None:
    """Ends must ascend from 1 to the number of ids."""
    with pytest.raises(ValueError, match="ends"):
        store.insert(np.arange(5, dtype=np.int32), "local", ends)


def test_float_ids_are_refused(store: Store) -> None:
    """Ids are integers."""
    with pytest.raises(ValueError, match="integers"):
        store.match(np.zeros(3), "local")  # type: ignore[arg-type]


def test_reopen_finds_the_same_tree(root: Path) -> None:
    """Ids, splits, pins and flushed uses survive; another tokenizer sees none of it."""
    with Store.open(root, ROW_IDENTITY, clock=lambda: 7.0) as store:
        leaf = store.insert(np.arange(10, dtype=np.int32), "local", [4, 10])[-1]
        store.insert(ids_of(0, 1, 7), "public", [3])
        store.pins.add(leaf.id)
        hits = leaf.hits
    with Store.open(root, OTHER_TOKENIZER) as store:
        assert store.nodes() == []
        store.insert(ids_of(5, 6), "local", [2])
    with Store.open(root, ROW_IDENTITY) as store:
        again = store.node(leaf.id)
        assert (again.p0, again.p1, again.hits, again.last_used) == (4, 10, hits, 7.0)
        assert again.pinned
        assert [node.id for node in store.pins.listing()] == [leaf.id]
        assert len(store.nodes()) == 3
        store.check_integrity(keys=True)


def test_unpin(store: Store) -> None:
    """Pins do not add up, and only what is pinned can be unpinned."""
    upper, lower = store.insert(ids_of(1, 2, 3), "local", [1, 3])
    store.pins.add(lower.id)
    store.pins.add(lower.id)
    with pytest.raises(NotFound):
        store.pins.remove(upper.id)
    store.pins.remove(lower.id)
    assert not upper.pinned
    with pytest.raises(NotFound):
        store.pins.remove(lower.id)
    with pytest.raises(NotFound):
        store.pins.add(999)
    store.check_integrity()


class Heard(Listener):
    """Writes down what it is told, by ids."""

    def __init__(self) -> None:
        self._events: list[tuple[str | int, ...]] = []

    def taken(self) -> list[tuple[str | int, ...]]:
        """What was told since the last time."""
        events, self._events = self._events, []
        return events

    def split(self, lower: Node, upper: Node) -> None:
        assert lower.parent is upper
        self._events.append(("split", lower.id, upper.id))

    def removed(self, node: Node) -> None:
        self._events.append(("removed", node.id))

    def became_hot(self, nodes: Sequence[Node]) -> None:
        self._events.append(("hot", *(node.id for node in nodes)))

    def left_hot(self, node: Node) -> None:
        self._events.append(("cool", node.id))

    def became_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        self._events.append(("warm", file.id))

    def left_warm(self, file: SegmentFile, nodes: Sequence[Node]) -> None:
        after = file.successor
        self._events.append(("gone", file.id, 0 if after is None else after.id))


def test_listeners_hear_of_every_change(store: Store) -> None:
    """In the order in which they happen, rows in memory and on disk included."""
    heard = Heard()
    store.listen(heard)
    (leaf,) = store.insert(ids_of(1, 2, 3), "local", [3])
    upper = store.insert(ids_of(1, 2, 3), "local", [1])[0]
    assert heard.taken() == [("split", leaf.id, upper.id)]
    make_hot(store, leaf)
    file = store.rows.write([upper, leaf])
    store.rows.drop_hot(upper)
    store.rows.drop_hot(upper)
    assert heard.taken() == [("hot", upper.id, leaf.id), ("warm", file.id), ("cool", upper.id)]
    new = store.rows.reencode(file, [])
    assert new is not None
    assert heard.taken() == [("gone", file.id, new.id), ("warm", new.id)]
    store.pins.add(upper.id)
    store.gc()
    removed, gone, warm = heard.taken()
    cut = warm[1]  # the file without the leaf's tokens
    assert (removed, gone) == (("removed", leaf.id), ("gone", new.id, cut))
    store.pins.remove(upper.id)
    store.gc()
    assert heard.taken() == [("removed", upper.id), ("gone", cut, 0)]
    assert leaf.removed


def test_failed_insert_leaves_no_trace(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside the transaction takes back splits and additions in memory too."""
    path = store.insert(np.arange(10, dtype=np.int32), "local", [10])
    before = [(node.id, node.p0, node.p1) for node in store.nodes()]
    catalog, calls = store.state.catalog, 0
    run = catalog.run

    def failing(sql: str, params: object = ()) -> int:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("planned")
        return run(sql, params)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "run", failing)
        with pytest.raises(RuntimeError, match="planned"):
            store.insert(ids_of(0, 1, 2, 3, 50, 51), "local", [2, 3, 6])
    assert [(node.id, node.p0, node.p1) for node in store.nodes()] == before
    assert store.match(np.arange(10, dtype=np.int32), "local").nodes == tuple(path)
    store.check_integrity(keys=True)
