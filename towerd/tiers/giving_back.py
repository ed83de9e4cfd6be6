"""RowsGiver: empties the hot tier when RAM that towerd may have is short."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from towerd.errors import StoreError
from towerd.system.ram_limit import RamLimit
from towerd.tiers.composer import Composer
from towerd.tiers.eviction import Evictor
from towerd.tiers.writer import RowsWriter

_WAIT_S = 0.5
"""How long who needs RAM waits for rows to leave it."""


class RowsGiver:
    """Called by any thread, it has the thread of the tiers do the work."""

    def __init__(
        self,
        ram: RamLimit,
        composer: Composer,
        evictor: Evictor,
        writer: RowsWriter,
        put: Callable[[tuple[str, Any]], None],
    ) -> None:
        """put: hands work to that thread, which is to call `give` for ("give", event) and then set the event"""
        self._ram, self._composer = ram, composer
        self._evictor, self._writer, self._put = evictor, writer, put

    def ask(self) -> None:
        """Have RAM given back that can be: idle buffers, and rows, which are written first."""
        self._composer.give_back()
        done = threading.Event()
        self._put(("give", done))
        done.wait(_WAIT_S)

    def give(self, pinned_bytes_max: int) -> None:
        """Empty the tier as far as need be: what is written, then what can be, at last what cannot."""
        self._evictor.evict_hot(0, pinned_bytes_max)
        if self._ram.is_pressed and self._writer.unwritten:
            with suppress(StoreError):
                self._writer.write_remaining()
            self._evictor.evict_hot(0, pinned_bytes_max)
        if not self._ram.has_room():
            self._evictor.drop_unwritten()

    def promoted_bytes_max(self, hot_bytes_max: int) -> int:
        """Bytes of a segment that may be copied into RAM because it was read."""
        return 0 if self._ram.is_pressed else hot_bytes_max // 4
