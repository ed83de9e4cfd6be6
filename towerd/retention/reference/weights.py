"""A llama's weights and sizes, read from a GGUF into torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from torch import Tensor

from towerd.errors import ModelError

Weights: TypeAlias = dict[str, Tensor]

ARCH = "llama"
FOREIGN = ("rope_freqs.weight",)
"""Tensors of models whose RoPE or heads this reference does not compute."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a llama, and how it rotates."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_vocab: int
    n_ctx: int
    head_size: int
    n_rot: int
    rope_freq_base: float
    norm_eps: float

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_head // self.n_head_kv


def read_llama(path: Path) -> tuple[LlamaShape, Weights]:
    """Sizes and float32 weights by their GGUF names, matrices as [outputs, inputs].

    Raises ModelError for a file that is no GGUF, another architecture, or a scaled RoPE."""
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable GGUF: {error}.") from error
    keys = {key: field.contents() for key, field in reader.fields.items() if "tokens" not in key}
    arch = keys.get("general.architecture")
    scaled = any(key.startswith(f"{ARCH}.rope.scaling") for key in keys)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if arch != ARCH or scaled or any(name in tensors for name in FOREIGN):
        raise ModelError(
            f"{path} is a model of {arch!r}{' with a scaled RoPE' if scaled else ''}: the torch "
            f"reference computes plain models of {ARCH!r} only."
        )
    return _shape(keys, tensors), {name: _tensor(tensor) for name, tensor in tensors.items()}


def _shape(keys: dict[str, Any], tensors: dict[str, ReaderTensor]) -> LlamaShape:
    def of(name: str, default: float | None = None) -> Any:
        value = keys.get(f"{ARCH}.{name}", default)
        if value is None:
            raise ModelError(f"The GGUF lacks {ARCH}.{name}.")
        return value

    n_embd, n_head = of("embedding_length"), of("attention.head_count")
    head_size = of("attention.key_length", n_embd // n_head)
    return LlamaShape(
        n_layer=of("block_count"),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=of("attention.head_count_kv", n_head),
        n_vocab=int(tensors["token_embd.weight"].shape[1]),
        n_ctx=of("context_length"),
        head_size=head_size,
        n_rot=of("rope.dimension_count", head_size),
        rope_freq_base=of("rope.freq_base", 10000.0),
        norm_eps=of("attention.layer_norm_rms_epsilon"),
    )


def _tensor(tensor: ReaderTensor) -> Tensor:
    values = dequantize(tensor.data, tensor.tensor_type)
    shape = tuple(int(n) for n in reversed(tensor.shape))
    return torch.from_numpy(np.array(values, np.float32).reshape(shape))
