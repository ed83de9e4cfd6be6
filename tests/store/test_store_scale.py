"""Many segments and many threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
from store_tools import ROW_IDENTITY, check_rows, rows_of, turn_of

from towerd.errors import RowsDamaged, StoreError
from towerd.store import Store
from towerd.store.segments.segment_header import segment_key
from towerd.tokens import ids_bytes

RUN = 80
N_RUNS = 100


def synthetic_ids(chat: int, n_runs: int = N_RUNS) -> npt.NDArray[np.int32]:
    """Tokens of one synthetic chat; the first ten runs are the same for ten chats each."""
    shared = np.random.default_rng(chat // 10).integers(0, 32_000, 10 * RUN, np.int32)
    own = np.random.default_rng(10_000 + chat).integers(0, 32_000, n_runs * RUN, np.int32)
    own[0] = 40_000 + chat
    return np.concatenate([shared, own])[: n_runs * RUN]


def fill(root: Path, n_chats: int, n_runs: int = N_RUNS) -> int:
    """Enter synthetic chats, a segment per run, straight into the catalog; returns segments."""
    with Store.open(root, ROW_IDENTITY) as store:
        state = store.state
        rows: list[tuple[object, ...]] = []
        seen: dict[bytes, int] = {}
        for chat in range(n_chats):
            data, parent = ids_bytes(synthetic_ids(chat, n_runs)), None
            for run in range(n_runs):
                prefix = data[: 4 * RUN * (run + 1)]
                key = segment_key(state.identity.tokenizer_digest, "local", prefix)
                if key not in seen:
                    seen[key] = len(seen) + 1
                    rows.append(
                        (
                            seen[key],
                            state.identity.tokenizer,
                            parent,
                            "local",
                            RUN * run,
                            RUN * (run + 1),
                            1.0,
                            1.0,
                            key,
                            prefix[4 * RUN * run :],
                        )
                    )
                parent = seen[key]
        with state.catalog.transaction():
            state.catalog.run_many(
                "INSERT INTO segments(id, tokenizer, parent, scope, p0, p1, last_used, created,"
                " key, ids) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
    return len(rows)


def test_hundred_thousand_segments(root: Path) -> None:
    """They load, are found in full, and the accounting holds."""
    n_segments = fill(root, 1100)
    assert n_segments >= 100_000
    with Store.open(root, ROW_IDENTITY) as store:
        assert len(store.nodes()) == n_segments
        for chat in range(0, 1100, 97):
            ids = synthetic_ids(chat)
            match = store.match(ids, "local")
            assert match.n == len(ids) == 8000
            assert len(match.nodes) == N_RUNS
            ids = ids.copy()
            ids[4000 + 3] += 1
            assert store.match(ids, "local").n == 4003
        store.check_integrity(keys=True)


def test_threads_share_one_store(store: Store) -> None:
    """Commits, rows, drops and gc from many threads leave exact sessions and right rows."""
    stop = threading.Event()

    def chat(number: int) -> list[int]:
        ids = [5, 6, 7, 8, 9]
        for turn in range(15):
            ids = [*ids, 100 + number, turn, 3]
            result = store.commit_turn(turn_of(ids, [turn, 4, 4], session=str(number)))
            ids = [*ids, turn, 4, 4]
            store.rows.attach_hot(result.node.path(), rows_of(ids[: result.node.p1]))
            with_rows = [node for node in result.node.path() if node.file is None]
            with suppress(StoreError):  # another thread dropped or removed them first
                store.rows.write(with_rows[-2:])
            for part in store.plan_rows(result.node, 0, result.node.p1):
                with suppress(RowsDamaged):  # dropped since planning
                    store.rows.load(part)
        return ids

    def churn() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            nodes = store.nodes()
            if nodes:
                node = nodes[int(rng.integers(len(nodes)))]
                store.rows.drop_hot(node)
                if node.file is not None and rng.random() < 0.3:
                    store.rows.drop_file(node.file)
            store.gc()
            store.flush()

    with ThreadPoolExecutor(6) as pool:
        churning = pool.submit(churn)
        chats = list(pool.map(chat, range(4)))
        stop.set()
        churning.result()
    for number, ids in enumerate(chats):
        assert store.session_ids(str(number)).tolist() == ids
    store.check_integrity(keys=True)
    for node in store.nodes():
        check_rows(store, node)
    assert store.verify().ok
