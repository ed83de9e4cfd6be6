"""KVRows: the K and V rows of some positions as one value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.kernels.arrays import Job
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout, Plane

Bytes2D: TypeAlias = npt.NDArray[np.uint8]
"""uint8[n, row_bytes]; each row is contiguous, the stride between rows is free."""
Blob: TypeAlias = npt.NDArray[np.uint8]
"""uint8[size]: a sequence blob."""


@dataclass(frozen=True, slots=True, eq=False)
class KVRows:
    """The rows of ascending positions. Arrays are views wherever possible, so treat them as
    read-only; they keep the underlying buffer alive.

    layout: one entry per cached layer
    positions: int32[n], strictly ascending, n >= 1, first >= 0
    k, v: per layer uint8[n, row_bytes], each row contiguous
    ext: int32[n, 3] (x, y, token id) if layout.cell_ext, else None
    v_trans: v is stored as in contexts without flash attention, channel by channel: per layer
        uint8[n_elements, n * element_bytes]
    blob: the sequence blob of a unified cache that holds exactly these rows, if they are views
        of one
    head: what a head that drafts has of these positions, if any

    Raises StateError when shapes, types or positions do not fit."""

    layout: KVLayout
    positions: npt.NDArray[np.int32]
    k: tuple[Bytes2D, ...]
    v: tuple[Bytes2D, ...]
    ext: npt.NDArray[np.int32] | None = None
    v_trans: bool = False
    blob: Blob | None = None
    head: HeadRows | None = None

    def __post_init__(self) -> None:
        positions = self.positions
        if positions.dtype != np.int32 or positions.ndim != 1 or len(positions) == 0:
            raise StateError("positions must be int32 of one dimension with at least one entry")
        if positions[0] < 0 or (positions[1:] <= positions[:-1]).any():
            raise StateError("positions must be strictly ascending and not negative")
        _check_planes(self.k, self.layout.k, len(positions), "k")
        if self.v_trans:
            _check_channels(self.v, self.layout.v, len(positions))
        else:
            _check_planes(self.v, self.layout.v, len(positions), "v")
        if (self.ext is not None) != self.layout.cell_ext:
            raise StateError("ext must be given exactly when the layout has a cell extension")
        if self.ext is not None and (
            self.ext.dtype != np.int32 or self.ext.shape != (len(positions), 3)
        ):
            raise StateError(f"ext must be int32 of shape ({len(positions)}, 3)")
        if (
            self.head is not None
            and not self.p0 <= self.head.rows.p0 < self.head.rows.p1 <= self.p1
        ):
            raise StateError("the rows of a head are of other positions")

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def p0(self) -> int:
        """The first position."""
        return int(self.positions[0])

    @property
    def p1(self) -> int:
        """The last position plus one."""
        return int(self.positions[-1]) + 1

    @property
    def is_consecutive(self) -> bool:
        """True when no position between p0 and p1 is missing."""
        return self.p1 - self.p0 == len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows (and extensions), those of a head included, viewed or owned."""
        n_bytes = len(self.positions) * self.layout.token_bytes
        return n_bytes if self.head is None else n_bytes + self.head.rows.nbytes

    def buffers(self) -> dict[int, int]:
        """Bytes of each buffer that the rows keep alive, by the buffer's id."""
        arrays = (*self.k, *self.v) if self.blob is None else (self.blob,)
        found = {id(owner): owner.nbytes for owner in map(_owner, arrays)}
        return found if self.head is None else found | self.head.rows.buffers()

    def planes(self) -> Iterator[Bytes2D]:
        """All K planes, then all V planes, in the layout's order, token-major."""
        return (self.plane(i) for i in range(len(self.layout.planes)))

    def plane(self, i: int) -> Bytes2D:
        """Plane i of `layout.planes`, uint8[n, row_bytes]: a view, or a copy if `v_trans`."""
        if i < len(self.k):
            return self.k[i]
        channels, plane = self.v[i - len(self.k)], self.layout.planes[i]
        if not self.v_trans:
            return channels
        rows = np.empty((len(self), plane.row_bytes), np.uint8)
        dispatch.transpose(channels, rows, plane.format.block_bytes)
        return rows

    def token_major(self) -> KVRows:
        """The same rows without `v_trans`: this value itself, or one with a copy of V."""
        if not self.v_trans:
            return self
        v = tuple(self.planes())[len(self.k) :]
        return KVRows(self.layout, self.positions, self.k, v, self.ext, head=self.head)

    def sections(self) -> tuple[KVRows, ...]:
        """The rows of each cache (see `KVLayout.sections`), as views."""
        if not self.layout.n_window:
            return (self,)
        n_full = self.layout.n_layer - self.layout.n_window
        return (
            self.layers(0, n_full, self.layout.sections[0], self.ext),
            self.layers(n_full, self.layout.n_layer, self.layout.sections[1], self.ext),
        )

    def layers(
        self, first: int, end: int, layout: KVLayout, ext: npt.NDArray[np.int32] | None
    ) -> KVRows:
        """Layers [first, end) as rows of `layout`, with the extension `ext`; views."""
        k, v = self.k[first:end], self.v[first:end]
        return KVRows(layout, self.positions, k, v, ext, self.v_trans)

    def slice(self, p0: int, p1: int) -> KVRows:
        """The rows with p0 <= position < p1, as views. StateError if there is none."""
        first, last = map(int, np.searchsorted(self.positions, (p0, p1)))
        if first >= last:
            raise StateError(f"no rows in [{p0}, {p1}); these are [{self.p0}, {self.p1})")
        if first == 0 and last == len(self.positions):
            return self
        cut = np.s_[first:last]
        return KVRows(
            self.layout,
            self.positions[cut],
            tuple(plane[cut] for plane in self.k),
            tuple(
                _cut(self.v, self.layout.v, first, last)
                if self.v_trans
                else (plane[cut] for plane in self.v)
            ),
            None if self.ext is None else self.ext[cut],
            self.v_trans,
            head=None if self.head is None else self.head.slice(p0, p1),
        )

    def split(self, at: int) -> tuple[KVRows, KVRows]:
        """The rows before position `at` and those from it on, as views; both non-empty."""
        return self.slice(self.p0, at), self.slice(at, self.p1)

    def settled(self) -> KVRows:
        """The rows without those of a head that depend on tokens behind them; views."""
        if self.head is None or not self.head.lag:
            return self
        return replace(self, head=self.head.slice(self.p0, self.p1 - self.head.lag))

    def copy(self) -> KVRows:
        """The same rows in memory of their own: one blob, or the planes one after the other."""
        if self.blob is None and not self.v_trans:
            return _gather((self,))
        ext = None if self.ext is None else self.ext.copy()
        head = None if self.head is None else self.head.copy()
        if self.blob is None:
            k, v = tuple(map(_owned, self.k)), tuple(map(_owned, self.v))
            return KVRows(self.layout, self.positions.copy(), k, v, ext, True, head=head)
        blob = _owned(self.blob[None])[0]
        k, v = (
            tuple(_within(blob, self.blob, plane) for plane in planes)
            for planes in (self.k, self.v)
        )
        return KVRows(self.layout, self.positions.copy(), k, v, ext, self.v_trans, blob, head)


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The rows that a head which drafts keeps beside the model's, in a layout of its own: of all or
    some of the same positions.

    digest: names the head; rows of another one are of no use to it
    rows: native, token-major, without a `head` of their own
    lag: each row depends on so many tokens behind its own"""

    digest: bytes
    rows: KVRows
    lag: int = 0

    def slice(self, p0: int, p1: int) -> HeadRows | None:
        """The rows with p0 <= position < p1, as views; None if there is none."""
        first, last = map(int, np.searchsorted(self.rows.positions, (p0, p1)))
        return replace(self, rows=self.rows.slice(p0, p1)) if first < last else None

    def copy(self) -> HeadRows:
        """The same rows in memory of their own."""
        return replace(self, rows=_gather((self.rows,)))


def join_heads(heads: Iterable[HeadRows | None]) -> HeadRows | None:
    """Rows of ascending positions as one value, positions between them may be missing: one copy, or the
    value itself if it is alone. Of several heads those of the last."""
    found = [head for head in heads if head is not None]
    same = [head.rows for head in found if head.digest == found[-1].digest]
    if len(same) < 2:
        return found[-1] if found else None
    return replace(found[-1], rows=_gather(same))


def delta(rows: KVRows, parent_n: int) -> KVRows:
    """The rows of `rows` after a parent that holds positions [0, parent_n), as views.

    StateError if nothing is left or rows just after the parent are missing."""
    rest = rows.slice(parent_n, max(rows.p1, parent_n))
    if rest.p0 != parent_n:
        raise StateError(f"rows {parent_n} to {rest.p0 - 1} after the parent are missing")
    return rest


def check_positions(parts: Sequence[KVRows]) -> None:
    """StateError unless there is at least one part and each starts where the one before ends."""
    if not parts:
        raise StateError("no rows to compose")
    for before, after in zip(parts, parts[1:], strict=False):
        if before.p1 != after.p0:
            raise StateError(f"a part ends at position {before.p1}, the next begins at {after.p0}")


def check_consecutive(parts: Sequence[KVRows]) -> KVLayout:
    """The layout that all parts share. StateError as `check_positions`, or if they differ."""
    check_positions(parts)
    if any(part.layout != parts[0].layout for part in parts[1:]):
        raise StateError("the parts have different layouts")
    return parts[0].layout


def _owner(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8] | memoryview:
    """The object that owns the memory of an array."""
    owner: npt.NDArray[np.uint8] | memoryview = array
    while True:
        below = owner.obj if isinstance(owner, memoryview) else owner.base
        if not isinstance(below, (np.ndarray, memoryview)):
            return owner
        owner = below


def join(parts: Sequence[KVRows]) -> KVRows:
    """Consecutive parts as one token-major value: one copy, or the part itself if it is alone.

    StateError if they are not consecutive or their layouts differ."""
    check_consecutive(parts)
    return parts[0] if len(parts) == 1 else _gather(parts)


def _gather(parts: Sequence[KVRows]) -> KVRows:
    """The parts' rows, and those of their heads, in memory of their own."""
    layout, parts = parts[0].layout, [part.token_major() for part in parts]
    n = sum(len(part) for part in parts)
    ends = np.cumsum([0] + [n * plane.row_bytes for plane in layout.planes])
    buffer = np.empty(int(ends[-1]), np.uint8)
    jobs: list[Job] = []
    row = 0
    for part in parts:
        for start, plane in zip(ends, part.planes(), strict=False):
            jobs.append((int(start) + row * plane.shape[1], plane, None))
        row += len(part)
    dispatch.copy_planes(buffer, jobs)
    planes = tuple(
        buffer[int(a) : int(b)].reshape(n, plane.row_bytes)
        for a, b, plane in zip(ends, ends[1:], layout.planes, strict=False)
    )
    exts = [part.ext for part in parts if part.ext is not None]
    return KVRows(
        layout,
        np.concatenate([part.positions for part in parts]),
        planes[: layout.n_layer],
        planes[layout.n_layer :],
        np.concatenate(exts) if exts else None,
        head=_joined_copy([part.head for part in parts]),
    )


