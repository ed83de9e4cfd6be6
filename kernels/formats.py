"""The formats that rows of K and V are kept in, one line each.

Cache types are ggml's own: the formats of llama.cpp contexts, and the only ones in blobs and slot
files. Stored formats are towerd's: shared bases are kept in them between uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from towerd.kernels import _native

STORED_ID_MIN = 256
"""The first id of a stored format; ggml's type ids are far below."""
HADAMARD_MAX = 64
"""Longest run of elements in the Hadamard rotation of a stored row."""


@dataclass(frozen=True, slots=True)
class Format:
    """How one format lays out a row: blocks of `block_elements` in `block_bytes` bytes."""

    name: str
    """For a cache type, llama-server's name (`--cache-type-k NAME`)."""
    type_id: int
    """ggml's type, or an id from STORED_ID_MIN on. Segment files contain it: never reassign one."""
    block_elements: int
    block_bytes: int

    @property
    def is_cache_type(self) -> bool:
        """True for what a llama.cpp context can hold; False for a stored format."""
        return self.type_id < STORED_ID_MIN

    @property
    def ggml_type(self) -> int:
        """The id to hand to llama.cpp. ValueError for a stored format, which it does not know."""
        if not self.is_cache_type:
            raise ValueError(f"format: {self.name} is a stored format, not a ggml type")
        return self.type_id

    @property
    def is_quantized(self) -> bool:
        """True when a block holds more than one element."""
        return self.block_elements > 1

    @property
    def is_hadamard(self) -> bool:
        """True when rows are rotated by `hadamard_block` before they are encoded."""
        return self.codec != self.name

    @property
    def codec(self) -> str:
        """The block code that rows are encoded with: the name without the Hadamard rotation."""
        return self.name if self.is_cache_type else self.name.removesuffix("h")

    @property
    def bits_per_value(self) -> float:
        """Bits that one element takes, scales included."""
        return 8 * self.block_bytes / self.block_elements

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of a row of `n_elements`; ValueError unless it is a whole number of blocks."""
        if n_elements <= 0 or n_elements % self.block_elements:
            raise ValueError(
                f"n_elements: {n_elements} is not a positive multiple of {self.block_elements}"
            )
        return n_elements // self.block_elements * self.block_bytes

    def n_elements(self, row_bytes: int) -> int:
        """Elements in a row of `row_bytes`; ValueError unless it is a whole number of blocks."""
        if row_bytes <= 0 or row_bytes % self.block_bytes:
            raise ValueError(
                f"row_bytes: {row_bytes} is not a positive multiple of {self.block_bytes}"
            )
        return row_bytes // self.block_bytes * self.block_elements

    def hadamard_block(self, n_elements: int) -> int:
        """Run of elements that a row of `n_elements` is rotated by: 32 or 64; 0 for no rotation.

        ValueError as `row_bytes`."""
        self.row_bytes(n_elements)
        return math.gcd(n_elements, HADAMARD_MAX) if self.is_hadamard else 0


FORMATS: tuple[Format, ...] = tuple(Format(*row[:4]) for row in _native.formats())
"""The table of cpp/formats.cpp: ggml's cache types, then the stored formats."""
CACHE_FORMATS = tuple(row for row in FORMATS if row.is_cache_type)
STORED_FORMATS = tuple(row for row in FORMATS if not row.is_cache_type)
CACHE_TYPES: frozenset[int] = frozenset(row.type_id for row in CACHE_FORMATS)
"""The ids that blobs, slot files and contexts may hold."""
BY_TYPE: dict[int, Format] = {row.type_id: row for row in FORMATS}
BY_NAME: dict[str, Format] = {row.name: row for row in FORMATS}
