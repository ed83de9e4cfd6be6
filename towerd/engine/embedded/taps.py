"""Taps: tensors of the compute graph, copied out while llama.cpp evaluates a batch.

llama.cpp asks before each node whether somebody wants its data and calls again with the data; to
want one splits the graph there, so tap what is needed and only while it is. Names and shapes:
llama.cpp `src/llama-graph.cpp` (build_attn_mha); without flash attention there are
`kq_soft_max-<layer>` [cells, tokens, heads] and `kqv-<layer>` [head size, tokens, heads].
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt

from towerd.errors import TowerdError

Values = npt.NDArray[np.float32]
_GGML_TYPE_F32 = 0


class _TensorHead(ctypes.Structure):
    """The leading fields of `struct ggml_tensor` (ggml.h)."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A ggml function; libllama depends on the library that has it, so one look-up finds it."""
    found = getattr(lib._lib, name)
    found.restype, found.argtypes = result, list(arguments)
    return found


class Taps:
    """Collects float32 tensors by name. Give `callback` to the context, keep this object as long
    as the context lives."""

    def __init__(self) -> None:
        """Watches nothing yet. Raises TowerdError for a llama.cpp whose tensors cannot be read."""
        self.values: dict[tuple[str, int], Values] = {}
        """(name, layer) -> values of the last node of that name, in numpy's axis order (the
        reverse of ggml's): `kq_soft_max` is [heads, tokens, cells]."""
        self._names = frozenset[str]()
        try:
            self._name = _function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
            self._nbytes = _function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
            self._n_elements = _function("ggml_nelements", ctypes.c_int64, ctypes.c_void_p)
            self._get = _function(
                "ggml_backend_tensor_get", None,
                ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
            )  # fmt: skip
        except AttributeError as error:
            raise TowerdError(
                f"This llama.cpp has no function to read tensors: {error}."
            ) from error
        self._error: TowerdError | None = None
        self.callback = lib.ggml_backend_sched_eval_callback(self._on_node)

    def take(self, name: str, layer: int) -> Values:
        """The values of one tensor of the last batch. Raises TowerdError if there were none."""
        if self._error is not None:
            raise self._error
        try:
            return self.values[name, layer]
        except KeyError:
            raise TowerdError(
                f"llama.cpp evaluated no tensor {name}-{layer}: "
                "this architecture's attention cannot be watched."
            ) from None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that any tensor was found for."""
        return tuple(sorted({layer for _, layer in self.values}))

    def watch(self, *names: str) -> None:
        """Forget what was collected; collect tensors of these names (without the layer, such as
        `Qcur`) from the next batch on."""
        self.values.clear()
        self._error = None
        self._names = frozenset(names)

    def _on_node(self, tensor: int, ask: bool, _user: Any) -> bool:
        # An exception must not leave a callback: ctypes would print and ignore it.
        if not self._names:
            return not ask
        name, _, layer = self._name(tensor).decode("utf-8", "replace").rpartition("-")
        if name not in self._names or not layer.isdecimal():
            return not ask
        if not ask and self._error is None:
            try:
                self.values[name, int(layer)] = self._read(tensor)
            except TowerdError as error:
                self._error = error
            except Exception as error:  # without an answer llama.cpp computes no more of the graph
                self._error = TowerdError(f"A tapped tensor cannot be read: {error}.")
        return True

    def _read(self, tensor: int) -> Values:
        head = _TensorHead.from_address(tensor)
        shape = tuple(head.ne)[::-1]
        if int(np.prod(shape)) != self._n_elements(tensor):
            raise TowerdError("This llama.cpp lays its tensors out in another way.")
        if head.type != _GGML_TYPE_F32:
            raise TowerdError("A tapped tensor does not hold 32-bit floats.")
        data = np.empty(self._nbytes(tensor), np.uint8)
        self._get(tensor, data.ctypes.data, 0, data.nbytes)
        # A view, such as the queries in a fused projection, has gaps: its strides skip them.
        values = np.ndarray(shape, np.float32, data, strides=tuple(head.nb)[::-1])
        return np.ascontiguousarray(values[0] if shape[0] == 1 else values)
