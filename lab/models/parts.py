"""Parts of layers that many architectures share.

Standard deviations keep activations at unit variance: what a layer adds to the residual stream is
scaled by 1/sqrt(2 layers), so that a deep model does not drown the embedding; a SwiGLU of unit
normals has variance ~0.36, a GELU ~0.43.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lab.models.shape import Shape
from lab.models.tensor import Tensor, bias, norm

QUERY_GAIN = 2.0
"""Attention logits get this standard deviation: far from uniform, far from one-hot."""
NORM_SPREAD = 0.2
"""Gains of Q and K norms vary, as trained ones do."""
LOGIT_STD = 3.0


def matrix(shape: Shape, name: str, dims: tuple[int, ...], std: float) -> Tensor:
    """A matrix of the model's type; the last of `dims` is the row length."""
    return Tensor(f"{name}.weight", dims, std, type=shape.matrix_type)


def added(shape: Shape, fan_in: int) -> float:
    """The standard deviation of a matrix whose product is added to the residual stream."""
    return 2.0 / math.sqrt(2 * shape.n_layer * fan_in)


def qkv(shape: Shape, block: str, q_factor: int = 1) -> Iterator[Tensor]:
    """Attention's four matrices. q_factor 2: the query's matrix includes a gate."""
    embd, unit = shape.n_embd, 1 / math.sqrt(shape.n_embd)
    q, kv = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    yield matrix(shape, f"{block}.attn_q", (q_factor * q, embd), QUERY_GAIN * unit)
    yield matrix(shape, f"{block}.attn_k", (kv, embd), unit)
    yield matrix(shape, f"{block}.attn_v", (kv, embd), unit)
    yield matrix(shape, f"{block}.attn_output", (embd, q), added(shape, q))


def normed_qkv(shape: Shape, block: str, q_factor: int = 1) -> Iterator[Tensor]:
    """`qkv` with norms of queries and keys."""
    yield from qkv(shape, block, q_factor)
    for name in ("attn_q_norm", "attn_k_norm"):
        yield from norm(f"{block}.{name}", shape.head_size, spread=NORM_SPREAD)


def fused_qkv(shape: Shape, block: str) -> Iterator[Tensor]:
    """Q, K and V in one matrix."""
    embd, unit = shape.n_embd, math.sqrt(QUERY_GAIN / shape.n_embd)
    rows = (shape.n_head + 2 * shape.n_head_kv) * shape.head_size
    yield matrix(shape, f"{block}.attn_qkv", (rows, embd), unit)
    yield matrix(shape, f"{block}.attn_output", (embd, embd), added(shape, embd))


def fused_qkv_biased(shape: Shape, block: str) -> Iterator[Tensor]:
    """`fused_qkv` with biases."""
    yield from fused_qkv(shape, block)
    yield bias(f"{block}.attn_qkv", (shape.n_head + 2 * shape.n_head_kv) * shape.head_size)
    yield bias(f"{block}.attn_output", shape.n_embd)


def latent(shape: Shape, block: str) -> Iterator[Tensor]:
    """DeepSeek's MLA: K and V are one latent of `head_size` values and half a head of roped
    ones; the other half of each head, and V, are made from the latent."""
    embd, rank, half = shape.n_embd, shape.head_size, shape.head_size // 2
    heads = shape.n_head
    yield from norm(f"{block}.attn_q_a_norm", rank)
    yield from norm(f"{block}.attn_kv_a_norm", rank)
    yield matrix(shape, f"{block}.attn_q_a", (rank, embd), 1 / math.sqrt(embd))
    gain = QUERY_GAIN / math.sqrt(rank)
    yield matrix(shape, f"{block}.attn_q_b", (heads * 2 * half, rank), gain)
    yield matrix(shape, f"{block}.attn_kv_a_mqa", (rank + half, embd), 1 / math.sqrt(embd))
    for name, dims in (("attn_k_b", (heads, rank, half)), ("attn_v_b", (heads, half, rank))):
        yield Tensor(f"{block}.{name}.weight", dims, 1 / math.sqrt(rank))  # llama.cpp: no F16
    yield matrix(shape, f"{block}.attn_output", (embd, heads * half), added(shape, heads * half))


def swiglu(shape: Shape, block: str) -> Iterator[Tensor]:
    """A gated feed-forward part."""
    embd, ff, unit = shape.n_embd, shape.n_ff, 1 / math.sqrt(shape.n_embd)
    yield matrix(shape, f"{block}.ffn_gate", (ff, embd), unit)
    yield matrix(shape, f"{block}.ffn_up", (ff, embd), unit)
    yield matrix(shape, f"{block}.ffn_down", (embd, ff), added(shape, ff))


def fused_swiglu(shape: Shape, block: str) -> Iterator[Tensor]:
    """`swiglu` with gate and up in one matrix."""
    embd, ff = shape.n_embd, shape.n_ff
    yield matrix(shape, f"{block}.ffn_up", (2 * ff, embd), 1 / math.sqrt(embd))
    yield matrix(shape, f"{block}.ffn_down", (embd, ff), added(shape, ff))


def gelu(shape: Shape, block: str) -> Iterator[Tensor]:
    """A feed-forward part with biases and no gate."""
    embd, ff = shape.n_embd, shape.n_ff
    yield matrix(shape, f"{block}.ffn_up", (ff, embd), 1 / math.sqrt(embd))
    yield bias(f"{block}.ffn_up", ff)
    yield matrix(shape, f"{block}.ffn_down", (embd, ff), added(shape, ff))
    yield bias(f"{block}.ffn_down", embd)
