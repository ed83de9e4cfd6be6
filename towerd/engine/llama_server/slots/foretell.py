"""What a reply has to say about its prompt, from what its slot holds."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.engine.base import Reuse
from towerd.engine.llama_server.slots.placement import Policy, Slot, Want
from towerd.engine.llama_server.slots.placer import Placed
from towerd.tokens import count_approximate


@dataclass(frozen=True, slots=True)
class Foretold:
    """Of one request."""

    reuse: Reuse
    """Where the prompt's tokens come from."""
    expected: int | None
    """How many the reply has to report as cached; None: that cannot be foretold."""
    n_live_max: int | None
    """How many it can at most; None when the slot may hold more than is known."""


def foretell(policy: Policy, want: Want, slot: Slot, placed: Placed) -> Foretold:
    """For a prompt that was brought into `slot` like that."""
    return Foretold(
        _reuse(want, placed), _expected(policy, want, slot, placed), _live_max(want, slot)
    )


def _expected(policy: Policy, want: Want, slot: Slot, placed: Placed) -> int | None:
    if want.ids is None or not want.cache_prompt:
        return None
    if placed.restored is not None:
        return placed.n
    if policy.window or policy.extends_only:
        return None  # it depends on the checkpoints that the server happens to have
    return min(placed.n, slot.n_certain)


def _live_max(want: Want, slot: Slot) -> int | None:
    if want.ids is None or slot.hidden or not slot.known:
        return None
    return slot.common(want.ids)


def _reuse(want: Want, placed: Placed) -> Reuse:
    restored = placed.restored
    if restored is None:
        return Reuse(live=placed.n, prefill=want.n - placed.n)
    approximate = count_approximate(restored.provenance)
    n_hot, n_warm = restored.n_hot, restored.n_warm
    return Reuse(0, n_hot, n_warm, want.n - restored.n, approximate)
