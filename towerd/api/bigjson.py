"""JSON bodies of any size without holding the interpreter for long.

A C decoder keeps the GIL for its whole run: 10 MB of text is 8 ms, 10 MB of token ids 45 ms, and
the event loop waits for it even when the decoder runs in a worker thread. So long strings and
long integer arrays are lifted out of the document first, decoded in slices, and put back.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from towerd.errors import InvalidRequest

LIFT_BYTES_MIN = 2048
"""Strings and integer arrays longer than this are lifted out."""
SLICE_BYTES = 256 * 1024
"""How much is decoded in one go: well under a millisecond."""

_MARK = "\x00towerd-" + secrets.token_hex(8) + "-"
_MARK_JSON = b'"\\u0000' + _MARK[1:].encode()
_OF_INTS = b" \t\r\n0123456789,-"
"""All that the text of an integer array is made of."""
_SHORT = re.compile(
    rb'(?:[^"]{0,2048}+"[^"\\]{0,1000}+(?:\\.[^"\\]{0,32}+){0,30}+"){0,64}+', re.DOTALL
)
"""Strings, and what stands between them, that are too short to be lifted: a chat of ten thousand
messages has forty thousand of them. Every part is bounded, so that no match takes long."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]")


@dataclass(frozen=True, slots=True)
class UnreadInts:
    """An array of more integers than its reader can use: they were counted and not decoded."""

    n: int


def decode(
    data: bytes | bytearray, ints_max: int | None = None, values_max: int | None = None
) -> Any:
    """The document's value. Integer arrays over `LIFT_BYTES_MIN` come back as int64 arrays, those
    of more than `ints_max` integers as `UnreadInts`.

    Raises InvalidRequest when it is not JSON, or has more than `values_max` other values."""
    try:
        if len(data) <= LIFT_BYTES_MIN:
            return msgspec.json.decode(data)
        lifted = _Lifted(ints_max, values_max)
        skeleton = _lift(bytes(data), lifted)
        if values_max is not None and _has_more(skeleton, values_max):
            raise lifted.too_many()
        return _put_back(msgspec.json.decode(skeleton), lifted.values)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("The request body is nested too deeply") from error
    except OverflowError as error:
        raise InvalidRequest("The request body has an integer beyond 64 bits") from error


class _Lifted:
    """What was taken out of a document, by the marks that stand for it."""

    def __init__(self, ints_max: int | None, values_max: int | None) -> None:
        self.values: dict[str, Any] = {}
        self._ints_max = ints_max
        self._values_max = values_max
        self._n_arrays = 0

    def add(self, value: Any) -> bytes:
        """The mark that stands for `value` from now on."""
        number = len(self.values)
        self.values[f"{_MARK}{number}"] = value
        return b'%s%d"' % (_MARK_JSON, number)

    def add_ints(self, data: bytes, start: int, stop: int) -> bytes:
        """The mark of the integers in data[start:stop]."""
        if self._ints_max is not None:
            n = 1 + _count_commas(data, start, stop)
            if n > self._ints_max:
                return self.add(UnreadInts(n))
        return self.add(_decode_ints(data, start, stop))

    def count_array(self) -> None:
        """One more array was looked at. Raises InvalidRequest if that makes too many values."""
        self._n_arrays += 1
        if self._values_max is not None and self._n_arrays > self._values_max:
            raise self.too_many()

    def too_many(self) -> InvalidRequest:
        return InvalidRequest(f"The request body has more than {self._values_max} values")


def _lift(data: bytes, lifted: _Lifted) -> bytes:
    """The document with a mark in place of everything long; what was long goes to `lifted`."""
    out: list[bytes] = []
    copied = 0
    position = _short_end(data, 0)
    while (quote := data.find(b'"', position)) >= 0:
        copied = _lift_ints(data, copied, position, quote, out, lifted)
        end = _string_end(data, quote + 1)
        if end - quote > LIFT_BYTES_MIN:
            out.append(data[copied:quote])
            out.append(lifted.add(_decode_text(data, quote + 1, end)))
            copied = end + 1
        position = _short_end(data, end + 1)
    copied = _lift_ints(data, copied, position, len(data), out, lifted)
    out.append(data[copied:])
    return b"".join(out)


def _short_end(data: bytes, start: int) -> int:
    """Where the first thing after `start`, which is in no string, begins that may be lifted."""
    while (found := _SHORT.match(data, start)) and found.end() > start:
        start = found.end()
    return start


def _string_end(data: bytes, start: int) -> int:
    """Position of the quote that closes the string opened just before `start`."""
    position = start
    while (end := data.find(b'"', position)) >= 0:
        run = end
        while run > start and data[run - 1] == 0x5C:
            run -= 1
        if (end - run) % 2 == 0:
            return end
        position = end + 1
    raise InvalidRequest("The request body is not valid JSON: a string never ends")


