"""A power cut right after a chat came from elsewhere, and right after one was erased."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
from simulated_disk import PowerLost, SimulatedDisk
from simulation import codec, edges_on
from store_tools import ROW_IDENTITY

from towerd import tower_file
from towerd.cold.coding import SessionModel
from towerd.store import Store
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.files import durable
from towerd.store.sessions.history import History, PastTurn
from towerd.transfer import import_session

CUTS = 9
OTHERS = TokenizerIdentity("never served here")
WORDS = KeptVocabulary([b"word %d " % id for id in range(9)], [b""] * 9)
IDS = (1, 2, 3)


def chat(name: str) -> bytes:
    """A file with a chat of another tokenizer."""
    turn = PastTurn(None, 0, 0, 1, 2, 0, 1.0, 1.0, True)
    history = History(name, True, "", 1.0, 1.0, 0, (turn,), (), np.array(IDS, np.int32))
    source = tower_file.Source("other", "", b"8 bytes!", 9, OTHERS)
    return tower_file.write(tower_file.TowerFile(source, history, WORDS))


def take_in(store: Store) -> None:
    import_session(store, SessionModel("here", "hash", codec()), chat("theirs"), "local")


def after_cuts(root: Path, then: Callable[[Store], None]) -> Iterator[Store]:
    """A store in which `then` was done, after each of some power cuts right behind it."""
    root.mkdir()
    (root / "0").mkdir()
    ticks = count(1)
    disk = SimulatedDisk(root / "0", None)
    with edges_on(disk, random.Random(0), lambda: float(next(ticks))):
        store = Store.open(root / "0", ROW_IDENTITY)
        then(store)
        disk.is_off = True
        with suppress(Exception, PowerLost):  # of a process that is gone: only descriptors
            store.close()
    for seed in range(1, CUTS):
        disk.after_cut(root / str(seed), random.Random(seed))
        with Store.open(root / str(seed), ROW_IDENTITY) as store:
            yield store


def test_a_chat_that_was_brought_along_can_be_read(tmp_path: Path) -> None:
    for store in after_cuts(tmp_path / "stores", take_in):
        ids, digest = store.foreign.session_ids("theirs", "local")
        assert store.vocabularies.read(digest, "local").text(ids) == "word 1 word 2 word 3 "


def test_words_that_were_erased_stay_so(tmp_path: Path) -> None:
    def erase(store: Store) -> None:
        take_in(store)
        store.foreign.delete("theirs", "local")
        store.gc()

    for store in after_cuts(tmp_path / "stores", erase):
        assert not list(store.vocabularies.folder.glob("*.words"))


def test_what_was_set_aside_and_erased_stays_so(tmp_path: Path) -> None:
    def erase(store: Store) -> None:
        take_in(store)
        of = store.state.directory
        with durable.new_file(of.tmp / "half", of.quarantine / "1-catalog.sqlite") as fd:
            os.write(fd, b"a conversation")
        store.foreign.delete("theirs", "local")
        store.gc()

    for store in after_cuts(tmp_path / "stores", erase):
        assert not list(store.state.directory.quarantine.iterdir())
