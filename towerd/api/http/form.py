"""Forms (multipart/form-data), read in time that grows with their length alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from towerd.errors import InvalidRequest

PARTS_MAX = 1024
HEAD_BYTES_MAX = 4096
FIELD_BYTES_MAX = 64 * 1024
"""Of a field that is no file, and eight times as much of all together."""
BOUNDARY_BYTES_MAX = 70
"""RFC 2046."""
SEARCHED_BYTES = 1 << 20
"""How much is searched in one call, which no other thread can interrupt."""
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s";]+))', re.IGNORECASE)
_PARAMETER = re.compile(rb'[;\s]([a-z*]+)=(?:"([^"]*)"|([^";\s]*))', re.IGNORECASE)
_DISPOSITION = b"content-disposition:"
_END = b"\r\n\r\n"


@dataclass(slots=True)
class HttpForm:
    """What a form says."""

    fields: dict[str, str | list[str]] = field(default_factory=dict)
    """Name -> text; of a name that occurs more than once, all of them."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name -> where its last file begins and ends in the body."""

    def text(self, name: str) -> str | None:
        """The first text of a name; None if there is none."""
        found = self.fields.get(name)
        return found[0] if isinstance(found, list) else found

    def _add(self, name: str, text: str) -> None:
        before = self.fields.get(name)
        if before is None:
            self.fields[name] = text
        elif isinstance(before, list):
            before.append(text)
        else:
            self.fields[name] = [before, text]


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names. Raises InvalidRequest if there is none."""
    found = _BOUNDARY.search(content_type)
    boundary = (found[1] or found[2]).encode("utf-8", "surrogateescape") if found else b""
    if not 0 < len(boundary) <= BOUNDARY_BYTES_MAX:
        raise InvalidRequest(
            "The Content-Type of the form names no boundary"
            if not boundary
            else f"The boundary of a form has at most {BOUNDARY_BYTES_MAX} characters"
        )
    return boundary


def read_form(body: bytes, boundary: bytes) -> HttpForm:
    """The parts of a form; what follows a part without an end is left out. Raises InvalidRequest for one
    that has more than is taken. Call it off the event loop if it is big."""
    form, n_bytes = HttpForm(), 0
    between = b"\r\n--" + boundary
    opening = between[2:]
    start = len(opening) if body.startswith(opening) else _after(body, between, 0)
    for _ in range(PARTS_MAX):
        end = _find(body, between, start) if start >= 0 else -1
        if end < 0:
            return form
        head_end = body.find(_END, start, min(end, start + HEAD_BYTES_MAX))
        says = _parameters(body[start:head_end]) if head_end >= 0 else {}
        if (name := says.get(b"name")) is not None:
            text, begin = name.decode("utf-8", "replace"), head_end + len(_END)
            if b"filename" in says or b"filename*" in says:
                form.files[text] = (begin, end)
            else:
                n_bytes += end - begin
                if end - begin > FIELD_BYTES_MAX or n_bytes > 8 * FIELD_BYTES_MAX:
                    raise InvalidRequest(f"A field of a form has at most {FIELD_BYTES_MAX} bytes")
                form._add(text, body[begin:end].decode("utf-8", "replace"))
        start = end + len(between)
    raise InvalidRequest(f"A form has at most {PARTS_MAX} parts")


def _after(body: bytes, between: bytes, start: int) -> int:
    """Where the next part begins; -1 if there is none."""
    found = _find(body, between, start)
    return -1 if found < 0 else found + len(between)


def _find(body: bytes, what: bytes, start: int) -> int:
    """As bytes.find, in pieces."""
    for begin in range(start, len(body), SEARCHED_BYTES):
        found = body.find(what, begin, begin + SEARCHED_BYTES + len(what) - 1)
        if found >= 0:
            return found
    return -1


def _parameters(head: bytes) -> dict[bytes, bytes]:
    """What the line of a part's head that names it says, the names in lower case. Nothing within a quoted
    value is taken for a parameter."""
    for line in head.split(b"\r\n"):
        if line[: len(_DISPOSITION)].lower() == _DISPOSITION:
            return {
                each[1].lower(): each[2] or each[3] or b"" for each in _PARAMETER.finditer(line)
            }
    return {}
