"""SlotTable: the slots of one llama-server, what each holds, and the requests that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from towerd.engine.llama_server.slots.placement import PlacementPolicy, SlotChoice, SlotRequest
from towerd.engine.llama_server.slots.slot import Slot
from towerd.errors import TowerdError, Unavailable

_RESERVE_CELLS = 256
"""Cells to leave for a reply where all slots share them; fewer if its limit is lower."""


class SlotTable:
    """Grants slots as the policy decides. Used on the event loop only.

    verify: called when a free slot's content is in doubt; it settles that and calls `pump`.
    cells: how many cells all slots share; 0: each has its own. llama-server fails every running
    request when they are used up, so a request waits until it fits beside those that run."""

    def __init__(
        self,
        policy: PlacementPolicy,
        n_slots: int,
        *,
        queue_max: int,
        verify: Callable[[], None],
        cells: int = 0,
    ) -> None:
        self.policy = policy
        self.slots = [Slot(i) for i in range(n_slots)]
        self.queue_max = queue_max
        self._cells = cells
        self._reserve = min(_RESERVE_CELLS, cells // 8)
        self._verify = verify
        self._waiting: dict[SlotRequest, asyncio.Future[SlotChoice]] = {}
        self._n_used = 0
        self._freed = asyncio.Event()
        self._displaced: deque[bool] = deque(maxlen=2 * n_slots)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_busy(self) -> int:
        return sum(slot.busy for slot in self.slots)

    @property
    def is_pressed(self) -> bool:
        """Whether conversations recently had to leave their slots, as there are more of them."""
        return any(self._displaced)

    async def acquire(self, request: SlotRequest) -> SlotChoice:
        """A slot, marked busy; so is `choice.capture`. Raises Unavailable when too many wait."""
        granted: asyncio.Future[SlotChoice] = asyncio.get_running_loop().create_future()
        self._waiting[request] = granted
        self.pump()
        if not granted.done() and len(self._waiting) > self.queue_max:
            del self._waiting[request]
            raise Unavailable(
                f"{self.queue_max} requests are waiting for a slot already; try again later."
            )
        try:
            return await granted
        except asyncio.CancelledError:
            was_waiting = self._waiting.pop(request, None) is not None
            if not was_waiting and granted.done() and not granted.cancelled():
                self.undo(granted.result())
            raise

    def fits(self, n_others: int, request: SlotRequest) -> bool:
        """Whether a request and its reply fit beside `n_others` cells of other slots."""
        return not self._cells or n_others + self._n_needed(request) <= self._cells

    def undo(self, choice: SlotChoice) -> None:
        """Give back a choice that was not used; its slots hold what they held."""
        for slot in {choice.slot, choice.capture or choice.slot}:
            self._set_free(slot)
        self.pump()

    def free(self, slot: Slot, *, used: bool = True) -> None:
        """Give a slot back. `used`: a request ran in it, rather than upkeep."""
        self._set_free(slot)
        if used:
            self._n_used += 1
            slot.last_used = self._n_used
        self.pump()

    async def freed(self) -> None:
        """Wait until a slot may have been given back."""
        await self._freed.wait()

    def pump(self) -> None:
        """Grant slots to as many waiting requests as possible."""
        self._freed.set()
        self._freed = asyncio.Event()
        while self._waiting:
            if any(not slot.sure and not slot.busy for slot in self.slots):
                self._verify()
                return
            pair = self.policy.next(self._fitting(), self.slots)
            if pair is None:
                return
            request, choice = pair
            for each in self._waiting:
                if each is request:
                    break
                each.overtaken += not self._has_room(each)
            granted = self._waiting.pop(request)
            if granted.cancelled():
                continue
            self._take(choice, request)
            granted.set_result(choice)

    def fail_waiting(self, error: TowerdError) -> None:
        """Fail all waiting requests with `error`."""
        waiting, self._waiting = self._waiting, {}
        for granted in waiting.values():
            if not granted.done():
                granted.set_exception(error)

    def _fitting(self) -> list[SlotRequest]:
        """The requests that fit beside those that run, in order. Later ones go before one that does
        not fit a limited number of times."""
        found: list[SlotRequest] = []
        for each in self._waiting:
            if self._has_room(each):
                found.append(each)
            elif each.overtaken >= len(self.slots):
                break
        return found

    def _has_room(self, request: SlotRequest) -> bool:
        """Whether the cells of idle slots are enough for a request; one that is alone has to do
        with those that there are."""
        running = [slot.n_needed for slot in self.slots if slot.busy and not slot.saving]
        return not running or self.fits(sum(running), request)

    def _n_needed(self, request: SlotRequest) -> int:
        n_reply = self._reserve
        if request.n_predict >= 0:
            n_reply = min(n_reply, request.n_predict)
        return request.n + n_reply

    def _set_free(self, slot: Slot) -> None:
        slot.busy = slot.saving = False
        slot.n_promised = 0

    def _take(self, choice: SlotChoice, request: SlotRequest) -> None:
        slot = choice.slot
        leaves = (slot.n > 0 or not slot.known) and choice.n_reused < slot.n
        self._displaced.append(choice.restore or leaves)
        slot.busy, slot.holder = True, request.scope
        slot.n_promised = self._n_needed(request)
        if choice.capture is not None:
            choice.capture.busy = True
            choice.capture.saving = choice.capture is not slot
