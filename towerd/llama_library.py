"""`lib`: llama.cpp's functions, as declared by llama-cpp-python's module `llama_cpp.llama_cpp`.

The package around that module has classes of its own, whose imports (jinja2, chat formats, caches)
take twice as long as everything that towerd needs of it. So the module is loaded without them; a
later import of the package gets all of it, on the same library.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from towerd.llama_build import CARRIED, is_carried, waiting_env

if TYPE_CHECKING:
    import llama_cpp.llama_cpp as lib

__all__ = ["lib"]

PACKAGE, MODULE = "llama_cpp", "llama_cpp.llama_cpp"
ENV_FOLDER = "LLAMA_CPP_LIB_PATH"
"""Where llama-cpp-python looks for libraries, if set."""


def _load() -> ModuleType:
    os.environ.update(waiting_env(os.environ))  # libgomp reads it once, when it is loaded
    if not is_carried():
        return _without_package(find_spec(PACKAGE))
    # `towerd.wire` is linked with the libraries in this folder, so no others may be loaded.
    with _libraries_in(CARRIED):
        module = _without_package(PathFinder.find_spec(PACKAGE, [str(CARRIED)]))
    _load_backends(module, CARRIED)
    return module


def _without_package(spec: importlib.machinery.ModuleSpec | None) -> ModuleType:
    """Load the module while an uninitialized module stands in for its package."""
    if PACKAGE in sys.modules or spec is None:
        return importlib.import_module(MODULE)
    sys.modules[PACKAGE] = module_from_spec(spec)
    try:
        return importlib.import_module(MODULE)
    finally:
        del sys.modules[PACKAGE]


@contextmanager
def _libraries_in(folder: Path) -> Iterator[None]:
    """llama-cpp-python takes its libraries from `folder` while the context is open."""
    before = os.environ.get(ENV_FOLDER)
    os.environ[ENV_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENV_FOLDER]
        else:
            os.environ[ENV_FOLDER] = before


def _load_backends(module: ModuleType, folder: Path) -> None:
    """Load the best of the CPU libraries in `folder` that runs here, and those of GPUs, without the
    line that ggml prints for each."""
    load = module._lib.ggml_backend_load_all_from_path
    load.argtypes, load.restype = [ctypes.c_char_p], None
    quiet = module.llama_log_callback(lambda *_: None)
    module.llama_log_set(quiet, None)
    load(str(folder).encode())
    module.llama_log_set(module.llama_log_callback(0), None)


if not TYPE_CHECKING:
    lib = _load()
