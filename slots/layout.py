"""What one token's rows look like: the ggml type and byte size of each layer's K and V row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from towerd.kernels.formats import BY_TYPE, Format
from towerd.slots.errors import StateError

STATE_VERSION = 3
"""llama.cpp's sequence state version that this package reads and writes."""
CELL_EXT_BYTES = 12
"""Per-cell extension (x, y, token id) that M-RoPE models store."""
LAYERS_MAX = 4096
ROW_BYTES_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's K or V row: `row_bytes` bytes of ggml type `ggml_type`.

    Raises StateError for a type that is no cache type or a size that is not whole blocks."""

    ggml_type: int
    row_bytes: int

    def __post_init__(self) -> None:
        if type(self.ggml_type) is not int or type(self.row_bytes) is not int:
            raise StateError("ggml_type and row_bytes must be integers")
        row = BY_TYPE.get(self.ggml_type)
        if row is None:
            raise StateError(f"ggml type {self.ggml_type} is not a KV cache type")
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


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The planes of every cached layer in llama.cpp's order (ascending layer index).

    `v` is as long as `k`, or empty for caches that keep no V (MLA). `cell_ext`: every cell
    carries 12 more bytes. Raises StateError when the counts do not fit."""

    k: tuple[Plane, ...]
    v: tuple[Plane, ...]
    cell_ext: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.k) <= LAYERS_MAX:
            raise StateError(f"{len(self.k)} layers; expected 1 to {LAYERS_MAX}")
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
    def token_bytes(self) -> int:
        """Bytes that one token's rows take, extension included, headers not."""
        ext = CELL_EXT_BYTES if self.cell_ext else 0
        return sum(plane.row_bytes for plane in self.planes) + ext

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` takes it back."""
        return {
            "k": [[plane.ggml_type, plane.row_bytes] for plane in self.k],
            "v": [[plane.ggml_type, plane.row_bytes] for plane in self.v],
            "cell_ext": self.cell_ext,
        }

    @classmethod
    def from_json(cls, value: object) -> KVLayout:
        """The layout that `to_json` described. Raises StateError for anything else."""
        if not isinstance(value, Mapping) or set(value) != {"k", "v", "cell_ext"}:
            raise StateError("a layout must be an object with exactly k, v and cell_ext")
        if not isinstance(value["cell_ext"], bool):
            raise StateError("cell_ext must be true or false")
        return cls(_planes(value["k"], "k"), _planes(value["v"], "v"), value["cell_ext"])


def _planes(value: object, name: str) -> tuple[Plane, ...]:
    if not isinstance(value, list | tuple) or len(value) > LAYERS_MAX:
        raise StateError(f"{name} must be a list of at most {LAYERS_MAX} planes")
    planes = []
    for item in value:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise StateError(f"{name} must hold [ggml_type, row_bytes] pairs")
        planes.append(Plane(item[0], item[1]))
    return tuple(planes)
