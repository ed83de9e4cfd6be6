"""`lib`: llama.cpp's functions, as the module `llama_cpp.llama_cpp` of llama-cpp-python declares them.

The package around that module has classes of its own, whose imports (jinja2, chat formats, caches)
take twice as long as everything that towerd needs of it. So the module is loaded without them;
who imports the package later gets it whole, on the same library.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llama_cpp.llama_cpp as lib

__all__ = ["lib"]

PACKAGE, MODULE = "llama_cpp", "llama_cpp.llama_cpp"


def _load() -> ModuleType:
    """The module; its package as one that was not run yet stands in for it meanwhile."""
    spec = find_spec(PACKAGE)
    if PACKAGE in sys.modules or spec is None:
        return importlib.import_module(MODULE)
    sys.modules[PACKAGE] = module_from_spec(spec)
    try:
        return importlib.import_module(MODULE)
    finally:
        del sys.modules[PACKAGE]


if not TYPE_CHECKING:
    lib = _load()
