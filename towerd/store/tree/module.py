"""Module: the properties of a base that may be spliced in anywhere (`reuse: anywhere`)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from towerd.drift import Drift

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""[start, stop) ranges of a module's tokens, ascending and disjoint, counted from its first."""


class Module(msgspec.Struct, frozen=True):
    """The base's rows are those of the module alone, after `first` tokens."""

    first: int
    """How many tokens of the base precede the module's own (BOS, if the model has one)."""
    digest: str
    """BLAKE2b-256 of the module's own ids, hex."""
    percent: float
    """The minimum share of its tokens that the operator wants recomputed at each splice."""
    spans: Spans
    """The tokens to recompute: those whose rows deviate most from the rows after other text."""
    kl: float
    """Measured drift: mean KL divergence of the next-token distributions after it, in nats."""
    top1: float
    """Share of those distributions whose most likely token is the same."""
    floor_kl: float = 0.0
    """The model's noise on the same tokens; 0 for a module measured without it."""
    fidelity: str = ""
    """The fidelity whose bound determined `spans`; "" for a module from an older version."""
    row_identity: str = msgspec.field(default="", name="fingerprint")
    """The row identity that it was measured with, hex."""

    @property
    def n_recomputed(self) -> int:
        """Tokens recomputed at each splice."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def drift(self) -> Drift:
        """The measured drift of splicing the module in."""
        return Drift(self.kl, self.floor_kl)

    def to_json(self) -> str:
        """The catalog's text."""
        return msgspec.json.encode(self).decode()


def module_from_json(text: str | None) -> Module | None:
    """The inverse; None for a base that is no module. Raises ValueError."""
    return None if text is None else msgspec.json.decode(text, type=Module)
