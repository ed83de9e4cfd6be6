"""WorkerSide: moves rows into vLLM's paged cache and out of it, layer by layer.

Loading runs beside the model: while one layer is computed, the next one's rows are written. Reading rows out of
the cache takes a copy in RAM during the step; all else of saving comes later, on the scheduler's side.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import torch

from towerd.connectors.vllm.cache_rows import CacheRows
from towerd.connectors.vllm.model import layer_specs, layout_of
from towerd.connectors.vllm.operations import ReadPlanes, RowLoad, RowSave, StoredPlanes
from towerd.kernels.dispatch import transcoded
from towerd.slots.layout import Plane
from towerd.slots.rows import Bytes2D

log = logging.getLogger(__name__)

warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # rows in mapped files


class WorkerSide:
    """Belongs to the worker's thread, but for what loads."""

    def __init__(self, kv_cache_config: Any, layers_of_model: Callable[[], Any]) -> None:
        """layers_of_model: the attention layers by name, once the model is loaded. Raises ConfigError."""
        self._specs = layer_specs(kv_cache_config)
        self._native = layout_of(self._specs).planes
        self._names = list(self._specs)
        self._places = {name: i for i, name in enumerate(self._names)}
        self._layers_of_model = layers_of_model
        self._caches: dict[str, Any] = {}
        self._rows: dict[str, CacheRows] = {}
        self._pool = ThreadPoolExecutor(1, "towerd-load")
        self._running: Future[None] | None = None
        self._loaded: list[Event] = []
        self._marks: list[Any] = []
        """On an accelerator: by layer, the event that its rows are there."""
        self._failed: set[int] = set()
        self._n_untrusted = 0
        """Steps, this one included, whose rows may build on rows that could not be loaded."""
        self._read: dict[str, list[tuple[Any, Any]]] = {}
        """By layer, K and V of each save of this step, in RAM."""
        self._done: list[ReadPlanes] = []
        self._ended: set[str] = set()

    def register(self, caches: dict[str, Any]) -> None:
        """vLLM's cache tensors by layer."""
        self._caches = caches

    def start_load(self, loads: Sequence[RowLoad]) -> None:
        """Begin to write stored rows into the cache."""
        if not loads:
            return
        self._learn()
        self._loaded = [Event() for _ in self._names]
        self._marks = [None] * len(self._names)
        stream = None
        if self._device().type == "cuda":
            stream = torch.cuda.Stream(self._device())
            stream.wait_stream(torch.cuda.current_stream())  # blocks are being zeroed
        self._running = self._pool.submit(self._load, loads, stream)

    def wait_for_layer(self, name: str) -> None:
        """Wait until the rows of a layer are there."""
        if self._running is not None and name in self._places:
            self._wait(self._places[name])

    def save_layer(self, name: str, saves: Sequence[RowSave]) -> None:
        """Read the rows of a layer that has been computed."""
        if saves and name in self._places and name not in self._read:
            self._learn()
            rows = self._rows[name]
            self._read[name] = [tuple(map(_to_ram, rows.read(each.slots))) for each in saves]

    def finish_step(self, saves: Sequence[RowSave]) -> None:
        """Wait for what the step loads, and read what is still to be read."""
        if self._running is not None:
            for i in range(len(self._names)):
                self._wait(i)
            self._running.result()
            self._running = None
        for name in self._names if saves else ():
            self.save_layer(name, saves)
        if saves and self._device().type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self._failed:
            self._n_untrusted = 2  # vLLM may have planned the next step already
        is_trusted = self._n_untrusted == 0
        self._n_untrusted = max(0, self._n_untrusted - 1)
        read, self._read = self._read, {}
        for i, save in enumerate(saves):
            layers = [read[name][i] for name in self._names]
            planes = tuple(layer[place].numpy() for place in (0, 1) for layer in layers)
            self._done.append(ReadPlanes(save.number, planes if is_trusted else ()))
            if save.finished is not None:
                self._ended.add(save.finished)

    def take_read(self) -> list[ReadPlanes]:
        """What was read since this was last asked."""
        done, self._done = self._done, []
        return done

    def take_ended(self) -> set[str]:
        """The requests that had ended, and whose rows were read since this was last asked."""
        ended, self._ended = self._ended, set()
        return ended

    def failed_blocks(self) -> set[int]:
        """Blocks whose rows could not be loaded, since this was last asked."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Wait for what loads."""
        self._pool.shutdown()

    def _device(self) -> Any:
        return self._caches[self._names[0]].device

    def _learn(self) -> None:
        """How the attention backend orders its cache, once it is ready to write into one."""
        if self._rows:
            return
        layers = self._layers_of_model()
        for name, spec in self._specs.items():
            layer = layers[name]
            update = partial(layer.impl.do_kv_cache_update, layer)
            sizes = spec.num_kv_heads, spec.head_size, spec.head_size_v
            self._rows[name] = CacheRows(self._caches[name], *sizes, update)

    def _load(self, loads: Sequence[RowLoad], stream: Any) -> None:
        """On a thread of its own."""
        with torch.cuda.stream(stream):  # nothing without a stream
            for i, name in enumerate(self._names):
                try:
                    for load in loads:
                        self._load_layer(i, self._rows[name], load)
                except Exception:
                    log.exception("stored rows could not be loaded")
                    self._failed |= {block for load in loads for block in load.block_ids}
                if stream is not None:
                    self._marks[i] = stream.record_event()
                self._loaded[i].set()

    def _load_layer(self, i: int, cache: CacheRows, load: RowLoad) -> None:
        at = 0
        for rows in load.pieces:
            k, v = (
                torch.from_numpy(_native(rows, place, self._native[place])).to(self._device())
                for place in (i, len(self._names) + i)
            )
            cache.write(load.slots[at : at + len(rows)], k, v)
            at += len(rows)

    def _wait(self, i: int) -> None:
        self._loaded[i].wait()
        if self._marks[i] is not None:
            torch.cuda.current_stream().wait_event(self._marks[i])


def _native(rows: StoredPlanes, place: int, native: Plane) -> Bytes2D:
    """One plane of stored rows in the cache's own format, uint8[n, row_bytes]."""
    if rows.formats[place] == native.format.name:
        return rows.planes[place]
    return transcoded(rows.planes[place], rows.formats[place], native.format.name)


def _to_ram(rows: Any) -> Any:
    """A tensor in RAM; from an accelerator it is complete once the current stream is."""
    if rows.device.type == "cpu":
        return rows
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    return host
