"""Coded rows: the rows of consecutive positions in the coding of a basis, page by page.

    0   magic "TWRTCR"
    6   u16  version
    8   32s  digest of the basis
    40  u32  first position
    44  u32  rows
    48  u16  rows of a page, u16 groups, u32 bytes of the coding's name
    56  xxh3_64 of bytes [0, 56), the name and the table of pages
    64  name, then the table of pages, page by page and in it group by group: u32 bytes, u64 xxh3_64
    then the pages in the same order; where cells have an extension (M-RoPE), it is one more group, int32[rows, 3]

Each page has a checksum of its own, so that damage costs the rows of one page, and a range is read without the rest.
What is read is labelled approximate by the caller; it is the same on every CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from towerd.codec.errors import CodecError, Damaged, NewerVersion, Truncated
from towerd.codec.rows.basis import Basis, check_basis
from towerd.codec.rows.plain import flattened, native, plain_format, plain_layout
from towerd.kernels import dispatch, row_coding
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows

MAGIC = b"TWRTCR"
VERSION = 1
PAGE_ROWS = 64
"""Rows of a page: a range costs at most 63 rows more than it has, and what a page has of its own takes 52
bytes a group, 0.007 bits a number of SmolLM2's."""
PRODUCTS_OF_STEP = 1 << 27
"""Multiplications between two pauses, but for those of one group's page: 5 ms of one core."""
_HEAD = struct.Struct("<6sH32sIIHHI8s")
_PAGE = np.dtype([("n_bytes", "<u4"), ("checksum", "<u8")])
_NAME_BYTES_MAX = 64
_POSITION_MAX = (1 << 31) - 1


def encode(
    rows: KVRows,
    basis: Basis,
    coding: str,
    rope: Rope,
    *,
    n_threads: int = dispatch.THREADS,
    pause: Callable[[], object] | None = None,
) -> bytes:
    """Native rows of consecutive positions in a coding of the basis; KeyError if it has none of that name.
    pause: called every few milliseconds of one core, returns when the next ones may be used, or raises

    CodecError if the basis is for other rows, or rows are not finite or pictures'. StateError as `unrotated`."""
    check_basis(basis, rows.layout)
    if not rows.is_consecutive:
        raise CodecError("Rows with holes between them are not transform-coded.")
    planes = list(flattened(rows, rope, rot_k=basis.rot_k, n_threads=n_threads).planes())
    coder, jobs = basis.coder(coding), []
    for at in range(0, len(rows), PAGE_ROWS):
        for group, (transform, quantizer) in zip(basis.groups, coder, strict=True):
            page = [planes[plane][at : at + PAGE_ROWS] for plane in group.planes]
            jobs.append((transform, quantizer, page))
    sizes = [group.vectors.size * min(PAGE_ROWS, len(rows)) for group in basis.groups]
    steps = [jobs] if pause is None else _steps(jobs, sizes)
    try:
        pages: list[bytes] = []
        for i, step in enumerate(steps):
            if pause is not None and i:
                pause()
            pages += row_coding.encode_pages(step, plain_format(basis.layout), n_threads)
    except ValueError as error:
        raise CodecError(f"The rows cannot be transform-coded: {error}.") from error
    if rows.ext is not None:
        pages = _with_ext(pages, rows.ext.astype("<i4"), len(basis.groups))
    table = np.array([(len(page), xxhash.xxh3_64_intdigest(page)) for page in pages], _PAGE)
    shape = (rows.p0, len(rows), PAGE_ROWS, _n_columns(basis))
    return b"".join([_head(basis.digest, coding, shape, table), *pages])


def _steps(
    jobs: Sequence[row_coding.EncodeJob], sizes: Sequence[int]
) -> Iterator[Sequence[row_coding.EncodeJob]]:
    """The jobs, of as many multiplications as the groups' `sizes` say in turn, as steps of at most
    PRODUCTS_OF_STEP or one job."""
    first, n_products = 0, 0
    for i in range(len(jobs)):
        size = sizes[i % len(sizes)]
        if first < i and n_products + size > PRODUCTS_OF_STEP:
            yield jobs[first:i]
            first, n_products = i, 0
        n_products += size
    yield jobs[first:]


