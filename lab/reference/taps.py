"""Copying tensors out of a compute graph through ctypes, taking the interpreter's lock per node."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
_TYPE_F32 = 0
_POINTER = ctypes.c_void_p


class _TensorHead(ctypes.Structure):
    """The leading fields of `struct ggml_tensor` (ggml.h)."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", _POINTER),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


class _TensorBody(ctypes.Structure):
    """All of them up to its name."""

    _fields_ = [
        ("head", _TensorHead),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", _POINTER * 10),
        ("view_src", _POINTER),
        ("view_offset", ctypes.c_size_t),
        ("data", _POINTER),
        ("name", ctypes.c_char * 64),
    ]


class ReferenceNodeTap:
    """A callback that llama.cpp calls for each node of a graph: before it, to ask whether the data
    is wanted, and after it, with the data (ggml's `ggml_backend_sched_eval_callback`). It must
    outlive the context that calls it, and must not be used while the context evaluates.

    name, n_bytes, n_elements, get: addresses of `ggml_get_name`, `ggml_nbytes`, `ggml_nelements`
    and `ggml_backend_tensor_get`. Raises ValueError for one that is 0."""

    def __init__(self, name: int, n_bytes: int, n_elements: int, get: int) -> None:
        for what, address in (
            ("name", name),
            ("n_bytes", n_bytes),
            ("n_elements", n_elements),
            ("get", get),
        ):
            if not address:
                raise ValueError(f"{what}: expected the address of a function")
        self._name = ctypes.CFUNCTYPE(_POINTER, _POINTER)(name)
        self._n_bytes = ctypes.CFUNCTYPE(ctypes.c_size_t, _POINTER)(n_bytes)
        self._n_elements = ctypes.CFUNCTYPE(ctypes.c_int64, _POINTER)(n_elements)
        size = ctypes.c_size_t
        self._get = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, size, size)(get)
        self._names = frozenset[str]()
        self._values: dict[tuple[str, int], tuple[Shape, Shape, npt.NDArray[np.uint8]]] = {}
        self._function = ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER, ctypes.c_bool, _POINTER)(
            self._on_node
        )
        self.error = ""
        """Why a tensor was not read; empty if none failed."""

    @property
    def callback(self) -> int:
        """The address of the callback."""
        return ctypes.cast(self._function, _POINTER).value or 0

    @property
    def user_data(self) -> int:
        """The address to pass as the callback's user data."""
        return 0

    def watch(self, names: Sequence[str]) -> None:
        """Forget all collected tensors; collect float32 tensors called `<name>-<layer>` from the
        next batch on. Each wanted tensor splits the graph; without names nothing is split.

        The name `queries` stands for what is multiplied with the keys of a layer: the second source of
        `kq`, or the first source of a fused attention, which has at least three and is that of `kqv_out`."""
        self._values.clear()
        self._names = frozenset(names)
        self.error = ""

    def places(self) -> list[tuple[str, int]]:
        """(name, layer) of the collected tensors, ascending."""
        return sorted(self._values)

    def read(self, name: str, layer: int) -> tuple[Shape, Shape, npt.NDArray[np.uint8]]:
        """(shape, strides in bytes, both in numpy's order; data uint8[n]) of the last node of that
        name. KeyError if there was none."""
        try:
            return self._values[name, layer]
        except KeyError:
            raise KeyError(f"{name}-{layer}") from None

    def _on_node(self, tensor: int, ask: bool, _user: int | None) -> bool:
        # An exception must not leave a callback: ctypes would print and ignore it.
        if not self._names:
            return not ask
        called = ctypes.string_at(self._name(tensor) or 0)
        name, _, layer = called.decode("utf-8", "replace").rpartition("-")
        if not layer.isdecimal():
            return not ask
        wanted = [(tensor, name)] if name in self._names else []
        if (queries := self._queries_of(tensor, name)) is not None:
            wanted.append((queries, "queries"))
        for each, what in wanted if not ask else ():
            try:
                if not self.error:
                    self._read(each, what, int(layer))
            except Exception as error:  # without an answer llama.cpp computes no more of the graph
                self.error = f"A tapped tensor cannot be read: {error}."
        return bool(wanted) or not ask

    def _queries_of(self, tensor: int, name: str) -> int | None:
        if name not in ("kq", "kqv_out") or "queries" not in self._names:
            return None
        body = _TensorBody.from_address(tensor)
        if self._name(tensor) != tensor + _TensorBody.name.offset:
            self.error = "This llama.cpp lays its tensors out in another way."
            return None
        if name == "kq":
            return body.src[1] or None
        fused = _TensorBody.from_address(body.src[0]) if body.src[0] else None
        return fused.src[0] if fused is not None and fused.src[2] else None

    def _read(self, tensor: int, name: str, layer: int) -> None:
        head = _TensorHead.from_address(tensor)
        shape = tuple(head.ne)[::-1]
        if int(np.prod(shape)) != self._n_elements(tensor):
            self.error = "This llama.cpp lays its tensors out in another way."
        elif head.type != _TYPE_F32:
            self.error = "A tapped tensor does not hold 32-bit floats."
        else:
            data = np.empty(self._n_bytes(tensor), np.uint8)
            self._get(tensor, data.ctypes.data, 0, data.nbytes)
            self._values[name, layer] = (shape, tuple(head.nb)[::-1], data)
