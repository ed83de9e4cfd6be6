"""The path that a running request holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_tools import ROW_IDENTITY

from towerd.store import Store

IDS = np.arange(1, 101, dtype=np.int32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY) as opened:
        yield opened


def test_it_sees_every_change_of_its_path(store: Store) -> None:
    with store.hold(IDS, "a") as path:
        assert path.match().n == 0
        store.insert(IDS[:50], "a", [50])
        assert path.match() == store.match(IDS, "a")
        store.insert(IDS[:20], "a", [20])
        assert [node.p1 for node in path.match().nodes] == [20, 50]
        assert [node.p1 for node in path.match(10).nodes] == [20]
        assert path.match(10).n == 10
        assert path.match(20).nodes == path.match().nodes[:1]
        store.insert(IDS, "b", [100])
        assert path.match().n == 50
        store.insert(IDS, "public", [100])
        assert path.match().n == 100


def test_nothing_on_it_is_collected(store: Store) -> None:
    store.insert(IDS[:60], "a", [20, 60])
    with store.hold(IDS[:40], "a") as path:
        assert path.match().n == 40
        assert store.gc().segments == 0
        assert store.holds_any(store.nodes())
    assert not store.holds_any(store.nodes())
    assert store.stats()["paths_held"] == 0
    assert store.gc().segments == 2


def test_a_late_look_does_not_hold_a_released_path(store: Store) -> None:
    """A client may leave while its request is looked up on another thread."""
    store.insert(IDS, "a", [100])
    path = store.hold(IDS, "a")
    with store.locked():
        looking = threading.Thread(target=path.match)
        looking.start()
        path.release()
    looking.join()
    assert store.stats()["paths_held"] == 0


def test_it_tells_how_the_newest_stored_tower_continues_where_it_ends(store: Store) -> None:
    """Across nodes, within the request's scope and public towers."""
    store.insert(IDS[:60], "a", [60])
    prompt = np.concatenate([IDS[:40], IDS[:5]])
    with store.hold(prompt, "a") as path:
        assert path.beyond(40, 9).tolist() == IDS[40:49].tolist()
        assert path.beyond(40, 99).tolist() == IDS[40:60].tolist()
        assert path.beyond(39, 9).tolist() == [], "it does not leave a tower there"
        store.insert(np.concatenate([IDS[:45], IDS[90:]]), "a", [55])
        assert path.beyond(40, 9).tolist() == [*IDS[40:45], *IDS[90:94]]
        store.insert(prompt, "a", [45])
        assert path.beyond(45, 9).tolist() == [], "none continues"
    with store.hold(prompt, "b") as path:
        assert path.beyond(0, 9).tolist() == []
        store.insert(IDS[:40], "public", [40])
        store.insert(IDS[:60], "a", [60])
        assert path.beyond(40, 9).tolist() == [], "what another tenant said"
        store.insert(IDS[:50], "b", [50])
        assert path.beyond(40, 9).tolist() == IDS[40:49].tolist()
