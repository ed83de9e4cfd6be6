"""Cached keys as float32 arrays. Quantized keys are not supported."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from towerd.retention import Rows
from towerd.slots.layout import Plane
from towerd.slots.rows import Bytes2D, KVRows


def keys_of(rows: KVRows, head_size: int, layer_step: int = 1) -> Rows:
    """float32[layers, KV heads, n, head size]: keys of `rows`, of every `layer_step`-th layer."""
    planes = list(zip(rows.layout.k, rows.k, strict=True))[::layer_step]
    layers = [floats(plane, k) for plane, k in planes]
    return np.stack([k.reshape(len(rows), -1, head_size).transpose(1, 0, 2) for k in layers])


def floats(plane: Plane, rows: Bytes2D) -> npt.NDArray[np.float32]:
    """float32[n, elements]: the values of `rows`, which must not be quantized."""
    data = np.ascontiguousarray(rows)
    if plane.format.name == "f32":
        return data.view(np.float32)
    if plane.format.name == "f16":
        return data.view(np.float16).astype(np.float32)
    assert plane.format.name == "bf16", "quantized keys are not read"
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
