"""Requests: what is asked of an object store, by kind, and what it holds afterwards."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, fields

from obstore.store import ObjectStore

from towerd.tiers.shared.bucket import Bucket


@dataclass(slots=True)
class Requests:
    """Counts. Names that are not there are asked for, too, and cost as much."""

    put: int = 0
    get: int = 0
    head: int = 0
    list: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    stored: Counter[str] = field(default_factory=Counter)
    """Objects by their first folder."""
    stored_bytes: Counter[str] = field(default_factory=Counter)
    tokens_fetched: int = 0
    """Rows that came from the bucket and were not evaluated."""

    def add(self, other: Requests, times: float = 1) -> None:
        """Count what `other` counted, `times` times; fractions are rounded."""
        for each in fields(self):
            mine, more = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Counter):
                mine.update({key: round(times * n) for key, n in more.items()})
            else:
                setattr(self, each.name, mine + round(times * more))

    def store(self, kind: str, n_bytes: int) -> None:
        """Count an object that is put."""
        self.put += 1
        self.bytes_up += n_bytes
        self.stored[kind] += 1
        self.stored_bytes[kind] += n_bytes

    @property
    def n_objects(self) -> int:
        return self.stored.total()

    @property
    def n_bytes(self) -> int:
        """Stored."""
        return self.stored_bytes.total()


class CountingBucket(Bucket):
    """A bucket that counts what it is asked below some folders, on whichever threads."""

    def __init__(self, store: ObjectStore, requests: Requests, folders: tuple[str, ...]) -> None:
        """requests: where it is counted; folders: with the slash behind them"""
        super().__init__(store)
        self._requests, self._folders = requests, folders
        self._counting = threading.Lock()

    def put(self, place: str, data: bytes) -> bool:
        """See Bucket."""
        is_new = super().put(place, data)
        if place.startswith(self._folders):
            assert is_new, f"{place} is put twice, which the count does not foresee"
            with self._counting:
                self._requests.store(place.partition("/")[0], len(data))
        return is_new

    def get(self, place: str, bytes_max: int) -> memoryview:
        """See Bucket."""
        self._count("get", place)
        return super().get(place, bytes_max)

    def has(self, place: str) -> bool:
        """See Bucket."""
        self._count("head", place)
        return super().has(place)

    def _count(self, kind: str, place: str) -> None:
        if place.startswith(self._folders):
            with self._counting:
                setattr(self._requests, kind, getattr(self._requests, kind) + 1)
