"""One request's hold on one slot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np

from towerd.engine.base import TURN_STOPS, Reuse
from towerd.engine.llama_server.slots.foretell import Foretold
from towerd.engine.llama_server.slots.placement import Slot
from towerd.engine.llama_server.slots.spoken import Answered
from towerd.engine.llama_server.slots.upkeep import Upkeep
from towerd.store.sessions.turn import Turn
from towerd.tokens import Ids

_NONE: Ids = np.zeros(0, np.int32)


class Lender(Protocol):
    """The engine as its leases see it: `towerd.engine.llama_server.engine.LlamaServerEngine`."""

    upkeep: Upkeep

    @property
    def epoch(self) -> int:
        """The number of restarts of llama-server."""
        ...

    @property
    def n_ctx(self) -> int: ...

    def learned(self, ids: Ids, slot: Slot) -> Foretold:
        """The reuse of a chat that continues in `slot`, now that its tokens are known."""
        ...

    def placed(self) -> None:
        """The request was launched, or will not be."""
        ...

    def misplaced(self) -> None:
        """The request ran in another slot than the one that was prepared."""
        ...

    def observe(self, lease: Lease, cache_n: int | None, prompt_ms: float | None) -> None:
        """Compare what the reply says with what was prepared for it."""
        ...

    async def guess(self, text: str) -> Ids:
        """The tokens that a reply of this text probably had."""
        ...

    def give_back(self, lease: Lease, slot: Slot) -> None:
        """The lease ended."""
        ...


@dataclass(frozen=True, slots=True)
class LeasedTurn:
    """The turn of a request that is over, to be recorded."""

    turn: Turn
    answered: bool
    """Whether there was a reply, if only one of tool calls."""


class Lease:
    """A slot with as much of a prompt in it as could be had. Use it as a context manager: it
    gives the slot back on exit, whatever happened."""

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
        self.foretold = Foretold(Reuse(prefill=0 if ids is None else len(ids)), None, None)
        self.restored = False
        """Whether what is in place comes from a restore for this request."""
        self.is_exact = True
        """False: the slot's rows are not what evaluating its tokens gives."""
        self.workflow: str | None = None
        """The workflow that the client names."""
        self.session = session
        """The session that its turn is recorded under; None: it is recognised then."""
        self.agent: str | None = None
        """Who asks, named or told apart by system prompt and tools."""
        self.calls_tools = False
        """Whether the reply ended with a call of a tool."""
        self.answered: Answered | None = None
        """The chat request that it was, when it got its reply."""
        self._engine = engine
        self._slot = slot
        self._started_s = time.time()
        self._epoch = engine.epoch
        self._is_placing = True
        self._is_awaited = True
        self._is_open = True
        self._is_released = False
        self._is_misplaced = False

    @property
    def slot(self) -> int:
        """The slot to pin the request to (`id_slot`)."""
        return self._slot.id

    @property
    def reuse(self) -> Reuse:
        """Where the prompt's tokens come from."""
        return self.foretold.reuse

    @property
    def is_stale(self) -> bool:
        """Whether llama-server was restarted since: the slot is empty by now."""
        return self._epoch != self._engine.epoch

    def learn(self, ids: Ids) -> None:
        """The prompt's tokens, of a chat whose slot was known before they were."""
        self.ids = ids
        self.foretold = self._engine.learned(ids, self._slot)

    async def launched(self) -> None:
        """The request runs in its slot: others may be placed from now on."""
        if self._is_placing:
            self._is_placing = False
            self._engine.placed()

    def answering(self) -> None:
        """The reply has begun: what would have kept its client waiting may be done now."""
        if self._is_awaited:
            self._is_awaited = False
            self._engine.upkeep.n_awaited -= 1

    def misplaced(self) -> None:
        """The request ran in another slot: this one holds all of the prompt but its last token,
        and what free slots hold has to be asked for. Call it before `finished`."""
        self._is_misplaced = True
        self._engine.misplaced()

    async def finished(
        self,
        *,
        reply_ids: Sequence[int] | None,
        reply_text: str,
        cache_n: int | None,
        stop: str,
        prompt_ms: float | None = None,
    ) -> LeasedTurn | None:
        """Say what the slot holds now, and return the turn that is to be recorded; None of a
        prompt whose tokens are not known. Call it before the last bytes of the reply go out.

        reply_ids: the generated tokens, or None when only their text is known
        cache_n: how many prompt tokens llama-server says it reused (None: it did not say)
        prompt_ms: how long it says the others took"""
        if self.ids is None:
            return None
        self._engine.observe(self, cache_n, prompt_ms)
        if reply_ids is not None:
            reply = np.asarray(reply_ids, np.int32)
        else:
            reply = await self._engine.guess(reply_text)
        is_certain = reply_ids is not None
        self.hold(reply, is_certain=is_certain, hidden=not is_certain or stop in _CUT_SHORT)
        n_cached = len(self.ids) - self._is_misplaced
        n_cached += max(0, len(reply) - 1) if is_certain and not self._is_misplaced else 0
        turn = Turn(
            scope=self.scope,
            session=self.session,
            prompt=self.ids,
            reply=reply,
            n_cached=n_cached,
            started_s=self._started_s,
            finished=stop != "cancelled",
            stop="tool_use" if self.calls_tools else TURN_STOPS.get(stop, ""),
            workflow=self.workflow,
            agent=self.agent,
        )
        # A reply that is all tool calls has no text, and is one all the same.
        answered = len(reply) > 0 or (reply_ids is None and stop != "cancelled")
        return LeasedTurn(turn, answered)

    def hold(self, reply: Ids, *, is_certain: bool, hidden: bool) -> None:
        """Note what the slot holds after this reply: all but its last token, which llama-server
        never evaluated."""
        if self.ids is None or self.is_stale:
            return
        self._is_open = False
        tokens = np.concatenate([self.ids, reply[:-1]])
        room = self._engine.n_ctx - (0 if is_certain else _GUESS_TOKENS)
        if self._is_misplaced:
            self._slot.hold(self.ids[:-1], self.scope)
        elif not self.is_exact or len(tokens) >= room:
            # Moved rows, or a context shift: not what a store may ever hold.
            self._slot.hold_unknown(self.scope)
        else:
            n_certain = len(tokens) if is_certain else len(self.ids)
            self._slot.hold(tokens, self.scope, n_certain=n_certain, hidden=hidden)
            self._slot.chat = self.answered

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the slot back. Without `finished` its content counts as unknown."""
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
                n = self.foretold.expected or 0
                slot.hold(self.ids[:n], self.scope, hidden=True)
        engine.give_back(self, slot)


_GUESS_TOKENS = 64
"""How far off the number of tokens may be that is guessed from a reply's text."""
_CUT_SHORT = ("word", "cancelled")
"""Ends after which the server may have evaluated more tokens than it sent."""
