"""A small language model whose numbers are the same on every machine: the C++ kernel if it is
built, else the numpy reference (slow)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.kernels.reference import lm as reference_lm
from towerd.kernels.reference.lm import (
    BLOCK,
    COUNT_ONE,
    LANES_MAX,
    ROWS,
    Counts,
    Floats,
    Ints,
    LmShape,
    Weights,
)

__all__ = [
    "BLOCK",
    "COUNT_ONE",
    "LANES_MAX",
    "ROWS",
    "Lm",
    "LmShape",
    "Weights",
    "make_lm",
    "pack",
    "pack_norm",
    "pack_q8",
]

_ALIGN = 64


class Lm(Protocol):
    """The interface of both implementations; see `reference.lm.ReferenceLm`."""

    def reset(self) -> None: ...
    def step(self, lanes: Ints, tokens: Ints, n_threads: int = 1) -> Floats: ...
    def counts(self, logits: Floats) -> Counts: ...


def make_lm(
    shape: LmShape, matrices: Sequence[Weights], norms: Sequence[Floats], cos: Floats, sin: Floats
) -> Lm:
    """A model with the arguments of `reference.lm.ReferenceLm`. ValueError if they do not fit.

    TOWERD_KERNELS chooses as for the other kernels; all give the same bits."""
    name = dispatch.name()
    if name == "metal":
        name = dispatch.available()[1]
    if name == "reference":
        return reference_lm.ReferenceLm(shape, matrices, norms, cos, sin)
    from towerd.kernels import _native

    return _native.Lm(
        name, list(shape.sizes), shape.norm_eps, list(matrices), list(norms), cos, sin
    )


def pack(rows: npt.NDArray[np.float32] | npt.NDArray[np.float16]) -> Weights:
    """A matrix [rows, columns] as panels of 16 rows, each stored column by column."""
    padded = np.zeros((-(-len(rows) // ROWS) * ROWS, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    panels = padded.reshape(-1, ROWS, rows.shape[1]).transpose(0, 2, 1)
    return "f32" if rows.dtype == np.float32 else "f16", _aligned(panels)


def pack_q8(blocks: npt.NDArray[np.uint8]) -> Weights:
    """Rows of ggml's q8_0 [rows, blocks, 34] (a float16 scale and 32 bytes) in panels: for each 32
    columns, 16 float32 scales and then the bytes, column by column."""
    n_blocks = blocks.shape[1]
    padded = np.zeros((-(-len(blocks) // ROWS) * ROWS, *blocks.shape[1:]), np.uint8)
    padded[: len(blocks)] = blocks
    panels = padded.reshape(-1, ROWS, n_blocks, 2 + BLOCK).transpose(0, 2, 3, 1)
    scales = panels[:, :, :2].transpose(0, 1, 3, 2).copy().view(np.float16).astype(np.float32)
    out = np.empty((len(panels), n_blocks, ROWS * (4 + BLOCK)), np.uint8)
    out[..., : 4 * ROWS] = scales.reshape(len(panels), n_blocks, ROWS).view(np.uint8)
    out[..., 4 * ROWS :] = panels[:, :, 2:].reshape(len(panels), n_blocks, -1)
    return "q8", _aligned(out)


def pack_norm(weights: Floats) -> Floats:
    """The weights of a norm, padded with zeros to a multiple of 16."""
    return np.append(weights, np.zeros(-len(weights) % ROWS, np.float32))


def _aligned(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of an array, in order, at an address that is a multiple of 64."""
    memory = np.empty(values.nbytes + _ALIGN, np.uint8)
    at = -memory.ctypes.data % _ALIGN
    out = memory[at : at + values.nbytes]
    out.view(values.dtype).reshape(values.shape)[...] = values
    return out
