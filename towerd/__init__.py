"""towerd: a local daemon that gives llama.cpp a memory.

Import from the submodules; this package itself exports only its version.
"""

from __future__ import annotations

__version__ = "0.1.0"
