"""Gittins indices: the C++ kernel if it is built, else the Python reference.

TOWERD_KERNELS=reference forces the Python one; both give the same numbers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TypeAlias

from towerd.kernels.dispatch import ENV, native
from towerd.kernels.reference import gittins as reference_gittins
from towerd.kernels.reference.gittins import Table

__all__ = ["Table", "gittins"]
_Kernel: TypeAlias = Callable[[Table, Table], Table]


def gittins(chances: Table, widths: Table) -> Table:
    """See `reference.gittins.gittins`; both arrays must be contiguous."""
    return _kernel(os.environ.get(ENV, ""))(chances, widths)


@functools.cache
def _kernel(choice: str) -> _Kernel:
    built = None if choice == "reference" else native()
    kernel: _Kernel = reference_gittins.gittins if built is None else built.gittins
    return kernel
