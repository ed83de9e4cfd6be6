"""A llama model in float64 whose layers and KV heads each see positions of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader

from lab.models.shape import Shape
from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.retention import Positions
from towerd.tokens import Ids

Floats = npt.NDArray[np.float64]
Event = tuple[int, npt.NDArray[np.int64] | None]
"""After so many tokens only these positions stay, int64[layers, KV heads, m]; None: what is there moves
together."""


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """What became of the live sets, in order."""
    events: list[Event] = []
    mix, compacted, drop = BoundedSet.mix, BoundedSet.compacted, BoundedSet.drop

    def mixing(live: BoundedSet, chosen: Any, *more: Any) -> None:
        events.append((live.n, chosen))
        mix(live, chosen, *more)

    def dropping(live: BoundedSet, stay: Any) -> None:
        events.append((live.n, stay[None, None]))
        drop(live, stay)

    def moving(live: BoundedSet, places: Positions) -> None:
        events.append((live.n, None))
        compacted(live, places)

    with monkeypatch.context() as patch:
        patch.setattr(BoundedSet, "mix", mixing)
        patch.setattr(BoundedSet, "drop", dropping)
        patch.setattr(BoundedSet, "compacted", moving)
        yield events


class ThinnedModel:
    """Evaluates one chat, token by token."""

    def __init__(self, path: Path, shape: Shape, half_life: float = math.inf) -> None:
        """half_life: tokens after which attention counts half in `masses`"""
        tensors = GGUFReader(path).tensors
        self._w = {each.name: np.asarray(each.data, np.float64) for each in tensors}
        self._shape = shape
        layers, size = (shape.n_layer, shape.n_head_kv), shape.head_size
        self._k, self._v = np.zeros((*layers, 0, size)), np.zeros((*layers, 0, size))
        self._places = np.zeros((*layers, 0), np.int64)
        self._is_live = np.zeros((*layers, 0), np.bool_)
        self._place_next = 0
        self._mass, self._half_life = np.zeros((*layers, 0)), half_life
        self.masses: list[Floats] = []
        """float64[layers, KV heads, n] at each event: the attention that each position got so far, averaged
        over the heads of a KV head."""

    def logprobs(self, ids: Ids, events: Sequence[Event] = ()) -> Floats:
        """float64[n, n_vocab] after each token."""
        found = []
        for n, token in enumerate(ids.tolist()):
            for _, positions in (each for each in events if each[0] == n):
                self._thin(positions)
            found.append(self._next(token))
        return np.stack(found)

    def _thin(self, positions: npt.NDArray[np.int64] | None) -> None:
        self.masses.append(self._mass.copy())
        if positions is None:
            rank = np.cumsum(self._is_live, axis=2) - 1
            self._places = np.where(self._is_live, rank, -1)
            self._place_next = int(self._is_live[0, 0].sum())
            return
        every = np.broadcast_to(positions, (*self._is_live.shape[:2], positions.shape[2]))
        stays = np.zeros_like(self._is_live)
        np.put_along_axis(stays, every, True, axis=2)
        assert not (stays & ~self._is_live).any(), "a position came back"
        self._is_live = stays

    def _next(self, token: int) -> Floats:
        place = self._new_place()
        x = self._w["token_embd.weight"][token]
        for layer in range(self._shape.n_layer):
            x = x + self._attention(layer, place, x)
            x = x + self._feed_forward(layer, x)
        return self._logprobs(x, "output", "output_norm")

    def _logprobs(self, x: Floats, output: str, norm: str) -> Floats:
        logits = self._w[f"{output}.weight"] @ self._norm(x, self._w[f"{norm}.weight"])
        return np.asarray(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))

    def _new_place(self) -> int:
        """The place of the next token, with room for its keys and values."""
        shape = self._shape
        place, self._place_next = self._place_next, self._place_next + 1
        column = (shape.n_layer, shape.n_head_kv, 1)
        self._places = np.concatenate([self._places, np.full(column, place)], axis=2)
        self._is_live = np.concatenate([self._is_live, np.ones(column, np.bool_)], axis=2)
        faded = self._mass * 2 ** (-1 / self._half_life)
        self._mass = np.concatenate([faded, np.zeros(column)], axis=2)
        empty = np.zeros((*column, shape.head_size))
        self._k, self._v = (np.concatenate([each, empty], axis=2) for each in (self._k, self._v))
        return place

    def _attention(self, layer: int, place: int, x: Floats) -> Floats:
        shape, w, name = self._shape, self._w, f"blk.{layer}."
        h = self._norm(x, w[name + "attn_norm.weight"])
        q, k, v = (
            (w[f"{name}attn_{each}.weight"] @ h).reshape(-1, shape.head_size) for each in "qkv"
        )
        return np.asarray(w[name + "attn_output.weight"] @ self._seen(layer, place, q, k, v))

    def _seen(self, layer: int, place: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """What the heads of a token see of the live positions and of itself. q, k, v: [heads, size], not
        rotated"""
        self._k[layer, :, -1], self._v[layer, :, -1] = k, v
        out = []
        for head, query in enumerate(self._turned(q, np.full(len(q), place))):
            kv = head // (len(q) // len(k))
            live = self._is_live[layer, kv]
            keys = self._turned(self._k[layer, kv][live], self._places[layer, kv][live])
            weights = weights_of(query, keys)
            self._mass[layer, kv, live] += weights * len(k) / len(q)
            out.append(weights @ self._v[layer, kv][live])
        return np.concatenate(out)

    def _feed_forward(self, layer: int, x: Floats) -> Floats:
        w, name = self._w, f"blk.{layer}.ffn_"
        h = self._norm(x, w[name + "norm.weight"])
        gate = w[name + "gate.weight"] @ h
        return np.asarray(
            w[name + "down.weight"] @ (gate / (1 + np.exp(-gate)) * (w[name + "up.weight"] @ h))
        )

    def _turned(self, rows: Floats, places: Any) -> Floats:
        """RoPE of pairs of neighbours."""
        size = self._shape.head_size
        steps = self._shape.rope_freq_base ** (-np.arange(0, size, 2) / size)
        angles = places[:, None] * steps
        a, b, cos, sin = rows[:, ::2], rows[:, 1::2], np.cos(angles), np.sin(angles)
        return np.stack([a * cos - b * sin, a * sin + b * cos], axis=2).reshape(rows.shape)

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        return np.asarray(x / np.sqrt((x * x).mean() + 1e-5) * weight)


def attended(query: Floats, keys: Floats, values: Floats) -> Floats:
    """[size]: the values by the attention of a query to the keys, [n, size] each."""
    return np.asarray(weights_of(query, keys) @ values)


def weights_of(query: Floats, keys: Floats) -> Floats:
    """[n]: the attention of a query to n keys."""
    scores = keys @ query / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())
