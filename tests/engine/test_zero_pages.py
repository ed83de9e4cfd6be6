"""A context takes memory for the cells that are used."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.core import declared_layout
from towerd.model.llama_model import LlamaModel
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config

N_CELLS = 1 << 18
N_CTX = 512


def rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_unused_cells_take_no_memory(tmp_path: Path) -> None:
    path = bundled_model()
    config = Config(model=path, store_dir=tmp_path, ctx_size=N_CTX)
    model = LlamaModel(path, config)
    token_bytes = declared_layout(model, config).token_bytes
    before = rss_bytes()
    context = LlamaContext(model, config, n_cells=N_CELLS, n_seqs=1)
    try:
        context.batch.add(np.arange(5, 5 + N_CTX, dtype=np.int32) % 300, 0, 0, logits_last=True)
        context.decode()
        assert rss_bytes() - before < N_CELLS * token_bytes // 2
    finally:
        context.close()
        model.close()
