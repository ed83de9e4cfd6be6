"""Live sets: which positions of a sequence are live, and their places in the context.

In most sequences every position is live, at its own place. A chat with a budget keeps a part: its
live set is *partial* once a position was evicted or moved.

A position keeps its rotation while it is live, so its place in the context is its position in the
chat until a chat that outgrew the context is compacted:

    chat       0 1 2 3 . . . . 8 9 . . 12 13 14      `kept`: ascending, `.` was evicted
    context    0 1 2 3 . . . . 8 9 . . 12 13 14      `places`, before
    context    0 1 2 3 4 5 6 7 8                     `places`, compacted

Where a budget is kept by layer or by KV head, the cells between sink and window are mixed: each group
(a layer, or a KV head of a layer) has the row of another position there, and `kept` has those of the first
group, which the cells are labelled by (`towerd.slots.virtual`).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.engine.base import LiveBudget
from towerd.engine.embedded.live.offloaded_rows import OffloadedRows
from towerd.engine.embedded.live.prompt_keys import PromptKeys
from towerd.retention import (
    Mass,
    Positions,
    Recalling,
    Retention,
    RetentionConfig,
    Rows,
    Signal,
    View,
    open_retention,
    retention_config,
)
from towerd.retention.attention import faded
from towerd.slots.rows import KVRows
from towerd.tokens import Ids, Provenances

Shape: TypeAlias = tuple[int, int]
"""(layers, KV heads) that choose for themselves; 1: the choice is for all."""

RELEASE_SHARE = 8
"""An eviction frees at least 1 / RELEASE_SHARE of the budget, so that evictions are rare."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """The queries of tokens [p0, p1) of a chat: float32[layers, heads, p1 - p0, head size]."""

    p0: int
    queries: Rows

    @property
    def p1(self) -> int:
        return self.p0 + int(self.queries.shape[2])

    def before(self, n: int) -> Observed:
        """The queries of the tokens before `n`."""
        return self if self.p1 <= n else Observed(self.p0, self.queries[:, :, : n - self.p0])

    def last(self, n: int) -> Observed:
        """The queries of the last `n` tokens."""
        extra = max(0, self.p1 - self.p0 - n)
        return Observed(self.p0 + extra, self.queries[:, :, extra:]) if extra else self


@dataclass(frozen=True, slots=True, eq=False)
class ExactPrefix:
    """A copy of a chat from before its first eviction: ids int32[n], the provenance of each
    token's rows uint8[n], and the rows of the last tokens, those that the store lacked: copied, or among
    those that can be recalled. The chat itself may have been cut and continued since."""

    ids: Ids
    provenance: Provenances
    p0: int
    """The first of the last tokens."""
    rows: KVRows | OffloadedRows

    def read(self, p0: int, p1: int) -> KVRows:
        """A copy of the rows [p0, p1), which are not before the first. Raises PagesLost."""
        if isinstance(self.rows, OffloadedRows):
            return self.rows.rows(np.arange(p0, p1))
        return self.rows.slice(p0, p1).copy()

    def bytes_beside(self, offloaded: OffloadedRows) -> int:
        """RAM of the rows, without those that are there anyhow."""
        if isinstance(self.rows, OffloadedRows):
            return sum(each.n_bytes for each in self.rows.chunks if each not in offloaded.chunks)
        return self.rows.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """The cells of a chat that have the rows of other positions than their labels."""

    start: int
    """The rank of the first one."""
    positions: Positions
    """int64[layers, KV heads, k], ascending: whose rows each group has in the k cells."""
    rotated: Positions
    """int64[layers, KV heads, k]: the place in the context that each key is rotated to."""

    @property
    def stop(self) -> int:
        """The rank after the last one."""
        return self.start + int(self.positions.shape[2])

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.rotated.nbytes

    def only(self, ranks: npt.NDArray[np.int64]) -> Mixed | None:
        """What is left of them in a chat of which these ranks stay, ascending."""
        mine = ranks[(ranks >= self.start) & (ranks < self.stop)] - self.start
        if not len(mine):
            return None
        start = int(np.searchsorted(ranks, self.start))
        return Mixed(start, self.positions[:, :, mine], self.rotated[:, :, mine])


class LiveSet:
    """The live set of a sequence. In the base class each of the sequence's `n` tokens is live, at
    its own position; the sequence keeps `n`."""

    __slots__ = ()
    budget: LiveBudget
    observed: tuple[Observed, ...]
    """Queries of its last tokens, ascending."""

    @property
    def is_partial(self) -> bool:
        """Whether a token was evicted or moved: rows computed since are never taken for exact
        ones."""
        return False

    def n_cells(self, n: int) -> int:
        """How many of the first `n` tokens are live."""
        return n

    def place_of(self, n: int) -> int:
        """The first place in the context after those of the positions before `n`."""
        return n

    def rank(self, n: int) -> int:
        """How many live positions are before position `n`."""
        return n

    def n_evaluable(self, n: int) -> int:
        """How many of the next `n` tokens may be evaluated before an eviction or move is due."""
        return n

    def extend(self, n: int) -> None:
        """Account for `n` more evaluated tokens."""

    def truncate(self, n: int) -> None:
        """Account for a cut after the first `n` tokens."""

    def note_computed_whole(self) -> None:
        """Account for that no row was computed while some of the tokens before it were not live."""

    def fork(self) -> LiveSet:
        """The live set of a branch."""
        return self

    def give_back(self, before: LiveSet) -> None:
        """Restore what was observed of a sequence that was preempted and is live again. before: its
        live set then"""

    @property
    def n_storable(self) -> int | None:
        """How many of the first tokens have or will have rows in the store; None: all."""
        return None

    def take_exact_prefix(self) -> ExactPrefix | None:
        """Return, once, the rows that prefill computed before the first eviction; None if there are
        none."""
        return None

    def check_integrity(self, n: int) -> None:
        """Raise AssertionError, saying what is wrong, if this does not fit `n` tokens."""


class Everything(LiveSet):
    """The live set of sequences without a budget."""

    __slots__ = ()
    budget = LiveBudget()
    observed = ()


EVERYTHING = Everything()


@dataclass(eq=False, slots=True)
class BoundedSet(LiveSet):
    """The live set of a chat with a budget. Arrays are replaced, never changed in place."""

    budget: LiveBudget
    policies: tuple[Retention, ...]
    """One for each group, by layer and then by KV head; one that can recall chooses for all groups."""
    shape: Shape
    kept: Positions
    """int64[m], ascending: positions of the chat that are live; those of the first group where cells are
    `mixed`."""
    places: Positions
    """int64[m], ascending: the place of each in the context."""
    mass: Mass
    """float32[layers, KV heads, m] by group, see `View.mass`; without layers if no policy uses it."""
    recent: Mass
    """float32[layers, KV heads, m]: see `View.recent`."""
    n: int
    """Evaluated tokens of the chat."""
    n_places: int
    """The context's length: places are below it."""
    n_prompt: int = 0
    """Length of the prompt that its request reads: until its end up to `n_full` positions may be live,
    and as many as the budget allows from there on."""
    n_full: int = 0
    """The most positions that are live while a prompt is read."""
    n_stop: int = 0
    """Where the evaluation of its prompt stops before it continues, so that its state can be kept; 0: nowhere."""
    mixed: Mixed | None = None
    """None: every cell has the rows of its label."""
    exact: ExactPrefix | None = None
    """The rows of prefill alone, until the store has them."""
    n_evictions: int = 0
    observed: tuple[Observed, ...] = ()
    """Queries since the last eviction that `mass` does not count yet, ascending; for a policy that can
    recall, the last ones of the chat whether before it or since."""
    keys: PromptKeys | None = None
    """The keys of the first cells, while a prompt is read whose queries count."""
    offloaded: OffloadedRows = field(default_factory=OffloadedRows)
    """Rows that may be recalled; empty if the policy cannot recall."""
    asked: Positions = field(default_factory=lambda: np.empty(0, np.int64))
    """int64[k], ascending: positions that the words of the last prompt are about, which a policy that can
    recall makes live beside its own choice."""
    n_chosen: int = 0
    """How many tokens had been evaluated when the policy last chose."""
    in_store: Future[list[KVRows]] | None = None
    """What the store is found to have of the offloaded rows; None: it was not asked."""
    failure: Exception | None = None
    """The error of a failed indexing: the index can no longer be used."""

    @classmethod
    def whole(
        cls,
        budget: LiveBudget,
        n: int,
        n_places: int,
        config: RetentionConfig | None = None,
        shape: Shape = (1, 1),
    ) -> BoundedSet:
        """The live set of a sequence whose `n` tokens are all live. config: that of its policy;
        None: the one for its budget. Raises ValueError as `retention_config`."""
        config = config or retention_config(budget.policy, budget.tokens)
        first = open_retention(config)
        if not first.signals:
            shape = 1, 1  # every group would choose the same
        n_groups = 1 if first.can_recall else shape[0] * shape[1]
        policies = first, *(open_retention(config) for _ in range(1, n_groups))
        every = np.arange(n, dtype=np.int64)
        has_mass = first.signals & {Signal.MASS, Signal.RECENT}
        zeros = np.zeros((*(shape if has_mass else (0, 0)), n), np.float32)
        return cls(budget, policies, shape, every, every, zeros, zeros, n, n_places)

    @property
    def policy(self) -> Retention:
        """The policy of the first group; all have the same parameters."""
        return self.policies[0]

    @property
    def can_recall(self) -> bool:
        """Whether evicted positions may be recalled."""
        return self.policy.can_recall

    @property
    def n_bytes_offloaded(self) -> int:
        """RAM of the offloaded rows and their index."""
        index = self.policy.n_bytes if isinstance(self.policy, Recalling) else 0
        return self.offloaded.n_bytes + index

    @property
    def nbytes(self) -> int:
        """RAM of everything in it."""
        arrays = (self.kept, self.places, self.mass, self.recent)
        queries = sum(each.queries.nbytes for each in self.observed)
        exact = 0 if self.exact is None else self.exact.bytes_beside(self.offloaded)
        mixed = 0 if self.mixed is None else self.mixed.nbytes
        n_bytes = sum(array.nbytes for array in arrays) + mixed
        keys = self.keys.nbytes if self.keys is not None else 0
        return n_bytes + queries + keys + exact + self.n_bytes_offloaded

    @property
    def is_partial(self) -> bool:
        return self.n_evictions > 0

    def n_cells(self, n: int) -> int:
        """See LiveSet.n_cells; `n` must be all tokens."""
        return len(self.kept)

    def n_evaluable(self, n: int) -> int:
        n = min(n, self.room)
        return min(n, self.n_stop - self.n) if self.n < self.n_stop else n

    def give_back(self, before: LiveSet) -> None:
        if isinstance(before, BoundedSet) and before.mass.shape == self.mass.shape:
            self.observed, self.mass = before.observed, before.mass

    @property
    def n_storable(self) -> int | None:
        if not self.is_partial:
            return None
        return 0 if self.exact is None else len(self.exact.ids)

    def take_exact_prefix(self) -> ExactPrefix | None:
        exact, self.exact = self.exact, None
        return exact

    @property
    def n_release(self) -> int:
        return max(1, self.budget.tokens // RELEASE_SHARE)

    @property
    def n_target(self) -> int:
        """The most positions that an eviction leaves."""
        return self.budget.tokens - self.n_release

    @property
    def n_more(self) -> int:
        """Tokens that may be evaluated before an eviction is due."""
        n_live = len(self.kept)
        n_read = min(self.n_prompt - self.n, max(self.n_full, self.budget.tokens) - n_live)
        return max(0, n_read, self.budget.tokens - n_live)

    @property
    def room(self) -> int:
        """Tokens that may be evaluated before an eviction or a move is due."""
        return min(self.n_more, self.n_places - self.place_next)

    @property
    def place_next(self) -> int:
        """The place of the next token in the context."""
        return int(self.places[-1]) + 1 if len(self.places) else 0

    def rank(self, n: int) -> int:
        return int(np.searchsorted(self.kept, n))

    def place_of(self, n: int) -> int:
        rank = self.rank(n)
        return int(self.places[rank - 1]) + 1 if rank else 0

    def extend(self, n: int) -> None:
        new = np.arange(n, dtype=np.int64)
        self.places = np.concatenate([self.places, new + self.place_next])
        self.kept = np.concatenate([self.kept, new + self.n])
        self.mass, self.recent = _longer(self.mass, n), _longer(self.recent, n)
        self.n += n

    def truncate(self, n: int) -> None:
        self._only(np.arange(self.rank(n)))
        self.n = n
        self.n_chosen = min(self.n_chosen, n)
        self.observed = tuple(each.before(n) for each in self.observed if each.p0 < n)
        for policy in self.policies:
            policy.truncate(n)
        self.offloaded = self.offloaded.without(n)
        self.asked = self.asked[self.asked < n]
        self.in_store = None  # what was asked of it may be of tokens that are no more

    def note_computed_whole(self) -> None:
        """See LiveSet.note_computed_whole. A chat whose tokens are all live at their own places is whole
        again, and what its policy knows of earlier evictions is forgotten."""
        if not self.is_partial or self.mixed is not None or self.failure is not None:
            return
        every = np.arange(self.n, dtype=np.int64)
        if np.array_equal(self.kept, every) and np.array_equal(self.places, every):
            self.policies = tuple(open_retention(each.config) for each in self.policies)
            self.offloaded, self.asked = OffloadedRows(), self.asked[:0]
            self.n_evictions = self.n_chosen = 0
            self.mass = np.zeros_like(self.mass)  # most of it was paid by what was cut

    def observe(self, observed: Observed, n_max: int) -> None:
        """Add queries, and keep those of at most the last `n_max` tokens."""
        kept: list[Observed] = []
        for each in reversed((*self.observed, observed)):
            if n_max <= 0:
                break
            kept.append(each.last(n_max))
            n_max -= kept[-1].p1 - kept[-1].p0
        self.observed = tuple(reversed(kept))

    def positions(self) -> Positions:
        """int64[layers, KV heads, m], ascending: whose rows each group has in each cell."""
        return self._by_group(self.kept, None if self.mixed is None else self.mixed.positions)

    def rotated(self) -> Positions:
        """int64[layers, KV heads, m]: the place in the context that each key is rotated to."""
        return self._by_group(self.places, None if self.mixed is None else self.mixed.rotated)

    def attended(self, masses: Mass, n_queries: int) -> None:
        """Account for attention to the live positions from the next `n_queries` queries, and for what
        earlier attention counts less by then.

        masses: float32[layers, KV heads, m] of all layers and heads, of which the last query spreads 1"""
        before = self.mass * faded(n_queries, self.policy.config.half_life)
        self.mass = before + self._by_shape(masses)

    def voted(self, masses: Mass) -> None:
        """Account for attention to the live positions from the last queries only.

        masses: as `attended`, but that each query spreads 1"""
        self.recent = self._by_shape(masses)

    def choose(self, messages: Positions | None) -> Positions:
        """int64[layers, KV heads, m'], ascending: the positions that stay, by group. Groups that choose
        fewer than others keep their latest ones beside.

        messages: int64[n], the message of each token of the chat; None if the policy does not use it"""
        lines = self.positions().reshape(len(self.policies), -1)
        chosen = []
        for i, (policy, positions) in enumerate(zip(self.policies, lines, strict=True)):
            view = View(
                positions,
                self.n,
                mass=self._of_group(self.mass, i),
                recent=self._of_group(self.recent, i),
                messages=None if messages is None else messages[positions],
            )
            chosen.append(policy.keep(view, self.n_target))
        most = max(map(len, chosen))
        even = [filled(*each, most) for each in zip(chosen, lines, strict=True)]
        return np.stack(even).reshape(*self.shape, most)

    def ranks_of(self, chosen: Positions) -> Positions:
        """int64[layers, KV heads, m']: in which cell the row of each of these positions is, which must
        be live in its group."""
        table = self.positions().reshape(-1, len(self.kept))
        lines = zip(table, chosen.reshape(len(table), -1), strict=True)
        ranks = np.stack([np.searchsorted(*each) for each in lines])
        return ranks.reshape(chosen.shape).astype(np.int64)

    def agreed(self, chosen: Positions) -> Positions | None:
        """int64[m']: the positions that stay, if all groups chose the same ones and no cell is mixed."""
        first = chosen[0, 0]
        return first if self.mixed is None and (chosen == first).all() else None

    def mix(
        self,
        chosen: Positions,
        rotated: Positions,
        places: Positions,
        ranks: Positions | None = None,
    ) -> None:
        """Account for cells that have the rows of these positions now, by group.

        chosen: int64[layers, KV heads, m']; rotated: the places that their keys are rotated to
        places: int64[m']: those that the cells are labelled by
        ranks: the cells that the rows were in; None: they were not live"""
        n_before, self.keys = len(self.kept), None
        self.kept, self.places = chosen[0, 0], places
        others = (chosen != self.kept) | (rotated != self.places)
        columns = np.flatnonzero(others.any(axis=(0, 1)))
        self.mixed = None
        if len(columns):
            start, stop = int(columns[0]), int(columns[-1]) + 1
            self.mixed = Mixed(start, chosen[:, :, start:stop], rotated[:, :, start:stop])
        self.n_evictions += ranks is None or len(self.kept) < n_before
        if self.mass.size and ranks is not None:
            self.mass = np.take_along_axis(self.mass, ranks, axis=2)
            self.recent = np.take_along_axis(self.recent, ranks, axis=2)
        else:
            zeros = np.zeros((*self.mass.shape[:2], len(self.kept)), np.float32)
            self.mass, self.recent = zeros, zeros

    def runs_beside(self, stay: Positions) -> list[tuple[int, int]]:
        """The runs [rank, rank) of live positions that are not in `stay`, ascending."""
        is_gone = np.isin(self.kept, stay, assume_unique=True, invert=True)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_gone, [False]])))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def drop(self, stay: Positions) -> None:
        """Account for an eviction of all live positions but `stay`."""
        ranks = np.flatnonzero(np.isin(self.kept, stay, assume_unique=True))
        self.n_evictions += len(ranks) < len(self.kept)
        self._only(ranks)

    def compacted(self, places: Positions) -> None:
        """Account for live rows that were moved to these places, which have no holes."""
        self.keys, self.places = None, places
        if self.mixed is not None:
            places = self.places[self.mixed.start : self.mixed.stop]
            rotated = np.broadcast_to(places, self.mixed.positions.shape)
            self.mixed = replace(self.mixed, rotated=rotated.copy())
        self.n_evictions += 1

    def moved_down(self) -> None:
        """Account for rows of which some went down. The observed queries do not fit them and are discarded."""
        self.observed = ()
        self.n_evictions += 1

    @property
    def sink(self) -> Positions:
        """The first positions, which always stay."""
        return self.kept[: getattr(self.policy.config, "sink", 0)]

    @property
    def has_own(self) -> npt.NDArray[np.bool_]:
        """bool[m]: which cells have the rows of their label in every group."""
        has_own = np.ones(len(self.kept), np.bool_)
        if self.mixed is not None:
            has_own[self.mixed.start : self.mixed.stop] = False
        return has_own

    @property
    def n_tail(self) -> int:
        """How many of the last live positions have no hole between them, and rows of their own."""
        holes = np.flatnonzero(np.diff(self.kept) > 1)
        first = int(holes[-1]) + 1 if len(holes) else 0
        return len(self.kept) - max(first, 0 if self.mixed is None else self.mixed.stop)

    def can_continue_from(self, n: int) -> bool:
        """Whether the chat can continue after its first `n` tokens: the tokens just before are
        live, as they are after an eviction, and its index is intact."""
        if self.failure is not None:
            return False
        window = min(n, self.policy.config.window)
        first = self.rank(n - window)
        if self.mixed is not None and first < self.mixed.stop and self.rank(n) > self.mixed.start:
            return False
        return self.rank(n) - first == window

    def fork(self) -> BoundedSet:
        policies = tuple(each.fork() for each in self.policies)
        return replace(self, policies=policies, keys=None, exact=None, in_store=None)

    def check_integrity(self, n: int) -> None:
        assert self.n == n, "tokens are miscounted"
        m = len(self.kept)
        assert len(self.places) == self.mass.shape[2] == self.recent.shape[2] == m, "lengths"
        assert (np.diff(self.kept) > 0).all(), "kept positions ascend"
        assert (np.diff(self.places) > 0).all(), "places ascend"
        assert m == 0 or int(self.kept[-1]) < self.n, "a position is not evaluated yet"
        assert self.is_partial or m == self.n, "positions of a whole sequence are missing"
        self.offloaded.check_integrity()
        if self.mixed is not None:
            assert (np.diff(self.positions(), axis=2) > 0).all(), "positions of a group ascend"
        positions, rotated = self.positions(), self.rotated()
        there = np.isin(positions, self.offloaded.positions)
        found = self.offloaded.places(positions[there])
        assert np.array_equal(found, rotated[there]), "offloaded places"

    def _only(self, ranks: npt.NDArray[np.int64]) -> None:
        self.keys = None
        self.mixed = None if self.mixed is None else self.mixed.only(ranks)
        self.kept, self.places = self.kept[ranks], self.places[ranks]
        self.mass, self.recent = self.mass[:, :, ranks], self.recent[:, :, ranks]

    def _by_group(self, of_cells: Positions, of_mixed: Positions | None) -> Positions:
        found = np.broadcast_to(of_cells, (*self.shape, len(of_cells)))
        if self.mixed is None or of_mixed is None:
            return found
        found = found.copy()
        found[:, :, self.mixed.start : self.mixed.stop] = of_mixed
        return found

    def _by_shape(self, masses: Mass) -> Mass:
        """Means over the layers or heads that choose together."""
        for axis, n in enumerate(self.shape):
            if n == 1:
                masses = masses.mean(axis=axis, keepdims=True)
        return masses

    def _of_group(self, mass: Mass, i: int) -> Mass | None:
        return mass[divmod(i, self.shape[1])] if mass.size else None


def _longer(mass: Mass, n: int) -> Mass:
    return np.concatenate([mass, np.zeros((*mass.shape[:2], n), np.float32)], axis=2)


def filled(chosen: Positions, positions: Positions, n: int) -> Positions:
    """The `n` of `positions` that were chosen or, beside these, are the latest."""
    if len(chosen) == n:
        return chosen
    others = np.setdiff1d(positions, chosen, assume_unique=True)
    return np.sort(np.concatenate([chosen, others[len(others) - (n - len(chosen)) :]]))