def _head(
    digest: bytes, coding: str, sizes: tuple[int, int, int, int], table: npt.NDArray[np.void]
) -> bytes:
    """All before the pages. sizes: first position, rows, rows of a page, groups"""
    name = coding.encode()
    head = _HEAD.pack(MAGIC, VERSION, digest, *sizes, len(name), b"")[:-8]
    rest = name + table.tobytes()
    return head + xxhash.xxh3_64_digest(head + rest) + rest


def joined(parts: Sequence[CodedRows]) -> bytes:
    """Consecutive coded rows of one coding, each but the last of whole pages, as one."""
    first = parts[0]
    for before, after in pairwise(parts):
        if before.p1 != after.p0 or before.n_rows % before.page_rows:
            raise CodecError("These coded rows do not follow one another page by page.")
    table = np.concatenate([part.table for part in parts])
    n_rows = sum(part.n_rows for part in parts)
    sizes = (first.p0, n_rows, first.page_rows, table.shape[1])
    head = _head(first.basis_digest, first.coding, sizes, table)
    return b"".join([head, *(part.pages for part in parts)])


def _n_columns(basis: Basis) -> int:
    """Of the table of pages."""
    return len(basis.groups) + basis.layout.cell_ext


def _with_ext(pages: list[bytes], ext: npt.NDArray[np.int32], n_groups: int) -> list[bytes]:
    """The pages with one of extensions behind those of every PAGE_ROWS rows."""
    found = []
    for page, at in enumerate(range(0, len(ext), PAGE_ROWS)):
        found += pages[page * n_groups : (page + 1) * n_groups]
        found.append(ext[at : at + PAGE_ROWS].tobytes())
    return found


