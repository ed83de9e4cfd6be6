"""A tiny LFM2 that has sliding windows beside its recurrent layers, a memory that is kept whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFWriter

from lab.models import recurrent
from lab.models.architectures import ARCHITECTURES
from lab.models.random_gguf import Shape, make_random_gguf


def make_windowed_hybrid(path: Path, shape: Shape, window: int) -> None:
    """Write it to `path`. shape: of the architecture lfm2"""
    known = ARCHITECTURES["lfm2"]

    def metadata(writer: GGUFWriter, shape: Shape) -> None:
        recurrent.lfm2_metadata(writer, shape)
        writer.add_sliding_window(window)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "lfm2", replace(known, metadata=metadata))
        make_random_gguf(path, shape)
