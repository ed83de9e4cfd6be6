"""Lossy coding on demand: symbols that a model finds nearly impossible are left out.

Section 10.3 of the towers paper codes tokens under a threshold p_min as one "out of vocabulary"
word. Measured on sessions of 16 KB, a word that stands for the lost ones costs more than it saves: it
is itself unexpected, and so is the text after it. So symbols that the mixer gives less than p_min
are left out, and the remaining text replaces the original: it is sent, evaluated and coded exactly,
and differs from the original in as many symbols as `Loss` says. Nothing in towerd does this by
itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from towerd.codec.forms.mix import BASE_IDS_MAX, MiniText, table_bits
from towerd.codec.prior import file
from towerd.codec.text import KINDS_MAX, MARK_FIRST, kinds_of, split


@dataclass(frozen=True)
class Loss:
    """A shortened text: `n_lost` of `n_symbols` symbols (tokens of the mini vocabulary) were left
    out. A character that lost some of its bytes is removed."""

    text: str
    n_lost: int
    n_symbols: int


def reduce(text: str, p_min: float, names: Sequence[bytes] = (), base: str = "") -> Loss:
    """`text`, which follows `base`, without the symbols less likely than `p_min`.

    `names`: how control tokens are written (`TokenVocabulary.names`); they always stay. ValueError
    unless 0 <= p_min < 1, UnknownModel if the package has no table."""
    if not 0 <= p_min < 1:
        raise ValueError(f"p_min is a probability from 0 to under 1, not {p_min}.")
    prior = file.bundled()
    mini, marks = MiniText(prior), _Marks(names, (base + text).encode())
    before = mini.symbols(marks.put(base.encode()))[-BASE_IDS_MAX:]
    symbols = mini.symbols(marks.put(text.encode()))
    mixer = prior.mixer()
    mixer.reset(1, table_bits(len(before) + len(symbols)))
    mixer.learn(0, before)
    n_lost, parts = 0, []
    for i, rank in enumerate(symbols.tolist()):
        bits, chances = mixer.encode(0, symbols[i : i + 1])
        piece = mini.bytes_by_rank[rank]
        chance = float(np.prod(np.where(bits == 1, chances, 1 - chances)))
        lost = chance < p_min and not _is_mark(piece)
        n_lost += int(lost)
        if not lost:
            parts.append(piece)
    left = marks.take(b"".join(parts), text.encode()) if n_lost else text
    return Loss(left, n_lost, len(symbols))


class _Marks:
    """Replaces the names of control tokens by marks, and back."""

    def __init__(self, names: Sequence[bytes], text: bytes) -> None:
        longest = sorted({name for name in names if name}, key=lambda name: (-len(name), name))
        self._pattern = re.compile(b"|".join(map(re.escape, longest)) or rb"(?!)")
        self._ids = {name: i for i, name in enumerate(longest)}
        self._kinds = kinds_of([self._ids[name] for name in self._pattern.findall(text)], longest)

    def put(self, text: bytes) -> bytes:
        return self._pattern.sub(lambda found: self._mark(found[0]), text)

    def take(self, marked: bytes, text: bytes) -> str:
        """The text of `marked`, whose marks come from `text`."""
        names = iter(self._pattern.findall(text))
        parts = [next(names) if _is_mark(part) else part for part in split(marked)]
        return "".join([part.decode(errors="ignore") for part in parts])

    def _mark(self, name: bytes) -> bytes:
        i = self._ids[name]
        return bytes((MARK_FIRST + (self._kinds.index(i) if i in self._kinds else KINDS_MAX),))


def _is_mark(piece: bytes) -> bool:
    return len(piece) == 1 and piece[0] >= MARK_FIRST
