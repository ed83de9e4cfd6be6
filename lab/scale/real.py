"""RealTier: the daemon's own shared tier, over stores of made-up rows and a bucket in memory that counts requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import numpy as np
from obstore.store import MemoryStore

from lab.scale.requests import CountingBucket, Requests
from lab.scale.work import RowsRun, TokenPath
from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RowIdentity
from towerd.slots.rows import KVRows
from towerd.store import Store
from towerd.store.tree.node import PUBLIC
from towerd.tiers.shared.objects import PutRows
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids

COUNTED = ("objects/", "marks/")
"""What `requests` are of: rows, and how they are found."""
_TENANT = "team"
_CELL_BYTES = 12
"""Of a native row, beside its numbers."""


class RealTier:
    """What a tenant's machine at home does, and others that have the bases alone. Implements `work.Tier`, without
    records. Use it as a context."""

    def __init__(self, root: Path, token_bytes: int) -> None:
        """root: an empty folder for the stores; token_bytes: rows of a token, 16 or more, a multiple of 4"""
        self.requests = Requests()
        self._bucket = CountingBucket(MemoryStore(), self.requests, COUNTED)
        plane = Plane(BY_NAME["f16"].ggml_type, (token_bytes - _CELL_BYTES) // 2)
        self._layout = KVLayout((plane,), (plane,))
        self._root, self._numbers = root, itertools.count()
        self._bases: list[tuple[TokenPath, RowsRun]] = []
        self._put = PutRows()
        self._open = ExitStack()
        self._store, self._tier = self._machine()

    def __enter__(self) -> RealTier:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def put_base(self, path: TokenPath, run: RowsRun) -> None:
        """See Tier."""
        self._bases.append((path, run))
        self._write(self._store, path, [run], PUBLIC)
        self._tier.put_path(_ids(path), PUBLIC)

    def put_session(
        self, session: int, path: TokenPath, runs: Sequence[RowsRun], turns: int
    ) -> None:
        """See Tier."""
        self._write(self._store, path, runs, _TENANT)
        self._put = self._tier.put_path(_ids(path), _TENANT)

    def look_up(self, path: TokenPath, n_known: int) -> None:
        """See Tier."""
        ids = _ids(path)
        found = self._tier.find(ids, _TENANT, n_known)
        if found is not None:
            self._fetch(found.put, ids, n_known, found.n_tokens)

    def pull(self, session: int, path: TokenPath, n_known: int) -> None:
        """See Tier."""
        self._fetch(self._put, _ids(path), n_known, None)

    def _fetch(self, put: PutRows, ids: Ids, n_known: int, n_common: int | None) -> None:
        """To a machine that has the bases."""
        store, tier = self._machine()
        for base in self._bases:
            self._write(store, base[0], [base[1]], PUBLIC)
        tier.fetch_path(put, ids, _TENANT, n_common=n_common)
        self.requests.tokens_fetched += tier.n_stored(ids, _TENANT) - n_known

    def _machine(self) -> tuple[Store, SharedTier]:
        identity = RowIdentity("scale", "llama", "bench", {}, (), self._layout, False, False, False)
        store = Store.open(self._root / str(next(self._numbers)), identity)
        self._open.callback(store.close)
        return store, SharedTier(store, self._bucket, bytes(32), "near", has_rows=True)

    def _write(self, store: Store, path: TokenPath, runs: Sequence[RowsRun], scope: str) -> None:
        """Files with the rows of a path that has none in some of them."""
        nodes = store.insert(_ids(path), scope, [run.p1 for run in runs])[-1].path()
        store.rows.attach_hot(nodes, self._rows(runs[-1].p1))
        for node in nodes:
            if node.file is None:
                store.rows.write([node])
        for node in nodes:
            store.rows.drop_hot(node)

    def _rows(self, n: int) -> KVRows:
        k, v = (
            np.zeros((n, planes[0].row_bytes), np.uint8)
            for planes in (self._layout.k, self._layout.v)
        )
        return KVRows(self._layout, np.arange(n, dtype=np.int32), (k,), (v,))


def _ids(path: TokenPath) -> Ids:
    at, found = 0, []
    for piece in path.pieces:
        found.append(_random(piece.number, piece.end)[at : piece.end])
        at = piece.end
    return np.concatenate(found)


@lru_cache(256)
def _random(number: int, n: int) -> Ids:
    """The first ids of a piece are the same whatever its length."""
    return np.random.default_rng(max(0, number)).integers(0, 1 << 30, n, np.int32)
