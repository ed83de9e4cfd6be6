"""Layers of architectures with a recurrent state, alone or beside attention.

Tensor names and shapes are those that llama.cpp's `src/models/{mamba,rwkv7,lfm2,granite-hybrid,
jamba,falcon-h1,qwen35}.cpp` loads. States decay within some tens of tokens: neither at once nor
never, so that a state of another prefix changes the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gguf import GGUFWriter

from lab.models.parts import added, matrix, normed_qkv, qkv, swiglu
from lab.models.shape import Shape
from lab.models.tensor import Tensor, bias, norm

CONV = 4
"""Taps of the convolution before a state-space scan."""
SHORT_CONV = 3
STATE = 32
"""Values per channel (or per head and channel) of a state-space layer."""
LORA = 32
"""Rank of RWKV's small matrices."""
RWKV_HEAD = 64
"""Every RWKV-7 has heads of 64, and llama.cpp's CPU code is wrong for smaller ones."""
DT_BIAS = -3.0
"""softplus(-3) is a step of 0.05: with A around -2 a state loses a tenth a token."""
ATTENTION_EVERY = 4
"""The period of attention layers in a hybrid; the last layer of each period is attention."""


def is_attention(shape: Shape, layer: int) -> bool:
    """Whether a layer of a hybrid with two kinds of layers is attention."""
    return (layer + 1) % ATTENTION_EVERY == 0


def heads_kv(shape: Shape) -> list[int]:
    """KV heads of each layer; llama.cpp treats a layer with none as recurrent."""
    return [shape.n_head_kv if is_attention(shape, layer) else 0 for layer in range(shape.n_layer)]


def n_inner(shape: Shape) -> int:
    """Channels of a state-space layer; llama.cpp supports only an expansion by two."""
    return 2 * shape.n_embd


