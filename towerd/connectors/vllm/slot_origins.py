"""SlotOrigins: the provenance of the rows in vLLM's cache, where stored rows may be approximate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from towerd.connectors.vllm.operations import RowLoad, Slots, scheduled, slots_of
from towerd.tokens import Provenance, Provenances, computed_after


class SlotOrigins:
    """Belongs to the scheduler's thread. A step costs nothing until approximate rows are loaded, and then as much as
    it has new tokens."""

    def __init__(self, n_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._of_slot: Provenances = np.zeros(n_blocks * block_tokens, np.uint8)
        self._is_exact = True
        self._known: dict[str, tuple[int, Provenance]] = {}
        """By request, how many of its rows were traced, and the worst of them."""

    def of(self, slots: Slots) -> Provenances:
        """uint8[n]: that of the rows in these slots."""
        return self._of_slot[slots]

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._known.pop(request_id, None)

    def trace(self, step: Any, loads: Sequence[tuple[RowLoad, Provenances]]) -> None:
        """Note the provenance of what a step of the scheduler writes into the cache."""
        if self._is_exact:
            self._is_exact = not any(provenance.any() for _, provenance in loads)
            if self._is_exact:
                return
        for copy in step.kv_cache_block_copies or ():
            self._block(copy.dst_block_id)[:] = self._block(copy.src_block_id)
        for load, provenance in loads:
            self._of_slot[load.slots] = provenance
        begun: list[tuple[str, Slots, Slots]] = []
        resumed = step.scheduled_cached_reqs.resumed_req_ids
        for id, before, after in scheduled(step):
            found = step.kv_connector_block_state.get_block_ids(id)
            if found is None:
                self.forget(id)
                continue
            n_known, worst = self._known.get(id, (-1, Provenance.EXACT))
            if n_known == before and id not in resumed:
                new = slots_of(found[0], before, after, self._block_tokens)
                self._computed(id, after, new, worst)
            else:
                slots = slots_of(found[0], 0, after, self._block_tokens)
                begun.append((id, slots[:before], slots[before:]))
        self._settle(begun)

    def _settle(self, begun: Sequence[tuple[str, Slots, Slots]]) -> None:
        """The requests that have just got their blocks. One may build on another of the same step, whichever is
        listed first, so that it is repeated until nothing changes."""
        is_settled = False
        while not is_settled:
            is_settled = True
            for id, behind, new in begun:
                before = self._of_slot[new]
                worst = Provenance(int(self._of_slot[behind].max(initial=Provenance.EXACT)))
                self._computed(id, len(behind) + len(new), new, worst)
                is_settled = is_settled and bool((self._of_slot[new] == before).all())

    def _computed(self, id: str, n: int, new: Slots, worst: Provenance) -> None:
        """The request's rows are `n` now, the last ones in the slots `new`. worst: of those before"""
        origin = computed_after(np.array([worst], np.uint8))
        self._of_slot[new] = origin
        self._known[id] = n, max(worst, origin)

    def _block(self, block_id: int) -> Provenances:
        return self._of_slot[block_id * self._block_tokens :][: self._block_tokens]
