"""A small language model in numpy: the specification of the C++, which gives the same bits.

The llama architecture (src/models/llama.cpp of llama.cpp): RMS norm before each part, RoPE on
adjacent pairs, attention over the text so far with KV heads that several heads may share, SwiGLU.
All numbers are float32. Every machine gets the same bits, because

- every product that is added is a fused multiply-add: one rounding;
- a row of a matrix times a vector is summed in the order of the columns, starting from 0; so are
  the elements of a score and the positions that a head attends to;
- other sums (mean square, sum of weights) are 16 partial sums of the numbers whose index is the
  same modulo 16, in order, and then those at distance 8, 4, 2, 1;
- the only other operations are + - * / and the square root, which IEEE 754 rounds correctly,
  for subnormal numbers, too; `exponential` is made of these.

The caller passes the angles of RoPE as tables, and must compute them as exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from towerd.kernels.lm import (
    BLOCK,
    COUNT_ONE,
    ITEMS_MAX,
    LANES_MAX,
    PARTS,
    ROWS,
    Counts,
    Floats,
    Ints,
    LmShape,
    Weights,
)

Past: TypeAlias = list[tuple[Floats, Floats]]
"""Rotated keys and values [n_head_kv, head_dim] of a token in each layer."""

_LEAST = np.float32(-80)
_LOG2_E, _ROUNDING = np.float32(float.fromhex("0x1.715476p0")), np.float32(1.5 * 2**23)
_LN2_HIGH = np.float32(float.fromhex("-0x1.62ep-1"))
_LN2_LOW = np.float32(float.fromhex("-0x1.0bfbe8p-15"))
_FACTORS = [np.float32(1) / np.float32(math.factorial(n)) for n in range(7, -1, -1)]


def fused(a: Floats, b: Floats | np.float32, c: Floats | np.float32) -> Floats:
    """float32 a * b + c with one rounding. The product of two floats is exact as a double. If the
    sum is not, its last bit is made odd, after which rounding to a float cannot err (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008)."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    raw = total.view(np.int64)
    even = np.where((error < 0) | (error > 0), ~raw & 1, 0)
    inward = np.where((raw ^ error.view(np.int64)) < 0, even, 0)
    odd = np.asarray(raw + even - 2 * inward)
    result: Floats = odd.view(np.float64).astype(np.float32)
    return result


def product(matrix: Floats, x: Floats) -> Floats:
    """float32[rows] of [rows, columns] and [columns]."""
    sums = np.zeros(len(matrix), np.float32)
    for column, value in enumerate(x):
        sums = fused(matrix[:, column], value, sums)
    return sums


def total(parts: Floats) -> np.float32:
    """The sum of 16 partial sums."""
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    return np.float32(parts[0])


def exponential(x: Floats) -> Floats:
    """e^x for x from -infinity to 0; 0 below -80."""
    clamped = np.maximum(x, _LEAST)
    shifted = fused(clamped, _LOG2_E, _ROUNDING)
    k = shifted - _ROUNDING
    r = fused(k, _LN2_LOW, fused(k, _LN2_HIGH, clamped))
    result = np.full_like(r, _FACTORS[0])
    for factor in _FACTORS[1:]:
        result = fused(result, r, factor)
    power = (shifted.view(np.int32) - _ROUNDING.view(np.int32) + np.int32(127)) << np.int32(23)
    return np.where(x >= _LEAST, result * power.view(np.float32), np.float32(0))


def norm(x: Floats, weights: Floats, eps: np.float32) -> Floats:
    """float32[n] x / sqrt(mean(x^2) + eps) * weights."""
    sums = np.zeros(ROWS, np.float32)
    for part in _sixteens(x):
        sums = fused(part, part, sums)
    factor = np.float32(1) / np.sqrt(total(sums) / np.float32(len(x)) + eps)
    scaled: Floats = (x * factor) * weights
    return scaled


def gated(gate: Floats, up: Floats) -> Floats:
    """gate / (1 + e^-gate) * up."""
    small = exponential(-np.abs(gate))
    share = np.where(gate >= 0, np.float32(1), small) / (np.float32(1) + small)
    result: Floats = (gate * share) * up
    return result


