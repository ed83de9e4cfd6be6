"""The names of transform codings as formats of stored rows: `t:<coding>:<basis>`.

A basis is named by the first 8 bytes of its digest, in hex; the coded rows themselves have all of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from towerd.slots.errors import StateError

PREFIX = "t:"
CODED_BYTES_MAX = 1 << 30
"""The most bytes of one piece of coded rows."""
_NAME = re.compile(r"t:([A-Za-z0-9_.-]{1,32}):([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class CodedPiece:
    """Rows [p0, p0 + n_rows) as coded rows (`towerd.codec.rows.coded`)."""

    p0: int
    n_rows: int
    data: bytes


def is_coded(format: str) -> bool:
    """Whether a format is a transform coding."""
    return format.startswith(PREFIX)


def coded_format(coding: str, basis_digest: bytes) -> str:
    """The format of rows in a coding of a basis."""
    return f"{PREFIX}{coding}:{basis_name(basis_digest)}"


def basis_name(digest: bytes) -> str:
    """The name of a basis in formats and of its file."""
    return digest[:8].hex()


def bases_in(text: str) -> set[str]:
    """The names of all bases that formats in a text name."""
    return {found[2] for found in _NAME.finditer(text)}


def coding_of(format: str) -> tuple[str, str]:
    """The coding and the name of its basis. Raises StateError for what is no such format."""
    found = _NAME.fullmatch(format)
    if found is None:
        raise StateError(f"{format!r} is not a transform coding")
    return found[1], found[2]
