"""The short way to a decision comes to what the long one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.engine.llama_server.slots.placement import (
    Costs,
    PlacementPolicy,
    SlotChoice,
    SlotRequest,
)
from towerd.engine.llama_server.slots.slot import Slot
from towerd.tokens import Ids

TOKENS = st.lists(st.integers(1, 2), max_size=6)


class Weighing(PlacementPolicy):
    """Weighs every option, always."""

    def _continuation(self, request: SlotRequest, slots: Any) -> SlotChoice | None:
        return None


def array(tokens: Sequence[int]) -> Ids:
    return np.array(tokens, np.int32)


@st.composite
def slot_lists(draw: st.DrawFn) -> list[Slot]:
    """Slots that hold anything, of anybody, in any state."""
    slots = []
    for index in range(draw(st.integers(1, 4))):
        slot = Slot(index, last_used=draw(st.integers(0, 3)))
        tokens = draw(TOKENS)
        if draw(st.booleans()):
            slot.hold(array(tokens), draw(st.sampled_from("ab")), hidden=draw(st.booleans()))
            slot.n_stored = draw(st.integers(0, len(tokens)))
            slot.window_from = draw(st.integers(0, 2))
        elif draw(st.booleans()):
            slot.hold_unknown(draw(st.sampled_from("ab")))
        slot.busy = draw(st.integers(0, 4)) == 0
        slots.append(slot)
    return slots


@settings(max_examples=300, deadline=None)
@given(slot_lists(), TOKENS, TOKENS, st.data())
def test_what_is_there_is_continued(
    slots: list[Slot], begun: list[int], said: list[int], data: st.DataObject
) -> None:
    """Slot, tokens, saving and cost are those of weighing all."""
    held = data.draw(st.sampled_from([begun, *(slot.tokens.tolist() for slot in slots)]))
    ids = array([*held, *said] or [1])
    request = SlotRequest(
        ids,
        "a",
        n_storable=data.draw(st.integers(0, len(ids) - 1)),
        n_public=data.draw(st.integers(0, 2)),
        cache_prompt=data.draw(st.booleans()),
    )
    fields: dict[str, Any] = {
        "window": data.draw(st.sampled_from([0, 0, 2])),
        "extends_only": data.draw(st.booleans()),
        "can_store": data.draw(st.booleans()),
    }
    costs = Costs(prefill_ms=data.draw(st.sampled_from([2.0, 0.01])))
    quick, thorough = PlacementPolicy(costs, **fields), Weighing(costs, **fields)
    assert quick.choose(request, slots) == thorough.choose(request, slots)