def _joined_copy(heads: Sequence[HeadRows | None]) -> HeadRows | None:
    head = join_heads(heads)
    return head.copy() if head is not None and head in heads else head


def _check_planes(arrays: Sequence[Bytes2D], planes: Sequence[Plane], n: int, name: str) -> None:
    if len(arrays) != len(planes):
        raise StateError(f"{name}: {len(arrays)} planes, the layout has {len(planes)}")
    for array, plane in zip(arrays, planes, strict=True):
        if array.dtype != np.uint8 or array.shape != (n, plane.row_bytes):
            raise StateError(f"{name} planes must be uint8 of shape ({n}, {plane.row_bytes})")
        if plane.row_bytes > 1 and array.strides[1] != 1:
            raise StateError(f"{name}: the bytes of each row must be contiguous")


def _check_channels(arrays: Sequence[Bytes2D], planes: Sequence[Plane], n: int) -> None:
    if len(arrays) != len(planes):
        raise StateError(f"v: {len(arrays)} planes, the layout has {len(planes)}")
    for array, plane in zip(arrays, planes, strict=True):
        if plane.format.is_quantized:
            raise StateError(f"a {plane.format.name} V cannot be transposed")
        shape = plane.n_elements, n * plane.format.block_bytes
        if array.dtype != np.uint8 or array.shape != shape:
            raise StateError(f"v planes must be uint8 of shape {shape}")
        if array.strides[1] != 1:
            raise StateError("v: the bytes of each channel must be contiguous")


def _cut(
    channels: Sequence[Bytes2D], planes: Sequence[Plane], first: int, last: int
) -> Iterator[Bytes2D]:
    for array, plane in zip(channels, planes, strict=True):
        element_bytes = plane.format.block_bytes
        yield array[:, first * element_bytes : last * element_bytes]


def _owned(plane: Bytes2D) -> Bytes2D:
    out = np.empty(plane.shape, np.uint8)
    dispatch.copy_planes(out.reshape(-1), [(0, plane, None)])
    return out


def _within(new: Blob, old: Blob, view: Bytes2D) -> Bytes2D:
    """The view of `new` at the place where `view` lies in `old`."""
    return np.ndarray(view.shape, np.uint8, new, view.ctypes.data - old.ctypes.data, view.strides)
