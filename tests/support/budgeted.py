"""Chats whose rows are many times what may be written a day; as a program, it kills itself at the end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, rows_of

from towerd.slots.layout import KVLayout
from towerd.store import Node, Store, Turn
from towerd.tiers.formats.fidelity import LevelFormats
from towerd.tiers.manager import Tiers
from towerd.tokens import Ids

LAYOUT = KVLayout((plane_of("f16", 4096),), (plane_of("f16", 4096),))
CHAT_TOKENS = 400
CHAT_BYTES = CHAT_TOKENS * LAYOUT.token_bytes


def opened(root: Path, clock: Callable[[], float] = time.time) -> Store:
    return Store.open(root, replace(ROW_IDENTITY, layout=LAYOUT), clock=clock)


def tiers_of(
    store: Store, hot_bytes: int, wait_s: float = 0.0, clock: Callable[[], float] = time.time
) -> Tiers:
    return Tiers(
        store,
        LAYOUT,
        v_trans=False,
        hot_bytes=hot_bytes,
        warm_bytes=1 << 40,
        policy="lru",
        forced=LevelFormats.parse("0=q4h,1=q6h,2=q8h"),
        shrink_after_s=wait_s,
        clock=clock,
    )


def chat_ids(number: int) -> Ids:
    return np.random.default_rng(number).integers(0, 1000, CHAT_TOKENS).astype(np.int32)


def talk(store: Store, tiers: Tiers, number: int) -> Node:
    """A chat of one turn, with rows for what lacks them. Returns its end."""
    ids = chat_ids(number)
    turn = Turn("local", f"s{number}", ids[:-20], ids[-20:], len(ids), 1.0)
    node = store.commit_turn(turn).node
    for gap in tiers.gaps(ids, "local"):
        tiers.accept(gap, rows_of(ids[: gap.p1], gap.p0, LAYOUT))
    return node


def bytes_of_system_calls() -> int:
    """What this process has handed to write calls, on Linux."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def main(root: Path, budget: int, n_chats: int) -> None:
    began = bytes_of_system_calls()
    store = opened(root)
    store.writes.budget = budget
    tiers = tiers_of(store, 4 * CHAT_BYTES)
    for number in range(n_chats):
        talk(store, tiers, number)
        if number % 8 == 7:
            tiers.flush()
    tiers.flush()
    called = bytes_of_system_calls() - began
    print(json.dumps({"called": called, "hot": tiers.stats()["hot_bytes"], **store.writes.stats()}))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
