"""Which cached rows llama.cpp rotates."""

from __future__ import annotations

from towerd.slots.layout import Plane


def is_rotated(plane: Plane, n_head_kv: int) -> bool:
    """llama.cpp rotates quantized rows whose head size is a multiple of 64."""
    return plane.format.is_quantized and (plane.n_elements // n_head_kv) % 64 == 0
