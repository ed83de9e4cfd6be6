"""Atomic writing of GGUF files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf import GGUFWriter


@contextmanager
def writing(out: Path, arch: str) -> Iterator[GGUFWriter]:
    """A writer whose header and tensors are written to `out` when the block ends.

    The body adds keys and tensors, or tensor infos; in the second case it calls `begin_data` and
    writes the tensors itself. `out` is replaced only on success.
    """
    part = out.with_name(f".{out.name}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(part, arch)
    try:
        yield writer
        if writer.fout is None:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        writer.close()
        os.replace(part, out)
    finally:
        for file in writer.fout or ():
            file.close()
        part.unlink(missing_ok=True)


def begin_data(writer: GGUFWriter) -> None:
    """Write everything that precedes the tensor data."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
