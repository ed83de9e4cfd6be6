"""The memory of the GPUs that llama.cpp computes on, by ggml's list of devices."""

from __future__ import annotations

import ctypes

from towerd.llama_library import lib

_GPU, _INTEGRATED = 1, 2
"""Of `ggml_backend_dev_type` (ggml/include/ggml-backend.h)."""


def gpu_free_bytes() -> int:
    """Bytes that are free on all GPUs together, 0 where llama.cpp has none. An integrated GPU counts
    only if there is no other, as llama.cpp chooses them."""
    ggml: ctypes.CDLL = lib._lib
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = (ctypes.c_size_t,)
    ggml.ggml_backend_dev_type.argtypes = (ctypes.c_void_p,)
    devices = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    kinds = [ggml.ggml_backend_dev_type(device) for device in devices]
    chosen = _GPU if _GPU in kinds else _INTEGRATED
    return sum(
        _free_bytes(ggml, device)
        for device, kind in zip(devices, kinds, strict=True)
        if kind == chosen
    )


def _free_bytes(ggml: ctypes.CDLL, device: int) -> int:
    sizes = ctypes.POINTER(ctypes.c_size_t)
    ggml.ggml_backend_dev_memory.argtypes = (ctypes.c_void_p, sizes, sizes)
    ggml.ggml_backend_dev_memory.restype = None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(device, free, total)
    return free.value
