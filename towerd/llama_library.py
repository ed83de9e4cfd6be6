"""`lib`: llama.cpp's functions, as declared by llama-cpp-python's module `llama_cpp.llama_cpp`.

The package around that module has classes of its own, whose imports (jinja2, chat formats, caches)
take twice as long as everything that towerd needs of it. So the module is loaded without them; a
later import of the package gets all of it, on the same library.
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
    """Load the module while an uninitialized module stands in for its package."""
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
