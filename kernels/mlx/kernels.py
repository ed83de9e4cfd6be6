"""The kernel that TOWERD_KERNELS=metal runs on an Apple GPU: numpy memory in, numpy memory out.

Same signature and checks as in C++. A Metal kernel does the work on Apple GPUs, plain MLX operations
elsewhere. With Metal, memory that starts on a page of the system (16 KiB on Apple Silicon) is read
in place, other memory is copied once; the result is copied once into `out`, because MLX allocates
the memory that its kernels write.

MLX rounds as the numpy reference does on its CPU backend; an Apple GPU flushes denormal floats to
zero, and is compiled with safe math and without contraction so that it otherwise rounds alike.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from towerd.kernels import _native
from towerd.kernels.arrays import Bytes, Floats, Lines
from towerd.kernels.formats import BY_NAME
from towerd.kernels.mlx import metal, ops


def available() -> bool:
    """Whether Metal kernels run here and by default: an Apple GPU, not switched off for MLX."""
    return bool(mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu)


def rope_shift(
    src: Bytes,
    out: Bytes,
    format: str,
    cos: Floats,
    sin: Floats,
    row_table: Lines | None,
    head_dim: int,
    n_rot: int,
    first: int,
    neox: bool,
    hadamard_block: int,
    n_threads: int = 1,
) -> None:
    """See `dispatch.rope_shift`."""
    where = (head_dim, n_rot, first, neox, hadamard_block)
    _native.check_rope_shift(src, out, format, cos, sin, row_table, *where, n_threads)
    if not src.size:
        return
    row = BY_NAME[format]
    lines = np.zeros(len(src), np.int32) if row_table is None else row_table
    use_metal = available() and metal.can_rope_shift(row, head_dim, hadamard_block)
    shift = metal.rope_shift if use_metal else ops.rope_shift
    rows, cosines, sines = (mx.asarray(memory) for memory in (src, cos, sin))
    out[:] = np.asarray(shift(rows, row, cosines, sines, mx.array(lines), *where))
