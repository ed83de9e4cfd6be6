"""Levels by use: which segments several conversations share, and the formats that follow."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, formats_of, write_all

from towerd.slots.layout import NATIVE, KVLayout
from towerd.store import FormatRequest, Node, Store, Turn
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.sharing import SHARED_BY, shared_levels
from towerd.tiers.shrink import SINKS, TAIL, Shrinker, without_short
from towerd.tokens import Ids

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
TABLE = LevelFormats.parse("0=q4h,1=q6h,2=q8h")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with opened(root) as found:
        yield found


def opened(root: Path) -> Store:
    return Store.open(root, replace(ROW_IDENTITY, layout=LAYOUT))


def tokens(n: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def say(store: Store, session: str, *parts: Ids) -> Node:
    """A turn of a session: the parts but the last are its prompt. Returns the tower's end."""
    prompt, reply = np.concatenate(parts[:-1]), parts[-1]
    n = len(prompt) + len(reply)
    return store.commit_turn(Turn("local", session, prompt, reply, n, 1.0)).node


def shrink(store: Store) -> int:
    """Encode all that is to be encoded; how many files were."""
    shrinker = Shrinker(store, 0.0, time.time)
    shrinker.set_formats(TABLE, enabled=True)
    n = 0
    while True:
        time.sleep(shrinker.wait_s())
        if shrinker.step() is not None:
            n += 1
        elif shrinker.wait_s() > 0:
            return n


def format_at(node: Node, position: int) -> str:
    """The stored format of one position on a node's path."""
    at = next(each for each in node.path() if each.p0 <= position < each.p1)
    assert at.file is not None
    return next(run.format for run in at.file.runs if position - at.file.p0 < run.end)


def test_levels_are_those_of_brute_force(store: Store, root: Path) -> None:
    """Counted by comparing the tokens of every pair of a conversation and a segment."""
    rng = np.random.default_rng(5)
    texts = {}
    for i in range(40):
        parts = [tokens(20, int(rng.integers(2))), tokens(20, int(rng.integers(4)))]
        parts += [tokens(20, 100 + int(rng.integers(30))), tokens(5, 1000 + i)]
        say(store, f"s{i}", *parts)
        texts[f"s{i}"] = np.concatenate(parts)
    first, *_ = texts
    store.delete_session(first)
    del texts[first]
    for each in (store, None):
        if each is None:  # after a restart
            store.close()
        with opened(root) if each is None else store as again:
            expected = {}
            for node in again.nodes():
                ids = node.prefix_ids()
                n = sum(np.array_equal(text[: len(ids)], ids) for text in texts.values())
                if n >= min(SHARED_BY):
                    expected[node.id] = next(i for i, least in enumerate(SHARED_BY) if n >= least)
            assert set(expected.values()) == {0, 1}
            assert shared_levels(again) == expected


def test_replies_written_again_are_one_conversation(store: Store) -> None:
    """A person who asks for the same reply eight times shares nothing."""
    prompt = tokens(300, 0)
    for i in range(8):
        say(store, "one", prompt, tokens(20, 10 + i))
    assert shared_levels(store) == {}


def test_a_frozen_session_shares_what_its_blob_continues(store: Store) -> None:
    prompt = tokens(300, 0)
    ends = [say(store, f"s{i}", prompt, tokens(20, 10 + i)) for i in range(2)]
    top = ends[0].path()[0]
    assert shared_levels(store)[top.id] == 1
    with store.locked():
        catalog = store.state.catalog
        with catalog.transaction():
            catalog.run("UPDATE turns SET prompt_node = NULL, reply_node = NULL")
            for pk in (1, 2):
                catalog.insert(
                    "cold", session=pk, base=top.id, n_base=top.p1, frozen=1,
                    turns=b"", marks=b"", digest=bytes(16),
                )  # fmt: skip
    assert shared_levels(store) == {top.id: 1}


def test_what_is_shared_takes_the_format_of_its_level(store: Store) -> None:
    """Four chats share a prompt, two of them more; the rest of each is its own."""
    prompt, more = tokens(400, 0), tokens(300, 1)
    ends = [say(store, f"s{i}", prompt, more, tokens(300, 10 + i)) for i in range(2)]
    ends += [say(store, f"s{i}", prompt, tokens(600, 10 + i)) for i in range(2, 4)]
    for end in ends:
        write_all(store, end)
    shrink(store)
    for i, end in enumerate(ends):
        assert format_at(end, SINKS - 1) == NATIVE
        assert {format_at(end, at) for at in (SINKS, 399)} == {"q4h"}
        assert format_at(end, 500) == ("q6h" if i < 2 else "q8h")
        assert format_at(end, end.p1 - TAIL - 1) == "q8h"
        assert format_at(end, end.p1 - TAIL) == NATIVE


def test_what_comes_to_be_shared_is_encoded_once_more(store: Store) -> None:
    """Stored as a private chat's first; then others join it. It never takes more bytes again."""
    prompt = tokens(400, 0)
    first = say(store, "s0", prompt, tokens(300, 10))
    write_all(store, first)
    assert shrink(store) == 1
    assert format_at(first, 200) == "q8h"
    seen = []
    for i in range(1, 4):
        end = say(store, f"s{i}", prompt, tokens(300, 10 + i))
        seen.append(shrink(store) and format_at(end, 200))
    assert seen == ["q6h", 0, "q4h"]
    assert format_at(first, 450) == "q8h"
    for i in range(4):
        store.delete_session(f"s{i}")
    assert shrink(store) == 0


def test_short_runs_join_their_neighbour() -> None:
    """A run of few tokens is stored with the one beside it that takes more bits, if there is one."""
    ends = [(4, 30, "q4h"), (30, 500, "q8h"), (500, 540, "q6h"), (600, 620, "q4h")]
    found = without_short([FormatRequest(*each) for each in ends])
    assert [(each.p0, each.p1, each.format) for each in found] == [
        (4, 30, "q8h"), (30, 500, "q8h"), (500, 540, "q8h"), (600, 620, "q4h"),
    ]  # fmt: skip
    assert all(a.p1 <= b.p0 for a, b in itertools.pairwise(found))


def test_a_shared_beginning_of_a_few_tokens_has_no_run_of_its_own(store: Store) -> None:
    """What every chat template begins with."""
    ends = [say(store, f"s{i}", tokens(30, 0), tokens(400, 10 + i)) for i in range(5)]
    for end in ends:
        write_all(store, end)
    shrink(store)
    assert formats_of(store, ends[0].path()[0])[-1] == (30 - SINKS, "q8h")
