"""Anchors: where prompts are known to diverge from stored ones, told by the text around the place.

A position tells nothing about the next prompt, the text does: a date follows the same words in each
session, a reminder that moves from message to message begins with the same ones. Where a prompt leaves a
stored tower, two anchors are learned, each a run of GRAM tokens:

    tower   [ ... Today is | 25 . You may ... ]      before: the tokens up to the word that differs
    prompt  [ ... Today is | 26 . You may ... ]      behind: those of the tower, one token further on

The token at the divergence counts for neither: it is often one that joins the text with what stands
before it. No text is kept, only hashes that differ from process to process, so that nothing of a session that
was deleted is left here.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.store.tree.scope import tenant_of
from towerd.tokens import Ids, run_hashes

GRAM = 8
"""Tokens of an anchor: the headers of a message, and a few words more."""
POSITIONS_MAX = 4
"""The most positions of one prompt: each costs a state."""
ANCHORS_MAX = 64
"""Of one tenant."""
TENANTS_MAX = 256
APART_MIN = 16
"""Checkpoints closer together than this save next to nothing: the first will do."""
_WORD_MAX = 12
"""The longest word, in tokens; what is longer is none."""

Flags = npt.NDArray[np.bool_]
_Place = tuple[int, int]
"""The hash of a run of tokens, and how far from its first one the divergence is."""


@dataclass(slots=True)
class Anchor:
    """How often prompts diverged at a place, and when last, as a number that grows."""

    seen: int = 0
    last: int = 0


class WordStarts:
    """Finds the word that a token is part of. The digits of a date differ now in the last, now in the one
    before it; the beginning of the word is where all of these prompts agree."""

    def __init__(self, pieces: Sequence[bytes], message_ends: Collection[int]) -> None:
        """pieces: the bytes of each token; message_ends: ids of the tokens that end a message"""
        self._begins = np.array([piece[:1].isspace() for piece in pieces], np.bool_)
        self._ends = np.array([piece[-1:].isspace() for piece in pieces], np.bool_)
        for flags in (self._begins, self._ends):
            flags[list(message_ends)] = True

    def before(self, ids: Ids, at: int) -> int:
        """Where the word begins that token `at` is part of, or would be; `at` if that is far away."""
        for start in range(at, max(at - _WORD_MAX, 0), -1):
            if start < len(ids) and self._has(self._begins, ids.item(start)):
                return start
            if self._has(self._ends, ids.item(start - 1)):
                return start
        return at

    @staticmethod
    def _has(flags: Flags, id: int) -> bool:
        return not 0 <= id < len(flags) or bool(flags[id])  # a medium is no part of a word


class Anchors:
    """Those of each tenant, whatever adapters its prompts are for: the text is the same. Bounded: the tenants
    that learned nothing for longest are forgotten, of one tenant the anchors that were seen once, the oldest
    first. Not thread-safe."""

    def __init__(self, words: WordStarts) -> None:
        self._words = words
        self._tenants: OrderedDict[str, dict[_Place, Anchor]] = OrderedDict()
        self._seed = secrets.randbits(64)
        self._n_learned = 0

    def learn(self, ids: Ids, scope: str, at: int, tower: Ids) -> None:
        """A prompt leaves a stored tower at token `at`. tower: the tokens with which that
        continues, of which GRAM + 1 are enough"""
        word = self._words.before(ids, at)
        before, behind = ids[max(word - GRAM, 0) : word], tower[1 : GRAM + 1]
        tenant = tenant_of(scope)
        known = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > TENANTS_MAX:
            self._tenants.popitem(last=False)
        self._n_learned += 1
        for run, offset in ((before, GRAM), (behind, -1)):
            for gram in run_hashes(run, GRAM, self._seed).tolist():
                anchor = known.setdefault((gram, offset), Anchor())
                anchor.seen, anchor.last = anchor.seen + 1, self._n_learned
        while len(known) > ANCHORS_MAX:
            del known[min(known, key=lambda place: (known[place].seen > 1, known[place].last))]

    def positions(self, ids: Ids, scope: str, start: int) -> list[int]:
        """Where a prompt is likely to diverge behind token `start`, the likeliest first: at the beginnings
        of words, at the first and the last occurrence of each anchor, APART_MIN apart."""
        found: list[int] = []
        for at in self._occurrences(ids, scope):
            at = self._words.before(ids, at)
            near = [each for each in found if abs(each - at) < APART_MIN]
            if at <= start or (near and at >= min(near)):
                continue
            found = [each for each in found if each not in near]
            if len(found) < POSITIONS_MAX:
                found.append(at)
        return found

    def _occurrences(self, ids: Ids, scope: str) -> Iterator[int]:
        """Those of the anchors that were seen most often first."""
        known = self._tenants.get(tenant_of(scope))
        if not known:
            return
        grams = run_hashes(ids, GRAM, self._seed)
        wanted = np.unique(np.array([gram for gram, _ in known], np.uint64))
        places = np.searchsorted(wanted, grams).clip(max=len(wanted) - 1)
        hits = np.flatnonzero(wanted[places] == grams)
        met = grams[hits]
        for gram, offset in sorted(
            known, key=lambda place: (known[place].seen, known[place].last), reverse=True
        ):
            mine = hits[met == np.uint64(gram)]
            if len(mine):
                yield from dict.fromkeys((int(mine[-1]) + offset, int(mine[0]) + offset))
