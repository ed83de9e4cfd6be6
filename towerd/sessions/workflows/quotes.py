"""Finds the workflow that a prompt quotes: agents pass text to each other, and text keeps its
tokens.

Every run of WINDOW tokens is hashed; one hash in SAMPLE is kept, chosen by its value, so that the
same text gives the same sample wherever it stands (Manber 1994, Schleimer et al. 2003). What two
workflows have in common, such as a greeting, is evidence for neither.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

from towerd.tokens import Ids, run_hashes

WINDOW = 12
SAMPLE = 4
EVIDENCE_MIN = 2
"""Sampled hashes that must point to the same workflow."""
HASHES_MAX = 1 << 16
_COMMON = ""


class Quotes:
    """Hashes of the texts of one tenant's workflows. Bounded: the oldest are forgotten first."""

    def __init__(self) -> None:
        self._owner: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owner)

    def source(self, ids: Ids) -> str | None:
        """The workflow that these tokens quote most, if any."""
        return next((workflow for workflow, _ in self.sources(sample(ids))), None)

    def sources(self, hashes: Iterable[int]) -> list[tuple[str, int]]:
        """The workflows that a text with these sampled hashes quotes, the most quoted first, each with
        the number of hashes that it alone has."""
        found = Counter(self._owner.get(h, _COMMON) for h in hashes)
        del found[_COMMON]
        return [(workflow, n) for workflow, n in found.most_common() if n >= EVIDENCE_MIN]

    def add(self, ids: Ids, workflow: str) -> None:
        """Record `ids` as a text of `workflow`."""
        for h in sample(ids):
            owner = self._owner.setdefault(h, workflow)
            if owner != workflow:
                self._owner[h] = _COMMON
            self._owner.move_to_end(h)
        while len(self._owner) > HASHES_MAX:
            self._owner.popitem(last=False)


def sample(ids: Ids) -> list[int]:
    """The sampled hashes of all runs of WINDOW tokens, without duplicates."""
    hashes = run_hashes(ids, WINDOW)
    kept = np.unique(hashes[hashes % np.uint64(SAMPLE) == 0])
    found: list[int] = kept.tolist()
    return found
