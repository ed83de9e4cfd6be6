"""A store's rows that a transform coding can make small, the basis for them, and an oracle of what comes back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from store_tools import ROW_IDENTITY

from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis
from towerd.codec.rows.learn import Rounding, groups_of, learn
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import rotated
from towerd.store import FormatRequest, Node, Store
from towerd.store.segments.coded_format import coded_format

WIDTH, LAYERS, F16 = 32, 2, 1
LAYOUT = KVLayout((Plane(F16, 2 * WIDTH),) * LAYERS, (Plane(F16, 2 * WIDTH),) * LAYERS)
IDENTITY = replace(ROW_IDENTITY, layout=LAYOUT)
ROPE = Rope((LayerRope("norm", 16, 16), LayerRope("neox", 16, 8)))
ROUNDINGS = {"near": Rounding(0.1, 0.05), "small": Rounding(0.5, 0.1)}
_MIXING = np.random.default_rng(9).normal(size=(6, 2 * LAYERS * WIDTH))
IDS = np.random.default_rng(3).integers(0, 1000, 1400).astype(np.int32)


def coded_rows_of(n: int, p0: int = 0, seed: int = 0) -> KVRows:
    """The rows [p0, n) of a text, whose numbers are mixed from few sources."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(n, 6)) @ _MIXING + 0.01 * random.normal(size=(n, _MIXING.shape[1]))
    each = np.split((values + 3).astype(np.float16), 2 * LAYERS, axis=1)
    planes = [np.ascontiguousarray(plane).view(np.uint8) for plane in each]
    positions = np.arange(n, dtype=np.int32)
    flat = KVRows(LAYOUT, positions, tuple(planes[:LAYERS]), tuple(planes[LAYERS:]))
    return rotated(flat, ROPE).slice(p0, n)


@cache
def basis(seed: int = 1) -> Basis:
    """One that was learned from other rows."""
    groups = groups_of(LAYOUT, 2)
    digest = IDENTITY.digest()
    return learn(
        [coded_rows_of(400, seed=seed)], ROPE, ROUNDINGS, row_identity=digest, groups=groups
    )


def transform(coding: str = "near", seed: int = 1) -> str:
    """The format of rows in a coding of the basis."""
    return coded_format(coding, basis(seed).digest)


def library_decodes(rows: KVRows, p0: int, p1: int, coding: str = "near", seed: int = 1) -> KVRows:
    """What the codec alone makes of these rows."""
    data = coded.encode(rows.slice(p0, p1), basis(seed), coding, ROPE)
    return coded.parse(data).read(p0, p1, basis(seed), ROPE)


def planes_of(store: Store, node: Node, p0: int, p1: int) -> list[npt.NDArray[np.uint8]]:
    """The loaded rows [p0, p1) of the path of a node, plane by plane."""
    found = [rows for part in store.plan_rows(node, p0, p1) for rows in store.rows.load(part).parts]
    assert [rows.p1 for rows in found[:-1]] == [rows.p0 for rows in found[1:]]
    assert (found[0].p0, found[-1].p1) == (p0, p1)
    assert all(rows.layout == LAYOUT for rows in found)
    return [np.concatenate([rows.plane(i) for rows in found]) for i in range(len(LAYOUT.planes))]


def same(found: list[npt.NDArray[np.uint8]], rows: KVRows) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, rows.planes(), strict=True))


def written(store: Store, *ends: int, seed: int = 0) -> Node:
    """A path whose native rows are in one file; its leaf."""
    ids = (IDS + 1000 * seed).astype(np.int32)
    leaf = store.insert(ids[: ends[-1]], "local", list(ends))[-1]
    store.rows.attach_hot(leaf.path(), coded_rows_of(ends[-1], seed=seed))
    store.rows.write(leaf.path())
    for node in leaf.path():
        store.rows.drop_hot(node)
    return leaf


def transformed(store: Store, leaf: Node, p0: int, p1: int, coding: str = "near") -> Path:
    """Put the rows [p0, p1) of a path into a coding; the new file."""
    store.rows.bases.add(basis())
    assert leaf.file is not None
    new = store.rows.reencode(leaf.file, [FormatRequest(p0, p1, transform(coding))])
    assert new is not None
    return new.path