def _dt_rank(shape: Shape) -> int:
    return max(8, shape.n_embd // 16)


def _decay(name: str, dims: tuple[int, ...]) -> Tensor:
    return Tensor(name, dims, 0.3, -2.0)


def _scan(shape: Shape, block: str) -> Iterator[Tensor]:
    """Mamba's selective scan."""
    embd, inner, rank = shape.n_embd, n_inner(shape), _dt_rank(shape)
    yield matrix(shape, f"{block}.ssm_in", (2 * inner, embd), 1 / math.sqrt(embd))
    yield Tensor(f"{block}.ssm_conv1d.weight", (inner, CONV), 0.5)
    yield bias(f"{block}.ssm_conv1d", inner)
    yield matrix(shape, f"{block}.ssm_x", (rank + 2 * STATE, inner), 2 / math.sqrt(inner))
    yield Tensor(f"{block}.ssm_dt.weight", (inner, rank), 1 / math.sqrt(rank))
    yield Tensor(f"{block}.ssm_dt.bias", (inner,), 0.5, DT_BIAS)
    yield _decay(f"{block}.ssm_a", (inner, STATE))
    yield Tensor(f"{block}.ssm_d", (inner,), 0.1, 1.0)
    yield matrix(shape, f"{block}.ssm_out", (embd, inner), added(shape, inner))


def _grouped_scan(shape: Shape, block: str) -> Iterator[Tensor]:
    """Mamba-2's scan: one decay per head, one group."""
    embd, inner, n_head = shape.n_embd, n_inner(shape), n_scan_heads(shape)
    conv = inner + 2 * STATE
    yield matrix(shape, f"{block}.ssm_in", (inner + conv + n_head, embd), 1 / math.sqrt(embd))
    yield Tensor(f"{block}.ssm_conv1d.weight", (conv, CONV), 0.5)
    yield bias(f"{block}.ssm_conv1d", conv)
    yield Tensor(f"{block}.ssm_dt.bias", (n_head,), 0.5, DT_BIAS)
    yield _decay(f"{block}.ssm_a", (n_head, 1))
    yield Tensor(f"{block}.ssm_d", (n_head, 1), 0.1, 1.0)
    yield Tensor(f"{block}.ssm_norm.weight", (1, inner), 0.1, 1.0)
    yield matrix(shape, f"{block}.ssm_out", (embd, inner), added(shape, inner))


def n_scan_heads(shape: Shape) -> int:
    """Heads of Mamba-2's scan, of 32 channels each."""
    return n_inner(shape) // 32


def mamba_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """The scan alone: Mamba has no feed-forward part."""
    yield from norm(f"blk.{layer}.attn_norm", shape.n_embd)
    yield from _scan(shape, f"blk.{layer}")


def jamba_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Mamba's scan with norms inside, or attention without positions."""
    block = f"blk.{layer}"
    yield from norm(f"{block}.attn_norm", shape.n_embd)
    if is_attention(shape, layer):
        yield from qkv(shape, block)
    else:
        yield from _scan(shape, block)
        sizes = (("dt", _dt_rank(shape)), ("b", STATE), ("c", STATE))
        for name, n in sizes:
            yield from norm(f"{block}.ssm_{name}_norm", n)
    yield from norm(f"{block}.ffn_norm", shape.n_embd)
    yield from swiglu(shape, block)


def granite_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Mamba-2's scan or attention."""
    block = f"blk.{layer}"
    yield from norm(f"{block}.attn_norm", shape.n_embd)
    yield from (qkv if is_attention(shape, layer) else _grouped_scan)(shape, block)
    yield from norm(f"{block}.ffn_norm", shape.n_embd)
    yield from swiglu(shape, block)


def falcon_h1_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Mamba-2's scan and attention side by side."""
    block = f"blk.{layer}"
    yield from norm(f"{block}.attn_norm", shape.n_embd)
    yield from _grouped_scan(shape, block)
    yield from qkv(shape, block)
    yield Tensor(f"{block}.ffn_norm", (shape.n_embd,), 0.0, 1.0)  # llama.cpp: without ".weight"
    yield from swiglu(shape, block)


def lfm2_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """A gated short convolution or attention."""
    block, embd, unit = f"blk.{layer}", shape.n_embd, 1 / math.sqrt(shape.n_embd)
    yield from norm(f"{block}.attn_norm", embd)
    if is_attention(shape, layer):
        yield from normed_qkv(shape, block)
    else:
        yield Tensor(f"{block}.shortconv.conv.weight", (embd, SHORT_CONV), 0.6)
        yield matrix(shape, f"{block}.shortconv.in_proj", (3 * embd, embd), unit)
        yield matrix(shape, f"{block}.shortconv.out_proj", (embd, embd), added(shape, embd))
    yield from norm(f"{block}.ffn_norm", embd)
    yield from swiglu(shape, block)


def qwen35_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """A gated delta net or gated attention."""
    block = f"blk.{layer}"
    yield from norm(f"{block}.attn_norm", shape.n_embd)
    yield from norm(f"{block}.post_attention_norm", shape.n_embd)
    if is_attention(shape, layer) or layer >= shape.n_layer:  # a head has no delta net
        yield from normed_qkv(shape, block, q_factor=2)
    else:
        yield from _delta_net(shape, block)
    yield from swiglu(shape, block)


def _delta_net(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, unit, n_head = shape.n_embd, 1 / math.sqrt(shape.n_embd), shape.n_head
    values, keys = n_head * shape.head_size, shape.n_head_kv * shape.head_size
    yield matrix(shape, f"{block}.attn_qkv", (2 * keys + values, embd), unit)
    yield matrix(shape, f"{block}.attn_gate", (values, embd), unit)
    yield Tensor(f"{block}.ssm_conv1d.weight", (2 * keys + values, CONV), 0.5)
    yield Tensor(f"{block}.ssm_dt.bias", (n_head,), 0.5, DT_BIAS)
    yield _decay(f"{block}.ssm_a", (n_head,))
    yield Tensor(f"{block}.ssm_beta.weight", (n_head, embd), unit)
    yield Tensor(f"{block}.ssm_alpha.weight", (n_head, embd), unit)
    yield from norm(f"{block}.ssm_norm", shape.head_size)
    yield matrix(shape, f"{block}.ssm_out", (embd, values), added(shape, values))


def rwkv7_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Time mixing and channel mixing, each with a shift of one token."""
    block, embd = f"blk.{layer}", shape.n_embd
    yield from norm(f"{block}.attn_norm", embd, with_bias=True)
    yield from norm(f"{block}.attn_norm_2", embd, with_bias=True)
    for name, mean in (("w", -1.0), ("a", 0.0), ("v", 0.0)):
        yield Tensor(f"{block}.time_mix_{name}0.weight", (embd,), 0.5, mean)
        yield from _low_rank(shape, block, name)
    yield from _low_rank(shape, block, "g")
    yield Tensor(f"{block}.time_mix_lerp_fused.weight", (6, 1, 1, embd), 0.2, 0.5)
    for name, std, mean in (("k_k", 0.1, 1.0), ("k_a", 0.1, 1.0), ("r_k", 0.1, 0.0)):
        yield Tensor(f"{block}.time_mix_{name}.weight", (embd,), std, mean)
    for name in ("key", "value", "receptance"):
        yield matrix(shape, f"{block}.time_mix_{name}", (embd, embd), 1 / math.sqrt(embd))
    yield from norm(f"{block}.time_mix_ln", embd, with_bias=True)
    yield matrix(shape, f"{block}.time_mix_output", (embd, embd), added(shape, embd))
    yield Tensor(f"{block}.channel_mix_lerp_k.weight", (1, 1, embd), 0.2, 0.5)
    yield matrix(shape, f"{block}.channel_mix_key", (shape.n_ff, embd), 1 / math.sqrt(embd))
    yield matrix(shape, f"{block}.channel_mix_value", (embd, shape.n_ff), added(shape, shape.n_ff))


def _low_rank(shape: Shape, block: str, name: str) -> Iterator[Tensor]:
    embd = shape.n_embd
    yield Tensor(f"{block}.time_mix_{name}1.weight", (LORA, embd), 1 / math.sqrt(embd))
    yield Tensor(f"{block}.time_mix_{name}2.weight", (embd, LORA), 1 / math.sqrt(LORA))


def rwkv7_extra(shape: Shape) -> Iterator[Tensor]:
    """The norm of the embedding."""
    yield from norm("token_embd_norm", shape.n_embd, with_bias=True)


def _add_scan(writer: GGUFWriter, shape: Shape, rank: int) -> None:
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(n_inner(shape))
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(rank)


def mamba_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Metadata of Mamba and Jamba."""
    _add_scan(writer, shape, _dt_rank(shape))


def grouped_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Metadata of Granite 4 and Falcon-H1."""
    _add_scan(writer, shape, n_scan_heads(shape))
    writer.add_ssm_group_count(1)


def lfm2_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Metadata of LFM2: the taps of its convolutions."""
    writer.add_shortconv_l_cache(SHORT_CONV)


def qwen35_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Metadata of Qwen3.5: the delta net's sizes, and the sections of M-RoPE (11, 11 and 10 of 32
    in the real model)."""
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(shape.n_head * shape.head_size)
    writer.add_ssm_state_size(shape.head_size)
    writer.add_ssm_time_step_rank(shape.n_head)
    writer.add_ssm_group_count(shape.n_head_kv)
    writer.add_full_attention_interval(ATTENTION_EVERY)
    pairs = shape.n_rot // 2
    side = -(-pairs // 3)
    writer.add_rope_dimension_sections([side, side, pairs - 2 * side, 0])


def rwkv7_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Metadata of RWKV-7: head size and ranks."""
    writer.add_wkv_head_size(RWKV_HEAD)
    writer.add_token_shift_count(2)
    writer.add_decay_lora_rank(LORA)
    writer.add_iclr_lora_rank(LORA)
    writer.add_value_residual_mix_lora_rank(LORA)
    writer.add_gate_lora_rank(LORA)
