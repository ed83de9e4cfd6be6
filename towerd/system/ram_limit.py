"""RamLimit: how much RAM this process may take with those that it starts, and what gives way before that is reached.

What is resident counts, whatever it is for: weights, contexts, rows, buffers, files that are mapped at the moment. A
thread looks at it. From a share on, what can be had again (rows that have files, buffers, freed memory) is given back;
from a higher share on, nothing new may begin. What takes much at once asks before (`claim`). A limit on the address space
(`ulimit -v`) counts in the same way.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from towerd.system.machine import (
    address_bytes_max,
    children_bytes,
    own_address_bytes,
    own_resident_bytes,
    resident_bytes,
    usable_cores,
)
from towerd.system.process import return_free_memory

log = logging.getLogger(__name__)

GIVE_SHARE = 0.92
"""Share of the limit from which on things give way."""
FULL_SHARE = 0.97
"""Share from which on nothing new begins."""
BUSY_SHARE = 0.8
"""Share from which on the thread looks often."""
LOOK_S, LOOK_OFTEN_S = 0.25, 0.02
UNTOUCHED_S = 5.0
"""Below that share, seconds for which what a context has not touched yet is not read again: it only becomes less."""
LOOKING_PART = 100
"""What children take is read in at most one of so many parts of the time."""
LATELY_S = 0.02
"""Seconds for which those that wait share one look."""
CHILDREN_S = 0.25
"""Seconds for which what children take is not read again."""
ADDRESS_SPARE = 64 << 20
"""Of a limited address space, bytes that stay free for threads and for what llama.cpp cannot do without."""
ADDRESS_OF_THREADS, ADDRESS_OF_CORE = 192 << 20, 16 << 20
"""What the threads that are started after a model was loaded take of it, and those for each core."""
REST_S = 0.5
"""Pause after everything gave way in vain."""
NO_LIMIT = sys.maxsize
TEXT_SHARE = 64
"""To tokenize a text takes some forty times its bytes: one takes at most one in so many parts of the room."""
MEDIA_SHARE = 8
"""To decode a medium takes some four times what it has then: all of a prompt have at most one in so many parts."""

Give = Callable[[], object]


def own_bytes() -> int:
    """RAM of this process."""
    found = own_resident_bytes()
    if found is not None:
        return found
    import os

    return resident_bytes(os.getpid())


class GivenSizes(NamedTuple):
    """What a model was given at its first load: clients know its context."""

    path: Path
    wanted: tuple[int, int]
    """Tokens of a conversation, and cells, that it would have without a limit."""
    n_ctx: int
    n_cells: int
    room: int
    """Bytes beside the model and its contexts."""
    ubatch_size: int
    live_sequences: int
    flash_attn: str


class RamLimit:
    """The limit of this process and its children. Thread-safe."""

    def __init__(
        self,
        bytes_max: int = 0,
        *,
        own: Callable[[], int] = own_bytes,
        children: Callable[[], int] = children_bytes,
        address_max: int | None = None,
        name: str = "--ram-max",
    ) -> None:
        """name: of the limit, in sentences. bytes_max: 0: no limit. own, children: RAM that they take now, in bytes. address_max: bytes of address space;
        0: no limit, None: what the system says"""
        self.bytes_max, self._name = bytes_max, name
        self.address_max = address_bytes_max() if address_max is None else address_max
        self.room = NO_LIMIT
        """Bytes that the model, once it was loaded, left for all else; see `leave_room`."""
        self.given: GivenSizes | None = None
        """What the model was given, for when it is loaded again."""
        self.peak = 0
        """The most that was seen, in bytes."""
        self.n_refused = 0
        """Requests that there was no room for."""
        self.n_given = 0
        """How often things gave way."""
        self._own, self._children = own, children
        self._children_seen = 0
        self._children_due = float("-inf")
        self._claimed = 0
        self._in_turn: list[int] = []
        self._largest = 0
        self._wanted = 0
        self._untouched: Callable[[], int] = lambda: 0
        self._untouched_seen = 0
        self._untouched_read = float("-inf")
        self._left_lately, self._lately_due = NO_LIMIT, float("-inf")
        self._lock = threading.Lock()
        self._giving = threading.Lock()
        self._gives: list[Give] = []
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self.bytes_max > 0 or self.address_max > 0

    @property
    def text(self) -> str:
        """The limit as a part of a sentence."""
        if self.bytes_max:
            return f"{self._name} {-(-self.bytes_max >> 20):,} MiB"
        return f"ulimit -v {self.address_max >> 20:,} MiB"

    # ---- what is taken ------------------------------------------------------------------------

    def taken(self) -> int:
        """Bytes of RAM in use by all processes, now."""
        total = self._own() + self._of_children()
        self.peak = max(self.peak, total)
        return total

    def left(self, share: float = FULL_SHARE) -> int:
        """Bytes that may be taken yet, below a share of the limit, beside all that was claimed and what a model's
        context will take once it is full."""
        left = NO_LIMIT
        if self.bytes_max:
            left = int(share * self.bytes_max) - self.taken() - self._untouched_seen
        if self.address_max:
            used = own_address_bytes() or 0
            left = min(left, self.address_max - ADDRESS_SPARE - used)
        return left if left == NO_LIMIT else left - self._claimed - self._largest

    def left_at_start(self) -> int:
        """Bytes that a model and its contexts may have, before anything gives way for them."""
        left = self.left(GIVE_SHARE)
        if self.address_max:
            used = own_address_bytes() or 0
            threads = ADDRESS_OF_THREADS + ADDRESS_OF_CORE * usable_cores()
            left = min(left, self.address_max - ADDRESS_SPARE - threads - used)
        return left

    def has_room(self, n_bytes: int = 0) -> bool:
        """Whether so much may be taken, without anything giving way."""
        return not self.is_limited or self.left() >= n_bytes

    def had_room(self, n_bytes: int) -> bool:
        """As `has_room`, but as of up to LATELY_S ago: for many that wait."""
        now = time.monotonic()
        if now >= self._lately_due:
            self._lately_due = now + LATELY_S
            self._left_lately = self.left()
        return self._left_lately >= n_bytes

    @property
    def is_pressed(self) -> bool:
        """Whether things give way: nothing that can wait is to begin."""
        return self.is_limited and self.left(GIVE_SHARE) <= 0

    # ---- claims -------------------------------------------------------------------------------

    def leave_room(self, n_bytes: int, untouched: Callable[[], int]) -> None:
        """Say what is left beside a model and its contexts. untouched: bytes of these that no page of RAM was needed
        for yet; called on any thread, until `take_back`"""
        self.room, self._untouched = n_bytes, untouched
        self._untouched_seen = untouched()

    def keep_to(self, room: int, wanted: int) -> int:
        """Of the room that was found, keep what is wanted, and lower the limit by the rest. Returns what is kept."""
        if self.bytes_max and room > wanted:
            self.bytes_max -= int((room - wanted) / GIVE_SHARE)
            room = wanted
        return room

    def take_back(self) -> None:
        """The model is to be freed."""
        self.room, self._untouched, self._untouched_seen = NO_LIMIT, lambda: 0, 0

    def claim(self, n_bytes: int, in_turn: int = 0) -> bool:
        """Count so many bytes as taken until `release`; False, with nothing counted, if there is no room.

        in_turn: bytes that all who claim such take one after the other: only the most of them counts"""
        if not self.is_limited:
            return True
        with self._lock:
            if self.left() < self.more(n_bytes, in_turn):
                return False
            self._claimed += n_bytes
            if in_turn:
                self._in_turn.append(in_turn)
                self._largest = max(self._in_turn)
        return True

    def more(self, n_bytes: int, in_turn: int) -> int:
        """Bytes that would count besides if these were claimed."""
        return n_bytes + max(0, in_turn - self._largest)

    def release(self, n_bytes: int, in_turn: int = 0) -> None:
        """What was claimed is not needed any more, or it is there and seen. in_turn: as it was claimed"""
        if self.is_limited:
            with self._lock:
                self._claimed -= n_bytes
                if in_turn:
                    self._in_turn.remove(in_turn)
                    self._largest = max(self._in_turn, default=0)

    # ---- giving way ---------------------------------------------------------------------------

    def gives_way(self, give: Give) -> None:
        """give: called, on any thread, to give back what it can; in the order in which they were named."""
        self._gives.append(give)

    def keeps(self, give: Give) -> None:
        """It gives nothing back any more."""
        self._gives.remove(give)

    def make_room(self, n_bytes: int) -> bool:
        """Have things give way until so much may be taken; whether it may."""
        if self.has_room(n_bytes):
            return True
        with self._giving:
            if self.has_room(n_bytes):
                return True
            self.n_given += 1
            return_free_memory()
            for give in list(self._gives):
                if self.has_room(n_bytes):
                    return True
                try:
                    give()
                except Exception:
                    log.exception("nothing was given back")
                return_free_memory()
            return self.has_room(n_bytes)

    def ask(self, n_bytes: int = 0) -> None:
        """Have the thread look at once, and things give way until so much may be taken."""
        self._wanted = max(self._wanted, n_bytes)
        self._wake.set()

    def start(self) -> None:
        """Start the thread, if there is a limit."""
        if self.is_limited and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="towerd-ram", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def stats(self) -> dict[str, int | None]:
        """Gauges and counters for /metrics and /towerd/v1/stats; `ram_bytes_max` is None without a limit."""
        return {
            "ram_bytes": self.taken(),
            "ram_bytes_max": self.bytes_max or None,
            "ram_bytes_peak": self.peak,
            "ram_refusals": self.n_refused,
            "ram_gave_way": self.n_given,
        }

    def _of_children(self) -> int:
        """As of a moment ago. The thread looks, if it runs: that takes milliseconds."""
        if self._thread is None or threading.current_thread() is self._thread:
            now = time.monotonic()
            if now >= self._children_due:
                self._children_seen = self._children()
                took_s = time.monotonic() - now
                self._children_due = now + max(CHILDREN_S, LOOKING_PART * took_s)
        return self._children_seen

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                wait_s = self._look()
            except Exception:  # without this thread nothing ever gives way
                log.exception("RAM could not be looked at")
                wait_s = REST_S
            self._wake.wait(wait_s)

    def _look(self) -> float:
        """Have things give way if need be; returns the seconds until it is time to look again."""
        is_busy = self.left(BUSY_SHARE) <= 0
        now = time.monotonic()
        if now >= self._untouched_read + (CHILDREN_S if is_busy else UNTOUCHED_S):
            self._untouched_read = now
            self._untouched_seen = self._untouched()
        wait_s = LOOK_OFTEN_S if is_busy else LOOK_S
        wanted, self._wanted = self._wanted, 0
        if self.left(GIVE_SHARE) < 0:
            spare = int((FULL_SHARE - GIVE_SHARE) * (self.bytes_max or self.address_max))
            wanted = max(wanted, spare)
        if wanted and not self.has_room(wanted):
            wait_s = LOOK_OFTEN_S if self.make_room(wanted) else REST_S
        return wait_s
