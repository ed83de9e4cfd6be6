"""KV rows of a small dense model, in a format without blocks."""

from __future__ import annotations

import numpy as np

from towerd.kernels.formats import BY_NAME
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import Bytes2D, KVRows

HEAD_SIZE, N_KV, N_LAYER = 4, 2, 3


def random_rows(rng: np.random.Generator, name: str, p0: int, n: int) -> KVRows:
    plane = Plane(BY_NAME[name].ggml_type, BY_NAME[name].row_bytes(HEAD_SIZE * N_KV))
    layout = KVLayout((plane,) * N_LAYER, (plane,) * N_LAYER)

    def planes() -> tuple[Bytes2D, ...]:
        values = rng.standard_normal((N_LAYER, n, HEAD_SIZE * N_KV), dtype=np.float32)
        if name == "f32":
            return tuple(np.ascontiguousarray(each).view(np.uint8) for each in values)
        if name == "f16":
            return tuple(each.astype(np.float16).view(np.uint8) for each in values)
        short = (values.view(np.uint32) >> 16).astype(np.uint16)
        return tuple(np.ascontiguousarray(each).view(np.uint8) for each in short)

    return KVRows(layout, np.arange(p0, p0 + n, dtype=np.int32), planes(), planes())
