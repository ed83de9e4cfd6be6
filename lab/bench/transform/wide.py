"""Decoding on the shape of an 8B model (32 layers, keys and values of 1,024 numbers), with random bases: what it takes
does not depend on what rows hold."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis, PlaneGroup, RowCoding
from towerd.codec.rows.learn import groups_of, table_of
from towerd.kernels.row_coding import ESCAPE, HALF, SYMBOLS
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows

LAYERS, WIDTH, HEAD_DIM = 32, 1024, 128
PARAMETERS = 8.03e9
COMPONENTS = 720
"""Of 1,024: the share that SmolLM2 keeps at the steps of `near`."""
STEP = 1.25
"""For rows of variance 1: 2 bits a component."""
LAYOUT = KVLayout((Plane(1, 2 * WIDTH),) * LAYERS, (Plane(1, 2 * WIDTH),) * LAYERS)
_ROWS = 512
_REPEATS = 3


def decode_s(n_tokens: int) -> float:
    """Seconds to decode the rows of so many tokens, measured on `_ROWS` of them at a time."""
    random = np.random.default_rng(0)
    basis, rope = _basis(random), Rope((LayerRope("norm", HEAD_DIM, HEAD_DIM),) * LAYERS)
    parsed = coded.parse(coded.encode(_rows(random), basis, "random", rope))
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        parsed.read(0, _ROWS, basis, rope)
        times.append(time.perf_counter() - began)
    return min(times) * n_tokens / _ROWS


def _basis(random: np.random.Generator) -> Basis:
    """Groups of one layer; each has other vectors, so that they are as far from the caches as real ones."""
    vectors = np.linalg.qr(random.normal(size=(WIDTH, WIDTH)))[0][:COMPONENTS].astype(np.float16)
    mean, weights = np.zeros(WIDTH, np.float32), np.ones(WIDTH, np.float32)
    groups = tuple(
        PlaneGroup(
            planes, np.ascontiguousarray(vectors[:, random.permutation(WIDTH)]), mean, weights
        )
        for planes in groups_of(LAYOUT, 1)
    )
    classes = (np.zeros(COMPONENTS, np.uint8),) * len(groups)
    table = _table(random)[None]
    coding = RowCoding(STEP, 0.0, 0.0, classes, np.zeros(1, np.uint8), table)
    return Basis(b"", LAYOUT, groups, {"random": coding})


def _table(random: np.random.Generator) -> npt.NDArray[np.uint16]:
    values = np.round(random.normal(size=100_000) / STEP).astype(int)
    symbols = np.where(np.abs(values) <= HALF, values + HALF, ESCAPE)
    return table_of(np.bincount(symbols, minlength=SYMBOLS))


def _rows(random: np.random.Generator) -> KVRows:
    planes = [
        random.standard_normal((_ROWS, WIDTH), np.float32).astype(np.float16).view(np.uint8)
        for _ in range(2 * LAYERS)
    ]
    positions = np.arange(_ROWS, dtype=np.int32)
    return KVRows(LAYOUT, positions, tuple(planes[:LAYERS]), tuple(planes[LAYERS:]))
