"""The header of an untrusted GGUF: its keys, and where its tensors lie.

The gguf package trusts the lengths that a file states, and ggml aborts the process on some wrong
ones. Here nothing is read or allocated beyond what the bytes of the file hold (docs/gguf.md of
ggml).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from towerd.codec.errors import UnknownModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
SHAPE_MAX = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_ITEMS_MAX = 1 << 24

Value = int | float | bool | bytes | None


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: ggml's type, its shape (fastest index first) and its offset in the file."""

    type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """The header. `keys`: numbers and strings; None for arrays, whose items are skipped."""

    keys: dict[str, Value]
    tensors: dict[str, TensorEntry]


def read_header(data: memoryview) -> GgufHeader:
    """The header of a whole file. UnknownModel if it is not a GGUF, or cut short."""
    try:
        return _read(_Cursor(data))
    except (struct.error, ValueError) as error:
        raise UnknownModel(f"The model is damaged: {error}.") from error


def _read(cursor: _Cursor) -> GgufHeader:
    if bytes(cursor.take(4)) != MAGIC:
        raise ValueError("it does not start like a GGUF")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"its GGUF has version {version}, known are 2 and 3")
    n_tensors, n_keys = int(cursor.number("Q")), int(cursor.number("Q"))
    keys: dict[str, Value] = {}
    for _ in range(n_keys):
        name = cursor.name()
        keys[name] = cursor.value(int(cursor.number("I")))
    entries = [_entry(cursor) for _ in range(n_tensors)]
    alignment = keys.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("its alignment is no number")
    first = cursor.at + -cursor.at % alignment
    tensors = {
        name: TensorEntry(type, shape, first + offset) for name, type, shape, offset in entries
    }
    return GgufHeader(keys, tensors)


def _entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name, n_dims = cursor.name(), int(cursor.number("I"))
    if n_dims > SHAPE_MAX:
        raise ValueError(f"a tensor has {n_dims} dimensions")
    shape = tuple(int(cursor.number("Q")) for _ in range(n_dims))
    return name, int(cursor.number("I")), shape, int(cursor.number("Q"))


class _Cursor:
    """Reads forward; every item takes at least a byte of the file."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> memoryview:
        if n > len(self.data) - self.at:
            raise ValueError("it ends too early")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value

    def text(self) -> bytes:
        return bytes(self.take(int(self.number("Q"))))

    def name(self) -> str:
        return self.text().decode()

    def value(self, type: int) -> Value:
        if type in _SCALARS:
            return self.number(_SCALARS[type])
        if type == _STRING:
            return self.text()
        if type != _ARRAY:
            raise ValueError(f"a key has the unknown type {type}")
        item, n = int(self.number("I")), int(self.number("Q"))
        if item in _SCALARS:
            self.take(n * struct.calcsize(_SCALARS[item]))
        elif item == _STRING and n <= _ITEMS_MAX:
            for _ in range(n):
                self.take(int(self.number("Q")))
        else:
            raise ValueError(f"an array has items of the unknown type {item}, or too many")
        return None
