"""Layers of architectures with sliding-window attention: Gemma 3, gpt-oss and Command R7B.

Tensor names and shapes are those that llama.cpp's `src/models/{gemma3,openai-moe,cohere2}.cpp`
loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gguf import GGUFWriter

from lab.models.parts import LOGIT_STD, NORM_SPREAD, added, matrix, normed_qkv, qkv, swiglu
from lab.models.shape import Shape
from lab.models.tensor import Tensor, bias, norm

N_EXPERT, N_EXPERT_USED = 4, 2
TIED_STD = 0.05
"""Command R7B's output matrix is its embedding: with unit variance, every token would predict
itself."""
SWA_FREQ_BASE = 10000.0
"""Gemma 3's windowed layers use another RoPE base than its full layers."""


def gemma3_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Norms before and after both parts; the later ones keep the sum at unit variance."""
    block, gain = f"blk.{layer}", 1 / math.sqrt(2 * shape.n_layer)
    yield from norm(f"{block}.attn_norm", shape.n_embd)
    yield from normed_qkv(shape, block)
    yield Tensor(f"{block}.post_attention_norm.weight", (shape.n_embd,), 0.1 * gain, gain)
    yield from norm(f"{block}.ffn_norm", shape.n_embd)
    yield from swiglu(shape, block)
    yield Tensor(f"{block}.post_ffw_norm.weight", (shape.n_embd,), 0.1 * gain, gain)


def gemma3_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Five windowed layers, then a full one; in a shallow model at least one is full."""
    _add_window(writer, shape, 6)
    writer.add_float32(f"{shape.arch}.rope.freq_base_swa", SWA_FREQ_BASE)


def gpt_oss_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Attention with sinks and biases, and a mixture of experts."""
    block, embd = f"blk.{layer}", shape.n_embd
    yield from norm(f"{block}.attn_norm", embd)
    yield from qkv(shape, block)
    for name, n_head in (("q", shape.n_head), ("k", shape.n_head_kv), ("v", shape.n_head_kv)):
        yield bias(f"{block}.attn_{name}", n_head * shape.head_size)
    yield bias(f"{block}.attn_output", embd)
    yield Tensor(f"{block}.attn_sinks.weight", (shape.n_head,), 1.0)
    yield from norm(f"{block}.post_attention_norm", embd)
    yield from _experts(shape, block)


def _experts(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, ff, unit = shape.n_embd, shape.n_ff, 1 / math.sqrt(shape.n_embd)
    yield Tensor(f"{block}.ffn_gate_inp.weight", (N_EXPERT, embd), unit)
    yield bias(f"{block}.ffn_gate_inp", N_EXPERT)
    for name, dims, std in (
        ("gate", (N_EXPERT, ff, embd), unit),
        ("up", (N_EXPERT, ff, embd), unit),
        ("down", (N_EXPERT, embd, ff), added(shape, ff)),
    ):
        yield matrix(shape, f"{block}.ffn_{name}_exps", dims, std)
        yield Tensor(f"{block}.ffn_{name}_exps.bias", dims[:2], 0.1)


def gpt_oss_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Every second layer is windowed."""
    _add_window(writer, shape, 2)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_feed_forward_length(shape.n_ff)


def cohere2_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """One norm for attention and feed-forward, which run in parallel."""
    block = f"blk.{layer}"
    yield Tensor(f"{block}.attn_norm.weight", (shape.n_embd,), NORM_SPREAD, 1.0)
    yield from qkv(shape, block)
    yield from swiglu(shape, block)


def cohere2_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Three windowed layers, then a full one without RoPE."""
    _add_window(writer, shape, 4)
    writer.add_logit_scale(LOGIT_STD / (TIED_STD * math.sqrt(shape.n_embd)))


def _add_window(writer: GGUFWriter, shape: Shape, pattern: int) -> None:
    writer.add_sliding_window(shape.window)
    key = f"{shape.arch}.attention.sliding_window_pattern"
    writer.add_uint32(key, min(pattern, shape.n_layer))
