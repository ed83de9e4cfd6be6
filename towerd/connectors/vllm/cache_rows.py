"""CacheRows: the rows of one layer in vLLM's paged cache, read and written by slot.

How a block orders its numbers is the attention backend's own affair: on a CPU a block has its keys channel by
channel, for matrix units in tiles. So it is learned: the backend writes known numbers into a block, and where
each of them lies is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from towerd.connectors.vllm.operations import Slots
from towerd.errors import ConfigError

Update: TypeAlias = Callable[[Any, Any, Any, Any], None]
"""Writes keys [n, heads, size], values and an int64[n] of slots into a cache: (key, value, cache, slots)."""
_BASE = 128
"""Numbers up to so many are exact in every element type."""


class NotLearned(ConfigError):
    """The attention backend keeps rows in a way that cannot be addressed by token."""


class CacheRows:
    """The rows of one layer; `cache` is vLLM's tensor [blocks, heads, tokens, content]."""

    def __init__(self, cache: Any, heads: int, k_size: int, v_size: int, update: Update) -> None:
        """update: the backend's own function. Raises NotLearned."""
        self.block_tokens = int(cache.shape[2])
        shape = self.block_tokens, heads
        n_k, n_v = prod(shape) * k_size, prod(shape) * v_size
        places = _places(cache, (*shape, k_size), (*shape, v_size), update)
        self._k = _View(cache, places[:n_k].reshape(*shape, k_size))
        self._v = _View(cache, places[n_k : n_k + n_v].reshape(*shape, v_size))

    def read(self, slots: Slots) -> tuple[Any, Any]:
        """K and V of these slots: tensors uint8[n, row_bytes] on the cache's device."""
        return self._k.read(slots, self.block_tokens), self._v.read(slots, self.block_tokens)

    def write(self, slots: Slots, k: Any, v: Any) -> None:
        """Write K and V, tensors uint8[n, row_bytes] on the cache's device; nothing else is touched."""
        self._k.write(slots, self.block_tokens, k)
        self._v.write(slots, self.block_tokens, v)


class _View:
    """K or V of a cache as a tensor [blocks, token digits..., head digits..., channel digits...]."""

    def __init__(self, cache: Any, places: npt.NDArray[np.int64]) -> None:
        """places: int64[tokens, heads, channels]: where each number of a block lies, from its first on."""
        first = places[0, 0, 0]
        axes = places[:, 0, 0] - first, places[0, :, 0] - first, places[0, 0, :] - first
        total = axes[0][:, None, None] + axes[1][None, :, None] + axes[2][None, None, :]
        if not np.array_equal(total, places - first):
            raise NotLearned("This attention backend mixes tokens and channels in its cache.")
        digits = [_digits(axis) for axis in axes]
        self._tokens = [size for size, _ in digits[0]]
        sizes = [size for axis in digits for size, _ in axis]
        strides = [stride for axis in digits for _, stride in axis]
        at = int(cache.storage_offset()) + int(first)
        n_blocks, step = int(cache.shape[0]), int(cache.stride(0))
        self._view = torch.as_strided(cache, (n_blocks, *sizes), (step, *strides), at)
        self._row = sizes[len(self._tokens) :]

    def read(self, slots: Slots, block_tokens: int) -> Any:
        rows = self._view[self._index(slots, block_tokens)]
        return rows.reshape(len(slots), -1).contiguous().view(torch.uint8)

    def write(self, slots: Slots, block_tokens: int, rows: Any) -> None:
        values = rows.view(self._view.dtype).reshape(len(slots), *self._row)
        self._view[self._index(slots, block_tokens)] = values

    def _index(self, slots: Slots, block_tokens: int) -> tuple[Any, ...]:
        blocks, places = np.divmod(slots, block_tokens)
        found, below = [blocks], block_tokens
        for size in self._tokens:
            below //= size
            found.append(places // below % size)
        return tuple(torch.from_numpy(each).to(self._view.device) for each in found)


def _digits(steps: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """(size, stride) of each digit of an index, the most significant first, so that strides times digits
    give `steps`. Raises NotLearned."""
    if len(steps) == 1:
        return []
    stride, n = int(steps[1]), 1
    while n < len(steps) and steps[n] == n * stride:
        n += 1
    while len(steps) % n:
        n -= 1
    index = np.arange(len(steps))
    if (
        n == 1
        or stride <= 0
        or not np.array_equal(steps, steps[index - index % n] + index % n * stride)
    ):
        raise NotLearned("This attention backend orders its cache in a way that is not understood.")
    return [*_digits(steps[::n]), (n, stride)]


def _places(
    cache: Any, k: Sequence[int], v: Sequence[int], update: Update
) -> npt.NDArray[np.int64]:
    """Where in a block each number of its keys lies, and then each of its values; their shapes are [tokens,
    heads, channels]."""
    _, heads, tokens, content = cache.shape
    strides = [int(each) for each in cache.stride()[1:]]
    n_cells = 1 + sum((int(n) - 1) * s for n, s in zip(cache.shape[1:], strides, strict=True))
    n_k, n_all = prod(k), prod(k) + prod(v)
    device, dtype = cache.device, cache.dtype
    cells = torch.zeros(n_cells, dtype=dtype, device=device)
    scratch = torch.as_strided(cells, (1, heads, tokens, content), (n_cells, *strides))
    slots = torch.arange(tokens, dtype=torch.int64, device=device)
    codes = np.arange(n_all)
    found, factor = np.zeros(n_cells, np.int64), 1
    while factor < n_all:
        digits = torch.from_numpy(codes // factor % _BASE + 1).to(device=device, dtype=dtype)
        cells.zero_()
        update(digits[:n_k].reshape(*k), digits[n_k:].reshape(*v), scratch, slots)
        seen = cells.to(device="cpu", dtype=torch.int64).numpy()
        found = np.where(seen > 0, found + (seen - 1) * factor, -1)
        factor *= _BASE
    at = np.flatnonzero(found >= 0)
    if not np.array_equal(np.sort(found[at]), codes):
        raise NotLearned("This attention backend does not keep keys and values as they are.")
    places = np.empty(n_all, np.int64)
    places[found[at]] = at
    return places
