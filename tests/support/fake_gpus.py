"""GPUs that hold nothing, in ggml's list of devices, and where llama.cpp then puts a model.

    python fake_gpus.py MODEL FREE_BYTES,... GPU_LAYERS WORD...

registers a GPU for each number, named GPU0, GPU1, ..., reads the model's vocabulary under the flags, and prints the
`RowMemory` as JSON. ggml takes no device back, so it needs a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp

from towerd.model.llama_model import LlamaModel, init_backend
from towerd.model.row_memory import row_memory
from towerd.settings.config import Config

_GPU = 1
"""Of `ggml_backend_dev_type`."""
RAM = 1 << 40
_POINTER = ctypes.c_void_p
_SIZES = ctypes.POINTER(ctypes.c_size_t)
_NAME = ctypes.CFUNCTYPE(ctypes.c_char_p, _POINTER)
_MEMORY = ctypes.CFUNCTYPE(None, _POINTER, _SIZES, _SIZES)
_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER)
_PROPERTIES = ctypes.CFUNCTYPE(None, _POINTER, _POINTER)


class Registry(ctypes.Structure):
    """A `ggml_backend_reg`."""

    _fields_ = (
        ("api_version", ctypes.c_int),
        ("get_name", _NAME),
        ("others", _POINTER * 3),
        ("context", _POINTER),
    )


class Device(ctypes.Structure):
    """A `ggml_backend_device`."""

    _fields_ = (
        ("get_name", _NAME),
        ("get_description", _NAME),
        ("get_memory", _MEMORY),
        ("get_type", _TYPE),
        ("get_props", _PROPERTIES),
        ("others", _POINTER * 10),
        ("registry", _POINTER),
        ("context", _POINTER),
    )


def make_device(name: str, free_bytes: int, registry: Registry) -> Device:
    """A GPU of which nothing is in use."""

    def tell(_device: int, free: Any, total: Any) -> None:
        free[0] = total[0] = free_bytes

    named = _NAME(returning(name.encode()))
    return Device(
        named,
        named,
        _MEMORY(tell),
        _TYPE(returning(_GPU)),
        _PROPERTIES(lambda _device, _properties: None),
        (_POINTER * 10)(),
        ctypes.addressof(registry),
        None,
    )


def returning(value: Any) -> Callable[[int], Any]:
    return lambda _object: value


def main() -> None:
    path, sizes, gpu_layers, *words = sys.argv[1:]
    init_backend()
    registry = Registry(2, _NAME(returning(b"fake")), (_POINTER * 3)(), None)
    devices = [
        make_device(f"GPU{i}", int(size), registry) for i, size in enumerate(sizes.split(","))
    ]
    for device in devices:
        llama_cpp._lib.ggml_backend_device_register(ctypes.byref(device))
    config = Config(gpu_layers=int(gpu_layers), llama_server_args=tuple(words))
    model = LlamaModel(Path(path), config, vocab_only=True)
    print(json.dumps(asdict(row_memory(model, config, RAM))))


if __name__ == "__main__":
    main()
