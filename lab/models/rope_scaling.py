"""The metadata keys and factor tensors of a random-weight model with an extended context.

Values are as published: linear and YaRN by 4; Llama 3.1's factors; for longrope two ramps like
Phi-3's, whose real factors were found by search."""

from __future__ import annotations

import math

import numpy as np
from gguf import GGUFWriter, RopeScalingType

from lab.models.shape import Shape
from lab.models.tensor import Tensor

FACTOR = 4.0
LLAMA3_FACTOR, LLAMA3_LOW, LLAMA3_HIGH = 8.0, 1.0, 4.0
TYPES = {
    "linear": RopeScalingType.LINEAR,
    "yarn": RopeScalingType.YARN,
    "longrope": RopeScalingType.LONGROPE,
}


def n_ctx_orig(shape: Shape) -> int:
    """The context length that such a model was trained on before the extension."""
    return max(1, shape.n_ctx_train // int(FACTOR))


def add_scaling(writer: GGUFWriter, shape: Shape) -> None:
    """Add the metadata keys of the scaling."""
    kind = TYPES.get(shape.rope_scaling)
    if kind is None:
        return
    writer.add_rope_scaling_type(kind)
    writer.add_rope_scaling_orig_ctx_len(n_ctx_orig(shape))
    if kind == RopeScalingType.LONGROPE:
        gain = 1 + math.log(FACTOR) / math.log(n_ctx_orig(shape)) if shape.n_ctx_train > 8 else 1
        writer.add_rope_scaling_attn_factors(math.sqrt(gain))
    else:
        writer.add_rope_scaling_factor(FACTOR)


def factor_tensors(shape: Shape) -> list[Tensor]:
    """The tensors of frequency factors, if the scaling has any."""
    n = shape.n_rot // 2
    if shape.rope_scaling == "llama3":
        return [_factors("rope_freqs", _llama3(shape))]
    if shape.rope_scaling == "longrope":
        ramp = np.arange(n) / max(1, n - 1)
        return [
            _factors("rope_factors_long", 1 + (2 * FACTOR - 1) * ramp**2),
            _factors("rope_factors_short", 1 + 0.5 * ramp),
        ]
    return []


def _factors(name: str, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Tensor:
    return Tensor(f"{name}.weight", (len(values),), values=tuple(float(v) for v in values))


def _llama3(shape: Shape) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Llama 3's factors: full for pairs of long wavelengths, 1 for short ones, a ramp between."""
    exponents = np.arange(0, shape.n_rot, 2) / shape.n_rot
    wavelengths = 2 * np.pi * shape.rope_freq_base**exponents
    turns = n_ctx_orig(shape) / wavelengths
    smooth = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / LLAMA3_FACTOR + smooth)
