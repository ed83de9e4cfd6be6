"""Folders with a llama of random weights as vLLM and transformers load it: config.json and model.safetensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a llama; its heads have 64 channels."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    inner: int = 512
    vocab: int = 1000
    context: int = 8192


HEAD_SIZE = 64
SPREAD = 3.0
"""Of queries: attention that tells tokens apart, so that rows of other tokens would change what is said."""


def write_hf_llama(folder: Path, shape: LlamaShape, seed: int = 0) -> Path:
    """Write the folder, float32; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_SIZE,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write(folder / "model.safetensors", _tensors(shape, np.random.default_rng(seed)))
    return folder


def _tensors(shape: LlamaShape, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    def random(rows: int, columns: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        values = rng.standard_normal((rows, columns), np.float32)
        return values * np.float32(scale * columns**-0.5)

    h, ones = shape.hidden, np.ones(shape.hidden, np.float32)
    found = {
        "model.embed_tokens.weight": random(shape.vocab, h, h**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": random(shape.vocab, h, 4.0),
    }
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        found |= {
            at + "input_layernorm.weight": ones,
            at + "post_attention_layernorm.weight": ones,
            at + "self_attn.q_proj.weight": random(shape.heads * HEAD_SIZE, h, SPREAD),
            at + "self_attn.k_proj.weight": random(shape.kv_heads * HEAD_SIZE, h),
            at + "self_attn.v_proj.weight": random(shape.kv_heads * HEAD_SIZE, h),
            at + "self_attn.o_proj.weight": random(h, shape.heads * HEAD_SIZE),
            at + "mlp.gate_proj.weight": random(shape.inner, h),
            at + "mlp.up_proj.weight": random(shape.inner, h),
            at + "mlp.down_proj.weight": random(h, shape.inner),
        }
    return found


def _write(path: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """In the format of safetensors: u64 size of the header | header, JSON | numbers."""
    header, at = {}, 0
    for name, values in tensors.items():
        end = at + values.nbytes
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())
