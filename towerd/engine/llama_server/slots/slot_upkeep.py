"""SlotUpkeep: saves idle slots, and asks llama-server what doubtful ones hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.slots.placer import Placer
from towerd.engine.llama_server.slots.slot import Slot
from towerd.engine.llama_server.slots.slot_table import SlotTable
from towerd.errors import TowerdError

log = logging.getLogger(__name__)

IDLE_S = 30.0
"""A slot that was not used for this long is saved, so that a crash costs no prefill."""
PRESSED_S = 0.02
"""With more conversations than slots it is saved after this time instead, unless it is in use."""
PATIENCE_S = 1.0
"""How long a save waits for the first tokens of other requests."""
FOREIGN_S = 0.1
"""A slot that runs a request which towerd did not place is asked about again after this time."""


class SlotUpkeep:
    """Background work on one table of slots."""

    def __init__(self, placer: Placer, table: SlotTable, upstream: UpstreamClient) -> None:
        self.idle_s = IDLE_S
        self.n_preparing = 0
        """Requests whose slots are being prepared right now."""
        self.n_awaited = 0
        """Requests that have a slot and no token yet."""
        self._placer = placer
        self._table = table
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()
        self._verifying = False
        self._foreign: set[Slot] = set()
        self._is_closed = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background; `settle` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- saving ---------------------------------------------------------------------------

    def capture_later(self, slot: Slot) -> None:
        """Save a slot once it has been idle for a while; soon if others need slots."""
        if not self._is_closed and self._wants_capture(slot):
            delay_s = PRESSED_S if self._table.is_pressed else self.idle_s
            self._call_later(delay_s, slot, slot.last_used, 0)

    def _call_later(self, delay_s: float, slot: Slot, used: int, n_waits: int) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._due, slot, used, n_waits)

    def _due(self, slot: Slot, used: int, n_waits: int) -> None:
        """Save a slot unless it was used since. A save stops all slots, so it waits while a
        request's slot is prepared, and for some time for a request's first token."""
        if self._is_closed or slot.last_used != used or not self._wants_capture(slot):
            return
        if self.n_preparing or (self.n_awaited and n_waits * PRESSED_S < PATIENCE_S):
            self._call_later(PRESSED_S, slot, used, n_waits + 1)
        else:
            self.spawn(self.capture_idle(slot))

    async def capture_idle(self, slot: Slot) -> None:
        """Save a slot if it is idle and the store lacks some of it."""
        if not self._wants_capture(slot):
            return
        slot.busy, slot.holder, slot.saving = True, "", True
        try:
            await self._placer.capture(slot)
        except TowerdError as error:
            log.warning("an idle slot could not be saved", extra={"error": error.message})
        finally:
            self._table.free(slot, used=False)

    async def settle(self) -> None:
        """Wait for what runs, then save every idle slot that has rows the store lacks."""
        await self._wait()
        for slot in self._table.slots:
            await self.capture_idle(slot)

    async def close(self, *, save: bool) -> None:
        """Start no more work, and wait for what runs; with `save`, also save idle slots."""
        self._is_closed = True
        await self._wait()
        if save:
            await self.settle()

    async def _wait(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _wants_capture(self, slot: Slot) -> bool:
        if slot.busy or not slot.known or not slot.sure:
            return False
        return self._placer.can_compose and slot.n_unsaved > 0

    # ---- verifying ------------------------------------------------------------------------

    def doubt(self) -> None:
        """Mark all slots as doubtful, because a request ran that towerd did not place."""
        for slot in self._table.slots:
            slot.sure = False
        self._release_foreign()

    def _release_foreign(self) -> None:
        """Release slots that ran other requests, as they may be free: they are asked about when
        needed."""
        for slot in self._foreign:
            slot.hold_unknown("")
            slot.busy = slot.sure = False
        self._foreign.clear()
        self._table.pump()

    def verify_soon(self) -> None:
        """Ask about doubtful free slots in the background, then grant slots again."""
        if not self._verifying:
            self._verifying = True
            self.spawn(self._verify())

    async def _verify(self) -> None:
        try:
            views = {view["id"]: view for view in await self._upstream.slots()}
        except TowerdError as error:
            log.warning("the slots cannot be asked for", extra={"error": error.message})
            views = {}
        for slot in self._table.slots:
            if not slot.sure and not slot.busy:
                self._settle_doubt(slot, views.get(slot.id))
        self._verifying = False
        if self._foreign:
            asyncio.get_running_loop().call_later(FOREIGN_S, self._release_foreign)
        self._table.pump()

    def _settle_doubt(self, slot: Slot, view: dict[str, Any] | None) -> None:
        """Trust a slot that holds as many tokens as it should. If that were wrong, llama-server
        would still compare tokens, and the reply would report that nothing was reused."""
        held = None if view is None else view.get("n_prompt_tokens", slot.n)
        if held != slot.n or slot.hidden or not slot.known:
            slot.hold_unknown("")
        slot.sure = True
        if view is not None and view.get("is_processing"):
            slot.busy, slot.holder = True, ""
            self._foreign.add(slot)
