"""Rows as quantized components of a learned transform, in numpy.

A transform has vectors[n_components, n_elements] (float16, orthonormal), a mean and weights
[n_elements]. The kernels add up products in the order of the columns, each rounded once to float32; here the
sums are in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Transform:
    """components = vectors @ ((row - mean) * weights)."""

    vectors: npt.NDArray[np.float16]
    mean: Floats
    weights: Floats

    def components(self, rows: Floats) -> npt.NDArray[np.float64]:
        """[n, n_components] of rows[n, n_elements]."""
        centred = ((rows - self.mean) * self.weights).astype(np.float64)
        return centred @ self.vectors.astype(np.float64).T

    def rows(self, components: Floats) -> Floats:
        """[n, n_elements] of components[n, n_components]."""
        wide = components.astype(np.float64) @ self.vectors.astype(np.float64)
        return (wide.astype(np.float32) * (np.float32(1) / self.weights) + self.mean).astype(
            np.float32
        )


def quantized(components: Floats, step: float, dead_zone: float) -> npt.NDArray[np.int16]:
    """sign(c) * floor(|c| / step + 0.5 - dead_zone), at most 32767."""
    inverse = np.float32(1) / np.float32(step)
    rounding = np.float32(0.5) - np.float32(dead_zone)
    level = np.minimum(np.floor(np.abs(components * inverse) + rounding), np.float32(32767))
    values: npt.NDArray[np.int16] = (np.sign(components) * np.maximum(level, 0)).astype(np.int16)
    return values


def dequantized(values: npt.NDArray[np.int16], step: float, shrink: float) -> Floats:
    """step * (q - sign(q) * shrink)."""
    wide = values.astype(np.float32)
    inward = wide - np.sign(wide) * np.float32(shrink)
    return (inward * np.float32(step)).astype(np.float32)
