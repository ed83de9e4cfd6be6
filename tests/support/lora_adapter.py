"""A LoRA adapter of random weights, as a GGUF file that llama.cpp loads."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

RANK = 4
_SUFFIXES = ("attn_q.weight", "attn_v.weight", "ffn_down.weight")


def write_adapter(
    path: Path, model: Path, *, seed: int, strength: float = 1.0, arch: str = "llama"
) -> Path:
    """Of a model's query, value and down projections; strong enough to change what it says."""
    reader = gguf.GGUFReader(model)
    chance = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    writer.add_string("adapter.lora.task_name", f"task {seed}")
    for tensor in reader.tensors:
        if not tensor.name.endswith(_SUFFIXES):
            continue
        n_in, n_out = (int(n) for n in tensor.shape)
        for name, shape in (("lora_a", (RANK, n_in)), ("lora_b", (n_out, RANK))):
            values = chance.normal(0.0, strength / np.sqrt(shape[1]), shape)
            writer.add_tensor(f"{tensor.name}.{name}", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
