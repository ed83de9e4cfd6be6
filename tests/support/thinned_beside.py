"""Gemma 3 and LFM2 in float64, whose layers that attend to everything see positions of their own, beside
layers with windows or short convolutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from thinned import Floats, ThinnedModel, attended

from lab.models.shape import Shape


class _Neox(ThinnedModel):
    """Pairs of RoPE are half a head apart, and queries and keys are normed."""

    _base = 0.0

    def _turned(self, rows: Floats, places: Any) -> Floats:
        half = rows.shape[1] // 2
        angles = places[:, None] * (self._base or self._shape.rope_freq_base) ** (
            -np.arange(half) / half
        )
        a, b, cos, sin = rows[:, :half], rows[:, half:], np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)

    def _heads(self, block: str, h: Floats) -> tuple[Floats, Floats, Floats]:
        """q, k, v: [heads, size], not rotated"""
        w, size = self._w, self._shape.head_size
        q, k, v = ((w[f"{block}attn_{name}.weight"] @ h).reshape(-1, size) for name in "qkv")
        q, k = (
            np.stack([self._norm(head, w[f"{block}attn_{name}_norm.weight"]) for head in heads])
            for name, heads in (("q", q), ("k", k))
        )
        return q, k, v


class ThinnedGemma3(_Neox):
    """`window_model`: of two layers the first has a window."""

    def __init__(self, path: Path, n_layer: int, window: int) -> None:
        full = Shape(n_layer // 2, 64, 4, 2, 128, 512, head_dim=32, rope_freq_base=10000.0)
        super().__init__(path, full)
        self._window, self._n = window, 0
        self._seen_by_window: list[list[tuple[Floats, Floats]]] = [[] for _ in range(n_layer // 2)]

    def _next(self, token: int) -> Floats:
        place, w = self._new_place(), self._w
        x = w["token_embd.weight"][token]
        x = x * np.sqrt(len(x))
        for layer in range(2 * self._shape.n_layer):
            block = f"blk.{layer}."
            q, k, v = self._heads(block, self._norm(x, w[f"{block}attn_norm.weight"]))
            if layer % 2:
                out = self._seen(layer // 2, place, q, k, v)
            else:
                out = self._windowed(layer // 2, q, k, v)
            out = w[f"{block}attn_output.weight"] @ out
            x = x + self._norm(out, w[f"{block}post_attention_norm.weight"])
            h = self._norm(x, w[f"{block}ffn_norm.weight"])
            h = gelu(w[f"{block}ffn_gate.weight"] @ h) * (w[f"{block}ffn_up.weight"] @ h)
            x = x + self._norm(w[f"{block}ffn_down.weight"] @ h, w[f"{block}post_ffw_norm.weight"])
        self._n += 1
        return self._logprobs(x, "output", "output_norm")

    def _windowed(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        here = np.full(len(q), self._n)
        self._seen_by_window[layer].append((self._turned(k, here[: len(k)]), v))
        last = self._seen_by_window[layer][-self._window :]
        keys, values = (np.stack(each, axis=1) for each in zip(*last, strict=True))
        group = len(q) // len(k)
        return np.concatenate(
            [
                attended(query, keys[head // group], values[head // group])
                for head, query in enumerate(self._turned(q, here))
            ]
        )


class ThinnedLfm2(_Neox):
    """Of four layers the last is attention, the others are convolutions."""

    def __init__(self, path: Path, shape: Shape, full: Shape) -> None:
        """full: of the layers with attention"""
        super().__init__(path, full)
        self._n_layer = shape.n_layer
        self._before: dict[int, list[Floats]] = {}

    def _next(self, token: int) -> Floats:
        place, w, n_full = self._new_place(), self._w, 0
        x = w["token_embd.weight"][token]
        for layer in range(self._n_layer):
            block = f"blk.{layer}."
            h = self._norm(x, w[f"{block}attn_norm.weight"])
            if f"{block}attn_q.weight" in w:
                out = self._seen(n_full, place, *self._heads(block, h))
                x = x + w[f"{block}attn_output.weight"] @ out
                n_full += 1
            else:
                x = x + self._convolution(layer, h)
            x = x + self._feed_forward(layer, x)
        name = "output" if "output.weight" in w else "token_embd"
        return self._logprobs(x, name, "token_embd_norm")

    def _convolution(self, layer: int, h: Floats) -> Floats:
        w, block = self._w, f"blk.{layer}.shortconv."
        b, c, values = np.split(w[f"{block}in_proj.weight"] @ h, 3)
        taps = w[f"{block}conv.weight"]
        before = self._before.setdefault(layer, [np.zeros_like(h)] * (taps.shape[1] - 1))
        before.append(b * values)
        mixed = sum(
            row * taps[:, -1 - i] for i, row in enumerate(reversed(before[-taps.shape[1] :]))
        )
        return np.asarray(w[f"{block}out_proj.weight"] @ (c * mixed))


def gelu(x: Floats) -> Floats:
    """As llama.cpp approximates it."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x**2))))
