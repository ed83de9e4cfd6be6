"""Basis: a transform of rows that was learned for one row identity, with the codings that it is used in.

    0   magic "TWRBAS"
    6   u16  version
    8   u32  header length in bytes
    12  u32  0
    16  xxh3_128 of all other bytes
    32  header (msgpack), then the arrays one after the other

A basis is immutable and named by the BLAKE2b-256 of its bytes: what was written with one is readable as long as
its file is kept. It holds means, variances and principal directions of the rows that it was learned
from: statistics of thousands of rows, from which no text can be read.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from towerd.codec.errors import CodecError, Damaged, NewerVersion, Truncated
from towerd.kernels import row_coding
from towerd.kernels.row_coding import Quantizer, RowTransform
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout
from towerd.slots.rope import Rope

MAGIC = b"TWRBAS"
VERSION = 1
BYTES_MAX = 1 << 30
_HEAD = struct.Struct("<6sHII16s")

Half = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Coder: TypeAlias = tuple[tuple[RowTransform, Quantizer], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlaneGroup:
    """Planes that are transformed together.

    planes: indices into `KVLayout.planes`
    vectors: float16[n_components, n_elements], orthonormal, by descending variance
    mean, weights: float32[n_elements]; see `lab.reference.row_transform`"""

    planes: tuple[int, ...]
    vectors: Half
    mean: Floats
    weights: Floats


@dataclass(frozen=True, slots=True, eq=False)
class RowCoding:
    """How the components of every group are rounded and written.

    classes: per group uint8[n], of the first n components; the others are left out
    shifts: uint8[n_classes]; frequencies: uint16[n_classes, 64]; see `lab.reference.rans`"""

    step: float
    dead_zone: float
    shrink: float
    classes: tuple[npt.NDArray[np.uint8], ...]
    shifts: npt.NDArray[np.uint8]
    frequencies: npt.NDArray[np.uint16]


class _PlaneGroupHead(msgspec.Struct, frozen=True):
    planes: tuple[int, ...]
    n_components: int


class _RowCodingHead(msgspec.Struct, frozen=True):
    step: float
    dead_zone: float
    shrink: float
    n_components: tuple[int, ...]
    n_classes: int


class _Header(msgspec.Struct, frozen=True):
    row_identity: bytes
    layout: dict[str, object]
    groups: tuple[_PlaneGroupHead, ...]
    codings: dict[str, _RowCodingHead]
    rope: Rope | None = None
    rot_k: bool = False


@dataclass(frozen=True, eq=False)
class Basis:
    """row_identity: digest of the row identity whose rows it is for; layout: theirs, native; rope: the
    rotation of its keys, so that whoever has the basis can read what it wrote; rot_k: their keys are
    Hadamard-rotated (`RowIdentity.rot_k`)."""

    row_identity: bytes
    layout: KVLayout
    groups: tuple[PlaneGroup, ...]
    codings: Mapping[str, RowCoding]
    rope: Rope | None = None
    rot_k: bool = False

    @functools.cached_property
    def data(self) -> bytes:
        """The bytes of its file."""
        header = _Header(
            self.row_identity,
            self.layout.to_json(),
            tuple(_PlaneGroupHead(group.planes, len(group.vectors)) for group in self.groups),
            {
                name: _RowCodingHead(
                    coding.step,
                    coding.dead_zone,
                    coding.shrink,
                    tuple(len(classes) for classes in coding.classes),
                    len(coding.shifts),
                )
                for name, coding in sorted(self.codings.items())
            },
            self.rope,
            rot_k=self.rot_k,
        )
        head = msgspec.msgpack.encode(header)
        body = head + b"".join(array.tobytes() for array in self._arrays())
        start = _HEAD.pack(MAGIC, VERSION, len(head), 0, b"")[:16]
        return start + xxhash.xxh3_128_digest(start + body) + body

    @functools.cached_property
    def digest(self) -> bytes:
        """The 32 bytes that name it."""
        return hashlib.blake2b(self.data, digest_size=32).digest()

    @property
    def nbytes(self) -> int:
        """Bytes of its file."""
        return len(self.data)

    def coder(self, coding: str) -> Coder:
        """What the kernels take for each group. KeyError for a coding that it does not have."""
        if coding not in self._coders:
            self._coders[coding] = self._coder(self.codings[coding])
        return self._coders[coding]

    @functools.cached_property
    def _coders(self) -> dict[str, Coder]:
        return {}

    @functools.cached_property
    def _transforms(self) -> tuple[RowTransform, ...]:
        """Of each group, for all codings: each takes the first components of them."""
        return tuple(
            RowTransform(group.vectors.view(np.uint16), group.mean, group.weights)
            for group in self.groups
        )

    def _coder(self, found: RowCoding) -> Coder:
        rounding = (found.step, found.dead_zone, found.shrink)
        quantizers = (
            Quantizer(*rounding, classes, found.shifts, found.frequencies)
            for classes in found.classes
        )
        return tuple(zip(self._transforms, quantizers, strict=True))

    def _arrays(self) -> Iterator[npt.NDArray[np.generic]]:
        for group in self.groups:
            yield group.vectors
            yield group.mean
            yield group.weights
        for _, coding in sorted(self.codings.items()):
            yield from coding.classes
            yield coding.shifts
            yield coding.frequencies


def read_basis(data: bytes) -> Basis:
    """The basis of a file's bytes. Raises CodecError for anything that `Basis.data` did not write."""
    if len(data) < _HEAD.size or len(data) > BYTES_MAX:
        raise Truncated("The basis is shorter than its head, or larger than any.")
    magic, version, head_bytes, _, checksum = _HEAD.unpack(data[: _HEAD.size])
    if magic != MAGIC:
        raise Damaged("The file is not a basis.")
    if version != VERSION:
        raise NewerVersion(f"The basis has version {version}; this towerd reads {VERSION}.")
    body = memoryview(data)[_HEAD.size :]
    digest = xxhash.xxh3_128(data[:16])
    digest.update(body)
    if digest.digest() != checksum:
        raise Damaged("The basis's checksum does not hold.")
    try:
        header = msgspec.msgpack.decode(body[:head_bytes], type=_Header)
        basis = _parsed(header, _Arrays(body[head_bytes:]))
        for name in basis.codings:
            basis.coder(name)
    except (msgspec.DecodeError, StateError, ValueError) as error:
        raise Damaged(f"The basis cannot be used: {error}.") from error
    return basis


