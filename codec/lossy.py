"""Below the entropy, on demand: what a model finds nearly impossible is left out.

Section 10.3 of the towers paper codes tokens under a threshold p_min as one "out of vocabulary"
word. Measured on sessions of 16 KB, a word that stands for the lost ones costs more than it saves: it
is itself unexpected, and so is what follows it. So symbols that the mixer gives less than p_min are
left out of the text, which is coded exactly afterwards: what comes back is known, has a hash, and
differs from the original in as many symbols as `Loss` says. Nothing in towerd does this by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from towerd.codec.base import Ids, Vocabulary, as_ids
from towerd.codec.mix import MiniText
from towerd.codec.mixers import table_bits
from towerd.codec.prior.file import Prior
from towerd.codec.text import MARK_FIRST, Text, from_ids, split


@dataclass(frozen=True)
class Loss:
    """Ids that stand for others: `n_lost` of `n_symbols` symbols of the text were left out."""

    ids: Ids
    n_lost: int
    n_symbols: int


def reduce(ids: Ids, vocabulary: Vocabulary, prior: Prior, p_min: float) -> Loss:
    """The ids with what is less likely than `p_min` left out; control tokens always stay.

    ValueError unless 0 <= p_min < 1."""
    if not 0 <= p_min < 1:
        raise ValueError(f"p_min is a probability from 0 to under 1, not {p_min}.")
    text, mini = from_ids(as_ids(ids), vocabulary), MiniText(prior)
    symbols = mini.symbols(text.text)
    mixer = prior.mixer()
    mixer.reset(1, table_bits(len(symbols)))
    n_lost, parts = 0, []
    for i, rank in enumerate(symbols.tolist()):
        bits, chances = mixer.encode(0, symbols[i : i + 1])
        piece = mini.bytes_by_rank[rank]
        chance = float(np.prod(np.where(bits == 1, chances, 1 - chances)))
        lost = chance < p_min and not (len(piece) == 1 and piece[0] >= MARK_FIRST)
        n_lost += int(lost)
        if not lost:
            parts.append(piece)
    changed = _tokenized(b"".join(parts), text, vocabulary) if n_lost else as_ids(ids)
    return Loss(changed, n_lost, len(symbols))


def _tokenized(changed: bytes, text: Text, vocabulary: Vocabulary) -> Ids:
    """The ids of `text` with other runs between its marks."""
    kinds = [*text.kinds, *[-1] * 8]
    others = iter(text.others)
    out: list[int] = []
    for part in filter(None, split(changed)):
        if len(part) == 1 and part[0] >= MARK_FIRST:
            kind = kinds[part[0] - MARK_FIRST]
            out.append(kind if kind >= 0 else next(others))
        else:
            out += [int(i) for i in vocabulary.tokenize(part.decode(errors="ignore").encode())]
    return as_ids(out)
