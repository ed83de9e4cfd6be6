"""What a store may take on the disk holds, with everything that is in its folder."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from store_tools import ROW_IDENTITY, make_hot, rows_of

from towerd.errors import DiskLimitReached
from towerd.slots.layout import KVLayout
from towerd.store import Store
from towerd.store.files.directory import Directory
from towerd.store.files.disk_limit import DiskLimit
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import Gap

LIMIT = 24 << 20
N_TOKENS = 100
CHECKPOINT_BYTES = 1 << 20
LAYOUT = KVLayout((plane_of("f16", 4096),), (plane_of("f16", 4096),))
IDENTITY = replace(ROW_IDENTITY, layout=LAYOUT)


def du(folder: Path) -> int:
    """Bytes of the blocks of all files below a folder."""
    n_blocks = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # it has left meanwhile
                n_blocks += (Path(at) / name).stat().st_blocks
    return 512 * n_blocks


def talk(store: Store, tiers: Tiers, seed: int, n: int = N_TOKENS) -> None:
    """A chat whose rows are written."""
    ids = np.random.default_rng(seed).integers(0, 500, n).astype(np.int32)
    nodes = store.insert(ids, "local", [n])
    tiers.accept(Gap(tuple(nodes), 0, n), rows_of(ids, 0, LAYOUT))
    tiers.flush()


@pytest.fixture
def limited(tmp_path: Path) -> tuple[Store, Tiers]:
    store = Store.open(tmp_path / "store", IDENTITY)
    store.disk.bytes_max = LIMIT
    layout = store.state.row_identity.layout
    tiers = Tiers(
        store,
        layout,
        v_trans=False,
        hot_bytes=0,
        warm_bytes=1 << 40,
        policy="lru",
        fidelity="exact",
    )
    return store, tiers


def test_rows_leave_so_that_everything_fits(limited: tuple[Store, Tiers], tmp_path: Path) -> None:
    store, tiers = limited
    row_bytes = LAYOUT.token_bytes * N_TOKENS
    n_chats = 3 * LIMIT // row_bytes
    largest = 0
    for seed in range(n_chats):
        talk(store, tiers, seed)
        largest = max(largest, du(tmp_path / "store"))
    assert LIMIT / 2 < largest <= LIMIT
    assert tiers.stats()["warm_evictions"] > 0
    talk(store, tiers, n_chats, 3 * LIMIT // LAYOUT.token_bytes)
    assert du(tmp_path / "store") <= LIMIT, "more than fits is not written"
    assert store.state.hot_bytes == 0, "nor does it stay in RAM"
    store.disk.check()
    tiers.close()
    store.close()


def test_many_files_at_once_and_pinned_ones_stay_within(
    limited: tuple[Store, Tiers], tmp_path: Path
) -> None:
    """Rows that waited in RAM are written together; pinned ones leave last, but they leave."""
    store, tiers = limited
    tiers.hot_bytes_max = 1 << 40
    for seed in range(3 * LIMIT // (LAYOUT.token_bytes * N_TOKENS)):
        ids = np.random.default_rng(seed).integers(0, 500, N_TOKENS).astype(np.int32)
        node = store.insert(ids, "local", [N_TOKENS])[-1]
        store.pins.add(node.id)
        make_hot(store, node)
    tiers.flush()
    assert LIMIT / 2 < du(tmp_path / "store") <= LIMIT
    store.disk.check()
    tiers.close()
    store.close()


def test_checkpoints_and_fetched_rows_stay_within(
    limited: tuple[Store, Tiers], tmp_path: Path
) -> None:
    """Neither keeps turns from being answered: they leave, or are not written."""
    store, tiers = limited
    checkpoints = CheckpointTier(store, bytes_max=1 << 40, exact=True)
    for seed in range(2 * LIMIT // CHECKPOINT_BYTES):
        ids = np.random.default_rng(seed).integers(0, 500, 60).astype(np.int32)
        store.insert(ids, "local", [60])
        state = np.frombuffer(os.urandom(CHECKPOINT_BYTES), np.uint8)
        checkpoints.accept(ids, "local", {60: (state, False)})
    checkpoints.flush()
    assert LIMIT / 2 < du(tmp_path / "store") <= LIMIT
    store.disk.check()
    with Store.open(tmp_path / "other", IDENTITY) as other:
        for seed in range(100, 100 + 2 * LIMIT // (LAYOUT.token_bytes * N_TOKENS)):
            ids = np.random.default_rng(seed).integers(0, 500, N_TOKENS).astype(np.int32)
            node = other.insert(ids, "local", [N_TOKENS])[-1]
            make_hot(other, node)
            other.rows.write([node])
            header, data = other.take_out(node)
            store.insert(ids, "local", [N_TOKENS])
            store.take_in(header, [data], len(data), ids)
            assert du(tmp_path / "store") <= LIMIT
    checkpoints.close()
    tiers.close()
    store.close()


def test_what_cannot_leave_is_refused(tmp_path: Path) -> None:
    """What is written once more in idle time counts twice; what can leave does not count."""
    now = [0.0]
    directory = Directory(tmp_path)
    limit = DiskLimit(directory, lambda: now[0])

    def put(folder: Path, n_mib: int) -> None:
        folder.mkdir(exist_ok=True)
        (folder / f"{n_mib}").write_bytes(os.urandom(n_mib << 20))

    put(directory.journal, 4)
    for each in (directory.segments, directory.checkpoints, directory.quarantine, directory.tmp):
        put(each, 20)
    limit.checkpoints_leave_by(lambda: None)
    limit.check()
    assert limit.rows_bytes_max(5) == 5
    limit.bytes_max = 64 << 20
    limit.check()
    assert limit.rows_bytes_max(1 << 40) >> 20 in (15, 16), "64, less 4 spare, 4, 20 and 20"
    assert not limit.has_left(19 << 20)
    assert limit.has_left(17 << 20)
    directory.catalog.write_bytes(os.urandom(29 << 20))
    limit.check()
    now[0] += 60.0
    with pytest.raises(DiskLimitReached, match="need 62 MiB of the 64 MiB of --disk-max"):
        limit.check()
    assert limit.rows_bytes_max(1 << 40) == limit.checkpoint_bytes_max(1 << 40) == 0


def test_checkpoints_that_no_tier_has_stay(tmp_path: Path) -> None:
    """Those of another model, where the served one resumes from any row."""
    directory = Directory(tmp_path)
    directory.checkpoints.mkdir()
    (directory.checkpoints / "1").write_bytes(os.urandom(20 << 20))
    limit = DiskLimit(directory)
    limit.bytes_max = 20 << 20
    with pytest.raises(DiskLimitReached):
        limit.check()
    limit.checkpoints_leave_by(lambda: None)
    limit.check()
