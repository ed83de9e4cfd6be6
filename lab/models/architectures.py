"""The tensors and keys of each architecture that a random-weight model can have.

Names and shapes are those that llama.cpp's `src/models/<arch>.cpp` loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gguf import GGUFWriter

from lab.models import parts, recurrent, windowed
from lab.models.shape import Arch, Shape
from lab.models.tensor import Tensor, norm
from lab.models.vision import DEEP_STACK

NORM_EPS = 1e-5

Parts = Callable[[Shape, str], Iterator[Tensor]]
Layer = Callable[[Shape, int], Iterator[Tensor]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture's layers are made, and what else it has.

    layer: every tensor of one layer, in file order
    metadata: adds the keys that not all architectures have
    extra: tensors that belong to no layer"""

    layer: Layer
    is_layer_norm: bool = False
    """Uses LayerNorm, mostly with biases; otherwise RMS norm."""
    has_norm_bias: bool = False
    """Whether the last norm has a bias."""
    metadata: Callable[[GGUFWriter, Shape], None] | None = None
    extra: Callable[[Shape], Iterator[Tensor]] | None = None
    output_norm: str = "output_norm"
    embd_std: Callable[[Shape], float] = lambda shape: 1.0
    is_tied: bool = False
    """The embedding is the output matrix."""
    heads_kv: Callable[[Shape], list[int]] | None = None
    """KV heads of each layer, if layers differ."""
    has_heads: bool = True
    """False for architectures without attention."""


def layer_tensors(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Every tensor of one layer, in file order."""
    return ARCHITECTURES[shape.arch].layer(shape, layer)


def _attention(attention: Parts, feed_forward: Parts, *, is_layer_norm: bool = False) -> Layer:
    """Make the layer function of a plain transformer."""

    def layer(shape: Shape, il: int) -> Iterator[Tensor]:
        block = f"blk.{il}"
        yield from norm(f"{block}.attn_norm", shape.n_embd, with_bias=is_layer_norm)
        yield from attention(shape, block)
        yield from norm(f"{block}.ffn_norm", shape.n_embd, with_bias=is_layer_norm)
        yield from feed_forward(shape, block)

    return layer


def _parallel_residual(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_parallel_residual(True)


def _sections(writer: GGUFWriter, shape: Shape) -> None:
    """Qwen's proportions: half of the pairs follow time in Qwen2-VL, 24 of 64 in Qwen3-VL."""
    pairs = shape.n_rot // 2
    side = pairs // 4 if shape.arch == "qwen2vl" else pairs * 20 // 64
    writer.add_rope_dimension_sections([pairs - 2 * side, side, side, 0])


def _deep_sections(writer: GGUFWriter, shape: Shape) -> None:
    """Qwen3-VL: its first layers, but never the last one, take features of a projector."""
    _sections(writer, shape)
    writer.add_num_deepstack_layers(min(DEEP_STACK, shape.n_layer - 1))


def _latent_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """All layers are dense; the expert counts only have to be present."""
    writer.add_leading_dense_block_count(shape.n_layer)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_q_lora_rank(shape.head_size)
    writer.add_kv_lora_rank(shape.head_size)
    writer.add_key_length_mla(shape.head_size)
    writer.add_value_length_mla(shape.head_size // 2)


_LLAMA = _attention(parts.qkv, parts.swiglu)
_QWEN3 = _attention(parts.normed_qkv, parts.swiglu)

ARCHITECTURES: dict[Arch, Architecture] = {
    "llama": Architecture(_LLAMA),
    "qwen3": Architecture(_QWEN3),
    "phi3": Architecture(_attention(parts.fused_qkv, parts.fused_swiglu)),
    "stablelm": Architecture(
        _attention(parts.qkv, parts.swiglu, is_layer_norm=True),
        is_layer_norm=True,
        has_norm_bias=True,
    ),
    "gptneox": Architecture(
        _attention(parts.fused_qkv_biased, parts.gelu, is_layer_norm=True),
        is_layer_norm=True,
        has_norm_bias=True,
        metadata=_parallel_residual,
    ),
    "smollm3": Architecture(_LLAMA),
    "qwen2vl": Architecture(_LLAMA, metadata=_sections),
    "qwen3vl": Architecture(_QWEN3, metadata=_deep_sections),
    "deepseek2": Architecture(_attention(parts.latent, parts.swiglu), metadata=_latent_metadata),
    "gemma3": Architecture(
        windowed.gemma3_layer,
        metadata=windowed.gemma3_metadata,
        embd_std=lambda shape: shape.n_embd**-0.5,  # llama.cpp scales it up again
    ),
    "gpt-oss": Architecture(windowed.gpt_oss_layer, metadata=windowed.gpt_oss_metadata),
    "cohere2": Architecture(
        windowed.cohere2_layer,
        is_layer_norm=True,
        metadata=windowed.cohere2_metadata,
        embd_std=lambda shape: windowed.TIED_STD,
        is_tied=True,
    ),
    "mamba": Architecture(
        recurrent.mamba_layer, metadata=recurrent.mamba_metadata, has_heads=False
    ),
    "rwkv7": Architecture(
        recurrent.rwkv7_layer,
        is_layer_norm=True,
        has_norm_bias=True,
        metadata=recurrent.rwkv7_metadata,
        extra=recurrent.rwkv7_extra,
        has_heads=False,
    ),
    "lfm2": Architecture(
        recurrent.lfm2_layer,
        metadata=recurrent.lfm2_metadata,
        output_norm="token_embd_norm",
        heads_kv=recurrent.heads_kv,
    ),
    "granitehybrid": Architecture(
        recurrent.granite_layer,
        metadata=recurrent.grouped_metadata,
        heads_kv=recurrent.heads_kv,
    ),
    "jamba": Architecture(
        recurrent.jamba_layer, metadata=recurrent.mamba_metadata, heads_kv=recurrent.heads_kv
    ),
    "falcon-h1": Architecture(recurrent.falcon_h1_layer, metadata=recurrent.grouped_metadata),
    "qwen35": Architecture(recurrent.qwen35_layer, metadata=recurrent.qwen35_metadata),
}
