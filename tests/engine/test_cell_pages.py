"""Rows are restored without page faults, and an idle daemon keeps no memory for it."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracle import ask, settle
from services import OpenService
from waiting import until_async

from lab.models.random_gguf import PRESETS, make_random_gguf
from lab.models.shape import Arch
from towerd.engine.embedded.context.cell_pages import SPARE_CELLS, CellPages
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.memory import SequenceMemory, open_memory
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.context.zero_pages import HostBuffer
from towerd.kernels._native import populate
from towerd.model.llama_model import LlamaModel
from towerd.settings.config import Config

N_CELLS = 1 << 14
N = 1500


@pytest.fixture(scope="module", autouse=True)
def supported() -> None:
    here = mmap.mmap(-1, mmap.PAGESIZE)
    if sys.platform != "linux" or not populate(np.frombuffer(here, np.uint8).ctypes.data, 0, 1, 1):
        pytest.skip("pages are asked for on Linux only, from 5.14 on")


@contextmanager
def fresh_memory(path: Path, flash_attn: str) -> Iterator[SequenceMemory]:
    """The memory of a new context."""
    config = Config(model=path, store_dir=path.parent, ctx_size=N_CELLS, flash_attn=flash_attn)
    model = LlamaModel(path, config)
    context = LlamaContext(model, config, n_cells=N_CELLS, n_seqs=5)
    try:
        yield open_memory(context, model)
    finally:
        context.close()
        model.close()


def faults_of_restoring(memory: SequenceMemory, blob: Buffer) -> int:
    """Page faults of this thread while the rows of `blob` are restored."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.append(0, blob, is_empty=True)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize(
    ("arch", "flash_attn"), [("llama", "off"), ("llama", "on"), ("gemma3", "off")]
)
def test_rows_are_restored_without_faults(tmp_path: Path, arch: Arch, flash_attn: str) -> None:
    """The pages that are asked for are those that llama.cpp writes to, however it lays out V."""
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], arch=arch, n_layer=6, n_head_kv=4))
    ids = np.random.default_rng(0).integers(260, 500, N).astype(np.int32)
    with fresh_memory(path, flash_attn) as memory:
        for at in range(0, N, 500):
            memory.context.batch.add(ids[at : at + 500], at, 0, logits_last=False)
            memory.context.decode()
        blob = memory.context.get_state(0)
    counts = []
    for n_asked in (0, N):
        with fresh_memory(path, flash_attn) as memory:
            context = memory.context
            pages = CellPages(
                context.host_buffers,
                memory.layout,
                n_cells=context.n_cells,
                v_trans=context.v_trans,
            )
            if n_asked:
                pages.ask(n_asked)
            pages.close()
            counts.append(faults_of_restoring(memory, blob))
    without, asked = counts
    assert without > 200
    assert asked < without / 10


def bytes_in_ram(buffers: Sequence[HostBuffer]) -> int:
    """How much of the buffers is in RAM."""
    n_pages = 0
    for base, n_bytes in buffers:
        start = base // mmap.PAGESIZE * mmap.PAGESIZE
        found = ctypes.create_string_buffer(n_bytes // mmap.PAGESIZE)
        ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), found)
        n_pages += sum(byte & 1 for byte in found.raw)
    return n_pages * mmap.PAGESIZE


async def test_a_spare_is_kept_after_the_first_request(
    service_on: OpenService, tmp_path: Path
) -> None:
    """Before it a daemon takes no memory for cells; after it for those of one more conversation."""
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=6, n_head_kv=4))
    async with service_on(path, ctx_size=4096, live_tokens=N_CELLS) as service:
        context, token_bytes = service.engine.core.context, service.engine.core.layout.token_bytes
        kv = [each for each in context.host_buffers if each.n_bytes == N_CELLS * token_bytes]
        assert len(kv) == 1
        await settle(service)
        idle = bytes_in_ram(kv)
        assert idle < SPARE_CELLS * token_bytes
        await ask(service, np.arange(300, 332, dtype=np.int32), 8)
        await settle(service)
        await until_async(lambda: bytes_in_ram(kv) >= SPARE_CELLS * token_bytes)
        await ask(service, np.arange(300, 340, dtype=np.int32), 8)
        await settle(service)
        assert bytes_in_ram(kv) < 3 * SPARE_CELLS * token_bytes
