"""Copying tensors out of a compute graph: tensors made by hand, through ctypes and in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lab.reference.taps import ReferenceNodeTap
from towerd.kernels._native import NodeTap

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """The fields that are read, and what the functions below answer for it."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32 * 18),
        ("src", ctypes.c_void_p * 10),
        ("view", ctypes.c_void_p * 3),
        ("name", ctypes.c_char * 64),
        ("n_bytes", ctypes.c_size_t),
        ("n_elements", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


def tensor_of(name: str, rows: np.ndarray) -> Tensor:
    """[cells, tokens] as a ggml tensor; `rows` must outlive it. Rows may lie apart."""
    tensor = Tensor(0, None, (rows.shape[1], rows.shape[0], 1, 1), (4, rows.strides[0], 0, 0))
    tensor.name, tensor.n_elements = name.encode(), rows.size
    tensor.n_bytes = (rows.shape[0] - 1) * rows.strides[0] + rows.shape[1] * 4
    tensor.data = rows.ctypes.data
    return tensor


@dataclass
class Ggml:
    """Functions with the addresses that a tap is given."""

    kept: list[Any] = field(default_factory=list)

    def addresses(self) -> list[int]:
        def at(tensor: int) -> Tensor:
            return Tensor.from_address(tensor)

        def get(tensor: int, to: int, offset: int, n: int) -> None:
            ctypes.memmove(to, at(tensor).data + offset, n)

        # A name must outlive the call: it is a pointer into the tensor itself.
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.kept = [
            ctypes.CFUNCTYPE(pointer, pointer)(lambda tensor: tensor + Tensor.name.offset),
            ctypes.CFUNCTYPE(size, pointer)(lambda tensor: at(tensor).n_bytes),
            ctypes.CFUNCTYPE(ctypes.c_int64, pointer)(lambda tensor: at(tensor).n_elements),
            ctypes.CFUNCTYPE(None, pointer, pointer, size, size)(get),
        ]
        return [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self.kept]


@pytest.fixture(params=[ReferenceNodeTap, NodeTap])
def tap(request: pytest.FixtureRequest) -> Any:
    ggml = Ggml()
    yield request.param(*ggml.addresses())
    del ggml


def caller(tap: NodeTap) -> Callable[[Tensor, bool], bool]:
    """What llama.cpp does with the tap."""
    function = CALLBACK(tap.callback)
    return lambda tensor, ask: bool(function(ctypes.addressof(tensor), ask, tap.user_data))


def values(tap: NodeTap, name: str, layer: int) -> np.ndarray:
    shape, strides, data = tap.read(name, layer)
    return np.asarray(np.ndarray(shape, np.float32, data, strides=strides)[0, 0])


def test_what_is_watched_is_copied(tap: NodeTap) -> None:
    """The last node of a name, rows that lie apart included; others are not asked for."""
    see = caller(tap)
    wide = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    first, apart = tensor_of("Qcur-3", wide), tensor_of("Qcur-11", wide[:, :3])
    assert not see(first, True)
    tap.watch(("Qcur", "kqv"))
    for tensor in (first, apart):
        assert see(tensor, True)
        assert see(tensor, False)
    for name in ("Qcur", "Qcur-", "Qcur-3 (view)", "Kcur-3", "Qcur-x", "-3", "xQcur-3"):
        other = tensor_of(name, wide)
        assert not see(other, True)
        assert see(other, False)  # what is not wanted does not end the evaluation
    assert tap.places() == [("Qcur", 3), ("Qcur", 11)]
    assert np.array_equal(values(tap, "Qcur", 3), wide)
    assert np.array_equal(values(tap, "Qcur", 11), wide[:, :3])
    later = wide + 1
    last = tensor_of("Qcur-3", later)
    see(last, False)
    assert np.array_equal(values(tap, "Qcur", 3), later)
    with pytest.raises(KeyError, match="kqv-3"):
        tap.read("kqv", 3)
    tap.watch(())
    assert tap.places() == []
    assert not see(first, True)
    assert not tap.error


def test_queries_are_found_where_they_go(tap: NodeTap) -> None:
    """What is multiplied with the keys of a layer, or goes into its fused attention, by whatever name."""
    see = caller(tap)
    rows = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    queries, keys = tensor_of("node_7", rows), tensor_of("node_8", rows - 1)
    q, k = ctypes.addressof(queries), ctypes.addressof(keys)
    product = tensor_of("kq-3", rows)
    product.src[:2] = k, q
    attention, plain = tensor_of("node_9", rows), tensor_of("node_10", rows)
    attention.src[:3], plain.src[:2] = (q, k, k), (q, k)
    fused, other = tensor_of("kqv_out-4", rows), tensor_of("kqv_out-5", rows)
    fused.src[0], other.src[0] = ctypes.addressof(attention), ctypes.addressof(plain)
    none, layerless = tensor_of("kqv_out-6", rows), tensor_of("kq", rows)
    nodes = (product, fused, other, none, layerless, queries)
    tap.watch(("Qcur",))
    assert not any(see(node, True) for node in nodes)
    tap.watch(("queries",))
    assert [see(node, True) for node in nodes] == [True, True, False, False, False, False]
    assert all(see(node, False) for node in nodes)
    assert tap.places() == [("queries", 3), ("queries", 4)]
    assert np.array_equal(values(tap, "queries", 3), rows)
    assert np.array_equal(values(tap, "queries", 4), rows)
    assert not tap.error


def test_what_cannot_be_read_is_told(tap: NodeTap) -> None:
    """The evaluation continues, and the first reason stays until other names are watched."""
    see = caller(tap)
    rows = np.zeros((2, 3), np.float32)
    for attribute, value, words in (
        ("type", 8, "does not hold 32-bit floats"),
        ("n_elements", 7, "lays its tensors out in another way"),
    ):
        tap.watch(("kqv",))
        wrong = tensor_of("kqv-0", rows)
        setattr(wrong, attribute, value)
        assert see(wrong, True)
        assert see(wrong, False)
        assert words in tap.error
        good = tensor_of("kqv-1", rows)
        assert see(good, False)
        assert tap.places() == []
        assert words in tap.error
    tap.watch(("kqv",))
    assert not tap.error


def test_functions_must_be_there(tap: NodeTap) -> None:
    """`tap` forces one implementation."""
    addresses = Ggml().addresses()
    for i, name in enumerate(("name", "n_bytes", "n_elements", "get")):
        wrong = [*addresses[:i], 0, *addresses[i + 1 :]]
        with pytest.raises(ValueError, match=f"^{name}:"):
            NodeTap(*wrong)
