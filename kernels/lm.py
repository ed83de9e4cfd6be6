"""A small language model whose numbers are the same on every machine: its shape, its packed weights,
and the C++ that evaluates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.kernels._native import Lm

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Counts: TypeAlias = npt.NDArray[np.uint32]
Weights: TypeAlias = tuple[str, npt.NDArray[np.uint8]]
"""(format, panels) of a matrix; `lm.pack` makes them."""

ROWS = 16
"""Rows of a panel."""
BLOCK = 32
"""Columns of format q8 that share a scale."""
LANES_MAX, ITEMS_MAX = 256, 65536
COUNT_ONE = 1 << 24
PARTS = 7
"""Matrices of a layer: query, key, value, output, gate, up, down."""
_ALIGN = 64


@dataclass(frozen=True)
class LmShape:
    """Sizes of a model. `n_ctx`: tokens of one text that a token attends to, itself included;
    `n_keep`, fewer: how many of the last tokens remain when a text would exceed n_ctx."""

    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_ctx: int
    n_keep: int
    norm_eps: float

    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of embedding, output, and `PARTS` for each layer."""
        heads, kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        layer = [
            (heads, self.n_embd),
            (kv, self.n_embd),
            (kv, self.n_embd),
            (self.n_embd, heads),
            (self.n_ff, self.n_embd),
            (self.n_ff, self.n_embd),
            (self.n_embd, self.n_ff),
        ]
        return [(self.n_vocab, self.n_embd)] * 2 + layer * self.n_layer


def make_lm(
    shape: LmShape, matrices: Sequence[Weights], norms: Sequence[Floats], cos: Floats, sin: Floats
) -> Lm:
    """A model. matrices, norms: packed, in the order of `shape.matrices()`; cos, sin: the angles of
    RoPE. ValueError if they do not fit. Every instruction set gives the same bits."""
    name = dispatch.instructions()
    *sizes, norm_eps = astuple(shape)
    return Lm(name, sizes, norm_eps, list(matrices), list(norms), cos, sin)


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
