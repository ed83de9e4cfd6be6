"""What conversations take after each layer, against sums over every token of every conversation."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, write_all

from towerd.slots.layout import NATIVE, KVLayout
from towerd.slots.slotfile import slot_file_bytes
from towerd.store import Store, Turn
from towerd.store.maintenance.footprint import session_footprints
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.shrink import Shrinker
from towerd.tokens import Ids

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
TOKEN_BYTES = 256
ID_BYTES = 4


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", replace(ROW_IDENTITY, layout=LAYOUT))


def tokens(n: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def say(store: Store, session: str, prompt: Ids, reply: Ids, *, has_rows: bool = True) -> Ids:
    """A turn with its rows on disk; its tokens."""
    n = len(prompt) + len(reply)
    node = store.commit_turn(Turn("local", session, prompt, reply, n, 1.0)).node
    if has_rows:
        write_all(store, node)
    return np.concatenate([prompt, reply])


def shrink(store: Store) -> None:
    shrinker = Shrinker(store, 0.0, time.time)
    shrinker.set_formats(LevelFormats.parse("0=q4h,1=q6h,2=q8h"), enabled=True)
    while True:
        time.sleep(shrinker.wait_s())
        if shrinker.step() is None and shrinker.wait_s() > 0:
            return


def conversations(store: Store) -> dict[str, Ids]:
    """Five chats with a common prompt, of which two have more in common and one is frozen-like: it has
    no rows."""
    prompt, more = tokens(500, 0), tokens(200, 1)
    said = {}
    for i in range(5):
        begin = np.concatenate([prompt, more]) if i < 2 else prompt
        said[f"s{i}"] = say(store, f"s{i}", begin, tokens(300 + i, 10 + i), has_rows=i < 4)
    return said


def prefixes(said: dict[str, Ids]) -> Counter[bytes]:
    """How many conversations have each token in common, a token being all that precedes it."""
    return Counter(ids[: n + 1].tobytes() for ids in said.values() for n in range(len(ids)))


def test_totals_are_those_of_all_tokens(store: Store) -> None:
    with store:
        said = conversations(store)
        n_once = len(prefixes(said))
        before = store.footprint()
        shrink(store)
        after = store.footprint()
        assert before.slot_bytes == sum(slot_file_bytes(LAYOUT, len(ids)) for ids in said.values())
        assert before.tokens == sum(map(len, said.values()))
        assert before.shared_bytes == before.levels_bytes == n_once * TOKEN_BYTES
        assert after.shared_bytes == after.levels_bytes + sum(
            each.tokens * TOKEN_BYTES - each.bytes for each in after.formats
        )
        assert {each.format for each in after.formats} == {NATIVE, "q4h", "q6h", "q8h"}
        assert after.transform_bytes == after.levels_bytes < 0.8 * before.levels_bytes
        files = sum(file.path.stat().st_size for file in store.files())
        assert after.text_bytes == ID_BYTES * n_once
        assert after.kept_bytes == files + after.text_bytes
        store.check_integrity()


def test_shares_of_conversations_add_up(store: Store) -> None:
    """Each has an equal share of what it has in common with others."""
    with store:
        said = conversations(store)
        shrink(store)
        total, users = store.footprint(), prefixes(said)
        infos = store.sessions()
        found = store.footprints(infos, with_public=True)
        for info, each in zip(infos, found, strict=True):
            ids = said[info.id]
            share = sum(1 / users[ids[: n + 1].tobytes()] for n in range(len(ids)))
            assert each is not None
            assert each.slot_bytes == slot_file_bytes(LAYOUT, len(ids))
            assert each.shared_bytes == pytest.approx(share * TOKEN_BYTES, abs=1)
        for key in ("slot_bytes", "shared_bytes", "levels_bytes", "kept_bytes", "text_bytes"):
            parts = sum(getattr(each, key) for each in found)
            assert parts == pytest.approx(getattr(total, key), abs=len(infos)), key
        (none,) = (each for info, each in zip(infos, found, strict=True) if info.id == "s4")
        assert none is not None
        assert none.kept_bytes < none.levels_bytes / 2  # its own tokens have no rows


def test_nothing_is_counted_of_an_empty_store(store: Store) -> None:
    with store:
        found = store.footprint()
        assert (found.slot_bytes, found.kept_bytes, list(found.formats)) == (0, 0, [])
        say(store, "one", tokens(50, 0), tokens(5, 1))
        store.delete_session("one")
        store.gc()
        assert store.footprint().kept_bytes == 0


def test_counts_of_formats_survive_a_restart(store: Store, tmp_path: Path) -> None:
    with store:
        conversations(store)
        shrink(store)
        before = store.footprint()
    with Store.open(tmp_path / "store", replace(ROW_IDENTITY, layout=LAYOUT)) as again:
        assert again.footprint() == before


def test_no_share_tells_how_many_use_a_public_base(store: Store) -> None:
    """A tenant is told what it has itself; the owner also its part of the base."""
    with store:
        base = tokens(200, 0)
        store.bases.add("b", base, "local", 0, True)
        for i in range(3):
            say(store, f"s{i}", base, tokens(40, 10 + i), has_rows=False)
        infos = store.sessions()
        for with_public, n in ((False, 40), (True, 40 + 200 / 3)):
            for each in store.footprints(infos, with_public=with_public):
                assert each is not None
                assert each.shared_bytes == round(n * TOKEN_BYTES)


def test_the_lock_is_free_between_two(store: Store) -> None:
    """Who reads some footprints and never the rest holds up no other thread."""
    say(store, "a", tokens(10, 0), tokens(10, 1))
    found = session_footprints(store.state, store.sessions() * 2, {}, {}, with_public=True)
    next(found)
    free = threading.Event()

    def take() -> None:
        with store.locked():
            free.set()

    threading.Thread(target=take, daemon=True).start()
    assert free.wait(10)
