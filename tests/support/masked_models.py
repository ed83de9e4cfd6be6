"""Gemma 3 and LFM2 in numpy's float64, with attention masks of one's own in the layers that attend to
everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from towerd.tokens import Ids

F64: TypeAlias = npt.NDArray[np.float64]
Masks: TypeAlias = Callable[[int], npt.NDArray[np.bool_]]
"""bool[heads, n, n], or what broadcasts to it, for the i-th layer that attends to everything: what each
query sees."""


class Model:
    """The weights of a GGUF in F32, and what architectures share."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.weights = {t.name: np.asarray(t.data, np.float64) for t in reader.tensors}
        arch = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        self.keys = {
            name.removeprefix(f"{arch}."): field.parts[field.data[0]][0]
            for name, field in reader.fields.items()
            if name.startswith(f"{arch}.")
        }
        self.n_layer = int(self.keys["block_count"])
        self.eps = float(self.keys["attention.layer_norm_rms_epsilon"])

    def norm(self, x: F64, name: str) -> F64:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
        return x / scale * self.weights[f"{name}.weight"]

    def times(self, x: F64, name: str) -> F64:
        return x @ self.weights[f"{name}.weight"].T

    def attention(self, x: F64, block: str, base: float, mask: npt.NDArray[np.bool_]) -> F64:
        size = len(self.weights[f"{block}.attn_q_norm.weight"])

        def heads(name: str, normed: bool) -> F64:
            values = self.times(x, f"{block}.attn_{name}").reshape(len(x), -1, size)
            if normed:
                values = rotated(self.norm(values, f"{block}.attn_{name}_norm"), base)
            return values.transpose(1, 0, 2)

        q, k, v = heads("q", True), heads("k", True), heads("v", False)
        k, v = (np.repeat(each, len(q) // len(each), axis=0) for each in (k, v))
        scores = np.where(mask, q @ k.transpose(0, 2, 1) / np.sqrt(size), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True)) @ v
        return self.times(out.transpose(1, 0, 2).reshape(len(x), -1), f"{block}.attn_output")


class Gemma3(Model):
    """`tests/support/window_model.py`: every second layer has a window."""

    def logits(self, ids: Ids, masks: Masks) -> F64:
        """[n, vocabulary]"""
        window, n = int(self.keys["attention.sliding_window"]), len(ids)
        every = np.arange(n)
        ages = every[:, None] - every
        x = self.weights["token_embd.weight"][ids]
        x = x * np.sqrt(x.shape[1])
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
            if layer % 2:
                mask, base = masks(layer // 2), float(self.keys["rope.freq_base"])
            else:
                mask, base = (ages >= 0) & (ages < window), 10000.0
            y = self.attention(self.norm(x, f"{block}.attn_norm"), block, base, mask)
            x = x + self.norm(y, f"{block}.post_attention_norm")
            y = self.norm(x, f"{block}.ffn_norm")
            y = gelu(self.times(y, f"{block}.ffn_gate")) * self.times(y, f"{block}.ffn_up")
            x = x + self.norm(self.times(y, f"{block}.ffn_down"), f"{block}.post_ffw_norm")
        return self.times(self.norm(x, "output_norm"), "output")


class Lfm2(Model):
    """Short convolutions, and attention in the layers that have its weights."""

    def logits(self, ids: Ids, masks: Masks) -> F64:
        """[n, vocabulary]"""
        x, n_full = self.weights["token_embd.weight"][ids], 0
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
            y = self.norm(x, f"{block}.attn_norm")
            if f"{block}.attn_q.weight" in self.weights:
                base = float(self.keys["rope.freq_base"])
                x = x + self.attention(y, block, base, masks(n_full))
                n_full += 1
            else:
                x = x + self._convolution(y, block)
            y = self.norm(x, f"{block}.ffn_norm")
            gate = self.times(y, f"{block}.ffn_gate")
            y = gate / (1 + np.exp(-gate)) * self.times(y, f"{block}.ffn_up")
            x = x + self.times(y, f"{block}.ffn_down")
        name = "output" if "output.weight" in self.weights else "token_embd"
        return self.times(self.norm(x, "token_embd_norm"), name)

    def _convolution(self, x: F64, block: str) -> F64:
        b, c, values = np.split(self.times(x, f"{block}.shortconv.in_proj"), 3, axis=1)
        taps, values = self.weights[f"{block}.shortconv.conv.weight"], b * values
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), values])
        mixed = sum(padded[i : i + len(x)] * taps[:, i] for i in range(taps.shape[1]))
        return self.times(c * mixed, f"{block}.shortconv.out_proj")


def rotated(x: F64, base: float) -> F64:
    """x[n, heads, size], each rotated to its index."""
    half = x.shape[2] // 2
    angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    cos, sin, (a, b) = np.cos(angles), np.sin(angles), np.split(x, 2, axis=2)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=2)


def gelu(x: F64) -> F64:
    """As llama.cpp approximates it."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x**2)))