class PageDamaged(Damaged):
    """The rows [p0, p1) of one page are lost; all others can be read."""

    def __init__(self, p0: int, p1: int) -> None:
        super().__init__(f"The rows [{p0}, {p1}) are damaged.")
        self.p0 = p0
        self.p1 = p1


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """The parsed head of coded rows; the pages are read when they are asked for."""

    basis_digest: bytes
    coding: str
    p0: int
    n_rows: int
    page_rows: int
    table: npt.NDArray[np.void]
    """[pages, groups] of n_bytes and checksum."""
    starts: npt.NDArray[np.int64]
    """[pages, groups]: where each begins in `pages`."""
    pages: memoryview

    @property
    def p1(self) -> int:
        """The last position plus one."""
        return self.p0 + self.n_rows

    def read(
        self, p0: int, p1: int, basis: Basis, rope: Rope, *, n_threads: int = dispatch.THREADS
    ) -> KVRows:
        """Approximate native rows of positions [p0, p1) in memory of their own.

        Damaged if a page of them is, with its positions; CodecError for another basis or positions that are
        not here."""
        if basis.digest != self.basis_digest:
            raise CodecError("The rows were coded with another basis.")
        if self.coding not in basis.codings or self.table.shape[1] != _n_columns(basis):
            raise Damaged("The rows are in a coding that their basis does not have.")
        if not self.p0 <= p0 < p1 <= self.p1:
            raise CodecError(f"There are no rows [{p0}, {p1}); these are [{self.p0}, {self.p1}).")
        first = (p0 - self.p0) // self.page_rows
        last = -(-(p1 - self.p0) // self.page_rows)
        start = first * self.page_rows
        n = min(last * self.page_rows, self.n_rows) - start
        layout = plain_layout(basis.layout)
        planes = [np.empty((n, plane.row_bytes), np.uint8) for plane in layout.planes]
        self._read_pages(first, last, planes, basis, n_threads)
        ext = self._read_ext(first, last, n) if layout.cell_ext else None
        at = self.p0 + start
        positions = np.arange(at, at + n, dtype=np.int32)
        k, v = planes[: layout.n_layer], planes[layout.n_layer :]
        plain = KVRows(layout, positions, tuple(k), tuple(v), ext).slice(p0, p1)
        return native(plain, basis.layout, rope, rot_k=basis.rot_k, n_threads=n_threads)

    def damaged(self) -> list[tuple[int, int]]:
        """The positions [p0, p1) of each page whose checksums do not hold."""
        found = []
        for page in range(len(self.table)):
            try:
                for group in range(self.table.shape[1]):
                    self._page(page, group)
            except PageDamaged as error:
                found.append((error.p0, error.p1))
        return found

    def whole_pages(self, p0: int, p1: int) -> tuple[int, int]:
        """The positions of the pages that lie within [p0, p1) as a whole; an empty range if none does."""
        first = -(-(max(p0, self.p0) - self.p0) // self.page_rows)
        last = len(self.table) if p1 >= self.p1 else (p1 - self.p0) // self.page_rows
        start = self.p0 + first * self.page_rows
        return start, max(start, min(self.p0 + last * self.page_rows, self.p1))

    def excerpt(self, p0: int, p1: int) -> bytes:
        """The rows of whole pages as coded rows of their own, whose pages are the same bytes."""
        first, last = (p0 - self.p0) // self.page_rows, -(-(p1 - self.p0) // self.page_rows)
        table = self.table[first:last]
        at = int(self.starts[first, 0])
        n_bytes = int(table["n_bytes"].astype(np.int64).sum())
        sizes = (p0, p1 - p0, self.page_rows, table.shape[1])
        return _head(self.basis_digest, self.coding, sizes, table) + self.pages[at : at + n_bytes]

    def _read_pages(
        self,
        first: int,
        last: int,
        planes: list[npt.NDArray[np.uint8]],
        basis: Basis,
        n_threads: int,
    ) -> None:
        """Pages [first, last) into planes of their rows. Group by group, so that its vectors stay in the
        caches."""
        jobs, places = [], []
        for i, (transform, quantizer) in enumerate(basis.coder(self.coding)):
            for page in range(first, last):
                at = (page - first) * self.page_rows
                to = [planes[plane][at : at + self.page_rows] for plane in basis.groups[i].planes]
                jobs.append((transform, quantizer, self._page(page, i), to))
                places.append(page)
        done = row_coding.decode_pages(jobs, plain_format(basis.layout), n_threads)
        for good, page in zip(done, places, strict=True):
            if not good:
                raise self._damaged(page)

    def _read_ext(self, first: int, last: int, n: int) -> npt.NDArray[np.int32]:
        """int32[n, 3] of pages [first, last)."""
        column = self.table.shape[1] - 1
        data = b"".join(self._page(page, column) for page in range(first, last))
        if len(data) != 12 * n:
            raise self._damaged(first)
        return np.frombuffer(data, "<i4").reshape(n, 3).astype(np.int32)

    def _page(self, page: int, group: int) -> memoryview:
        start, entry = int(self.starts[page, group]), self.table[page, group]
        data = self.pages[start : start + int(entry["n_bytes"])]
        if xxhash.xxh3_64_intdigest(data) != int(entry["checksum"]):
            raise self._damaged(page)
        return data

    def _damaged(self, page: int) -> PageDamaged:
        at = self.p0 + page * self.page_rows
        return PageDamaged(at, min(at + self.page_rows, self.p1))


def parse(data: bytes | bytearray | memoryview) -> CodedRows:
    """The head of coded rows. CodecError for anything else."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise Truncated("The coded rows are shorter than their head.")
    magic, version, digest, p0, n, page_rows, groups, name_bytes, checksum = _HEAD.unpack(
        view[: _HEAD.size]
    )
    if magic != MAGIC:
        raise Damaged("These are not coded rows.")
    if version != VERSION:
        raise NewerVersion(f"The coded rows have version {version}; this towerd reads {VERSION}.")
    if not (n and groups and 0 < page_rows <= row_coding.PAGE_ROWS_MAX) or (
        name_bytes > _NAME_BYTES_MAX or p0 + n > _POSITION_MAX
    ):
        raise Damaged("The coded rows' head has sizes that none have.")
    n_pages = -(-n // page_rows)
    table_bytes = n_pages * groups * _PAGE.itemsize
    rest = view[_HEAD.size : _HEAD.size + name_bytes + table_bytes]
    if len(rest) != name_bytes + table_bytes:
        raise Truncated("The coded rows are shorter than their table.")
    digest_of_head = xxhash.xxh3_64(view[: _HEAD.size - 8])
    digest_of_head.update(rest)
    if digest_of_head.digest() != checksum:
        raise Damaged("The checksum of the coded rows' head does not hold.")
    table = np.frombuffer(rest[name_bytes:], _PAGE).reshape(n_pages, groups)
    sizes = table["n_bytes"].astype(np.int64).ravel()
    pages = view[_HEAD.size + len(rest) :]
    if sizes.sum() != len(pages):
        raise Truncated("The coded rows have other pages than their table says.")
    starts = (np.cumsum(sizes) - sizes).reshape(table.shape)
    name = bytes(rest[:name_bytes]).decode("utf-8", "replace")
    return CodedRows(digest, name, p0, n, page_rows, table, starts, pages)
