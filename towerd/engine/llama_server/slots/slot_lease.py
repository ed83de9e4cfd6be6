"""SlotLease: one request's hold on one slot."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from towerd.engine.base import Reuse
from towerd.engine.llama_server.slots.expected_reuse import ExpectedReuse
from towerd.engine.llama_server.slots.reuse_check import ReuseCheck
from towerd.engine.llama_server.slots.slot import Slot
from towerd.engine.llama_server.slots.slot_upkeep import SlotUpkeep
from towerd.store.sessions.deletions import DeletionWatch
from towerd.tokens import Ids


class Lender(Protocol):
    """The engine as its leases see it: `towerd.engine.llama_server.engine.LlamaServerEngine`."""

    upkeep: SlotUpkeep
    reuse_check: ReuseCheck

    @property
    def epoch(self) -> int:
        """The number of restarts of llama-server."""
        ...

    @property
    def n_ctx(self) -> int: ...

    def placed(self) -> None:
        """Called when the request was launched, or will not be."""
        ...

    def watch_deletions(self) -> DeletionWatch:
        """What is deleted from now on."""
        ...

    def give_back(self, lease: SlotLease, slot: Slot) -> None:
        """Called when the lease ended."""
        ...


class SlotLease:
    """A slot that holds as much of a prompt as is available. Use it as a context manager, which
    gives the slot back on every exit."""

    def __init__(
        self,
        engine: Lender,
        slot: Slot,
        ids: Ids | None,
        scope: str,
        *,
        session: str | None = None,
        label: str = "",
    ) -> None:
        self.ids = ids
        self.scope = scope
        self.label = label
        self.expected_reuse = ExpectedReuse(
            Reuse(prefill=0 if ids is None else len(ids)), None, None
        )
        self.restored = False
        """Whether the tokens in place come from a restore for this request."""
        self.is_exact = True
        """False: the slot's rows are not what evaluating its tokens gives."""
        self.session = session
        """The session that its client names."""
        self._engine = engine
        self._slot = slot
        self.t_began = time.monotonic()
        """When its request was parsed."""
        self.t_first: float | None = None
        """When its reply began; None before, or if that does not show until its end."""
        self._since = engine.watch_deletions()
        self._epoch = engine.epoch
        self._is_placing = True
        self._is_awaited = True
        self._is_open = True
        self._is_released = False

    @property
    def slot(self) -> int:
        """The slot to pin the request to (`id_slot`)."""
        return self._slot.id

    @property
    def reuse(self) -> Reuse:
        """Where the prompt's tokens come from."""
        return self.expected_reuse.reuse

    @property
    def is_stale(self) -> bool:
        """Whether llama-server was restarted since, so that the slot is empty."""
        return self._epoch != self._engine.epoch

    async def launched(self) -> None:
        """Called when the request runs in its slot: others may be placed from now on."""
        if self._is_placing:
            self._is_placing = False
            self._engine.placed()

    def answering(self) -> None:
        """Called when the reply begins: work that would have delayed it may be done now."""
        if self._is_awaited:
            self._is_awaited = False
            self.t_first = time.monotonic()
            self._engine.upkeep.n_awaited -= 1

    def observe(self, cache_n: int, prompt_ms: float) -> None:
        """Compare what the reply says with what was prepared for it: how many prompt tokens were
        reused, and how long the others took."""
        if self.ids is None:
            return
        check, expected = self._engine.reuse_check, self.expected_reuse
        check.prefilled(len(self.ids) - cache_n, prompt_ms)
        if expected.n_live_max is not None and cache_n > expected.n_live_max:
            # It moved rows from elsewhere in the slot (--cache-reuse), which is not exact.
            self.is_exact = False
        if expected.n_cached is not None and not self.is_stale:
            check.reused(cache_n, expected.n_cached, restored=self.restored)

    def hold(self, reply: Ids, *, is_certain: bool, hidden: bool) -> None:
        """Note what the slot holds after this reply: all but its last token, which llama-server
        never evaluated."""
        if self.ids is None or self.is_stale:
            return
        self._is_open = False
        self._slot.since = self._since
        tokens = np.concatenate([self.ids, reply[:-1]])
        room = self._engine.n_ctx - (0 if is_certain else _GUESS_TOKENS)
        if not self.is_exact or len(tokens) >= room:
            # Moved rows or a context shift, which must never be stored.
            self._slot.hold_unknown(self.scope)
        else:
            n_certain = len(tokens) if is_certain else len(self.ids)
            self._slot.hold(tokens, self.scope, n_certain=n_certain, hidden=hidden)

    async def __aenter__(self) -> SlotLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the slot back. Without `hold` its content counts as unknown."""
        engine, slot = self._engine, self._slot
        if self._is_placing:
            self._is_placing = False
            engine.placed()
        self.answering()
        if self._is_released:
            return
        self._is_released = True
        if self._is_open and not self.is_stale:
            if self.ids is None:
                slot.hold_unknown(self.scope, self.label)
            else:
                n = self.expected_reuse.n_cached or 0
                slot.hold(self.ids[:n], self.scope, hidden=True)
        engine.give_back(self, slot)


_GUESS_TOKENS = 64
"""How far off the number of tokens may be where some ids are not certain."""
