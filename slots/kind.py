"""The kinds of memory that a model keeps of a sequence, and where each can be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Cut: TypeAlias = Literal["anywhere", "boundary", "whole"]


@dataclass(frozen=True, slots=True)
class StateKind:
    """One kind of llama.cpp memory.

    cut: where a stored sequence can be resumed: after any token, where a state checkpoint was
    taken, or only as one piece
    has_rows: attention rows of single positions can be stored
    has_state: it needs a state that is valid at one position only"""

    name: str
    cut: Cut
    has_rows: bool
    has_state: bool

    @property
    def why_not_movable(self) -> str:
        """Why stored rows cannot be put at another place, or "" if they can."""
        return _WHY_NOT_MOVABLE.get(self.name, "")

    @property
    def can_slice(self) -> bool:
        """Whether every prefix of a stored sequence can be resumed."""
        return self.cut == "anywhere"


_WHY_NOT_MOVABLE = {
    "hybrid": "it has recurrent layers beside attention",
    "recurrent": "its layers are recurrent",
    "whole": "its state can only be stored as a whole",
}

DENSE = StateKind("dense", "anywhere", has_rows=True, has_state=False)
WINDOW = StateKind("window", "anywhere", has_rows=True, has_state=False)
HYBRID = StateKind("hybrid", "boundary", has_rows=True, has_state=True)
RECURRENT = StateKind("recurrent", "boundary", has_rows=False, has_state=True)
WHOLE = StateKind("whole", "whole", has_rows=False, has_state=True)
"""Memories whose format is not known well enough to cut: kept as llama.cpp wrote them."""
