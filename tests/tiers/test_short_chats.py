"""What stays native of short chats: as few positions as calibration asks for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, check_rows, formats_of, write_all

from towerd.slots.layout import NATIVE, KVLayout
from towerd.store import Node, Store, Turn
from towerd.tiers.formats.calibration import ALL_NATIVE, FormatChoice, FormatCost, Table
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.formats.format_search import ENDS, choose_ends
from towerd.tiers.shrink import DEFAULT_ENDS, SHORT_TOKENS, SINKS, TAIL, NativeEnds, Shrinker
from towerd.tokens import Ids

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
TABLE = LevelFormats(("q4h", "q6h", "q8h"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", replace(ROW_IDENTITY, layout=LAYOUT)) as opened:
        yield opened


def ids_of(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def stored(store: Store, ids: Ids, *ends: int) -> Node:
    """The last segment of a path that has all its rows in files."""
    node = store.insert(ids, "local", ends or [len(ids)])[-1]
    write_all(store, node)
    return node


def shrink(store: Store, ends: NativeEnds) -> None:
    """Encode all that is to be encoded."""
    shrinker = Shrinker(store, 0.0, lambda: time.time() + 60)
    shrinker.set_formats(TABLE, enabled=True, ends=ends)
    while shrinker.step() is not None or shrinker.wait_s() == 0:
        time.sleep(shrinker.wait_s())


@pytest.mark.parametrize("ends", ENDS, ids=lambda each: f"{each.sinks}-{each.tail}")
def test_a_short_chat_keeps_these_ends(store: Store, ends: NativeEnds) -> None:
    short = stored(store, ids_of(SHORT_TOKENS))
    long = stored(store, ids_of(SHORT_TOKENS + 1, 1))
    shrink(store, ends)
    for node, tail in ((short, ends.tail), (long, TAIL)):
        n = node.p1 - ends.sinks - tail
        runs = [(ends.sinks, NATIVE), (n, "q8h"), (tail, NATIVE)]
        assert formats_of(store, node) == [each for each in runs if each[0]]
        assert check_rows(store, node) == node.p1


def test_what_chats_share_keeps_the_ends_that_it_was_measured_with(store: Store) -> None:
    shared = ids_of(200)
    chats = [np.concatenate([shared, ids_of(100, 1 + i)]) for i in range(2)]
    for i, chat in enumerate(chats):
        turn = Turn("local", f"chat {i}", chat[:200], chat[200:], 300, 1.0)
        write_all(store, store.commit_turn(turn).node)
    shrink(store, NativeEnds(0, 0))
    for chat in chats:
        base, own = store.match(chat, "local").nodes
        assert formats_of(store, base) == [(SINKS, NATIVE), (172 - SINKS, "q6h"), (28, NATIVE)]
        assert formats_of(store, own) == [(100, "q8h")]


class Fake:
    """Costs of short chats by their native ends."""

    n_max = 16

    def __init__(self, excess: dict[NativeEnds, float]) -> None:
        self.excess = excess
        self.asked: list[Table] = []

    def costs(
        self, tables: Sequence[Table], n: int, ends: NativeEnds = DEFAULT_ENDS
    ) -> list[FormatCost]:
        self.asked += tables
        return [FormatCost(0.003, self.excess[ends], 0.0001, 1.0, 8.0, n) for _ in tables]


def choice_of(table: Table) -> FormatChoice:
    return FormatChoice(table, FormatCost(0.004, 0.001, 0.0, 1.0, 8.0, 64), 5.0, 0.002)


@pytest.mark.parametrize("n_over", range(len(ENDS) + 1))
def test_the_fewest_within_the_bound_are_chosen(n_over: int) -> None:
    """Of chats in the format of what one alone has."""
    costs = [0.01] * n_over + [0.001] * (len(ENDS) - n_over)
    meter = Fake(dict(zip(ENDS, costs, strict=True)))
    found = choose_ends(meter, choice_of(("q4h", "q4h", "q6h")))
    assert found.ends == (*ENDS, DEFAULT_ENDS)[n_over]
    assert found.whole is not None
    assert found.whole.excess == costs[0]
    assert set(meter.asked) == {("q6h",) * 3}


def test_native_chats_are_not_measured() -> None:
    meter = Fake(dict.fromkeys(ENDS, 0.0))
    assert choose_ends(meter, choice_of(ALL_NATIVE)) == choice_of(ALL_NATIVE)
    assert not meter.asked
    found = choose_ends(meter, choice_of(("q4h", "q4h", NATIVE)))
    assert (found.ends, found.whole is None) == (DEFAULT_ENDS, False)