class ReferenceLm:
    """A model that reads several texts (lanes) side by side. Not thread-safe."""

    def __init__(
        self,
        shape: LmShape,
        matrices: Sequence[Weights],
        norms: Sequence[Floats],
        cos: Floats,
        sin: Floats,
    ) -> None:
        """`matrices`: as `LmShape.matrices` says; `norms`: [n_embd] of attention and feed-forward
        of each layer, and of the output, with zeros up to a multiple of 16; `cos`, `sin`: float32
        [n_ctx, pairs] for the first pairs of a head's elements. All numbers are finite. ValueError
        for sizes that do not fit."""
        self.shape = shape
        self._matrices = [
            unpacked(weights, *size)
            for weights, size in zip(matrices, shape.matrices(), strict=True)
        ]
        self._norms = [each[: shape.n_embd] for each in norms]
        self._cos, self._sin = cos, sin
        self._texts: dict[int, tuple[list[int], list[Past]]] = {}

    def reset(self) -> None:
        """Forget all texts."""
        self._texts.clear()

    def step(self, lanes: Ints, tokens: Ints, n_threads: int = 1) -> Floats:
        """Append tokens[i] to the text of lanes[i] for each i, lanes in order (one may occur more
        than once). A text of n_ctx tokens is first cut to its last n_keep, which are evaluated
        again. Returns float32[n, n_vocab]: the logits of the token that follows each.

        What a lane gets does not depend on the other lanes, nor on how its tokens are spread over
        calls. ValueError for arguments that do not fit, and if a number exceeds float32, after
        which only `reset` may be called."""
        self._check(lanes, tokens)
        rows = np.empty((len(tokens), self.shape.n_vocab), np.float32)
        # Ignore the warnings: `_finite` checks for the overflow and the NaN that cause them.
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for i, (lane, token) in enumerate(zip(lanes.tolist(), tokens.tolist(), strict=True)):
                rows[i] = self._evaluate(lane, token)
        return rows

    def counts(self, logits: Floats) -> Counts:
        """uint32[n, n_vocab] 1 + 2^24 e^(logit - the highest of its row), rounded down."""
        if not np.isfinite(logits).all() or not logits.shape[1]:
            raise ValueError("logits: a row is not of finite numbers")
        chances = exponential(logits - logits.max(axis=1, keepdims=True)) * np.float32(COUNT_ONE)
        return chances.astype(np.uint32) + np.uint32(1)

    def _check(self, lanes: Ints, tokens: Ints) -> None:
        if len(tokens) != len(lanes) or len(lanes) > ITEMS_MAX:
            raise ValueError("tokens: expected one for each of at most 65536 lanes")
        if len(lanes) and (lanes[0] < 0 or lanes[-1] >= LANES_MAX or (np.diff(lanes) < 0).any()):
            raise ValueError("lanes: expected numbers from 0 to 255 in order")
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.shape.n_vocab):
            raise ValueError("tokens: one is not a token")

    def _evaluate(self, lane: int, token: int) -> Floats:
        shape = self.shape
        tokens, past = self._texts.setdefault(lane, ([], []))
        if len(tokens) == shape.n_ctx:
            del tokens[: shape.n_ctx - shape.n_keep]
            past.clear()
            for each in tokens:
                self._append(past, each)
        tokens.append(token)
        x = norm(self._append(past, token), self._norms[-1], np.float32(shape.norm_eps))
        return _finite(product(self._matrices[1], x))

    def _append(self, past: list[Past], token: int) -> Floats:
        """The output of the layers for a token."""
        shape, eps = self.shape, np.float32(self.shape.norm_eps)
        past.append([])
        x: Floats = self._matrices[0][token]
        for layer in range(shape.n_layer):
            q, k, v, o, gate, up, down = self._matrices[2 + PARTS * layer :][:PARTS]
            y = norm(x, self._norms[2 * layer], eps)
            seen = self._look_back(past, layer, product(q, y), product(k, y), product(v, y))
            x = x + product(o, seen)
            y = norm(x, self._norms[2 * layer + 1], eps)
            x = x + product(down, gated(_finite(product(gate, y)), product(up, y)))
        return x

    def _look_back(self, past: list[Past], layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        shape, position = self.shape, len(past) - 1
        scale = np.float32(1) / np.sqrt(np.float32(shape.head_dim))
        queries = self._rotated(q.reshape(shape.n_head, -1), position) * scale
        past[-1].append(
            (
                self._rotated(k.reshape(shape.n_head_kv, -1), position),
                v.reshape(shape.n_head_kv, -1),
            )
        )
        heads = []
        for head, query in enumerate(queries):
            kv = head * shape.n_head_kv // shape.n_head
            keys = np.array([each[layer][0][kv] for each in past])
            values = np.array([each[layer][1][kv] for each in past])
            scores = _finite(product(keys, query))
            weights = exponential(scores - scores.max())
            sums = np.zeros(ROWS, np.float32)
            for part in _sixteens(weights):
                sums = sums + part
            heads.append(product(np.ascontiguousarray(values.T), weights) / total(sums))
        return np.concatenate(heads)

    def _rotated(self, heads: Floats, position: int) -> Floats:
        cos, sin = self._cos[position], self._sin[position]
        result = heads.copy()
        a, b = heads[:, 0 : 2 * len(cos) : 2], heads[:, 1 : 2 * len(cos) : 2]
        result[:, 0 : 2 * len(cos) : 2] = a * cos - b * sin
        result[:, 1 : 2 * len(cos) : 2] = a * sin + b * cos
        return result


def unpacked(weights: Weights, n_rows: int, n_columns: int) -> Floats:
    """float32[n_rows, n_columns] of panels; ValueError if they have another size."""
    format, panels = weights
    n_panels = -(-n_rows // ROWS)
    if format == "q8":
        blocks = panels.reshape(n_panels, n_columns // BLOCK, -1)
        scales = blocks[..., : 4 * ROWS].copy().view(np.float32)[:, :, None, :]
        codes = blocks[..., 4 * ROWS :].view(np.int8).reshape(n_panels, -1, BLOCK, ROWS)
        values = codes.astype(np.float32) * scales
    elif format in ("f32", "f16"):
        values = panels.view(np.float32 if format == "f32" else np.float16).astype(np.float32)
    else:
        raise ValueError(f"matrices: unknown format {format}")
    rows = values.reshape(n_panels, n_columns, ROWS).transpose(0, 2, 1)
    return np.ascontiguousarray(rows.reshape(-1, n_columns)[:n_rows])


def _sixteens(x: Floats) -> Floats:
    """float32[m, 16]: x, padded with zeros."""
    return np.append(x, np.zeros(-len(x) % ROWS, np.float32)).reshape(-1, ROWS)


def _finite(x: Floats) -> Floats:
    if not np.isfinite(x).all():
        raise ValueError("weights: a number is beyond what float32 holds")
    return x
