"""Probabilities of return: the C++ kernel if it is built, else the numpy reference.

TOWERD_KERNELS=reference forces the numpy one; both give the same numbers up to rounding."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from towerd.kernels.dispatch import ENV, native
from towerd.kernels.reference import hazard as reference_hazard
from towerd.kernels.reference.hazard import HazardWeights, Table

__all__ = ["HazardWeights", "Table", "chances"]
_Kernel: TypeAlias = Callable[[HazardWeights, Table, Sequence[int]], Table]


def chances(weights: HazardWeights, x: Table, of: Sequence[int]) -> Table:
    """See `reference.hazard.chances`."""
    return _kernel(os.environ.get(ENV, ""))(weights, x, of)


@functools.cache
def _kernel(choice: str) -> _Kernel:
    built = None if choice == "reference" else native()
    if built is None:
        return reference_hazard.chances
    compute: Callable[[Table, Table, Table, Table, Table, Sequence[int]], Table]
    compute = built.hazard_chances
    return lambda w, x, of: compute(w.w1, w.b1, w.correction, w.logits, x, of)
