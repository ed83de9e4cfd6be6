"""Runs: the rows of consecutive positions, some of them in a stored format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows, check_positions


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Consecutive KVRows as one value; each part has a layout of its own and no gaps.

    Raises StateError for no parts, gaps, or layouts that hold different values."""

    parts: tuple[KVRows, ...]

    def __post_init__(self) -> None:
        check_positions(self.parts)
        first = self.parts[0].layout
        for part in self.parts:
            if not part.is_consecutive:
                raise StateError("the rows of a run have gaps")
            if part.layout != first and not part.layout.converts_to(first):
                raise StateError("the parts hold different values")

    @classmethod
    def of(cls, rows: KVRows | Runs | Iterable[KVRows]) -> Runs:
        """The rows, runs or parts as one value."""
        if isinstance(rows, Runs):
            return rows
        return cls((rows,) if isinstance(rows, KVRows) else tuple(rows))

    def __iter__(self) -> Iterator[KVRows]:
        return iter(self.parts)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def p0(self) -> int:
        """The first position."""
        return self.parts[0].p0

    @property
    def p1(self) -> int:
        """The last position plus one."""
        return self.parts[-1].p1

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as they are kept."""
        return sum(part.nbytes for part in self.parts)

    def buffers(self) -> dict[int, int]:
        """Bytes of each buffer that the rows keep alive, by the buffer's id."""
        return {owner: n for part in self.parts for owner, n in part.buffers().items()}

    @property
    def is_native(self) -> bool:
        """True when no part is in a stored format."""
        return all(part.layout.is_native for part in self.parts)

    @property
    def n_approximate(self) -> int:
        """Positions whose rows are in a stored format."""
        return sum(len(part) for part in self.parts if not part.layout.is_native)

    def fits(self, native: KVLayout) -> bool:
        """True when every part holds the values of `native`, in its formats or in stored ones."""
        return all(
            part.layout is native or part.layout == native.stored_as(part.layout.format_name)
            for part in self.parts
        )

    def slice(self, p0: int, p1: int) -> Runs:
        """The rows with p0 <= position < p1, as views. StateError if there is none."""
        parts = [part.slice(p0, p1) for part in self.parts if part.p0 < p1 and p0 < part.p1]
        if not parts:
            raise StateError(f"no rows in [{p0}, {p1}); these are [{self.p0}, {self.p1})")
        return Runs(tuple(parts))

    def split(self, at: int) -> tuple[Runs, Runs]:
        """The rows before position `at` and those from it on, as views; both non-empty."""
        return self.slice(self.p0, at), self.slice(at, self.p1)

    def settled(self) -> Runs:
        """See `KVRows.settled`."""
        return Runs((*self.parts[:-1], self.parts[-1].settled()))

    def copy(self) -> Runs:
        """The same rows in memory of their own."""
        return Runs(tuple(part.copy() for part in self.parts))
