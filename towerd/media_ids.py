"""The ids of images and sounds among a prompt's tokens.

`towerd.wire` derives them from the bytes of a medium and of the projector. They are negative, so
that no token has them, and bit 30 is clear only in the first id of a medium: the ids alone tell
where media begin and end. For a model with M-RoPE they also tell whether the tokens of a medium
share one position: bit 29 of the first id is set then, and its lowest 16 bits are how many positions
later the next token is.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.tokens import Ids

Span: TypeAlias = tuple[int, int]

_FIRST_BELOW = -(1 << 30)
_AT_ONE_PLACE = 1 << 29
_PLACES = (1 << 16) - 1


def spans_of(ids: Ids) -> tuple[Span, ...]:
    """(first position, position after the last) of each medium, or of the part that `ids` has."""
    inside = np.asarray(ids) < 0
    if not inside.any():
        return ()
    starts = np.flatnonzero(starts_of(ids))
    text = np.append(np.flatnonzero(~inside), len(ids))
    ends = np.minimum(text[np.searchsorted(text, starts)], np.append(starts[1:], len(ids)))
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def starts_of(ids: Ids) -> npt.NDArray[np.bool_]:
    """bool[n]: whether a medium, or the part of one that `ids` has, begins with each id."""
    inside = np.asarray(ids) < 0
    after_text = np.concatenate([[True], ~inside[:-1]]) if len(inside) else inside
    return inside & (after_text | (np.asarray(ids) < _FIRST_BELOW))


def whole(spans: tuple[Span, ...], n: int) -> int:
    """`n`, or the start of the medium that a cut at `n` would split."""
    return next((start for start, end in spans if start < n < end), n)


def is_token(ids: Ids) -> npt.NDArray[np.bool_]:
    """bool[n]: whether each id is a token of the vocabulary."""
    return np.asarray(ids) >= 0


def is_first(token_id: int) -> bool:
    """Whether a medium begins with this id."""
    return token_id < _FIRST_BELOW


def n_places(token_id: int) -> int | None:
    """For a model with M-RoPE: how many positions the medium that begins with this id takes, if its
    tokens share the first of them; None: each token has a position of its own, or none begins."""
    if not is_first(token_id) or not token_id & _AT_ONE_PLACE:
        return None
    return token_id & _PLACES
