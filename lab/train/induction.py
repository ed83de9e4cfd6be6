"""Weights that begin as induction heads, so that training refines what it would search for long.

Attention that finds where the last tokens stood before ("In-context Learning and Induction Heads",
Olsson and others, 2022) appears by itself only after tens of millions of tokens. Here it is there
at the first step, roughly: the lower half of the residual stream holds a token, the upper half a slot for
each of the tokens before it, as many as there are heads.

layer 0      head h looks h + 1 tokens back and writes what it finds into slot h
layer 1      the same heads, which write nothing yet
the others   each head looks for the place whose slots hold the last tokens, and says what is there

Looking back is a matter of positions: queries and keys read a part of the embedding that is the same
for every token, and the keys' is turned by so many steps of RoPE. Matching is one of contents: it uses
the slower half of a head's pairs, which the distance hardly turns. Retrieval starts in the third
layer where there are as many, since policies that choose by attention do not ask the first two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.train.network import (
    EMBEDDING,
    NetworkShape,
    Weights,
    init_weights,
    rotation_frequencies,
)

EMBEDDING_STD = 0.08
"""A token that is copied to the output has to win there: more than a language model starts with."""
N_LOCAL_LAYERS = 2
CONSTANT_SHARE = 0.25
"""The energy of the part that all tokens share, beside that of the part that tells them apart."""
LOOK_BACK = 1.4
MATCH = 1.2
NOISE = 0.2
"""Of the usual random queries and keys: what tells equal heads apart, and lets them change."""
N_TOKENS_MATCHED = (2, 3, 4)
"""The last tokens that heads compare, one after the other."""


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
    """Writes the parts of the circuit into the weights."""

    def __init__(self, weights: Weights, shape: NetworkShape, seed: int) -> None:
        self._weights, self._shape = weights, shape
        self._half, self._slot = shape.n_embd // 2, shape.head_size // 2
        self._chance = torch.Generator().manual_seed(seed + 1)
        self._digest = self._random(self._slot, self._half - 1) / max(1, self._half - 1) ** 0.5
        """What of a token goes into a slot."""

    def embed(self) -> None:
        """Tokens in the lower half, after the constant; the slots are empty."""
        table = self._weights[EMBEDDING]
        table.copy_(self._random(*table.shape) * EMBEDDING_STD)
        table[:, self._half :] = 0
        table[:, 0] = EMBEDDING_STD * (CONSTANT_SHARE * self._half) ** 0.5

    def look_back(self, layer: int, head: int) -> None:
        """Head h attends to the token h + 1 places before."""
        q, k = self._rows(layer, head, "q"), self._rows(layer, head, "k")
        angles = (head + 1) * rotation_frequencies(self._shape)
        q[0::2, 0], q[1::2, 0] = LOOK_BACK, 0.0
        k[0::2, 0], k[1::2, 0] = LOOK_BACK * angles.cos(), LOOK_BACK * angles.sin()

    def remember(self, head: int) -> None:
        """Head h of layer 0 writes a digest of what it attends to into slot h."""
        v = self._rows(0, head, "v")
        v.zero_()
        v[: self._slot, 1 : self._half] = self._digest
        out = self._columns(0, head)
        out[self._in_slot(head), : self._slot] = EMBEDDING_STD * torch.eye(self._slot)

    def seek(self, layer: int, head: int) -> None:
        """Attend to the place before which the last tokens stood, and write what stands there."""
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
