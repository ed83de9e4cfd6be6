"""In-context retention: which positions of a chat stay in the live cache.

llama.cpp holds or drops a position for all heads and layers at once, so a policy answers with
positions. It knows nothing of llama.cpp: the engine and the evaluation run the same code.

To keep a chat under a budget of live tokens: before the live tokens would exceed the budget, make a
`View` of what is live, call `keep(view, n_max)` and drop the rest.
"""

from __future__ import annotations

import copy
import enum
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from towerd.kernels._native import DciKeys

Positions = npt.NDArray[np.int64]
Mass = npt.NDArray[np.float32]
Rows = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

SINK_DEFAULT = 4
"""First tokens that always stay: StreamingLLM found four to be enough, BUZZ uses one to five."""
POOL_DEFAULT = 15
"""Width of max pooling over neighbours, about the tokens of a line that states a fact. SnapKV's paper has
5 and 7."""
HALF_LIFE_DEFAULT = 16.0
"""Tokens after which attention counts half, in policies that go by all of it."""


class Keys(Protocol):
    """Cached keys, rotated by RoPE: [layers, KV heads, n, head size], in pieces that lie anywhere, in any
    format."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, layer: int, head: int, wanted: Positions) -> Rows:
        """float32[m, head size]: the keys of one layer and KV head at m indices below n."""
        ...

    def at(self, layer: int, head: int, wanted: Positions) -> DciKeys:
        """The same for an index, which reads them where they lie; -1: a key that is no more."""
        ...


class Signal(enum.Enum):
    """A field of `View` that a policy needs in addition to the positions."""

    MASS = "mass"
    RECENT = "recent"
    MESSAGES = "messages"
    KEYS = "keys"
    QUERIES = "queries"


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees of one chat when it has to choose among n positions."""

    positions: Positions
    """int64[n], ascending: where the tokens stand in the chat; never renumbered."""
    n_seen: int
    """Tokens of the chat so far, including dropped ones; greater than every position."""
    mass: Mass | None = None
    """float32[n]: attention that each position got from all queries observed since its rows were
    computed; the last query spreads a mass of 1, and those before it less by `RetentionConfig.half_life`.
    Heads and layers are averaged."""
    recent: Mass | None = None
    """float32[n]: the attention from the last queries only (the observation window), each of which spreads
    1."""
    messages: Positions | None = None
    """int64[n], non-decreasing: the number of the message that each position belongs to."""
    keys: Keys | None = None
    """The keys of each position, in every layer."""
    queries: Rows | None = None
    """float32[layers, heads, m, head size]: the last m queries, rotated by RoPE."""
    live: npt.NDArray[np.bool_] | None = None
    """bool[n]: which positions are live now; None: all. Only a policy that can recall sees
    positions that are not live, whose rows would have to be fetched."""

    @property
    def n(self) -> int:
        return len(self.positions)

    @property
    def ages(self) -> Positions:
        """int64[n]: how many tokens came after each position."""
        return self.n_seen - 1 - self.positions

    def signal(self, signal: Signal) -> npt.NDArray[np.generic]:
        """The array of a signal. Raises ValueError if it is missing or of another length."""
        values: npt.NDArray[np.generic] | None = getattr(self, signal.value)
        if values is None:
            raise ValueError(f"this policy needs the signal {signal.value!r}, which is missing")
        is_keys = signal is Signal.KEYS and len(values.shape) == 4
        n = values.shape[2 if is_keys else 0]
        if signal is not Signal.QUERIES and n != self.n:
            raise ValueError(f"{signal.value!r} has {n} entries for {self.n} positions")
        return values


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """Parameters of a policy that always keeps the first and the last tokens. Raises ValueError for
    what cannot be."""

    sink: int = SINK_DEFAULT
    window: int = 1
    half_life: float = field(default=math.inf, kw_only=True)
    """Tokens after which the attention that a query paid counts half in `View.mass`; infinite: it counts
    as much for ever."""

    def __post_init__(self) -> None:
        if self.sink < 0 or self.window < 1:
            raise ValueError(
                f"a sink of {self.sink} and a window of {self.window} tokens: the sink cannot be "
                "negative, and the last token always stays"
            )
        if not self.half_life > 0:
            raise ValueError(f"attention cannot fade with a half-life of {self.half_life} tokens")

    @property
    def n_min(self) -> int:
        """The fewest positions that the policy can be asked to keep."""
        return self.sink + self.window

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        """What the paper recommends for `budget` live tokens: half of what the sink leaves for the
        window, if it says nothing else. Raises ValueError for too few."""
        return cls(window=(budget - SINK_DEFAULT) // 2)


class Retention(ABC):
    """One policy's decisions for one chat. It may remember its earlier decisions."""

    signals: ClassVar[frozenset[Signal]] = frozenset()
    """What a view must contain."""
    can_recall: ClassVar[bool] = False
    """Whether it also chooses among positions that are not live (`View.live`)."""

    def __init__(self, config: RetentionConfig) -> None:
        self.config = config

    def keep(self, view: View, n_max: int) -> Positions:
        """int64[at most n_max], ascending: the positions that stay (or come back).

        Returns all of them if they fit. Raises ValueError for n_max < config.n_min, a missing
        signal, and positions that do not ascend or are not below n_seen."""
        self._check(view, n_max)
        if view.n <= n_max:
            return view.positions
        span = self._middle(view.n)
        chosen = self._choose(view, span, n_max - self.config.n_min)
        positions = view.positions
        return np.concatenate(
            [positions[: span.start], positions[span][chosen], positions[span.stop :]]
        )

    @abstractmethod
    def _choose(self, view: View, span: slice, room: int) -> Indices:
        """int64[at most room], ascending: which positions of `span`, those between sink and window,
        stay."""

    def truncate(self, n: int) -> None:  # noqa: B027  # most remember nothing
        """Only the first `n` tokens of the chat are left: forget what was decided about later
        positions, as other tokens will take their place."""

    def fork(self) -> Self:
        """A copy with the same decisions so far, for a branch of the chat."""
        return copy.copy(self)

    def _middle(self, n: int) -> slice:
        """The indices between sink and window of n; the window comes first."""
        stop = max(0, n - self.config.window)
        return slice(min(self.config.sink, stop), stop)

    def _check(self, view: View, n_max: int) -> None:
        if n_max < self.config.n_min:
            raise ValueError(
                f"cannot keep at most {n_max} positions: sink and window alone are "
                f"{self.config.n_min}"
            )
        positions = view.positions
        if positions.ndim != 1 or (np.diff(positions) <= 0).any():
            raise ValueError("positions must be one ascending row without repeats")
        if len(positions) and not 0 <= positions[0] <= positions[-1] < view.n_seen:
            raise ValueError(f"positions must be in [0, {view.n_seen})")
        for signal in self.signals:
            view.signal(signal)


class Recalling(Retention):
    """A policy that may choose positions that are not live: it indexes all that it was shown."""

    can_recall = True

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Approximate size of the index in RAM."""

    @abstractmethod
    def index_bytes(self, layers: int, kv_heads: int, head_size: int) -> int:
        """Approximate RAM of one position in the index of a model of this shape."""

    def keep(self, view: View, n_max: int) -> Positions:
        """See `Retention.keep`: the choice of a single group."""
        (kept,) = self.keep_groups(view, n_max, (1, 1)).reshape(1, -1)
        return kept

    def keep_groups(self, view: View, n_max: int, shape: tuple[int, int]) -> Positions:
        """int64[layers, KV heads, at most n_max], ascending: the positions of each group.

        shape: (layers, KV heads) that choose for themselves; 1: the choice is for all. As many
        positions in each group, sink and window among them. Otherwise as `keep`; raises ValueError
        for a shape that the keys do not have, too."""
        self._check(view, n_max)
        positions = view.positions
        if view.n <= n_max:
            return np.broadcast_to(positions, (*shape, view.n))
        span = self._middle(view.n)
        chosen = self._choose_groups(view, span, n_max - self.config.n_min, shape)
        middle = positions[span][chosen]
        sink = np.broadcast_to(positions[: span.start], (*shape, span.start))
        window = np.broadcast_to(positions[span.stop :], (*shape, view.n - span.stop))
        return np.concatenate([sink, middle, window], axis=2)

    def _choose(self, view: View, span: slice, room: int) -> Indices:
        (chosen,) = self._choose_groups(view, span, room, (1, 1)).reshape(1, -1)
        return chosen

    @abstractmethod
    def _choose_groups(self, view: View, span: slice, room: int, shape: tuple[int, int]) -> Indices:
        """int64[layers, KV heads, at most room]: see `_choose`, for each group."""

    def indexed(self, n: int) -> slice:
        """Which of `n` positions belong in the index: those that have left the window."""
        return self._middle(n)

    @abstractmethod
    def layers(self, n_layer: int) -> range:
        """The layers whose keys it reads."""

    @abstractmethod
    def index(self, positions: Positions, keys: Keys, *, n_threads: int = 1) -> None:
        """Index positions [n] with their keys [layers, KV heads, n, head size]: those that are not there
        are added, and those that are not among them are forgotten. `keep` indexes what it is shown; a
        caller with time to spare earlier, such as while a prompt is evaluated, may index then.

        The index refers to keys and holds none: each call reads those that it needs."""

    @abstractmethod
    def forget(self, positions: Positions) -> None:
        """Remove positions that will not be shown again, or only with other keys."""


def check_pool(width: int) -> None:
    """Raise ValueError if `pooled` cannot have this width."""
    if width < 1 or width % 2 == 0:
        raise ValueError(f"a pooling over {width} neighbours has no middle: take an odd one")


def pooled(scores: Mass, width: int) -> Mass:
    """float32[n]: the maximum over a window of `width`, odd, around each score, cut off at the ends."""
    if not len(scores):
        return scores
    padded = np.pad(scores, width // 2, constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    return np.asarray(windows.max(axis=1), np.float32)


def top(scores: Mass, k: int) -> Indices:
    """Indices of the k largest scores, ascending; the later on ties."""
    order = np.lexsort((np.arange(len(scores)), scores))
    return np.sort(order[max(0, len(scores) - k) :]).astype(np.int64)