def _decode_text(data: bytes, start: int, stop: int) -> str:
    """The string between two quotes, decoded slice by slice."""
    parts: list[str] = []
    while start < stop:
        cut = stop if stop - start <= SLICE_BYTES else _cut(data, start, start + SLICE_BYTES)
        parts.append(msgspec.json.decode(b'"%s"' % data[start:cut], type=str))
        start = cut
    return "".join(parts)


def _cut(data: bytes, start: int, cut: int) -> int:
    """The last place <= `cut` that splits neither a UTF-8 character, nor an escape, nor a
    surrogate pair. `start` is such a place."""
    whole = cut
    while data[cut] & 0xC0 == 0x80 and cut > start:
        cut -= 1
    if cut == start:
        return whole  # not UTF-8 at all; the decoder says so
    slash = data.rfind(b"\\", max(start, cut - 5), cut)
    if slash < 0:
        run = cut
    else:
        run = slash
        while run > start and data[run - 1] == 0x5C:
            run -= 1
        begins_escape = (slash - run) % 2 == 0
        length = 6 if data[slash + 1] == 0x75 else 2
        if begins_escape and slash + length > cut:
            cut = slash
    if _LOW_SURROGATE.match(data, cut) and _HIGH_SURROGATE.match(data, cut - 6):
        cut -= 6
    return cut


def _lift_ints(
    data: bytes, copied: int, start: int, stop: int, out: list[bytes], lifted: _Lifted
) -> int:
    """Lift the long integer arrays of [start, stop), which holds no string; returns how far the
    document is copied to `out` or lifted."""
    if stop - start <= LIFT_BYTES_MIN:
        return copied
    while (opening := data.find(b"[", start, stop)) >= 0:
        closing = data.find(b"]", opening, stop)
        if closing < 0:
            break
        lifted.count_array()
        opening = data.rfind(b"[", opening, closing)  # the innermost: one pass over the region
        if closing - opening > LIFT_BYTES_MIN and _all_ints(data, opening + 1, closing):
            out.append(data[copied:opening])
            out.append(lifted.add_ints(data, opening + 1, closing))
            copied = closing + 1
        start = closing + 1
    return copied


def _all_ints(data: bytes, start: int, stop: int) -> bool:
    while start < stop:
        end = min(stop, start + SLICE_BYTES)
        if data[start:end].translate(None, _OF_INTS):
            return False
        start = end
    return True


def _has_more(skeleton: bytes, values_max: int) -> bool:
    """Whether it has more than `values_max` values, by the commas that are in no string."""
    if _count_commas(skeleton, 0, len(skeleton)) <= values_max:
        return False
    n = end = 0
    for found in _STRING.finditer(skeleton):
        n += skeleton.count(b",", end, found.start())
        end = found.end()
        if n > values_max:
            return True
    return n + _count_commas(skeleton, end, len(skeleton)) > values_max


def _count_commas(data: bytes, start: int, stop: int) -> int:
    slices = range(start, stop, SLICE_BYTES)
    return sum(data.count(b",", at, min(at + SLICE_BYTES, stop)) for at in slices)


def _decode_ints(data: bytes, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    parts = []
    while start <= stop:
        cut = stop
        if stop - start > SLICE_BYTES:
            cut = data.find(b",", start + SLICE_BYTES, stop)
            cut = stop if cut < 0 else cut
        values = msgspec.json.decode(b"[%s]" % data[start:cut], type=list[int])
        if not values:
            raise InvalidRequest("The request body is not valid JSON: a value is missing")
        parts.append(np.array(values, dtype=np.int64))
        start = cut + 1
    return np.concatenate(parts)


def _put_back(value: Any, lifted: dict[str, Any]) -> Any:
    """`value` with every mark replaced by what it stands for, which is taken out of `lifted`. Lists
    and objects stay the same ones: most have nothing to replace, and there may be ten thousands."""
    if isinstance(value, str):
        return lifted.pop(value) if value.startswith(_MARK) else value
    if isinstance(value, dict):
        return _put_back_in(value, lifted)
    if isinstance(value, list):
        for i, each in enumerate(value):
            if not lifted:
                break
            if type(each) is not str or each.startswith(_MARK):
                value[i] = _put_back(each, lifted)
    return value


def _put_back_in(value: dict[str, Any], lifted: dict[str, Any]) -> dict[str, Any]:
    is_key = False
    for key, each in value.items():
        if not lifted:
            break
        is_key = is_key or key.startswith(_MARK)
        if type(each) is not str or each.startswith(_MARK):
            value[key] = _put_back(each, lifted)
    if not is_key:
        return value
    keys = [_put_back(key, lifted) for key in value]
    if not all(isinstance(key, str) for key in keys):
        raise InvalidRequest("The request body is not valid JSON: an object key is an array")
    return dict(zip(keys, value.values(), strict=True))
