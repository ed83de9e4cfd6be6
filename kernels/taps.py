"""Copying tensors out of a compute graph: in C++ if it is built, else through ctypes, which costs a
microsecond for each node and waits for the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.kernels.reference import taps as reference_taps
from towerd.kernels.reference.taps import Shape

__all__ = ["NodeTap", "make_node_tap"]


class NodeTap(Protocol):
    """The interface of both implementations; see `reference.taps.ReferenceNodeTap`."""

    @property
    def callback(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def error(self) -> str: ...
    def watch(self, names: Sequence[str]) -> None: ...
    def places(self) -> list[tuple[str, int]]: ...
    def read(self, name: str, layer: int) -> tuple[Shape, Shape, npt.NDArray[np.uint8]]: ...


def make_node_tap(name: int, n_bytes: int, n_elements: int, get: int) -> NodeTap:
    """A tap that watches nothing yet, with ggml's functions at these addresses. Raises ValueError.

    TOWERD_KERNELS=reference forces the tap through ctypes."""
    if dispatch.name() != "reference":
        from towerd.kernels import _native

        return _native.NodeTap(name, n_bytes, n_elements, get)
    return reference_taps.ReferenceNodeTap(name, n_bytes, n_elements, get)
