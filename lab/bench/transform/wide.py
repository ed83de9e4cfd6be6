"""The shape of an 8B model (32 layers, keys and values of 1,024 numbers): evaluating tokens with layers of random
weights, and decoding rows with random bases. What either takes does not depend on what the numbers are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lab.bench.quality.formats import context_on
from lab.bench.transform.resume import resume_times
from lab.models.kept import random_model
from lab.models.shape import Shape
from towerd.codec.rows import coded
from towerd.codec.rows.basis import Basis, PlaneGroup, RowCoding
from towerd.codec.rows.learn import groups_of, table_of
from towerd.kernels.row_coding import ESCAPE, HALF, SYMBOLS
from towerd.slots.blob import emit_blob
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows
from towerd.tiers.formats.calibration import stored

LAYERS, WIDTH, HEAD_DIM = 32, 1024, 128
SHAPE = Shape(LAYERS, 4096, 32, WIDTH // HEAD_DIM, 14336, 2048)
COMPONENTS = 900
"""Of 1,024: the share that SmolLM2 keeps at the steps of `near`."""
STEP = 0.7
"""For rows of variance 1: 2.5 bits a component."""
LAYOUT = KVLayout((Plane(1, 2 * WIDTH),) * LAYERS, (Plane(1, 2 * WIDTH),) * LAYERS)
ROWS = 512


def seconds_a_token(n_layers: int) -> tuple[float, float, float]:
    """To evaluate a token as part of a prompt, to decode its rows, and to decode them from q4h, in turns. Of the
    model `n_layers` layers are evaluated, and what they take is counted for all."""
    random = np.random.default_rng(0)
    basis, rope = _basis(random), Rope((LayerRope("norm", HEAD_DIM, HEAD_DIM),) * LAYERS)
    rows = _rows(random)
    parsed, blocks = coded.parse(coded.encode(rows, basis, "random", rope)), stored(rows, "q4h")
    readers = {
        "coded": lambda p0, p1: emit_blob([parsed.read(p0, p1, basis, rope)]),
        "q4h": lambda p0, p1: emit_blob([blocks.slice(p0, p1)], layout=LAYOUT),
    }
    path = random_model(f"8b-{n_layers}-layers", replace(SHAPE, n_layer=n_layers), announce=True)
    with context_on(path, ROWS + 1, settings={"batch_size": str(ROWS // 4)}) as (context, _):
        ids = np.arange(ROWS, dtype=np.int32) % SHAPE.n_vocab
        times = resume_times(context, ids, readers, (ROWS,))[0]
    evaluated_s = times.prefill_s * LAYERS / n_layers
    return evaluated_s / ROWS, times.read_s["coded"] / ROWS, times.read_s["q4h"] / ROWS


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
        random.standard_normal((ROWS, WIDTH), np.float32).astype(np.float16).view(np.uint8)
        for _ in range(2 * LAYERS)
    ]
    positions = np.arange(ROWS, dtype=np.int32)
    return KVRows(LAYOUT, positions, tuple(planes[:LAYERS]), tuple(planes[LAYERS:]))