class _Arrays:
    """Reads arrays one after the other; ValueError if there are not as many bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def take(self, dtype: str, *shape: int) -> npt.NDArray[np.generic]:
        count = math.prod(shape)
        n_bytes = count * np.dtype(dtype).itemsize
        if min(shape) < 0 or n_bytes > len(self.data):
            raise ValueError("an array is cut off")
        found = np.frombuffer(self.data, dtype, count).reshape(shape).copy()  # aligned
        self.data = self.data[n_bytes:]
        return found


def _parsed(header: _Header, arrays: _Arrays) -> Basis:
    layout = KVLayout.from_json(header.layout)
    groups = tuple(_group(head, layout, arrays) for head in header.groups)
    planes = sorted(plane for group in groups for plane in group.planes)
    if planes != list(range(len(layout.planes))):
        raise ValueError("each plane must be in one group")
    codings = {name: _coding(head, groups, arrays) for name, head in sorted(header.codings.items())}
    if len(arrays.data):
        raise ValueError("bytes are left over")
    return Basis(header.row_identity, layout, groups, codings, header.rope, header.rot_k)


def _group(head: _PlaneGroupHead, layout: KVLayout, arrays: _Arrays) -> PlaneGroup:
    if not all(0 <= plane < len(layout.planes) for plane in head.planes):
        raise ValueError("a group has a plane that the layout has not")
    n = sum(layout.planes[plane].n_elements for plane in head.planes)
    vectors = arrays.take("<f2", head.n_components, n)
    # `take` gives what its type string says, which mypy does not read.
    return PlaneGroup(head.planes, vectors, arrays.take("<f4", n), arrays.take("<f4", n))  # type: ignore[arg-type]


def _coding(head: _RowCodingHead, groups: tuple[PlaneGroup, ...], arrays: _Arrays) -> RowCoding:
    if len(head.n_components) != len(groups):
        raise ValueError("a coding is of other groups")
    for n, group in zip(head.n_components, groups, strict=True):
        if not 0 < n <= len(group.vectors):
            raise ValueError("a coding has other components than its group")
    classes = tuple(arrays.take("u1", n) for n in head.n_components)
    shifts = arrays.take("u1", head.n_classes)
    frequencies = arrays.take("<u2", head.n_classes, row_coding.SYMBOLS)
    # As above: the types are in the strings given to `take`.
    return RowCoding(head.step, head.dead_zone, head.shrink, classes, shifts, frequencies)  # type: ignore[arg-type]


def check_basis(basis: Basis, layout: KVLayout, row_identity: bytes | None = None) -> None:
    """CodecError unless the basis is for rows of this layout and row identity."""
    if basis.layout != layout or (row_identity is not None and basis.row_identity != row_identity):
        raise CodecError("The basis is for the rows of another model or cache type.")
