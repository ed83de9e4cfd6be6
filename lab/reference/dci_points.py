"""Attention keys as points of length 1, for the DCI tree: `lab.reference.dci`.

Keys get one more coordinate, [k / c, sqrt(1 - |k|^2 / c^2)] with c >= |k| for all keys, and queries
become [q / |q|, 0], so the nearest point is the key with the largest inner product. When a key
longer than c is added, c grows and all points move. The order of sums is as in C++.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lab.reference.sums import dots, padded, square_of

F32: TypeAlias = npt.NDArray[np.float32]
Scored: TypeAlias = tuple[float, int]
"""(minus the score, number of the point): the better one sorts first."""

_SCALE_MIN = 1e-15
_HEADROOM = 1.25
_NOTHING: F32 = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class DciQuery:
    """A point to look for: its product with a key is a cosine."""

    vector: F32
    last: np.float32
    projections: F32


@dataclass(frozen=True, slots=True)
class DciMean:
    """The mean of some points, and half the square of its length."""

    point: DciQuery
    half: np.float32


class DciPoints:
    """The keys, and their projections on `directions`, float32[n, n_dims + 1] of length 1."""

    def __init__(self, n_dims: int, directions: F32) -> None:
        self.n_dims = n_dims
        self._directions = padded(directions[:, :-1])
        self._direction_last = directions[:, -1].astype(np.float64)
        self._scale = 0.0
        self._keys = np.zeros((0, self._directions.shape[1]), np.float32)
        self._square: list[float] = []
        self._last: list[np.float32] = []
        self._raw: list[F32] = []
        self._projection: list[F32] = []

    def __len__(self) -> int:
        return len(self._square)

    @property
    def n_directions(self) -> int:
        """Number of directions."""
        return len(self._directions)

    @property
    def keys(self) -> F32:
        """float32[n, n_dims]: the keys as they were added."""
        keys: F32 = self._keys[:, : self.n_dims]
        return keys

    def make_room(self, keys: F32) -> bool:
        """Let the scale grow to the longest of `keys`, before they are added. Returns whether all
        points moved."""
        longest = math.sqrt(max(square_of(key) for key in keys))
        if self._scale >= longest and self._scale > 0:
            return False
        self._scale = max(_SCALE_MIN, longest * _HEADROOM if len(self) else longest)
        for i in range(len(self)):
            self._last[i] = self._last_of(self._square[i])
            self._projection[i] = self._projected(self._raw[i], self._last[i])
        return True

    def add(self, key: F32) -> None:
        """Add a key [n_dims] that there is room for."""
        row = padded(key[None])[0]
        self._keys = np.concatenate([self._keys, row[None]])
        self._square.append(square_of(key))
        self._last.append(self._last_of(self._square[-1]))
        self._raw.append(dots(self._directions, row))
        self._projection.append(self._projected(self._raw[-1], self._last[-1]))

    def projection(self, i: int, direction: int) -> float:
        """The place of a point along a direction."""
        return float(self._projection[i][direction])

    def as_query(self, query: F32) -> DciQuery:
        """A query [n_dims] to search for."""
        length = math.sqrt(square_of(query))
        unit = np.zeros(self.n_dims, np.float64)
        if length > 0:
            unit = query.astype(np.float64) / length
        vector = padded((unit / self._scale).astype(np.float32)[None])[0]
        rows = padded(unit.astype(np.float32)[None])[0]
        return DciQuery(vector, np.float32(0), dots(self._directions, rows))

    def as_point(self, i: int) -> DciQuery:
        """A key to search for."""
        vector = self._keys[i].astype(np.float64) / (self._scale * self._scale)
        return DciQuery(vector.astype(np.float32), self._last[i], self._projection[i])

    def scores(self, query: DciQuery, points: list[int]) -> list[Scored]:
        """The score of each of `points`."""
        last = np.array([self._last[i] for i in points], np.float32)
        scores = dots(self._keys[points], query.vector) + query.last * last
        return [(-float(score), i) for score, i in zip(scores, points, strict=True)]

    def mean_of(self, points: list[int]) -> DciMean:
        """The mean of `points`."""
        n = len(points)
        total, last = np.zeros(self._keys.shape[1]), 0.0
        for i in points:
            total += self._keys[i]
            last += float(self._last[i])
        mean = total / n / self._scale
        square = square_of(mean) + last / n * (last / n)
        point = DciQuery((mean / self._scale).astype(np.float32), np.float32(last / n), _NOTHING)
        return DciMean(point, np.float32(square / 2))

    def nearness(self, i: int, mean: DciMean) -> np.float32:
        """Larger for a mean that is nearer to a point."""
        product = dots(self._keys[i][None], mean.point.vector)[0] + mean.point.last * self._last[i]
        return np.float32(product - mean.half)

    def _last_of(self, square: float) -> np.float32:
        return np.float32(math.sqrt(max(0.0, 1.0 - square / (self._scale * self._scale))))

    def _projected(self, raw: F32, last: np.float32) -> F32:
        values = raw.astype(np.float64) / self._scale + self._direction_last * float(last)
        return values.astype(np.float32)
