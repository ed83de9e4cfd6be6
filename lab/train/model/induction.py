"""Initial weights with induction heads, so that training refines what it would take long to find.

Attention that finds where the last tokens stood before ("In-context Learning and Induction Heads",
Olsson and others, 2022) emerges only after tens of millions of tokens. Here a rough form of it
exists from the first step: the lower half of the residual stream holds a token, the upper half has
a slot for each of the tokens before it, as many as there are heads.

layer 0      head h looks h + 1 tokens back and writes what it finds into slot h
layer 1      the same heads, which write nothing yet
the others   each head looks for the place whose slots hold the last tokens, and outputs its token

Looking back depends on positions: queries and keys read a part of the embedding that is the same
for every token, and the keys' part is rotated by h + 1 steps of RoPE. Matching depends on contents:
it uses the slower half of a head's pairs, which the distance hardly rotates. Retrieval starts in
the third layer if there is one, because policies that choose by attention skip the first two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.train.model.network import (
    EMBEDDING,
    NetworkShape,
    Weights,
    init_weights,
    rotation_frequencies,
)

EMBEDDING_STD = 0.08
"""Larger than language models start with, because a copied token has to win at the output."""
N_LOCAL_LAYERS = 2
CONSTANT_SHARE = 0.25
"""Energy of the part that all tokens share, relative to the part that distinguishes them."""
LOOK_BACK = 1.4
MATCH = 1.2
NOISE = 0.2
"""Share of the usual random queries and keys: it distinguishes equal heads and lets them change."""
N_TOKENS_MATCHED = (2, 3, 4)
"""Numbers of last tokens that heads compare; heads take these values in turn."""


def induction_weights(shape: NetworkShape, seed: int) -> Weights:
    """Fresh weights [as NetworkShape.tensors] with the circuit in them."""
    weights = init_weights(shape, seed)
    circuit = _Circuit(weights, shape, seed)
    n_local = min(N_LOCAL_LAYERS, shape.n_layer - 1)
    with torch.no_grad():
        circuit.embed()
        for layer in range(shape.n_layer):
            for head in range(shape.n_head):
                if layer >= n_local:
                    circuit.seek(layer, head)
                else:
                    circuit.look_back(layer, head)
                    if layer == 0:
                        circuit.remember(head)
    return weights


class _Circuit:
    """Writes the parts of the circuit into weights."""

    def __init__(self, weights: Weights, shape: NetworkShape, seed: int) -> None:
        self._weights, self._shape = weights, shape
        self._half, self._slot = shape.n_embd // 2, shape.head_size // 2
        self._chance = torch.Generator().manual_seed(seed + 1)
        self._digest = self._random(self._slot, self._half - 1) / max(1, self._half - 1) ** 0.5
        """Projects a token to the contents of a slot."""

    def embed(self) -> None:
        """Put tokens into the lower half, after the constant part; the slots are empty."""
        table = self._weights[EMBEDDING]
        table.copy_(self._random(*table.shape) * EMBEDDING_STD)
        table[:, self._half :] = 0
        table[:, 0] = EMBEDDING_STD * (CONSTANT_SHARE * self._half) ** 0.5

    def look_back(self, layer: int, head: int) -> None:
        """Make head h attend to the token h + 1 places before."""
        q, k = self._rows(layer, head, "q"), self._rows(layer, head, "k")
        angles = (head + 1) * rotation_frequencies(self._shape)
        q[0::2, 0], q[1::2, 0] = LOOK_BACK, 0.0
        k[0::2, 0], k[1::2, 0] = LOOK_BACK * angles.cos(), LOOK_BACK * angles.sin()

    def remember(self, head: int) -> None:
        """Make head h of layer 0 write a digest of the token that it attends to into slot h."""
        v = self._rows(0, head, "v")
        v.zero_()
        v[: self._slot, 1 : self._half] = self._digest
        out = self._columns(0, head)
        out[self._in_slot(head), : self._slot] = EMBEDDING_STD * torch.eye(self._slot)

    def seek(self, layer: int, head: int) -> None:
        """Make a head attend to the place after an earlier occurrence of the last tokens, and
        output its token."""
        q, k = self._rows(layer, head, "q"), self._rows(layer, head, "k")
        first = self._shape.head_size - self._slot
        q[first:], k[first:] = 0.0, 0.0
        q[first:, 1 : self._half] = MATCH * self._digest
        k[first:, self._in_slot(0)] = MATCH * torch.eye(self._slot)
        n_matched = N_TOKENS_MATCHED[head % len(N_TOKENS_MATCHED)]
        for n in range(1, min(self._shape.n_head, n_matched)):
            turn = MATCH * self._orthogonal(self._slot)
            q[first:, self._in_slot(n - 1)], k[first:, self._in_slot(n)] = turn, turn
        part = self._orthogonal(self._half)[: self._shape.head_size]
        part[:, 0] = 0
        v, out = self._rows(layer, head, "v"), self._columns(layer, head)
        v.zero_()
        v[: len(part), : self._half] = part
        out[: self._half, : len(part)] = EMBEDDING_STD * part.T

    def _rows(self, layer: int, head: int, name: str) -> Tensor:
        """The outputs of one head of a projection; queries and keys lose most of their noise."""
        size = self._shape.head_size
        rows = self._weights[f"blk.{layer}.attn_{name}.weight"][head * size : (head + 1) * size]
        return rows.mul_(NOISE) if name in "qk" else rows

    def _columns(self, layer: int, head: int) -> Tensor:
        size = self._shape.head_size
        return self._weights[f"blk.{layer}.attn_output.weight"][:, head * size : (head + 1) * size]

    def _in_slot(self, number: int) -> slice:
        return slice(self._half + number * self._slot, self._half + (number + 1) * self._slot)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._chance)

    def _orthogonal(self, n: int) -> Tensor:
        q: Tensor = torch.linalg.qr(self._random(n, n))[0]
        return q
