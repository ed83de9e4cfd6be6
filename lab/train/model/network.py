"""The llama architecture in torch: weights by their GGUF names, and the arithmetic of llama.cpp
(src/models/llama.cpp): RMS norm before each part, RoPE on adjacent pairs, SwiGLU, and an output head
that is the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.train.errors import TrainError

Weights: TypeAlias = dict[str, Tensor]

EMBEDDING = "token_embd.weight"
EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of the network. Raises TrainError if they do not fit each other."""

    n_vocab: int
    n_embd: int = 192
    n_layer: int = 6
    n_head: int = 3
    n_ff: int = 512
    n_ctx: int = 512
    rope_freq_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        sizes = (self.n_vocab, self.n_embd, self.n_layer, self.n_head, self.n_ff, self.n_ctx)
        if min(sizes) < 1 or self.n_embd % (2 * self.n_head):
            raise TrainError(
                f"The embedding length ({self.n_embd}) must be a multiple of twice the "
                f"number of heads ({self.n_head}), and every size at least 1."
            )

    @property
    def head_size(self) -> int:
        """Values per head."""
        return self.n_embd // self.n_head

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> torch shape (outputs first) of every weight, in file order."""
        d, ff = self.n_embd, self.n_ff
        layer = {
            "attn_norm": (d,),
            "attn_q": (d, d),
            "attn_k": (d, d),
            "attn_v": (d, d),
            "attn_output": (d, d),
            "ffn_norm": (d,),
            "ffn_gate": (ff, d),
            "ffn_up": (ff, d),
            "ffn_down": (d, ff),
        }
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.n_vocab, d)}
        for i in range(self.n_layer):
            found |= {f"blk.{i}.{name}.weight": size for name, size in layer.items()}
        return found | {"output_norm.weight": (d,)}


def init_weights(shape: NetworkShape, seed: int) -> Weights:
    """Initial weights: a small embedding, matrices of orthogonal scale, and zero outputs of each
    part, so that the network starts as its embedding."""
    chance = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, size in shape.tensors().items():
        if len(size) == 1:
            value = torch.ones(size)
        elif name.endswith(("attn_output.weight", "ffn_down.weight")):
            value = torch.zeros(size)
        else:
            std = EMBEDDING_STD if name == EMBEDDING else size[1] ** -0.5
            value = torch.randn(size, generator=chance) * std
        weights[name] = value.requires_grad_()
    return weights


def placed(weights: Weights, device: torch.device) -> Weights:
    """The same values as leaves on `device`."""
    return {n: weight.detach().to(device).requires_grad_() for n, weight in weights.items()}


def device_of(weights: Weights) -> torch.device:
    """The device that the weights are on."""
    return weights[EMBEDDING].device


def hidden(weights: Weights, shape: NetworkShape, ids: Tensor) -> Tensor:
    """The input of the output head: float32 [batch, n, n_embd] for ids [batch, n], int64."""
    x = F.embedding(ids, weights[EMBEDDING])
    cos, sin = _rotations(shape, ids.shape[1], x.device)
    for i in range(shape.n_layer):
        layer = f"blk.{i}."
        y = _norm(weights, f"{layer}attn_norm", shape, x)
        x = x + _attention(weights, layer, shape, y, cos, sin)
        y = _norm(weights, f"{layer}ffn_norm", shape, x)
        x = x + _feed_forward(weights, layer, y)
    return _norm(weights, "output_norm", shape, x)


def logits(weights: Weights, shape: NetworkShape, ids: Tensor) -> Tensor:
    """float32 [batch, n, n_vocab] for ids [batch, n], int64."""
    return F.linear(hidden(weights, shape, ids), weights[EMBEDDING])


def _norm(weights: Weights, name: str, shape: NetworkShape, x: Tensor) -> Tensor:
    return F.rms_norm(x, (shape.n_embd,), weights[f"{name}.weight"], shape.norm_eps)


def _attention(
    weights: Weights, layer: str, shape: NetworkShape, x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    batch, n, _ = x.shape

    def heads(name: str) -> Tensor:
        y = F.linear(x, weights[f"{layer}attn_{name}.weight"])
        return y.view(batch, n, shape.n_head, shape.head_size).transpose(1, 2)

    q, k = _rotate(heads("q"), cos, sin), _rotate(heads("k"), cos, sin)
    y = _attend(q, k, heads("v"))
    y = y.transpose(1, 2).reshape(batch, n, shape.n_embd)
    return F.linear(y, weights[f"{layer}attn_output.weight"])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # Autocast's bfloat16 would take 1.8 times as long, and with AMX release the tiles of llama.cpp: see
    # lab/__init__.py.
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)


def _feed_forward(weights: Weights, layer: str, x: Tensor) -> Tensor:
    gate = F.silu(F.linear(x, weights[f"{layer}ffn_gate.weight"]))
    up = F.linear(x, weights[f"{layer}ffn_up.weight"])
    return F.linear(gate * up, weights[f"{layer}ffn_down.weight"])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def rotation_frequencies(shape: NetworkShape) -> Tensor:
    """float64 [head_size / 2]: radians by which RoPE turns each pair of a head per position."""
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
    return shape.rope_freq_base**-exponents


@lru_cache(maxsize=8)
def _rotations(shape: NetworkShape, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [n, head_size / 2] of every position's angles."""
    angles = torch.arange(n, dtype=torch.float64)[:, None] * rotation_frequencies(shape)
    return angles.cos().float().to(device), angles.sin().float().to(device)
