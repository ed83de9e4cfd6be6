"""Pages of memory that the system has not given yet: asked for by the C++ kernels, if they are built."""

from __future__ import annotations

from towerd.kernels.dispatch import native

__all__ = ["populate"]


def populate(start: int, stride: int, n: int, run_bytes: int) -> bool:
    """Have the pages of `n` runs of `run_bytes` bytes in RAM and writable; the first run is at the
    address `start`, each other one `stride` bytes after the one before.

    What is stored in them stays, and other threads may write to them meanwhile. All of it must be
    memory of this process. Returns False where nothing was done, or only a part: elsewhere than on
    Linux, before its version 5.14, without free memory or without the C++ kernels."""
    built = native()
    return built is not None and bool(built.populate(start, stride, n, run_bytes))
