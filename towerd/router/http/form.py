"""One field of a form (multipart/form-data), in time that grows with the form's length alone."""

from __future__ import annotations

import re
from email.message import Message

from towerd.errors import InvalidRequest

PARTS_MAX = 1024
HEAD_BYTES_MAX = 4096
VALUE_BYTES_MAX = 4096
_NAME = re.compile(rb'\bname=(?:"([^"]*)"|([^";\s]*))', re.IGNORECASE)
_DISPOSITION = b"content-disposition:"
_END = b"\r\n\r\n"


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names. Raises InvalidRequest if there is none."""
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_boundary()
    if not boundary:
        raise InvalidRequest("The Content-Type of the form names no boundary")
    return boundary.encode("utf-8", "surrogateescape")


def field_of(body: bytes, boundary: bytes, name: str) -> str | None:
    """The text of the first field of a name; None if there is none. Raises InvalidRequest if it
    comes after more than `PARTS_MAX` parts."""
    between = b"\r\n--" + boundary
    opening = between[2:]
    start = len(opening) if body.startswith(opening) else _after(body, between, 0)
    for _ in range(PARTS_MAX):
        if start < 0:
            return None
        end = body.find(between, start)
        head_end = body.find(_END, start, start + HEAD_BYTES_MAX)
        if end >= 0 and 0 <= head_end < end and _named(body[start:head_end]) == name.encode():
            value = body[head_end + len(_END) : end]
            return value[:VALUE_BYTES_MAX].decode("utf-8", "replace")
        start = end + len(between) if end >= 0 else -1
    raise InvalidRequest(f"A form has at most {PARTS_MAX} parts")


def _after(body: bytes, between: bytes, start: int) -> int:
    """Where the next part begins; -1 if there is none."""
    found = body.find(between, start)
    return -1 if found < 0 else found + len(between)


def _named(head: bytes) -> bytes | None:
    """The field name in the head of a part."""
    for line in head.split(b"\r\n"):
        if line[: len(_DISPOSITION)].lower() == _DISPOSITION:
            found = _NAME.search(line)
            return None if found is None else found[1] or found[2]
    return None
