"""Live sets: which positions of a sequence are live, and where they stand in the context.

Of most sequences that is every one, in its own place. A chat with a budget keeps a part.

A position of the chat keeps its rows' rotation while it is live, so its place in the context is
its position there, until a chat that outgrew the context is moved together:

    chat       0 1 2 3 . . . . 8 9 . . 12 13 14      `kept`: ascending, `.` was dropped
    context    0 1 2 3 . . . . 8 9 . . 12 13 14      `places`, before
    context    0 1 2 3 4 5 6 7 8                     `places`, moved together
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.longchat.shelf import Shelf
from towerd.retention import (
    Mass,
    Positions,
    Recalling,
    Retention,
    RetentionConfig,
    Rows,
    View,
    open_retention,
    retention_config,
)
from towerd.slots.rows import KVRows
from towerd.tokens import Ids, Provenances

RELEASE_SHARE = 8
"""An eviction frees at least one part in this many of the budget, so that it is rare."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """The queries of tokens [p0, p1) of a chat: float32[layers, heads, p1 - p0, head size]."""

    p0: int
    queries: Rows

    @property
    def p1(self) -> int:
        return self.p0 + int(self.queries.shape[2])

    def before(self, n: int) -> Observed:
        """Those of tokens before `n`."""
        return self if self.p1 <= n else Observed(self.p0, self.queries[:, :, : n - self.p0])

    def last(self, n: int) -> Observed:
        """Those of the last `n` tokens."""
        extra = max(0, self.p1 - self.p0 - n)
        return Observed(self.p0 + extra, self.queries[:, :, extra:]) if extra else self


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """A chat as it was before its first eviction: ids int32[n], what each token's rows are
    uint8[n], and these rows. Its own, for the chat may since have been cut and gone on."""

    ids: Ids
    provenance: Provenances
    rows: KVRows


class LiveSet:
    """What a sequence asks its live set. Here each of its `n` tokens is live, at its own position;
    the sequence says how many these are."""

    __slots__ = ()
    budget: LiveBudget
    observed: tuple[Observed, ...]
    """Queries of its last tokens, the last ones last."""

    @property
    def is_thinned(self) -> bool:
        """Whether a token is missing, or not where it was: such rows are never taken for exact
        ones."""
        return False

    def n_cells(self, n: int) -> int:
        """Tokens of the first `n` that are live."""
        return n

    def place_of(self, n: int) -> int:
        """The first place in the context that belongs to no position before `n`."""
        return n

    def rank(self, n: int) -> int:
        """How many live positions stand before position `n`."""
        return n

    def n_evaluable(self, n: int) -> int:
        """How many of the next `n` tokens may be evaluated before something has to be done."""
        return n

    def extend(self, n: int) -> None:
        """`n` more tokens were evaluated."""

    def truncate(self, n: int) -> None:
        """Only the first `n` tokens are left."""

    def fork(self) -> LiveSet:
        """The live set of a branch."""
        return self

    def give_back(self, observed: tuple[Observed, ...]) -> None:
        """The rows that left the context with these queries are back."""

    @property
    def n_storable(self) -> int | None:
        """How many of the first tokens have, or get, rows in the store; None: all."""
        return None

    def take_beginning(self) -> Beginning | None:
        """Of a thinned sequence, once: what prefill computed of it before its first eviction."""
        return None

    def check_integrity(self, n: int) -> None:
        """Raises AssertionError naming what does not add up for a sequence of `n` tokens."""


class Everything(LiveSet):
    """The live set of sequences without a budget."""

    __slots__ = ()
    budget = LiveBudget()
    observed = ()


EVERYTHING = Everything()


@dataclass(eq=False, slots=True)
class BoundedSet(LiveSet):
    """The live set of a chat with a budget. Arrays are replaced, never changed."""

    budget: LiveBudget
    policy: Retention
    kept: Positions
    """int64[m], ascending: positions of the chat that are live."""
    places: Positions
    """int64[m], ascending: where each stands in the context."""
    mass: Mass
    """float32[m]: see `View.mass`."""
    recent: Mass
    """float32[m]: see `View.recent`."""
    n: int
    """Tokens of the chat that were evaluated."""
    n_places: int
    """The context's length: places are below it."""
    exact: Beginning | None = None
    """What is known of prefill alone, until the store has it."""
    n_evictions: int = 0
    observed: tuple[Observed, ...] = ()
    """Queries since the last eviction, the last ones last; for a policy that can recall the last
    ones altogether."""
    shelf: Shelf = field(default_factory=Shelf)
    """Rows that may come back; always empty if the policy cannot recall."""
    n_chosen: int = 0
    """How many tokens had been evaluated when the policy chose last."""
    failure: Exception | None = None
    """What went wrong when it was indexed: the index is of no use any more."""

    @classmethod
    def whole(
        cls, budget: LiveBudget, n: int, n_places: int, config: RetentionConfig | None = None
    ) -> BoundedSet:
        """Of a sequence whose `n` tokens are all live; `config` of its policy, None: the one for
        its budget. Raises ValueError as `retention_config`."""
        policy = open_retention(config or retention_config(budget.policy, budget.tokens))
        every = np.arange(n, dtype=np.int64)
        zeros = np.zeros(n, np.float32)
        return cls(budget, policy, every, every, zeros, zeros, n, n_places)

    @property
    def can_recall(self) -> bool:
        """Whether what is dropped may come back."""
        return self.policy.can_recall

    @property
    def n_bytes_aside(self) -> int:
        """RAM that the account takes for what is not live."""
        index = self.policy.n_bytes if isinstance(self.policy, Recalling) else 0
        return self.shelf.n_bytes + index

    @property
    def nbytes(self) -> int:
        """RAM of all of it."""
        arrays = (self.kept, self.places, self.mass, self.recent)
        queries = sum(each.queries.nbytes for each in self.observed)
        exact = self.exact.rows.nbytes if self.exact is not None else 0
        return sum(array.nbytes for array in arrays) + queries + exact + self.n_bytes_aside

    @property
    def is_thinned(self) -> bool:
        """See LiveSet.is_thinned."""
        return self.n_evictions > 0

    def n_cells(self, n: int) -> int:
        """See LiveSet.n_cells; `n` is all of them."""
        return len(self.kept)

    def n_evaluable(self, n: int) -> int:
        """See LiveSet.n_evaluable."""
        return min(n, self.room)

    def give_back(self, observed: tuple[Observed, ...]) -> None:
        """See LiveSet.give_back."""
        self.observed = observed

    @property
    def n_storable(self) -> int | None:
        """See LiveSet.n_storable."""
        if not self.is_thinned:
            return None
        return 0 if self.exact is None else len(self.exact.ids)

    def take_beginning(self) -> Beginning | None:
        """See LiveSet.take_beginning."""
        exact, self.exact = self.exact, None
        return exact

    @property
    def n_release(self) -> int:
        return max(1, self.budget.tokens // RELEASE_SHARE)

    @property
    def n_target(self) -> int:
        """The most positions that stay at an eviction."""
        return self.budget.tokens - self.n_release

    @property
    def room(self) -> int:
        """Tokens that may be evaluated before something has to be done."""
        return min(self.budget.tokens - len(self.kept), self.n_places - self.place_next)

    @property
    def place_next(self) -> int:
        """Where the next token goes in the context."""
        return int(self.places[-1]) + 1 if len(self.places) else 0

    def rank(self, n: int) -> int:
        """See LiveSet.rank."""
        return int(np.searchsorted(self.kept, n))

    def place_of(self, n: int) -> int:
        """See LiveSet.place_of."""
        rank = self.rank(n)
        return int(self.places[rank - 1]) + 1 if rank else 0

    def extend(self, n: int) -> None:
        """See LiveSet.extend."""
        new = np.arange(n, dtype=np.int64)
        self.places = np.concatenate([self.places, new + self.place_next])
        self.kept = np.concatenate([self.kept, new + self.n])
        zeros = np.zeros(n, np.float32)
        self.mass, self.recent = np.append(self.mass, zeros), np.append(self.recent, zeros)
        self.n += n

    def truncate(self, n: int) -> None:
        """See LiveSet.truncate."""
        self._only(np.arange(self.rank(n)))
        self.n = n
        self.n_chosen = min(self.n_chosen, n)
        self.observed = tuple(each.before(n) for each in self.observed if each.p0 < n)
        self.policy.truncate(n)
        self.shelf = self.shelf.without(n)

    def observe(self, observed: Observed, n_max: int) -> None:
        """Keep the queries of the chat's last tokens, `n_max` of them at most."""
        kept: list[Observed] = []
        for each in reversed((*self.observed, observed)):
            if n_max <= 0:
                break
            kept.append(each.last(n_max))
            n_max -= kept[-1].p1 - kept[-1].p0
        self.observed = tuple(reversed(kept))

    def view(self, messages: Positions | None) -> View:
        """What the policy sees. messages: int64[n], the message of each token of the chat; None:
        the policy does not ask"""
        return View(
            self.kept,
            self.n,
            mass=self.mass,
            recent=self.recent,
            messages=None if messages is None else messages[self.kept],
        )

    def runs_beside(self, stay: Positions) -> list[tuple[int, int]]:
        """[rank, rank): the runs of live positions that are not among `stay`, ascending."""
        is_gone = np.isin(self.kept, stay, assume_unique=True, invert=True)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_gone, [False]])))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def drop(self, stay: Positions) -> None:
        """Only `stay`, of what is live, has not left the context."""
        ranks = np.flatnonzero(np.isin(self.kept, stay, assume_unique=True))
        self.n_evictions += len(ranks) < len(self.kept)
        self._only(ranks)

    def recall(self, positions: Positions, places: Positions) -> None:
        """Positions that were dropped are live again, at these places."""
        kept = np.concatenate([self.kept, positions])
        order = np.argsort(kept, kind="stable")
        zeros = np.zeros(len(positions), np.float32)
        self.kept, self.places = kept[order], np.concatenate([self.places, places])[order]
        self.mass = np.append(self.mass, zeros)[order]
        self.recent = np.append(self.recent, zeros)[order]

    def moved_together(self) -> None:
        """The rows were moved to places without holes."""
        self.places = np.arange(len(self.kept), dtype=np.int64)
        self.n_evictions += 1

    def moved_down(self, shelf: Shelf) -> None:
        """Of everything that is live or may come back only what is on `shelf` is left, at the
        places that it has there. The keys are others: what was indexed and observed is not."""
        self._only(np.flatnonzero(np.isin(self.kept, shelf.positions)))
        self.places = shelf.places(self.kept)
        self.shelf, self.observed = shelf, ()
        self.policy = open_retention(self.policy.config)
        self.n_evictions += 1

    @property
    def sink(self) -> Positions:
        """The first positions, which always stay."""
        return self.kept[: getattr(self.policy.config, "sink", 0)]

    @property
    def n_tail(self) -> int:
        """How many live positions stand at the end without a hole between them."""
        holes = np.flatnonzero(np.diff(self.kept) > 1)
        return len(self.kept) - (int(holes[-1]) + 1 if len(holes) else 0)

    def can_go_on_from(self, n: int) -> bool:
        """Whether the chat can go on after its first `n` tokens: the ones just before are live, as
        after an eviction they are, and nothing is wrong with its index."""
        if self.failure is not None:
            return False
        window = min(n, getattr(self.policy.config, "window", 1))
        return self.rank(n) - self.rank(n - window) == window

    def fork(self) -> BoundedSet:
        """See LiveSet.fork."""
        return BoundedSet(
            self.budget, self.policy.fork(), self.kept, self.places, self.mass, self.recent,
            self.n, self.n_places, None, self.n_evictions, self.observed, self.shelf,
            self.n_chosen, self.failure,
        )  # fmt: skip

    def check_integrity(self, n: int) -> None:
        """See LiveSet.check_integrity."""
        assert self.n == n, "tokens are miscounted"
        m = len(self.kept)
        assert len(self.places) == len(self.mass) == len(self.recent) == m, "lengths"
        assert (np.diff(self.kept) > 0).all(), "kept positions ascend"
        assert (np.diff(self.places) > 0).all(), "places ascend"
        assert m == 0 or int(self.kept[-1]) < self.n, "a position is not evaluated yet"
        assert self.is_thinned or m == self.n, "positions are missing of a whole sequence"
        self.shelf.check_integrity()
        shelved, live = np.intersect1d(self.shelf.positions, self.kept, return_indices=True)[::2]
        assert np.array_equal(self.shelf.places(shelved), self.places[live]), "shelved elsewhere"

    def _only(self, ranks: npt.NDArray[np.int64]) -> None:
        self.kept, self.places = self.kept[ranks], self.places[ranks]
        self.mass, self.recent = self.mass[ranks], self.recent[ranks]
