"""Passing a stream on: in C++ where it is built, else in Python.

TOWERD_KERNELS=reference forces the one in Python; both pass the same on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TypeAlias

from towerd.kernels import reference_relay
from towerd.kernels.dispatch import ENV, native
from towerd.kernels.reference_relay import Marks, Relayed

__all__ = ["Marks", "Relayed", "relay"]
_Kernel: TypeAlias = Callable[[int, int, int, Marks, int, bool], Relayed]


def relay(
    up: int, down: int, cancel: int, marks: Marks, bytes_max: int, is_chunked: bool
) -> Relayed:
    """See `reference_relay.relay`."""
    return _kernel(os.environ.get(ENV, ""))(up, down, cancel, marks, bytes_max, is_chunked)


@functools.cache
def _kernel(choice: str) -> _Kernel:
    built = None if choice == "reference" else native()
    if built is None:
        return reference_relay.relay

    def relay(
        up: int, down: int, cancel: int, marks: Marks, bytes_max: int, is_chunked: bool
    ) -> Relayed:
        return Relayed(
            *built.relay(up, down, cancel, marks.goes_on, marks.ends, bytes_max, is_chunked)
        )

    return relay
