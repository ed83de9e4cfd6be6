"""A tiny Gemma 3 with random weights: every second layer has a sliding window."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lab.models.gguf_file import writing
from lab.models.templates import CHATML
from lab.models.vocabulary import synthetic

N_LAYER, N_EMBD, N_HEAD, N_KV, HEAD, N_FF, N_VOCAB = 4, 64, 4, 2, 32, 128, 512


def make_window_model(path: Path, window: int, seed: int = 0) -> None:
    """Write it to `path`. Attention is far from uniform, so that a wrong row shows."""
    rng = np.random.default_rng(seed)
    vocabulary = synthetic(N_VOCAB)
    unit, q = N_EMBD**-0.5, N_HEAD * HEAD
    with writing(path, "gemma3") as writer:
        writer.add_name(f"window-{window}")
        writer.add_context_length(8192)
        writer.add_embedding_length(N_EMBD)
        writer.add_block_count(N_LAYER)
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEAD)
        writer.add_head_count_kv(N_KV)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_sliding_window(window)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        writer.add_vocab_size(len(vocabulary))
        vocabulary.write(writer, CHATML)

        def matrix(name: str, rows: int, columns: int, std: float) -> None:
            values = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(std)
            if name == "output":
                values[vocabulary.silent] = 0.0
            writer.add_tensor(f"{name}.weight", values)

        def norm(name: str, n: int, gain: float = 1.0) -> None:
            writer.add_tensor(f"{name}.weight", np.full(n, gain, np.float32))

        matrix("token_embd", len(vocabulary), N_EMBD, unit)
        matrix("output", len(vocabulary), N_EMBD, 3 * unit)
        norm("output_norm", N_EMBD)
        for layer in range(N_LAYER):
            block = f"blk.{layer}"
            for name in ("attn_norm", "ffn_norm"):
                norm(f"{block}.{name}", N_EMBD)
            for name in ("post_attention_norm", "post_ffw_norm"):
                norm(f"{block}.{name}", N_EMBD, 0.7)
            norm(f"{block}.attn_q_norm", HEAD, 2.0)
            norm(f"{block}.attn_k_norm", HEAD)
            matrix(f"{block}.attn_q", q, N_EMBD, unit)
            matrix(f"{block}.attn_k", N_KV * HEAD, N_EMBD, unit)
            matrix(f"{block}.attn_v", N_KV * HEAD, N_EMBD, unit)
            matrix(f"{block}.attn_output", N_EMBD, q, q**-0.5)
            matrix(f"{block}.ffn_gate", N_FF, N_EMBD, unit)
            matrix(f"{block}.ffn_up", N_FF, N_EMBD, unit)
            matrix(f"{block}.ffn_down", N_EMBD, N_FF, N_FF**-0.5)
