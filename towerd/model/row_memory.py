"""Where llama.cpp keeps the rows of a model's contexts, and how much memory is free there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towerd.model.llama_model import LlamaModel
from towerd.settings.config import Config
from towerd.wire import device_bytes


@dataclass(frozen=True, slots=True)
class RowMemory:
    """The memory that holds the rows: those of a layer are where its weights are."""

    n_layer: int
    n_on_gpu: int
    """Layers whose rows are on GPUs; 0: all rows are in RAM."""
    ram: int
    """Bytes."""
    gpu: int
    """Bytes that are free on the GPUs that hold rows."""

    def n_affordable(self, n_bytes: int, *, ram_share: int, gpu_share: int) -> int:
        """How many things of `n_bytes`, each with as much in every layer, fit 1 / ram_share of RAM and
        1 / gpu_share of what is free on the GPUs."""
        on_gpu = n_bytes * self.n_on_gpu // self.n_layer
        in_ram = n_bytes - on_gpu
        limits = []
        if on_gpu:
            limits.append(self.gpu // gpu_share // on_gpu)
        if in_ram or not limits:
            limits.append(self.ram // ram_share // max(1, in_ram))
        return min(limits)


def row_memory(model: LlamaModel, config: Config, ram: int) -> RowMemory:
    """Ask llama.cpp, which has read the flags about devices, where it put a model. ram: bytes"""
    is_offloaded = bool(model.context_params(config).offload_kqv)
    devices = device_bytes(model.address) if is_offloaded else []
    n_layer = int(model.key("block_count", "1"))
    return row_memory_of(devices, n_layer=n_layer, gpu_layers=config.gpu_layers, ram=ram)


def row_memory_of(
    devices: Sequence[tuple[int, int]], *, n_layer: int, gpu_layers: int, ram: int
) -> RowMemory:
    """devices: bytes that are free and all bytes of each that may hold rows; one that tells neither has no
    memory but RAM. gpu_layers: as in `Config`; llama.cpp counts the output as the last of them, so the rows
    of one layer less are on the devices."""
    n_layer = max(1, n_layer)
    told = [free for free, total in devices if total]
    n_on_gpu = n_layer if gpu_layers < 0 else min(n_layer, max(0, gpu_layers - 1))
    if not told:
        n_on_gpu = 0
    return RowMemory(n_layer, n_on_gpu, ram, sum(told) if n_on_gpu else 0)
