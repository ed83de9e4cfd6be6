"""Heads that predict a further token (MTP), of Qwen3.5 and GLM 4, and what they guess.

Tensor names and shapes are those that llama.cpp's `src/models/{glm4-moe,qwen35}.cpp` loads. Of GLM's
layers only the head's is a mixture of experts, as llama.cpp wants it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from gguf import GGUFWriter

from lab.models.parts import added, matrix, qkv, swiglu
from lab.models.recurrent import qwen35_layer
from lab.models.shape import Shape
from lab.models.tensor import F32, Tensor, bias, norm

N_EXPERT, N_EXPERT_USED = 2, 1
ROWS_GAIN = 60.0
"""What a head `of rows` adds of one row, in embeddings. It attends to all its rows alike, so that of n
different ones ROWS_GAIN / sqrt(n) are left: a guess is wrong with fewer than some 200 rows."""
_ADDED = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "ssm_out")


def glm4moe_layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Attention and a dense feed-forward part; in a head experts."""
    block = f"blk.{layer}"
    yield from norm(f"{block}.attn_norm", shape.n_embd)
    yield from qkv(shape, block)
    yield from norm(f"{block}.post_attention_norm", shape.n_embd)
    yield from (_experts if layer >= shape.n_layer else swiglu)(shape, block)


def _experts(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, ff, unit = shape.n_embd, shape.n_ff // 2, 1 / math.sqrt(shape.n_embd)
    yield Tensor(f"{block}.ffn_gate_inp.weight", (N_EXPERT, embd), unit)
    yield bias(f"{block}.exp_probs_b", N_EXPERT)
    for kind, count in (("exps", (N_EXPERT,)), ("shexp", ())):
        yield matrix(shape, f"{block}.ffn_gate_{kind}", (*count, ff, embd), unit)
        yield matrix(shape, f"{block}.ffn_up_{kind}", (*count, ff, embd), unit)
        yield matrix(shape, f"{block}.ffn_down_{kind}", (*count, embd, ff), added(shape, ff))


def glm4moe_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """All layers but a head are dense."""
    writer.add_leading_dense_block_count(shape.n_layer)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(shape.n_ff // 2)


def head_tensors(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Every tensor of the head that is this layer: it joins the embedding of a token with the hidden
    state of the one before. Its output matrix is the model's."""
    block, embd = f"blk.{layer}", shape.n_embd
    yield from (qwen35_layer if shape.arch == "qwen35" else glm4moe_layer)(shape, layer)
    yield matrix(shape, f"{block}.nextn.eh_proj", (embd, 2 * embd), 1 / math.sqrt(2 * embd))
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield from norm(f"{block}.nextn.{name}", embd)


def guessing(shape: Shape, plan: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors of a model whose head guesses as `shape.guesses` says.

    Layers add nothing to the embedding, and the output matrix is the embedding, moved by one: after a
    token comes the next one of the vocabulary. A head that does the same with the embedding alone is
    right."""
    if shape.guesses == "random":
        yield from plan
        return
    first, *others = plan  # the embedding
    yield first
    for tensor in others:
        yield _constructed(shape, tensor, first)


def _constructed(shape: Shape, tensor: Tensor, embedding: Tensor) -> Tensor:
    head = f"blk.{shape.n_layer}."
    part = tensor.name.removeprefix(head).removesuffix(".weight")
    if tensor.name == "output.weight":

        def moved(seed: int) -> F32:
            return np.roll(embedding.draw(seed), 1, axis=0) * np.float32(tensor.std)

        return replace(tensor, made=moved)
    if part == "nextn.eh_proj":
        return replace(tensor, made=lambda _seed: np.eye(*tensor.shape, dtype=np.float32))
    if shape.guesses == "of rows" and tensor.name.startswith(head):
        if part == "attn_q":  # all rows weigh the same
            return replace(tensor, std=0.0)
        if part == "attn_output":
            return replace(tensor, std=ROWS_GAIN / math.sqrt(tensor.shape[-1]))
    if tensor.name.split(".")[-2] in _ADDED:
        return replace(tensor, std=0.0)
    return tensor
