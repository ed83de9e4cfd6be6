"""Tables of RoPE's angles that are the same on every machine.

sin and cos of different C libraries and of numpy differ in the last bit, so these are computed with
integers: fixed-point numbers, a decimal power that is correctly rounded by definition, Taylor
series, and the addition theorem from one position to the next.
"""

from __future__ import annotations

import decimal

import numpy as np
import numpy.typing as npt

_BITS = 128
_ONE = 1 << _BITS
_DIGITS = 60
_TERMS = 20

Floats = npt.NDArray[np.float32]


def rotation(n_positions: int, n_rot: int, freq_base: float) -> tuple[Floats, Floats]:
    """(cos, sin), float32[n_positions, n_rot / 2]: position p and pair j turn by
    p * freq_base^(-2 j / n_rot). `freq_base` is at least 1."""
    table = np.empty((2, n_positions, n_rot // 2), np.float32)
    for pair in range(n_rot // 2):
        step_cos, step_sin = _cos_sin(_angle(pair, n_rot, freq_base))
        cos, sin = _ONE, 0
        for position in range(n_positions):
            table[:, position, pair] = cos / _ONE, sin / _ONE
            cos, sin = (
                (cos * step_cos - sin * step_sin) >> _BITS,
                (cos * step_sin + sin * step_cos) >> _BITS,
            )
    return table[0], table[1]


def _angle(pair: int, n_rot: int, freq_base: float) -> int:
    """The angle of a pair per position, in units of 1 / _ONE; at most 1 radian."""
    context = decimal.Context(prec=_DIGITS)
    exponent = context.divide(decimal.Decimal(-2 * pair), decimal.Decimal(n_rot))
    power = context.exp(context.multiply(exponent, context.ln(decimal.Decimal(freq_base))))
    return int(context.multiply(power, decimal.Decimal(_ONE)))


def _cos_sin(angle: int) -> tuple[int, int]:
    square = angle * angle >> _BITS
    cos, sin = _ONE, angle
    cos_term, sin_term = _ONE, angle
    for term in range(1, _TERMS):
        cos_term = -(cos_term * square >> _BITS) // ((2 * term - 1) * (2 * term))
        sin_term = -(sin_term * square >> _BITS) // ((2 * term) * (2 * term + 1))
        cos, sin = cos + cos_term, sin + sin_term
    return cos, sin
