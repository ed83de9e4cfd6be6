"""A tiny model's row identity, and rows that are a function of the tokens before them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from format_oracle import converted

from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RowIdentity
from towerd.slots.rows import KVRows
from towerd.store import Node, Store, Turn
from towerd.tokens import Provenance

F16 = 1
Q8_0 = 8
LAYOUT = KVLayout((Plane(F16, 16), Plane(F16, 32)), (Plane(Q8_0, 34), Plane(F16, 64)))
ROW_IDENTITY = RowIdentity(
    "hash", "llama", "spm", {"freq_base": 1e4}, (), LAYOUT, False, False, False
)
OTHER_MODEL = replace(ROW_IDENTITY, model_hash="other")
OTHER_TOKENIZER = replace(OTHER_MODEL, tokenizer="bpe")
FINITE = np.uint8(0xBF)
"""What keeps any byte from completing the exponent of an infinity."""
MROPE = replace(ROW_IDENTITY, layout=replace(LAYOUT, cell_ext=True))


def ids_of(*ids: int) -> npt.NDArray[np.int32]:
    return np.array(ids, np.int32)


def rows_of(
    prefix: Sequence[int] | npt.NDArray[np.int32], p0: int = 0, layout: KVLayout = LAYOUT
) -> KVRows:
    """The rows [p0, len(prefix)): each depends on every token up to its own, and on the plane.
    Their bytes are finite numbers in every format."""
    h = hashlib.blake2b(digest_size=32)
    seeds = []
    for token in prefix:
        h.update(int(token).to_bytes(4, "little", signed=True))
        seeds.append(h.digest())
    n = len(seeds) - p0
    base = np.frombuffer(b"".join(seeds[p0:]), np.uint8).reshape(n, 32)
    planes = [
        (np.tile(base, (1, -(-plane.row_bytes // 32)))[:, : plane.row_bytes] + np.uint8(number))
        & FINITE
        for number, plane in enumerate(layout.planes)
    ]
    ext = np.ascontiguousarray(base[:, :12]).view(np.int32) if layout.cell_ext else None
    positions = np.arange(p0, len(seeds), dtype=np.int32)
    n_k = len(layout.k)
    return KVRows(layout, positions, tuple(planes[:n_k]), tuple(planes[n_k:]), ext)


def moved_rows_of(
    prefix: Sequence[int] | npt.NDArray[np.int32], p0: int = 0, layout: KVLayout = LAYOUT
) -> KVRows:
    """`rows_of`, behind another first token."""
    return rows_of([-1 - int(prefix[0]), *list(prefix)[1:]], p0, layout)


def assert_same_rows(found: KVRows, expected: KVRows) -> None:
    assert (found.p0, found.p1) == (expected.p0, expected.p1)
    for mine, theirs in zip(found.planes(), expected.planes(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    if expected.ext is not None:
        np.testing.assert_array_equal(found.ext, expected.ext)


def make_hot(store: Store, node: Node) -> list[Node]:
    """Give the whole path of `node` its rows."""
    layout = store.state.row_identity.layout
    return store.rows.attach_hot(node.path(), rows_of(node.prefix_ids(), layout=layout))


def insert_in_vain(
    store: Store, ids: npt.NDArray[np.int32], scope: str, ends: Sequence[int]
) -> None:
    """`Store.insert` whose commit the catalog refuses. Raises StoreError."""
    catalog = store.state.catalog
    with store.locked(), store.state.growing() as growth:
        growth.grow(ids[: ends[-1]].tobytes(), scope, ends)
        catalog.run("PRAGMA defer_foreign_keys = ON")
        catalog.run("INSERT INTO pins(node, created) VALUES (?, 0)", (10**9,))  # of no segment


def write_all(store: Store, node: Node) -> None:
    """Make the whole path of `node` hot, write it to one file, and let go of the hot rows."""
    make_hot(store, node)
    store.rows.write(node.path())
    for each in node.path():
        store.rows.drop_hot(each)


def check_rows(store: Store, node: Node, worst: Provenance = Provenance.AFTER_MOVED) -> int:
    """Load whatever rows up to `worst` the path of `node` has from its start and compare, those in
    stored formats with native ones encoded once, moved ones with `moved_rows_of`; returns how many."""
    at = 0
    for part in store.plan_rows(node, 0, node.p1, worst=worst):
        found = set(part.provenance.tolist())
        assert max(found) <= worst
        make = moved_rows_of if found == {Provenance.AFTER_MOVED} else rows_of
        for rows in store.rows.load(part):
            assert rows.p0 == at
            layout = store.state.row_identity.layout
            expected = make(node.prefix_ids()[: rows.p1], at, layout)
            assert_same_rows(rows, converted(expected, rows.layout))
            at = rows.p1
    return at


def formats_of(store: Store, node: Node) -> list[tuple[int, str]]:
    """(positions, format) of each run of a node's rows, as they would be loaded."""
    (part,) = store.plan_rows(node, node.p0, node.p1)
    return [(len(rows), rows.layout.format_name) for rows in store.rows.load(part)]


def turn_of(
    prompt: Sequence[int],
    reply: Sequence[int],
    *,
    scope: str = "local",
    session: str | None = None,
    n_cached: int | None = None,
) -> Turn:
    """A finished turn; by default all but the last sampled token have rows."""
    if n_cached is None:
        n_cached = max(0, len(prompt) + len(reply) - 1)
    return Turn(
        scope, session, np.array(prompt, np.int32), np.array(reply, np.int32), n_cached, 1.0
    )
