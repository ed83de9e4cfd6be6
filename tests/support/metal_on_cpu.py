"""mx.fast.metal_kernel on a machine without Metal: the C++ compiler and a shim of the language.

`metal_kernel` takes the same arguments as MLX's, puts the same signature around the body, compiles
it for the CPU and runs one coroutine per GPU thread, so that tests execute the text that Apple
GPUs get, through the Python that launches it there.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

SHIM = Path(__file__).parent.parent / "kernels" / "metal_shim.h"
TYPES = {
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int32: "int",
    mx.float16: "float16_t",
    mx.float32: "float",
}
ATTRIBUTES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
)
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
FLAGS += ["-ffp-contract=off", "-fPIC", "-shared"]


class MetalOnCpu:
    """Compiles kernels into a folder; each runs with rising and falling order of threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiled: dict[str, Any] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """MLX says that it has an Apple GPU, and hands its kernels to the C++ compiler."""
        patch.setattr(mx.fast, "metal_kernel", self.metal_kernel)
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.DeviceType.gpu, 0))

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
    ) -> Callable[..., list[Any]]:
        """Stands in for mx.fast.metal_kernel; one output."""

        def launch(
            *,
            inputs: Sequence[Any],
            template: Sequence[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[Any],
        ) -> list[Any]:
            types = [TYPES[array.dtype] for array in inputs]
            unit = translation_unit(
                zip(types, (array.ndim for array in inputs), input_names, strict=True),
                (TYPES[output_dtypes[0]], output_names[0]),
                template,
                header,
                source,
            )
            run = self._library(name, unit).run
            run.restype = ctypes.c_bool
            return [self._run(run, inputs, grid, threadgroup, output_shapes[0], output_dtypes[0])]

        return launch

    def _library(self, name: str, unit: str) -> Any:
        if unit not in self.compiled:
            path = self.folder / f"{name}-{hashlib.sha256(unit.encode()).hexdigest()[:16]}.so"
            subprocess.run(
                ["c++", *FLAGS, "-x", "c++", "-", "-o", path], input=unit, text=True, check=True
            )
            self.compiled[unit] = ctypes.CDLL(str(path))
        return self.compiled[unit]

    def _run(
        self,
        run: Any,
        inputs: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        shape: tuple[int, ...],
        dtype: Any,
    ) -> Any:
        assert grid[2] == 1
        assert threadgroup[1:] == (1, 1)
        memory = [np.ascontiguousarray(np.asarray(array)) for array in inputs]
        results = []
        for falling in (False, True):
            out = np.full(shape, 0x5A, np.asarray(mx.zeros(1, dtype)).dtype)
            passed = [
                argument
                for a in (*memory, out)
                for argument in (ctypes.c_void_p(a.ctypes.data), ctypes.c_int64(a.size))
            ]
            sizes = (grid[0], grid[1], threadgroup[0], ctypes.c_bool(falling))
            assert run(*passed, *sizes), "an array is used beyond its end"
            results.append(out)
        rising, fallen = (result.view(np.uint8) for result in results)
        assert np.array_equal(rising, fallen), "the order of threads matters: a barrier is missing"
        return mx.array(results[0])


def translation_unit(
    inputs: Any,
    output: tuple[str, str],
    template: Sequence[tuple[str, Any]],
    header: str,
    source: str,
) -> str:
    """The kernel as MLX writes it (mlx/backend/common/metal_kernel.cpp), and a way to call it."""
    signature, stored, arguments = [], [], []
    arrays = [(f"const {type_name}", n, name) for type_name, n, name in inputs]
    for type_name, n_dimensions, name in (*arrays, (output[0], 2, output[1])):
        stored.append(f"shim::Checked<{type_name}> {name}")
        by_value = n_dimensions == 0
        signature.append(f"{type_name}& {name}" if by_value else stored[-1])
        arguments.append(f"call::{name}[0]" if by_value else f"call::{name}")
    attributes = [name for name in ATTRIBUTES if name in source]
    signature += [f"uint3 {name}" for name in attributes]
    kinds = {bool: "bool", int: "int", mx.Dtype: "typename"}
    parameters = ", ".join(f"{kinds[type(value)]} {name}" for name, value in template)
    values = ", ".join(cpp_value(value) for _, value in template)
    names = [declaration.split()[-1] for declaration in stored]
    fields = [f"call::{name} = {{{name}, n_{name}, 0}};" for name in names]
    types = [declaration.split("<")[1].split(">")[0] for declaration in stored]
    taken = [f"{t}* {name}, int64_t n_{name}" for t, name in zip(types, names, strict=True)]
    return f"""#include "{SHIM}"
{header}
template <{parameters}> void kernel({", ".join(signature)}) {{
{source}
}}
namespace call {{
{" ".join(f"static {declaration};" for declaration in stored)}
}}
static void invoke({", ".join(f"[[maybe_unused]] uint3 {name}" for name in ATTRIBUTES)}) {{
    kernel<{values}>({", ".join(arguments + attributes)});
}}
extern "C" bool run({", ".join(taken)}, uint columns, uint rows, uint size, bool falling) {{
    {" ".join(fields)}
    return shim::dispatch(invoke, columns, rows, size, falling);
}}
"""


def cpp_value(value: Any) -> str:
    """A template argument as C++ writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else TYPES[value]
