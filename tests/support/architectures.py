"""A small random model of every architecture that llama.cpp knows.

EVERY keys are those of most architectures; what one wants otherwise is in OWN, which is what its
`load_arch_hparams` and `load_arch_tensors` in llama.cpp's `src/models` ask for. Tensors and their shapes
come from llama.cpp itself (`any_arch`).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from any_arch import COMMON, N_VOCAB, Values, make_arch_gguf, make_metadata_gguf
from llama_cpp import llama_cpp

N_EMBD: int = COMMON["embedding_length"]
N_LAYER: int = COMMON["block_count"]
_NAME_OF_ARCH = "_Z13llm_arch_name8llm_arch"
"""`llm_arch_name(llm_arch)`, as C++ compilers call it."""

EVERY: dict[str, Any] = {
    "features_length": N_EMBD,
    "use_parallel_residual": True,
    "full_attention_interval": 2,
    "interleave_moe_layer_step": 2,
    "expert_group_scale": 1.0,
    "experts_per_group": 1,
    "expert_latent_length": 64,
    "expert_chunk_feed_forward_length": 64,
    "time_mix_extra_dim": 32,
    "time_decay_extra_dim": 32,
    "wkv.head_size": 64,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 8,
    "attention.relative_buckets_count": 8,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
    "attention.decay_lora_rank": 32,
    "attention.iclr_lora_rank": 32,
    "attention.value_residual_mix_lora_rank": 32,
    "attention.gate_lora_rank": 32,
    "attention.sliding_window_pattern": 2,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 16,
    "attention.indexer.block_size": 4,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "attention.indexer.local_blocks": 1,
    "rope.dimension_sections": [4, 4, 4, 4],
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * N_EMBD,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
    "kda.head_dim": 32,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
    "shortconv.l_cache": 3,
    "residual_scale": 1.0,
    "attn_res.block_size": 2,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
    "xielu.alpha_n": 1.0,
    "xielu.alpha_p": 1.0,
    "xielu.beta": 1.0,
    "xielu.eps": 1e-7,
    "posnet.embedding_length": N_EMBD,
    "posnet.block_count": N_LAYER,
    "convnext.embedding_length": N_EMBD,
    "convnext.block_count": N_LAYER,
}
_LATENT = {
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}
"""Multi-head latent attention: one row of 32 + 16 values for all heads."""
_WINDOWS = {"attention.sliding_window_pattern": [True, False] * (N_LAYER // 2)}
_WINDOWED_HEADS = {"attention.key_length_swa": 32, "attention.value_length_swa": 32}
_INDEXED = {"attention.indexer.types": [1, 0] * (N_LAYER // 2)}
"""An index of rows in each second layer, which the next one shares."""
_RECURRENT = {"attention.head_count_kv": [2, 0] * (N_LAYER // 2)}
"""Layers without KV heads are recurrent."""
_THREE_KINDS = {
    "attention.head_count_kv": [2, 0, 0, 2],
    "feed_forward_length": [0, 0, 128, 0],
}
"""Layers are attention, recurrent, or a feed-forward part alone."""
_LATENT_RECURRENT = _LATENT | {"attention.head_count_kv": [1, 0] * (N_LAYER // 2)}
_MANY_KV = {"attention.head_count_kv": 4}
_BOTH_WAYS = {"attention.causal": False}
"""Embedding and diffusion models; their conversions say so."""
_ENCODER = {"attention.causal": False, "tokenizer.ggml.token_type_count": 2}
_STREAMS = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 2.0,
}
_WEIGHTED = {"expert_weights_scale": 1.0, "expert_weights_norm": True, "swiglu_clamp_exp": 10.0}
_N_GRAMS = {
    "ple.layers": [0],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 0,
    "embedding_length_per_layer_input": N_EMBD // 4,
    "ple.layer_multipliers": np.array([1, 3, 5], np.uint64),
    "ple.head_offsets": np.arange(4, dtype=np.uint64) * N_VOCAB,
    "ple.head_vocab_sizes": np.full(4, N_VOCAB, np.uint64),
}
"""Embeddings of the last two and three tokens, of two hashes each."""
_BY_LAYER = (
    *("attention.head_count_kv", "attention.sliding_window_pattern", "feed_forward_length"),
    *("attention.compress_ratios", "attention.indexer.types"),
)
HEADED: dict[str, dict[str, Any]] = {
    "bailingmoe3": {"attention.head_count_kv": 1},
    "cohere2moe": {},
    "deepseek2": {},
    "deepseek32": {},
    "deepseek4": {"attention.compress_ratios": 0},
    "glm-dsa": {},
    "glm4moe": {},
    "glm5-next": {"attention.head_count_kv": 1},
    "hy_v3": {},
    "mimo2": {},
    "nemotron_h_moe": {"attention.head_count_kv": 2, "feed_forward_length": 128},
    "qwen35": {},
    "qwen35moe": {},
    "qwen3next": {},
    "step35": {},
}
"""Architectures with a head, and what is of its layer in lists by layer: else what the layer before has."""
OWN: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arwkv7": {"token_shift_count": 1},
    "bailingmoe3": _LATENT_RECURRENT | {"rope.dimension_sections": [2, 3, 3, 0]},
    "bert": _ENCODER,
    "chameleon": {"vocab_size": 10240},
    "deepseek2": _LATENT,
    "deepseek2-ocr": _MANY_KV,
    "deepseek32": _LATENT,
    "deepseek4": _STREAMS
    | _WEIGHTED
    | {
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.q_lora_rank": 64,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0, 0, 4, 128],
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 0,
        "expert_gating_func": 4,
    },
    "dflash": _WINDOWS | {"target_layers": [0, 1, 2]},
    "dots3note": _LATENT
    | _WINDOWS
    | {
        "attention.indexer.types": [0, 1] * (N_LAYER // 2),
        "attention.kv_lora_rank_swa": 32,
        "attention.key_length_swa": 48,
        "attention.value_length_swa": 32,
        "attention.key_length_mla_swa": 32,
        "attention.value_length_mla_swa": 32,
        "rope.freq_base_swa": 10000.0,
    },
    "dots1": _MANY_KV,
    "dream": _BOTH_WAYS,
    "eurobert": _BOTH_WAYS,
    "eagle3": {"target_layers": [0, 1, 2], "target_hidden_size": N_EMBD},
    "gemma4": _WINDOWS | _WINDOWED_HEADS | {"embedding_length_per_layer_input": 64},
    "gemma4-assistant": _WINDOWS
    | _WINDOWED_HEADS
    | {"embedding_length_out": 64, "nextn_predict_layers": N_LAYER},
    "glm4moe": {"rope.dimension_sections": None},
    "glm-dsa": _LATENT,
    "glm5-next": _LATENT_RECURRENT
    | _STREAMS
    | _N_GRAMS
    | {"attention.key_length": 32, "rope.dimension_count": 0},
    "granite_swa": _WINDOWS,
    "granitehybrid": _RECURRENT,
    "graniteswitch": {
        "adapters.count": 2,
        "adapters.lora_rank": 8,
        "adapters.token_ids_activate": [310, 320],
        "adapters.token_ids_substitute": [311, 321],
    },
    "hrm_text": {
        "hrm.layers_per_stack": 1,
        "hrm.h_cycles": 2,
        "hrm.l_cycles": 2,
        "block_count": 6,
    },
    "hy_v4": _LATENT | _STREAMS | _WEIGHTED | _INDEXED,
    "jamba": _RECURRENT,
    "jina-bert-v2": _ENCODER,
    "jina-bert-v3": _ENCODER,
    "kimi-k3": _LATENT_RECURRENT,
    "kimi-linear": _LATENT_RECURRENT,
    "lfm2": _RECURRENT | {"attention.sliding_window": None},
    "lfm2moe": _RECURRENT,
    "llada": _BOTH_WAYS,
    "llada-moe": _BOTH_WAYS,
    "maple": _WINDOWS | {"swiglu_clamp_exp": 7.0},
    "modern-bert": _ENCODER,
    "mimo2": _WINDOWS,
    "minimax-m3": {"attention.indexer.head_count": 4},
    "minicpm3": _MANY_KV | {"rope.dimension_count": 16},
    "mistral4": _LATENT,
    "nemotron_h": _THREE_KINDS,
    "nemotron_h_moe": _THREE_KINDS,
    "neo-bert": _ENCODER,
    "nomic-bert": _ENCODER,
    "nomic-bert-moe": _ENCODER,
    "olmoe": _MANY_KV,
    "plamo2": _RECURRENT | {"ssm.group_count": 0},
    "plm": _MANY_KV | {"rope.dimension_count": 16},
    "qwen3tts": {"vocab_size": 3072},
    "rnd1": _BOTH_WAYS,
    "rwkv6qwen2": {"token_shift_count": 1},
    "qwen4exp": _STREAMS | _N_GRAMS | {"attention.compress_ratios": [4] * N_LAYER},
    "spark2_5": _WINDOWS,
    "step35": _WINDOWS,
    "wavtokenizer-dec": _BOTH_WAYS,
}

_NO_QKV = (f"blk.{N_LAYER}.attn_q.", f"blk.{N_LAYER}.attn_k.", f"blk.{N_LAYER}.attn_v.")
WITHOUT: dict[str, tuple[str, ...]] = {"rwkv6qwen2": ("time_mix_first",), "mimo2": _NO_QKV}
"""Tensors that llama.cpp asks for and that real models go without: with them it takes one for another."""
MORE = {"mimo2": {f"blk.{N_LAYER}.attn_qkv.weight": (2 * N_EMBD, N_EMBD)}}
"""Tensors that they have instead."""
ONLY_METADATA = ("clip", "eagle3", "gemma4-assistant", "gptj")
"""llama.cpp makes no model of them from nothing, and serves none: what is said of them is said of the metadata."""


def llama_architectures() -> list[str]:
    """The names that the loaded llama.cpp knows."""
    name_of = llama_cpp._lib[_NAME_OF_ARCH]
    name_of.restype, name_of.argtypes = ctypes.c_char_p, (ctypes.c_int,)
    names: list[str] = []
    while "unknown" not in (name := name_of(len(names)).decode()):
        names.append(name)
    return names


def has_head(arch: str) -> bool:
    """Whether its model gets a head that predicts a further token (MTP)."""
    return arch in HEADED


def keys_of(arch: str) -> dict[str, Any]:
    """Its metadata, without `{arch}.`"""
    keys = COMMON | EVERY | OWN.get(arch, {})
    if not has_head(arch):
        return keys
    lists = {
        name: [*each, HEADED[arch].get(name, each[-1])]
        for name, each in keys.items()
        if name in _BY_LAYER and isinstance(each, list)
    }
    return keys | lists | {"block_count": keys["block_count"] + 1, "nextn_predict_layers": 1}


def make_any_gguf(path: Path, arch: str) -> None:
    """A small random model of it."""

    def changed(name: str, values: Values) -> Values | None:
        # Of quantized weights; llama.cpp does not know them in a head that it skips.
        is_odd = has_head(arch) and name.endswith("scale")
        is_left_out = any(each in name for each in WITHOUT.get(arch, ()))
        return None if is_odd or is_left_out else values

    if arch in ONLY_METADATA:
        make_metadata_gguf(path, arch, keys_of(arch))
        return
    make_arch_gguf(path, arch, keys_of(arch), changed=changed, more=MORE.get(arch, {}))
