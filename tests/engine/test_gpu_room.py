"""How many cells the default live context has where GPUs hold some of its layers, and which do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from towerd.engine.embedded.context.core import affordable_cells, flash_attention
from towerd.model.row_memory import RowMemory, row_memory_of
from towerd.settings.config import Config
from towerd.slots.layout import KVLayout, Plane

F16 = 1
N_LAYER = 4
LAYOUT = KVLayout((Plane(F16, 256),) * N_LAYER, (Plane(F16, 256),) * N_LAYER)
CELL_BYTES = 2 * N_LAYER * 256
GIB = 1 << 30
FAKE_GPUS = Path(__file__).resolve().parent.parent / "support" / "fake_gpus.py"


def memory(ram: int, *gpus: int, gpu_layers: int = -1) -> RowMemory:
    """With so many bytes free on each GPU, all of which hold rows."""
    devices = [(free, 80 * GIB) for free in gpus]
    return row_memory_of(devices, n_layer=N_LAYER, gpu_layers=gpu_layers, ram=ram)


def cells(ram: int, *gpus: int, gpu_layers: int = -1) -> int:
    return affordable_cells(LAYOUT, memory(ram, *gpus, gpu_layers=gpu_layers))


def test_without_a_gpu_an_eighth_of_ram() -> None:
    assert cells(8 * GIB) == GIB // CELL_BYTES
    assert cells(8 * GIB, 2 * GIB, gpu_layers=0) == GIB // CELL_BYTES


def test_on_gpus_half_of_what_is_free_there_whatever_ram_there_is() -> None:
    assert cells(8 * GIB, 3 * GIB) == cells(GIB, 3 * GIB) == 3 * GIB // 2 // CELL_BYTES
    assert cells(8 * GIB, GIB, 2 * GIB, gpu_layers=99) == 3 * GIB // 2 // CELL_BYTES
    assert cells(8 * GIB, 0) == 0, "a full GPU"


def test_layers_on_both_sides_must_fit_both() -> None:
    assert cells(8 * GIB, GIB, gpu_layers=2) == GIB * N_LAYER // (3 * CELL_BYTES)
    assert cells(80 * GIB, GIB, gpu_layers=2) == GIB // 2 * N_LAYER // CELL_BYTES


@pytest.mark.parametrize(
    ("gpu_layers", "n_on_gpu"),
    [(-1, N_LAYER), (0, 0), (1, 0), (2, 1), (N_LAYER, N_LAYER - 1), (N_LAYER + 1, N_LAYER)],
)
def test_the_output_counts_as_a_layer(gpu_layers: int, n_on_gpu: int) -> None:
    assert memory(GIB, GIB, gpu_layers=gpu_layers).n_on_gpu == n_on_gpu


def test_a_device_that_tells_no_size_has_no_memory_but_ram() -> None:
    rows = row_memory_of([(0, 0)], n_layer=N_LAYER, gpu_layers=-1, ram=8 * GIB)
    assert (rows.n_on_gpu, affordable_cells(LAYOUT, rows)) == (0, GIB // CELL_BYTES)


def test_flash_attention_is_that_of_the_cpu_where_rows_are_in_ram() -> None:
    on_gpu, in_ram = memory(64 * GIB, GIB), memory(64 * GIB, GIB, gpu_layers=0)
    assert flash_attention(Config(), on_gpu, n_head=32, n_cells=4096) == "auto"
    assert flash_attention(Config(), in_ram, n_head=32, n_cells=4096) == "off"


@pytest.mark.parametrize(
    ("flags", "free"),
    [
        ("", 7),
        ("--device none", 0),
        ("--device GPU0,GPU2", 5),
        ("-dev GPU0 --device GPU1", 2),
        ("--split-mode none", 1),
        ("--split-mode none --main-gpu 2", 4),
        ("-sm none -mg 1 --device GPU1,GPU2", 4),
        ("-sm none -mg -1", 0),
        ("--split-mode row --main-gpu 2", 7),
        ("--no-kv-offload", 0),
        ("-nkvo --kv-offload", 7),
    ],
)
def test_memory_is_that_of_the_gpus_that_the_flags_choose(
    flags: str, free: int, tiny_model: Path
) -> None:
    """llama.cpp reads them: it has three GPUs here, with 1, 2 and 4 GiB."""
    sizes = ",".join(str(n * GIB) for n in (1, 2, 4))
    done = subprocess.run(
        [sys.executable, FAKE_GPUS, tiny_model, sizes, "-1", *flags.split()],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = RowMemory(**json.loads(done.stdout))
    assert found.gpu == free * GIB
    assert found.n_on_gpu == (found.n_layer if free else 0)
