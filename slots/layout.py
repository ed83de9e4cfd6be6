"""The layout of one token's rows: the format and byte size of each layer's K and V row."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from towerd.kernels.formats import BY_NAME, BY_TYPE, CACHE_TYPES, Format
from towerd.slots.errors import StateError

STATE_VERSION = 3
"""llama.cpp's sequence state version that this package reads and writes."""
CELL_EXT_BYTES = 12
"""Per-cell extension (x, y, token id) that M-RoPE models store."""
LAYERS_MAX = 4096
NATIVE = "native"
"""The name that `KVLayout.format_name` gives to a layout without stored formats."""
ROW_BYTES_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's K or V row: `row_bytes` bytes of the format with id `ggml_type`, a ggml cache
    type or a stored format (see `towerd.kernels.formats`).

    Raises StateError for an unknown id or a size that is not whole blocks."""

    ggml_type: int
    row_bytes: int

    def __post_init__(self) -> None:
        if type(self.ggml_type) is not int or type(self.row_bytes) is not int:
            raise StateError("ggml_type and row_bytes must be integers")
        row = BY_TYPE.get(self.ggml_type)
        if row is None:
            raise StateError(f"type {self.ggml_type} is no format of KV cache rows")
        if not 0 < self.row_bytes <= ROW_BYTES_MAX or self.row_bytes % row.block_bytes:
            raise StateError(
                f"a row of {self.row_bytes} bytes is not 1 to {ROW_BYTES_MAX} bytes "
                f"in whole {row.name} blocks of {row.block_bytes}"
            )

    @property
    def format(self) -> Format:
        """The table row of this plane's type."""
        return BY_TYPE[self.ggml_type]

    @property
    def n_elements(self) -> int:
        """Values in one row (KV heads times head dimension)."""
        return self.format.n_elements(self.row_bytes)

    def stored_as(self, name: str) -> Plane:
        """These values as rows of the stored format `name`; this plane itself where that is
        impossible (rows that are not whole blocks) or would not take fewer bytes.

        Raises StateError unless `name` is a stored format."""
        row = stored_format(name)
        if self.n_elements % row.block_elements:
            return self
        n_bytes = row.row_bytes(self.n_elements)
        return Plane(row.type_id, n_bytes) if n_bytes < self.row_bytes else self


@dataclass(frozen=True)
class KVLayout:
    """The planes of every cached layer in llama.cpp's order (ascending layer index).

    `v` is as long as `k`, or empty for caches that keep no V (MLA). `cell_ext`: every cell
    carries 12 more bytes. `n_window`: how many of the layers, the last ones, are in a second
    cache, that of the sliding window. A layout without layers is that of a model that keeps no
    rows. Raises StateError when the counts do not fit."""

    k: tuple[Plane, ...]
    v: tuple[Plane, ...]
    cell_ext: bool = False
    n_window: int = 0

    def __post_init__(self) -> None:
        if len(self.k) > LAYERS_MAX:
            raise StateError(f"{len(self.k)} layers; expected at most {LAYERS_MAX}")
        if not 0 <= self.n_window < max(1, len(self.k)):
            raise StateError(f"{self.n_window} of {len(self.k)} layers cannot have a window")
        if len(self.v) not in (0, len(self.k)):
            raise StateError(f"{len(self.v)} V planes for {len(self.k)} K planes")

    @property
    def n_layer(self) -> int:
        """Layers that are in the cache (not the model's layer count)."""
        return len(self.k)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """All K planes, then all V planes."""
        return self.k + self.v

    @property
    def sections(self) -> tuple[KVLayout, ...]:
        """The layouts of the caches that hold these layers, in llama.cpp's order."""
        if not self.n_window:
            return (self,)
        n_full = self.n_layer - self.n_window
        return (
            KVLayout(self.k[:n_full], self.v[:n_full], self.cell_ext),
            KVLayout(self.k[n_full:], self.v[n_full:], self.cell_ext),
        )

    @functools.cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's rows, with the extension and without headers."""
        ext = CELL_EXT_BYTES if self.cell_ext else 0
        return sum(plane.row_bytes for plane in self.planes) + ext

    @property
    def is_native(self) -> bool:
        """True when every plane has a cache type, so that a llama.cpp context can hold it."""
        return all(plane.ggml_type in CACHE_TYPES for plane in self.planes)

    @property
    def format_name(self) -> str:
        """`native`, or the stored format that the layout was made with by `stored_as`."""
        stored = (plane.format.name for plane in self.planes if not plane.format.is_cache_type)
        return next(stored, NATIVE)

    def stored_as(self, name: str) -> KVLayout:
        """The same values with every plane in the stored format `name` if it gets smaller (see
        `Plane.stored_as`); `native` is this layout itself. StateError for other names."""
        return self if name == NATIVE else _stored_as(self, name)

    def converts_to(self, other: KVLayout) -> bool:
        """Whether rows of this layout hold the same values as rows of `other`, format aside."""
        return (
            (self.n_layer, len(self.v), self.cell_ext, self.n_window)
            == (other.n_layer, len(other.v), other.cell_ext, other.n_window)
        ) and all(
            mine.n_elements == theirs.n_elements
            for mine, theirs in zip(self.planes, other.planes, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` takes it back if the layout is native."""
        value = {
            "k": [[plane.ggml_type, plane.row_bytes] for plane in self.k],
            "v": [[plane.ggml_type, plane.row_bytes] for plane in self.v],
            "cell_ext": self.cell_ext,
        }
        return value | ({"n_window": self.n_window} if self.n_window else {})

    @classmethod
    def from_json(cls, value: object) -> KVLayout:
        """The native layout that `to_json` described. Raises StateError for anything else."""
        if not isinstance(value, Mapping) or set(value) - {"n_window"} != {"k", "v", "cell_ext"}:
            raise StateError("a layout must be an object with exactly k, v and cell_ext")
        if not isinstance(value["cell_ext"], bool):
            raise StateError("cell_ext must be true or false")
        n_window = value.get("n_window", 0)
        if type(n_window) is not int:
            raise StateError("n_window must be an integer")
        k, v = _planes(value["k"], "k"), _planes(value["v"], "v")
        return cls(k, v, value["cell_ext"], n_window)


def _planes(value: object, name: str) -> tuple[Plane, ...]:
    if not isinstance(value, list | tuple) or len(value) > LAYERS_MAX:
        raise StateError(f"{name} must be a list of at most {LAYERS_MAX} planes")
    planes = []
    for item in value:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise StateError(f"{name} must hold [ggml_type, row_bytes] pairs")
        planes.append(cache_plane(item[0], item[1]))
    return tuple(planes)


def cache_plane(ggml_type: int, row_bytes: int) -> Plane:
    """A plane as external bytes describe it. Raises StateError unless it has a cache type:
    llama.cpp neither reads nor writes stored formats."""
    if ggml_type not in CACHE_TYPES:
        raise StateError(f"ggml type {ggml_type} is not a KV cache type")
    return Plane(ggml_type, row_bytes)


def stored_format(name: str) -> Format:
    """The stored format of that name. Raises StateError for any other name."""
    row = BY_NAME.get(name)
    if row is None or row.is_cache_type:
        raise StateError(f"{name!r} is not a stored format")
    return row


@functools.lru_cache(maxsize=256)
def _stored_as(layout: KVLayout, name: str) -> KVLayout:
    stored_format(name)
    k = tuple(plane.stored_as(name) for plane in layout.k)
    v = tuple(plane.stored_as(name) for plane in layout.v)
    return KVLayout(k, v, layout.cell_ext, layout.n_window)
