"""The bytes that processes write to disks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from towerd.engine.llama_server.slots.slotdir import SlotDir


def can_count_written() -> bool:
    """Whether this system counts the bytes that processes write, and temporary files are on a disk:
    writes into RAM are not counted."""
    import psutil

    return (
        hasattr(psutil.Process, "io_counters") and not SlotDir(Path(tempfile.gettempdir())).in_ram
    )


def written_bytes() -> int:
    """The bytes that this process has written to disks, including those of ended children and their
    descendants. Pages in the page cache count as written."""
    import psutil

    return int(psutil.Process().io_counters().write_bytes)
