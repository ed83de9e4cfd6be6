"""Gittins indices: the C++ kernel where it is built, else the Python reference.

TOWERD_KERNELS=reference forces the one in Python; both give the same numbers."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import TypeAlias

from towerd.kernels import reference_gittins
from towerd.kernels.dispatch import ENV
from towerd.kernels.reference_gittins import Table

__all__ = ["Table", "gittins"]
_Kernel: TypeAlias = Callable[[Table, Table], Table]


def gittins(chances: Table, widths: Table) -> Table:
    """See `reference_gittins.gittins`; both arrays must be contiguous."""
    return _kernel(os.environ.get(ENV, ""))(chances, widths)


@functools.cache
def _kernel(choice: str) -> _Kernel:
    if choice != "reference":
        try:
            native = importlib.import_module("towerd.kernels._native")
        except ImportError:
            pass
        else:
            kernel: _Kernel = native.gittins
            return kernel
    return reference_gittins.gittins
