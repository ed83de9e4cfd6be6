"""Taps: tensors of the compute graph, copied out while llama.cpp evaluates a batch.

Before each node llama.cpp asks whether its data is wanted, and if so calls again with the data. A
tap splits the graph at its node, so tap only what is needed and only while it is: a batch without
a tapped node is computed as if there were no taps (ggml's `ggml-backend.cpp`, compute_splits).
Names and shapes: llama.cpp `src/llama-graph.cpp` (build_attn_mha); without flash attention there
are `kq_soft_max-<layer>` [cells, tokens, heads] and `kqv-<layer>` [head size, tokens, heads].
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from towerd.errors import TowerdError
from towerd.kernels._native import NodeTap
from towerd.llama_library import lib

Values = npt.NDArray[np.float32]

QUERIES = "queries"
"""What is multiplied with the keys of a layer, whatever llama.cpp calls it: the source of `kq`, or of a fused
attention."""


class Taps:
    """Collects float32 tensors by name. Give it to the context, which keeps it."""

    def __init__(self) -> None:
        """Watch nothing yet. Raises TowerdError for a llama.cpp whose tensors cannot be read."""
        names = ("ggml_get_name", "ggml_nbytes", "ggml_nelements", "ggml_backend_tensor_get")
        try:
            # libllama depends on the library that has them, so one look-up finds them.
            found = [getattr(lib._lib, name) for name in names]
        except AttributeError as error:
            raise TowerdError(
                f"This llama.cpp has no function to read tensors: {error}."
            ) from error
        addresses = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found)
        self._tap = NodeTap(*addresses)

    @property
    def callback(self) -> tuple[int, int]:
        """The addresses of the callback for each node and of its user data."""
        return self._tap.callback, self._tap.user_data

    def queries(self, name: str, layer: int) -> Values:
        """float32[tokens, heads, head size]: the queries of the last batch in a layer, by the name that they
        are watched by. Raises TowerdError as `take`."""
        taken = self.take(name, layer)
        return taken.transpose(1, 0, 2) if name == QUERIES else taken

    def take(self, name: str, layer: int) -> Values:
        """The values of one tensor of the last batch, of the last node of that name. Axes are in
        numpy's order, the reverse of ggml's: `kq_soft_max` is [heads, tokens, cells]. Raises
        TowerdError if there is no such tensor."""
        if self._tap.error:
            raise TowerdError(self._tap.error)
        try:
            shape, strides, data = self._tap.read(name, layer)
        except KeyError:
            raise TowerdError(
                f"llama.cpp evaluated no tensor {name}-{layer}: "
                "this architecture's attention cannot be watched."
            ) from None
        # A view, such as the queries in a fused projection, has gaps: its strides skip them.
        values = np.ndarray(shape, np.float32, data, strides=strides)
        return np.ascontiguousarray(values[0] if shape[0] == 1 else values)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with at least one collected tensor."""
        return tuple(sorted({layer for _, layer in self._tap.places()}))

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The layers with a collected tensor of this name."""
        return tuple(sorted(layer for found, layer in self._tap.places() if found == name))

    def watch(self, *names: str) -> None:
        """Forget what was collected; collect tensors of these names (without the layer, such as
        `Qcur`) from the next batch on."""
        self._tap.watch(names)
