"""ExpectedReuse: what a reply should report about its prompt, by what its slot holds."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.engine.base import Reuse
from towerd.engine.llama_server.slots.placement import PlacementPolicy, SlotRequest
from towerd.engine.llama_server.slots.placer import PlacedPrompt
from towerd.engine.llama_server.slots.slot import Slot
from towerd.tokens import count_approximate


@dataclass(frozen=True, slots=True)
class ExpectedReuse:
    """The expected reuse of one request."""

    reuse: Reuse
    """Where the prompt's tokens come from."""
    n_cached: int | None
    """How many tokens the reply should report as cached; None: that cannot be predicted."""
    n_live_max: int | None
    """The most that it can report; None when the slot may hold more than is known."""


def expect_reuse(
    policy: PlacementPolicy, request: SlotRequest, slot: Slot, placed: PlacedPrompt
) -> ExpectedReuse:
    """The expected reuse of a prompt that was brought into `slot` as `placed` says."""
    return ExpectedReuse(
        _reuse(request, placed), _expected(policy, request, slot, placed), _live_max(request, slot)
    )


def _expected(
    policy: PlacementPolicy, request: SlotRequest, slot: Slot, placed: PlacedPrompt
) -> int | None:
    if request.ids is None or not request.cache_prompt:
        return None
    if placed.restored is not None:
        return placed.n
    if policy.window or policy.extends_only:
        return None  # it depends on which checkpoints the server has
    return min(placed.n, slot.n_certain)


def _live_max(request: SlotRequest, slot: Slot) -> int | None:
    if request.ids is None or slot.hidden or not slot.known:
        return None
    return slot.common(request.ids)


def _reuse(request: SlotRequest, placed: PlacedPrompt) -> Reuse:
    restored = placed.restored
    if restored is None:
        return Reuse(live=placed.n, prefill=request.n - placed.n)
    approximate = count_approximate(restored.provenance)
    n_hot, n_warm = restored.n_hot, restored.n_warm
    return Reuse(0, n_hot, n_warm, request.n - restored.n, approximate)
