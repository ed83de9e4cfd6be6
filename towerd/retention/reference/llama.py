"""The forward pass of llama.cpp's `llama` (src/models/llama.cpp) over a cache with holes.

Every row ever computed stays in the cache, and a mask says which of them a head still sees: that is
what dropping them amounts to, rows keep their RoPE, and what was dropped can come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from towerd.retention.reference.weights import LlamaShape, Weights, read_llama


@dataclass(slots=True)
class Cache:
    """Rows of `batch` texts of the same length, and the attention that they got.

    keys, values: [layers, batch, KV heads, positions, head size]; live: bool [layers, batch, KV
    heads, positions], what the next tokens see; mass, recent: [layers, batch, heads, positions],
    from all queries and from those of the last call; queries: [layers, batch, heads, tokens of
    the last call, head size]
    """

    keys: Tensor
    values: Tensor
    live: Tensor
    mass: Tensor
    recent: Tensor
    queries: Tensor
    n: int = 0
    """Positions that are filled."""

    def copy(self) -> Cache:
        """The same rows; what is done to one is not done to the other."""
        return Cache(
            self.keys.clone(), self.values.clone(), self.live.clone(), self.mass.clone(),
            self.recent.clone(), self.queries, self.n,
        )  # fmt: skip


class Llama:
    """A model that evaluates some tokens of several texts at a time."""

    def __init__(self, shape: LlamaShape, weights: Weights) -> None:
        self.shape, self._weights = shape, weights

    @classmethod
    def load(cls, path: Path) -> Llama:
        """From a GGUF. Raises ModelError."""
        return cls(*read_llama(path))

    def cache(self, batch: int, n_positions: int) -> Cache:
        """Room for `n_positions` of each of `batch` texts."""
        s = self.shape
        rows = (s.n_layer, batch, s.n_head_kv, n_positions, s.head_size)
        heads = (s.n_layer, batch, s.n_head, n_positions)
        return Cache(
            torch.zeros(rows), torch.zeros(rows), torch.zeros(rows[:-1], dtype=torch.bool),
            torch.zeros(heads), torch.zeros(heads), torch.zeros((*rows[:2], s.n_head, 0, rows[4])),
        )  # fmt: skip

    def evaluate(self, ids: Tensor, cache: Cache) -> Tensor:
        """Logits [batch, n, vocab] of ids [batch, n] after what is live in `cache`, which takes
        their rows. ValueError if it has no room for them."""
        first, last = cache.n, cache.n + ids.shape[1]
        if last > cache.keys.shape[3]:
            raise ValueError(f"the cache holds {cache.keys.shape[3]} positions, not {last}")
        with torch.no_grad():
            return self._evaluate(ids, cache, first, last)

    def _evaluate(self, ids: Tensor, cache: Cache, first: int, last: int) -> Tensor:
        cache.n = last
        cache.live[..., first:last] = True
        cache.recent.zero_()
        queries = []
        x = F.embedding(ids, self._weights["token_embd.weight"])
        angles = self._angles(first, last)
        for layer in range(self.shape.n_layer):
            y = self._norm(f"blk.{layer}.attn_norm", x)
            y, q = self._attention(layer, y, cache, first, angles)
            queries.append(q)
            x = x + y
            x = x + self._feed_forward(layer, self._norm(f"blk.{layer}.ffn_norm", x))
        cache.queries = torch.stack(queries)
        head = self._weights.get("output.weight", self._weights["token_embd.weight"])
        return F.linear(self._norm("output_norm", x), head)

    def _attention(
        self, layer: int, x: Tensor, cache: Cache, first: int, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Output [batch, n, embd] and the rotated queries [batch, heads, n, head size]."""
        s, n = self.shape, x.shape[1]
        last = first + n

        def heads(name: str, n_heads: int) -> Tensor:
            y = self._linear(f"blk.{layer}.attn_{name}", x)
            return y.view(len(x), n, n_heads, s.head_size).transpose(1, 2)

        q = self._rotated(heads("q", s.n_head), angles)
        cache.keys[layer, :, :, first:last] = self._rotated(heads("k", s.n_head_kv), angles)
        cache.values[layer, :, :, first:last] = heads("v", s.n_head_kv)
        keys, values, live = (
            rows[layer, :, :, :last].repeat_interleave(s.group, 1)
            for rows in (cache.keys, cache.values, cache.live)
        )
        scores = q @ keys.transpose(-1, -2) / s.head_size**0.5
        causal = torch.arange(last) <= torch.arange(first, last)[:, None]
        shares = scores.masked_fill(~(live[:, :, None] & causal), -torch.inf).softmax(-1)
        cache.recent[layer, :, :, :last] = shares.sum(2)
        cache.mass[layer, :, :, :last] += shares.sum(2)
        y = (shares @ values).transpose(1, 2).reshape(len(x), n, -1)
        return self._linear(f"blk.{layer}.attn_output", y), q

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        gate = F.silu(self._linear(f"blk.{layer}.ffn_gate", x))
        up = self._linear(f"blk.{layer}.ffn_up", x)
        return self._linear(f"blk.{layer}.ffn_down", gate * up)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._weights[f"{name}.weight"], self.shape.norm_eps)

    def _angles(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, n_rot / 2]."""
        s = self.shape
        exponents = torch.arange(0, s.n_rot, 2, dtype=torch.float64) / s.n_rot
        positions = torch.arange(first, last, dtype=torch.float64)[:, None]
        angles = positions * s.rope_freq_base**-exponents
        return angles.cos().float(), angles.sin().float()

    def _rotated(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Adjacent pairs of the first n_rot values of a head turn."""
        cos, sin = angles
        even, odd = x[..., : self.shape.n_rot].unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return torch.cat((turned, x[..., self.shape.n_rot :]), -1)
