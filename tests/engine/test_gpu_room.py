"""How many cells the default live context has where a GPU holds some of its layers."""

from __future__ import annotations

import pytest

from towerd.engine.embedded.context.core import affordable_cells
from towerd.model.gpus import gpu_free_bytes
from towerd.model.llama_model import init_backend
from towerd.settings.config import Config
from towerd.slots.layout import KVLayout, Plane

F16 = 1
N_LAYER = 4
LAYOUT = KVLayout((Plane(F16, 256),) * N_LAYER, (Plane(F16, 256),) * N_LAYER)
CELL_BYTES = 2 * N_LAYER * 256
GIB = 1 << 30


def cells(ram: int, gpu: int, gpu_layers: int = -1, *flags: str) -> int:
    return affordable_cells(
        LAYOUT, Config(gpu_layers=gpu_layers, llama_server_args=flags), ram, gpu
    )


def test_without_a_gpu_an_eighth_of_ram() -> None:
    assert cells(8 * GIB, 0) == GIB // CELL_BYTES


def test_on_a_gpu_half_of_what_is_free_there_whatever_ram_there_is() -> None:
    assert cells(8 * GIB, 3 * GIB) == cells(GIB, 3 * GIB) == 3 * GIB // 2 // CELL_BYTES
    assert cells(8 * GIB, 3 * GIB, 99) == 3 * GIB // 2 // CELL_BYTES


def test_layers_on_both_sides_must_fit_both() -> None:
    assert cells(8 * GIB, GIB, 1) == GIB * N_LAYER // (3 * CELL_BYTES)
    assert cells(80 * GIB, GIB, 1) == GIB // 2 * N_LAYER // CELL_BYTES


@pytest.mark.parametrize("flags", [(), ("--no-kv-offload",)])
def test_cells_that_stay_in_ram_take_ram(flags: tuple[str, ...]) -> None:
    layers = -1 if flags else 0
    assert cells(8 * GIB, GIB, layers, *flags) == GIB // CELL_BYTES


def test_free_memory_is_that_of_the_gpus_there_are() -> None:
    init_backend()
    assert gpu_free_bytes() >= 0
