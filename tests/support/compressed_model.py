"""A tiny DeepSeek 4 with random weights: latent rows behind a window, and compressed ones.

Tensor names and shapes as llama.cpp's `src/models/deepseek4.cpp` loads them. Of its layers the
second keeps a row for every 4 tokens with an index of them, the third one for every 128.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from lab.models.gguf_file import writing
from lab.models.templates import CHATML
from lab.models.vocabulary import synthetic

N_EMBD, N_HEAD, HEAD, N_ROT, N_VOCAB = 128, 4, 64, 32, 448
RATIOS = (0, 4, 128, 0)
RANK, N_GROUP, OUT_RANK = 64, 2, 32
N_FF, N_EXPERT, N_USED = 64, 4, 2
N_INDEX, INDEX = 4, 64
STREAMS = 4
"""Residual streams that hyper-connections mix."""
SQRT_SOFTPLUS = 4


def make_compressed_model(path: Path, window: int, seed: int = 0) -> None:
    """Write it to `path`."""
    vocabulary = synthetic(N_VOCAB)
    with writing(path, "deepseek4") as writer:
        _metadata(writer, window)
        vocabulary.write(writer, CHATML)
        tensors = _Tensors(writer, seed)
        tensors.matrix("token_embd", N_VOCAB, N_EMBD, std=1.0)
        tensors.ones("output_norm", N_EMBD)
        output = tensors.values(3 / N_EMBD**0.5, N_VOCAB, N_EMBD)
        output[vocabulary.silent] = 0.0
        writer.add_tensor("output.weight", output)
        _mixer(tensors, "output_hc", STREAMS, 1)
        for layer, ratio in enumerate(RATIOS):
            _attention(tensors, f"blk.{layer}.", ratio)
            _experts(tensors, f"blk.{layer}.")


def _metadata(writer: GGUFWriter, window: int) -> None:
    writer.add_name("compressed")
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(len(RATIOS))
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(N_ROT)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_q_lora_rank(RANK)
    writer.add_sliding_window(window)
    writer.add_vocab_size(N_VOCAB)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_USED)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)
    for name, whole in (
        ("expert_gating_func", SQRT_SOFTPLUS),
        ("attention.indexer.head_count", N_INDEX),
        ("attention.indexer.key_length", INDEX),
        ("attention.indexer.top_k", 8),
        ("attention.output_group_count", N_GROUP),
        ("attention.output_lora_rank", OUT_RANK),
        ("hyper_connection.count", STREAMS),
        ("hyper_connection.sinkhorn_iterations", 2),
        ("hash_layer_count", 0),
    ):
        writer.add_uint32(f"deepseek4.{name}", whole)
    for name, number in (
        ("swiglu_clamp_exp", 10.0),
        ("attention.compress_rope_freq_base", 160000.0),
        ("hyper_connection.epsilon", 1e-6),
    ):
        writer.add_float32(f"deepseek4.{name}", number)
    writer.add_array("deepseek4.attention.compress_ratios", list(RATIOS))


class _Tensors:
    """Adds F32 tensors of reproducible values."""

    def __init__(self, writer: GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(seed)

    def values(self, std: float, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return self._rng.standard_normal(shape).astype(np.float32) * np.float32(std)

    def matrix(self, name: str, *shape: int, std: float | None = None) -> None:
        """The last of `shape` is the row length, by which values are scaled."""
        std = shape[-1] ** -0.5 if std is None else std
        self._writer.add_tensor(f"{name}.weight", self.values(std, *shape))

    def ones(self, name: str, n: int) -> None:
        self._writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))

    def bias(self, name: str, n: int) -> None:
        self._writer.add_tensor(f"{name}.bias", np.zeros(n, np.float32))


def _mixer(tensors: _Tensors, name: str, n: int, n_scale: int) -> None:
    """Weights, offsets and gains of one hyper-connection."""
    tensors.matrix(f"{name}_fn", n, STREAMS * N_EMBD)
    tensors.matrix(f"{name}_base", n, std=0.3)
    tensors.ones(f"{name}_scale", n_scale)


def _attention(tensors: _Tensors, block: str, ratio: int) -> None:
    tensors.ones(block + "attn_norm", N_EMBD)
    tensors.matrix(block + "attn_sinks", N_HEAD, std=1.0)
    tensors.matrix(block + "attn_q_a", RANK, N_EMBD)
    tensors.ones(block + "attn_q_a_norm", RANK)
    tensors.matrix(block + "attn_q_b", N_HEAD * HEAD, RANK, std=2 * RANK**-0.5)
    tensors.matrix(block + "attn_kv", HEAD, N_EMBD)
    tensors.ones(block + "attn_kv_a_norm", HEAD)
    tensors.matrix(block + "attn_output_a", N_GROUP * OUT_RANK, N_HEAD * HEAD // N_GROUP)
    tensors.matrix(block + "attn_output_b", N_EMBD, N_GROUP * OUT_RANK)
    for part in ("attn", "ffn"):
        _mixer(tensors, f"{block}hc_{part}", (2 + STREAMS) * STREAMS, 3)
    if ratio:
        _compressor(tensors, block + "attn_compressor", HEAD, ratio)
    if ratio == 4:
        tensors.matrix(block + "indexer.proj", N_INDEX, N_EMBD)
        tensors.matrix(block + "indexer.attn_q_b", N_INDEX * INDEX, RANK)
        _compressor(tensors, block + "indexer_compressor", INDEX, ratio)


def _compressor(tensors: _Tensors, name: str, head: int, ratio: int) -> None:
    width = head * (2 if ratio == 4 else 1)
    tensors.matrix(f"{name}_kv", width, N_EMBD)
    tensors.matrix(f"{name}_gate", width, N_EMBD)
    tensors.matrix(f"{name}_ape", ratio, width, std=0.3)
    tensors.ones(f"{name}_norm", head)


def _experts(tensors: _Tensors, block: str) -> None:
    tensors.ones(block + "ffn_norm", N_EMBD)
    tensors.matrix(block + "ffn_gate_inp", N_EXPERT, N_EMBD)
    tensors.bias(block + "exp_probs_b", N_EXPERT)
    for name, rows, columns in (
        ("gate", N_FF, N_EMBD),
        ("up", N_FF, N_EMBD),
        ("down", N_EMBD, N_FF),
    ):
        tensors.matrix(f"{block}ffn_{name}_exps", N_EXPERT, rows, columns)
        tensors.matrix(f"{block}ffn_{name}_shexp", rows, columns)
