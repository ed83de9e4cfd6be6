"""The room of a chat, turn after turn, against the rows that were put there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from random_rows import HEAD_SIZE, random_rows

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.live.offloaded_rows import OffloadedKeys
from towerd.engine.embedded.longchat.offload_space import OffloadSpace
from towerd.retention import Recalling
from towerd.slots.rows import KVRows
from towerd.store.files.writes import DailyWrites

N_TURNS, N_NEW, BUDGET = 150, 8, 16
FILES_MAX = 17
"""Two files one after the other have more than an eighth of the disk."""


def test_a_long_chat_has_few_files(tmp_path: Path) -> None:
    """However little is written at a time; of two branches as well. What is on disk is what was
    written, and stays within its bytes."""
    whole = random_rows(np.random.default_rng(0), "f16", 0, N_TURNS * N_NEW)
    token_bytes = whole.layout.token_bytes
    room = OffloadSpace(
        whole.layout, HEAD_SIZE, 0, 600 * token_bytes, tmp_path, DailyWrites(tmp_path)
    )
    chats = [BoundedSet.whole(LiveBudget("icecache", BUDGET), 0, 4096)]
    for turn in range(N_TURNS):
        if turn == N_TURNS // 2:
            chats.append(chats[0].fork())
        for chat in chats:
            take_turn(room, chat, whole, turn * N_NEW)
            assert chat.offloaded.disk_bytes <= room.disk_bytes_max
            assert len(chat.offloaded.in_ram) <= BUDGET + N_NEW
    for chat in chats:
        assert 1 < len(chat.offloaded.files) <= FILES_MAX
        assert 300 * token_bytes < chat.offloaded.disk_bytes
        rows = chat.offloaded.rows(chat.offloaded.positions)
        for mine, theirs in zip(rows.planes(), whole.planes(), strict=True):
            assert np.array_equal(mine, theirs[chat.offloaded.positions])
        chat.offloaded.check_integrity()


def test_rows_that_are_live_do_not_push_out_others(tmp_path: Path) -> None:
    """While a long prompt is read of which only the first rows are offloaded yet, those of before stay as far
    as there is room."""
    whole = random_rows(np.random.default_rng(1), "f16", 0, 300)
    room = OffloadSpace(whole.layout, HEAD_SIZE, 0, 0, tmp_path, DailyWrites(tmp_path))
    chat = BoundedSet.whole(LiveBudget("icecache", BUDGET), 0, 4096)
    room = replace(room, bytes_max=90 * room.position_bytes(chat)[0])
    chat.extend(100)
    every = np.arange(100)
    chat.offloaded = chat.offloaded.add(room.lay_out(whole.slice(0, 100), every, every))
    chat.drop(every[90:])
    chat.extend(110)  # of which none is offloaded
    room.make(chat)
    assert 60 < len(chat.offloaded) <= 90


def take_turn(room: OffloadSpace, chat: BoundedSet, whole: KVRows, p0: int) -> None:
    """N_NEW more tokens; of the older ones the first and the last stay live."""
    assert isinstance(chat.policy, Recalling)
    new = np.arange(p0, p0 + N_NEW)
    chat.extend(N_NEW)
    chat.drop(np.union1d(chat.kept[:4], chat.kept[-N_NEW:]))
    chunk = room.lay_out(whole.slice(p0, p0 + N_NEW), new, np.arange(N_NEW))
    chat.offloaded = chat.offloaded.add(chunk)
    chat.policy.index(chat.offloaded.positions, OffloadedKeys(chat.offloaded, HEAD_SIZE))
    room.page_out(chat)
