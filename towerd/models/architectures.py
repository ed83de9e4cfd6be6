"""The tensors and keys of each architecture that a random-weight model can have.

Names and shapes are those that llama.cpp's `src/models/<arch>.cpp` loads. Deviations keep
activations at unit variance: what a layer adds to the residual stream is scaled by
1/sqrt(2 layers), so that the depth of the model does not drown the embedding; a SwiGLU of unit
normals has variance ~0.36, a GELU ~0.43.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gguf import GGUFWriter

from towerd.models.shape import Arch, Shape
from towerd.models.tensor import Tensor, bias, norm

NORM_EPS = 1e-5
QUERY_GAIN = 2.0
"""Attention logits get this standard deviation: far from uniform, far from one-hot."""
NORM_SPREAD = 0.2
"""Gains of Q and K norms vary, as trained ones do."""

Parts = Callable[[Shape, str], Iterator[Tensor]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a layer is made: its attention and its feed-forward network, and its kind of norm.

    metadata: adds the keys beyond the ones that all architectures have"""

    attention: Parts
    feed_forward: Parts
    is_layer_norm: bool = False
    """LayerNorm with biases; otherwise RMS norm."""
    metadata: Callable[[GGUFWriter, Shape], None] | None = None


def layer_tensors(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Every tensor of one layer, in file order."""
    arch, block = ARCHITECTURES[shape.arch], f"blk.{layer}"
    yield from norm(f"{block}.attn_norm", shape.n_embd, with_bias=arch.is_layer_norm)
    yield from arch.attention(shape, block)
    yield from norm(f"{block}.ffn_norm", shape.n_embd, with_bias=arch.is_layer_norm)
    yield from arch.feed_forward(shape, block)


def matrix(shape: Shape, name: str, dims: tuple[int, ...], std: float) -> Tensor:
    """A matrix of the model's type; the last of `dims` is the row length."""
    return Tensor(f"{name}.weight", dims, std, type=shape.matrix_type)


def _added(shape: Shape, fan_in: int) -> float:
    return 2.0 / math.sqrt(2 * shape.n_layer * fan_in)


def _qkv(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, unit = shape.n_embd, 1 / math.sqrt(shape.n_embd)
    q, kv = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    yield matrix(shape, f"{block}.attn_q", (q, embd), QUERY_GAIN * unit)
    yield matrix(shape, f"{block}.attn_k", (kv, embd), unit)
    yield matrix(shape, f"{block}.attn_v", (kv, embd), unit)
    yield matrix(shape, f"{block}.attn_output", (embd, q), _added(shape, q))


def _normed_qkv(shape: Shape, block: str) -> Iterator[Tensor]:
    yield from _qkv(shape, block)
    for name in ("attn_q_norm", "attn_k_norm"):
        yield from norm(f"{block}.{name}", shape.head_size, spread=NORM_SPREAD)


def _fused_qkv(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, unit = shape.n_embd, math.sqrt(QUERY_GAIN / shape.n_embd)
    rows = (shape.n_head + 2 * shape.n_head_kv) * shape.head_size
    yield matrix(shape, f"{block}.attn_qkv", (rows, embd), unit)
    yield matrix(shape, f"{block}.attn_output", (embd, embd), _added(shape, embd))


def _fused_qkv_biased(shape: Shape, block: str) -> Iterator[Tensor]:
    yield from _fused_qkv(shape, block)
    yield bias(f"{block}.attn_qkv", (shape.n_head + 2 * shape.n_head_kv) * shape.head_size)
    yield bias(f"{block}.attn_output", shape.n_embd)


def _latent(shape: Shape, block: str) -> Iterator[Tensor]:
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
    yield matrix(shape, f"{block}.attn_output", (embd, heads * half), _added(shape, heads * half))


def _swiglu(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, ff, unit = shape.n_embd, shape.n_ff, 1 / math.sqrt(shape.n_embd)
    yield matrix(shape, f"{block}.ffn_gate", (ff, embd), unit)
    yield matrix(shape, f"{block}.ffn_up", (ff, embd), unit)
    yield matrix(shape, f"{block}.ffn_down", (embd, ff), _added(shape, ff))


def _fused_swiglu(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, ff = shape.n_embd, shape.n_ff
    yield matrix(shape, f"{block}.ffn_up", (2 * ff, embd), 1 / math.sqrt(embd))
    yield matrix(shape, f"{block}.ffn_down", (embd, ff), _added(shape, ff))


def _gelu(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, ff = shape.n_embd, shape.n_ff
    yield matrix(shape, f"{block}.ffn_up", (ff, embd), 1 / math.sqrt(embd))
    yield bias(f"{block}.ffn_up", ff)
    yield matrix(shape, f"{block}.ffn_down", (embd, ff), _added(shape, ff))
    yield bias(f"{block}.ffn_down", embd)


def _parallel_residual(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_parallel_residual(True)


def _sections(writer: GGUFWriter, shape: Shape) -> None:
    """Qwen's proportions: half of the pairs follow time in Qwen2-VL, 24 of 64 in Qwen3-VL."""
    pairs = shape.n_rot // 2
    side = pairs // 4 if shape.arch == "qwen2vl" else pairs * 20 // 64
    writer.add_rope_dimension_sections([pairs - 2 * side, side, side, 0])


def _latent_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """All layers dense: the expert counts only have to be there."""
    writer.add_leading_dense_block_count(shape.n_layer)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_q_lora_rank(shape.head_size)
    writer.add_kv_lora_rank(shape.head_size)
    writer.add_key_length_mla(shape.head_size)
    writer.add_value_length_mla(shape.head_size // 2)


ARCHITECTURES: dict[Arch, Architecture] = {
    "llama": Architecture(_qkv, _swiglu),
    "qwen3": Architecture(_normed_qkv, _swiglu),
    "phi3": Architecture(_fused_qkv, _fused_swiglu),
    "stablelm": Architecture(_qkv, _swiglu, is_layer_norm=True),
    "gptneox": Architecture(
        _fused_qkv_biased, _gelu, is_layer_norm=True, metadata=_parallel_residual
    ),
    "smollm3": Architecture(_qkv, _swiglu),
    "qwen2vl": Architecture(_qkv, _swiglu, metadata=_sections),
    "qwen3vl": Architecture(_normed_qkv, _swiglu, metadata=_sections),
    "deepseek2": Architecture(_latent, _swiglu, metadata=_latent_metadata),
}
