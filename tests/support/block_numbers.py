"""Blocks of 32 numbers that quantizers stumble over, family by family."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
N = 200


def families() -> dict[str, Floats]:
    """float32[n, 32] each, all finite; those of `huge` are beyond what f16 holds."""
    random = np.random.default_rng(20)
    normal = random.standard_normal((N, 32)).astype(np.float32)
    zeros = np.where(random.random((N, 32)) < 0.5, np.float32(0), np.float32(-0.0))
    found: dict[str, Floats] = {
        "normal": normal,
        "laplace": random.laplace(size=(N, 32)).astype(np.float32),
        "f16": normal.astype(np.float16).astype(np.float32),
        "shifted": normal + np.float32(1000),
        "constant": np.repeat(normal[:, :1], 32, 1),
        "zeros of both signs": zeros,
        "not negative": np.where(random.random((N, 32)) < 0.3, zeros, np.abs(normal)),
        "ties": (random.integers(-254, 255, (N, 32)) / 2).astype(np.float32),
        "few values": (random.integers(-8, 9, (N, 32)) / 2).astype(np.float32),
        "signs": random.integers(-1, 2, (N, 32)).astype(np.float32),
        "mixed sizes": (normal * 10.0 ** random.uniform(-10, 4, (N, 32))).astype(np.float32),
        "near f16's limit": (random.uniform(-1, 1, (N, 32)) * 65504).astype(np.float32),
    }
    for exponent in (-45, -42, -40, -38.3, -38, -37, -20, -16, -15, -10, -8, -7, -6, -4):
        found[f"1e{exponent}"] = (normal * 10.0**exponent).astype(np.float32)
    for exponent in (5, 6, 8, 12, 20, 30, 37):
        found[f"huge 1e{exponent}"] = (normal * 10.0**exponent).astype(np.float32)
    return found


FAMILIES = families()
IN_F16 = [name for name in FAMILIES if not name.startswith("huge")]
