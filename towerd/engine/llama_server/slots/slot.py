"""Slot: what towerd believes about one slot of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from towerd.drift import DecodedRun
from towerd.engine.base import SlotView
from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.tree.scope import adapters_of
from towerd.tokens import Ids, Provenances, common_prefix, computed_after, count_unmoved

_EMPTY: Ids = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of the server; towerd may be mistaken about it."""

    id: int
    tokens: Ids = field(default_factory=lambda: _EMPTY)
    """What it holds rows for."""
    scope: str = ""
    """The scope of these tokens."""
    known: bool = True
    """False: it holds something towerd cannot name (images, a request it did not place)."""
    hidden: bool = False
    """Whether it may hold more after `tokens`: what was generated last, as far as it is not known."""
    n_uncertain: int = 0
    """How many tokens of a reply follow `tokens`, about, whose ids are not certain: a save tells them."""
    n_stored: int = 0
    """Leading tokens whose rows the store has."""
    provenance: Provenances = field(default_factory=lambda: np.zeros(0, np.uint8))
    """Provenance of the rows of the restored leading tokens."""
    decoded: Sequence[DecodedRun] = ()
    """What approximate ones among them were decoded from."""
    window_from: int = 0
    """The first position whose sliding-window rows it holds; earlier ones were not restored."""
    busy: bool = False
    holder: str = ""
    """Scope of the request that uses it, while busy."""
    n_promised: int = 0
    """Cells that the request which uses it was granted, for its prompt and some of its reply."""
    saving: bool = False
    """Busy only because it is being saved: it holds the same afterwards."""
    sure: bool = True
    """False: it may have changed without towerd's knowledge; ask before relying on it."""
    last_used: int = 0
    """Count of requests when it was last released; 0: never."""
    adapters: str = ""
    """The LoRA adapters of its last request, as in a scope."""
    since: DeletionWatch | None = None
    """What was deleted since its last request began: it may hold that."""
    _compared: tuple[Ids, Ids, int] = field(default=(_EMPTY, _EMPTY, 0), repr=False)
    """The last two arrays that were compared and their common prefix, which is asked for often."""

    @property
    def ids(self) -> Ids:
        """See `LiveIndex`."""
        return self.tokens

    @property
    def rank(self) -> int:
        """See `LiveIndex`: of slots that hold the same, the one that was used longest ago."""
        return -self.last_used

    def n_visible(self, scope: str) -> int:
        """See `LiveIndex`. Whether a request of `scope` may use it is the policy's to decide."""
        return self.n

    @property
    def n(self) -> int:
        """How many tokens it holds."""
        return len(self.tokens)

    @property
    def n_all(self) -> int:
        """How many tokens it holds, with those whose ids are not certain."""
        return self.n + self.n_uncertain

    @property
    def n_needed(self) -> int:
        """Cells that it takes, or will take with the request that uses it."""
        return self.n_promised or self.n_all

    @property
    def n_unsaved(self) -> int:
        """Tokens whose rows only this slot has."""
        return max(0, self.n_all - self.n_stored)

    @property
    def n_unmoved(self) -> int:
        """Leading tokens whose rows are neither moved nor computed from moved ones."""
        n = count_unmoved(self.provenance)
        return n if n < len(self.provenance) else self.n

    def be_stored(self) -> None:
        """Note that it has nothing that is to be saved."""
        self.n_stored, self.n_uncertain = self.n, 0

    def forget(self) -> None:
        """Note that it is empty."""
        self.hold_restored(_EMPTY, "", 0, np.zeros(0, np.uint8))

    def hold(self, tokens: Ids, scope: str, *, n_uncertain: int = 0, hidden: bool = False) -> None:
        """Note that it holds these tokens; rows of unchanged tokens are as before."""
        self.n_stored = min(self.n_stored, self.common(tokens))
        self.provenance = self.provenance[: self.common(tokens)]
        self.tokens, self.scope = tokens, scope
        self.known, self.sure, self.hidden = True, True, hidden or n_uncertain > 0
        self.n_uncertain = n_uncertain
        self.adapters = adapters_of(scope)

    def hold_first(self, tokens: Ids, scope: str) -> None:
        """Note that it holds these first tokens of what it held, and maybe the others still. If these
        are another tenant's, or rows that look better without those before them, it is unknown."""
        n = len(tokens)
        rest = self.provenance_of(self.n)[n:]
        is_foreign = self.scope != scope and (self.n_all > n or self.hidden)
        if is_foreign or (rest > computed_after(self.provenance[:n])).any():
            self.hold_unknown("")
        else:
            self.hold(tokens, scope, hidden=True)

    def hold_restored(
        self,
        tokens: Ids,
        scope: str,
        window_from: int,
        provenance: Provenances,
        decoded: Sequence[DecodedRun] = (),
    ) -> None:
        """Note that it was replaced by stored rows of these tokens."""
        self.tokens, self.scope, self.provenance = tokens, scope, provenance
        self.decoded = decoded
        self.n_stored = len(tokens)
        self.window_from = window_from
        self.known, self.sure, self.hidden = True, True, False
        self.n_uncertain = 0

    def provenance_of(self, n: int) -> Provenances:
        """The provenance of `n` tokens: tokens after a row that is not exact are derived."""
        provenance = np.full(n, computed_after(self.provenance), np.uint8)
        provenance[: min(n, len(self.provenance))] = self.provenance[:n]
        return provenance

    def hold_unknown(self, scope: str) -> None:
        """Note that it holds unknown tokens of `scope`; empty: of whom is not known either."""
        self.forget()
        self.scope, self.known = scope, False

    def view(self, n_ctx: int) -> SlotView:
        """The view for GET /slots."""
        scope = self.scope if self.known and self.sure else ""
        scope = self.holder if self.busy else scope
        return SlotView(self.id, n_ctx, self.busy, None, self.n, 0, None, scope)

    def common(self, ids: Ids) -> int:
        """Length of the prefix that it shares with `ids`, an array that must not be changed."""
        tokens, other, n = self._compared
        if tokens is not self.tokens or other is not ids:
            n = common_prefix(self.tokens, ids)
            self._compared = (self.tokens, ids, n)
        return n
