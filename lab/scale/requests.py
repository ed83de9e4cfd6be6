"""Requests: what is asked of an object store, by kind, and what it holds afterwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from towerd.tiers.shared.bucket import Bucket, Listed


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
    """A bucket that counts what it is asked."""

    def count_in(self, requests: Requests) -> None:
        """Count in `requests` from now on."""
        self.requests = requests

    def put(self, place: str, data: bytes) -> bool:
        """See Bucket."""
        is_new = super().put(place, data)
        assert is_new, f"{place} is put twice, which is a request that the count does not foresee"
        self.requests.store(place.partition("/")[0], len(data))
        return is_new

    def get(self, place: str, bytes_max: int) -> bytes:
        """See Bucket."""
        self.requests.get += 1
        found = super().get(place, bytes_max)
        self.requests.bytes_down += len(found)
        return found

    def has(self, place: str) -> bool:
        """See Bucket."""
        self.requests.head += 1
        return super().has(place)

    def listing(self, folder: str) -> list[Listed]:
        """See Bucket."""
        self.requests.list += 1
        return super().listing(folder)
