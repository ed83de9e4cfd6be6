"""Tensor: one tensor of a random-weight model, drawn when it is written."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A name, a numpy shape and a normal distribution, the `values` themselves, or how they are `made`
    of a seed."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0
    type: GGMLQuantizationType = GGMLQuantizationType.F32
    values: tuple[float, ...] | None = None
    made: Callable[[int], F32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * block_bytes

    def draw(self, seed: int) -> F32:
        """The values. Each name has its own random stream, independent of the other tensors."""
        if self.made is not None:
            return self.made(seed)
        if self.values is not None:
            return np.array(self.values, dtype=np.float32).reshape(self.shape)
        if self.std == 0.0:
            return np.full(self.shape, self.mean, dtype=np.float32)
        digest = hashlib.blake2b(f"{seed}/{self.name}".encode(), digest_size=16).digest()
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        values = stream.standard_normal(self.shape, dtype=np.float32)
        values *= np.float32(self.std)
        if self.mean:
            values += np.float32(self.mean)
        return values


def norm(name: str, n: int, *, spread: float = 0.0, with_bias: bool = False) -> list[Tensor]:
    """A norm's gain around 1 and, if requested, its small bias."""
    gain = Tensor(f"{name}.weight", (n,), spread, 1.0)
    return [gain, bias(name, n)] if with_bias else [gain]


def bias(name: str, n: int) -> Tensor:
    """A small bias."""
    return Tensor(f"{name}.bias", (n,), 0.1)
