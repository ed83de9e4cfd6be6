"""RoPE: how a model rotates the keys it caches, by position, layer by layer.

llama.cpp caches K after the rotation, so one more rotation moves rows to other positions
(towers paper, Definition 6). Formulas: llama.cpp `ggml/src/ggml-cpu/ops.cpp` (rope_yarn,
ggml_rope_cache_init, ggml_mrope_cache_init).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from towerd.slots.errors import StateError

Kind: TypeAlias = Literal["none", "norm", "neox"]
Angles: TypeAlias = npt.NDArray[np.float64]
Table: TypeAlias = npt.NDArray[np.float32]
Sections: TypeAlias = tuple[int, int, int, int]

HEAD_DIM_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class LayerRope:
    """One cached layer's rotation: in each head of `head_dim` elements, `n_rot` elements from
    `first` on rotate. Raises StateError if the numbers do not fit together."""

    kind: Kind
    """Pair j is (2j, 2j + 1) for norm, (j, j + n_rot / 2) for neox; none: keys do not rotate."""
    head_dim: int
    n_rot: int = 0
    first: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    """How much of YaRN's extrapolation is mixed in; 0: plain or linear scaling."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    factors: tuple[float, ...] | None = None
    """n_rot / 2 divisors of the angles (llama3, longrope)."""
    sections: Sections | None = None
    """M-RoPE: pairs that follow time, height, width and a fourth position that text leaves 0."""
    interleaved: bool = False
    """The sections alternate pair by pair (IMROPE)."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise StateError(f"rope: kind is {self.kind!r}; expected one of {get_args(Kind)}")
        if not 0 < self.head_dim <= HEAD_DIM_MAX:
            raise StateError(f"rope: head_dim is {self.head_dim}; expected 1 to {HEAD_DIM_MAX}")
        if self.kind == "none":
            return
        if self.n_rot < 2 or self.n_rot % 2 or not 0 <= self.first <= self.head_dim - self.n_rot:
            raise StateError(
                f"rope: {self.n_rot} elements from {self.first} on cannot be rotated in a head "
                f"of {self.head_dim}"
            )
        if not (_is_positive(self.freq_base) and _is_positive(self.freq_scale)):
            raise StateError("rope: freq_base and freq_scale must be positive and finite")
        if self.ext_factor != 0.0:
            self._check_yarn()
        if self.factors is not None:
            self._check_factors(self.factors)
        if self.sections is not None:
            self._check_sections(self.sections)

    def _check_yarn(self) -> None:
        bounds = (self.ext_factor, self.beta_fast, self.beta_slow, self.n_ctx_orig)
        if not all(map(_is_positive, bounds)) or self.freq_base == 1.0:
            raise StateError("rope: YaRN needs positive factors, betas and original context")

    def _check_factors(self, factors: tuple[float, ...]) -> None:
        if len(factors) != self.n_rot // 2 or not all(map(_is_positive, factors)):
            raise StateError(f"rope: expected {self.n_rot // 2} positive frequency factors")

    def _check_sections(self, sections: Sequence[int]) -> None:
        if len(sections) != 4 or min(sections) < 0 or sum(sections[:3]) == 0:
            raise StateError("rope: sections must be four counts, the first three not all 0")

    def angles(self) -> Angles:
        """float64[n_rot / 2]: radians that each pair turns per position; 0 where it does not."""
        return self._scaled(self._theta_scale ** np.arange(self.n_rot // 2))

    def chain(self, positions: npt.ArrayLike) -> Table:
        """float32[n, n_rot / 2]: the angles of llama.cpp's CPU code, which multiplies its way from
        pair to pair in float32, with the same rounding errors."""
        theta = np.empty((np.size(positions), self.n_rot // 2), np.float32)
        theta[:] = np.reshape(positions, (-1, 1))
        theta[:, 1:] = self._theta_scale
        return self._scaled(np.multiply.accumulate(theta, axis=1))

    @property
    def _theta_scale(self) -> float:
        """From one pair's angle to the next one's; float32 in every llama.cpp backend."""
        return float(np.float32(self.freq_base) ** np.float32(-2.0 / self.n_rot))

    def _scaled(self, theta: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Unscaled angles, one column per pair, as the model has them; same dtype."""
        j, cast = np.arange(self.n_rot // 2), theta.dtype.type
        if self.factors is not None:
            theta = theta / np.array(self.factors, theta.dtype)
        extrapolated, theta = theta, theta * cast(self.freq_scale)
        if self.ext_factor != 0.0:
            mix = (self._ramp(j) * self.ext_factor).astype(theta.dtype)
            theta = theta * (1 - mix) + extrapolated * mix
        if self.sections is not None:
            theta = np.where(self._follows_text(j, self.sections), theta, cast(0))
        return theta

    def _ramp(self, j: npt.NDArray[np.int64]) -> Angles:
        """YaRN: 1 where a pair turns often enough in the original context to extrapolate."""

        def pair_of(turns: float) -> float:  # float32 as in llama.cpp: it is rounded next
            ratio = np.float32(self.n_ctx_orig) / np.float32(turns * 2 * math.pi)
            pairs = np.float32(self.n_rot) * np.log(ratio)
            return float(pairs / (2 * np.log(np.float32(self.freq_base))))

        low = max(0, math.floor(pair_of(self.beta_fast)))
        high = min(self.n_rot - 1, math.ceil(pair_of(self.beta_slow)))
        return 1 - np.clip((j - low) / max(0.001, high - low), 0.0, 1.0)

    def _follows_text(self, j: npt.NDArray[np.int64], sections: Sections) -> npt.NDArray[np.bool_]:
        """Pairs of the first three sections: a text token has its position in all of them."""
        time, height, width, _ = sections
        sector = j % sum(sections)
        if not self.interleaved:
            return sector < time + height + width
        bound = np.choose(sector % 3, [3 * time, 3 * height, 3 * width])
        return sector < bound


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of every cached layer, in the cache's order (`KVLayout.k`).

    n_window: how many of them, the last ones, are the sliding window's (`KVLayout.n_window`)

    Raises StateError without a layer, or if only some layers have M-RoPE sections."""

    layers: tuple[LayerRope, ...]
    n_window: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise StateError("rope: no layers")
        roped = [layer for layer in self.layers if layer.kind != "none"]
        if len({layer.sections is None for layer in roped}) > 1:
            raise StateError("rope: either all rotating layers have sections or none")

    @property
    def sections(self) -> tuple[Rope, ...]:
        """The rotation of the layers of each cache (see `KVLayout.sections`)."""
        if not self.n_window:
            return (self,)
        n_full = len(self.layers) - self.n_window
        return Rope(self.layers[:n_full]), Rope(self.layers[n_full:])

    @property
    def is_multi(self) -> bool:
        """Positions have several components (M-RoPE), which cells record in their extension."""
        return any(layer.sections is not None for layer in self.layers)

    def angles(self, layer: int) -> Angles:
        """float64[n_rot / 2]: radians per position of a layer's pairs."""
        return self.layers[layer].angles()

    def tables(self, layer: int, deltas: npt.ArrayLike) -> tuple[Table, Table]:
        """cos and sin, float32[k, n_rot / 2], that move a layer's keys by k position deltas.

        The magnitude is always 1: the factors of YaRN and longrope are in the keys already.
        The angles are products in float64."""
        return _turn(np.multiply.outer(np.asarray(deltas, np.float64), self.angles(layer)))

    def rounded_tables(
        self, layer: int, positions: npt.NDArray[np.int32], delta: int | npt.NDArray[np.int32]
    ) -> tuple[Table, Table]:
        """cos and sin, float32[n, n_rot / 2], one line per row, that move keys from the angles that
        llama.cpp gave them at `positions` to those it would give them `delta` further on, which may
        differ by row.

        A decode's own angles are off by up to ~2^-24 of their size. Measured against a decode
        at the target position on a CPU (16-bit keys, heads of 64, base 10,000; mean and largest
        error, relative to the keys' RMS and maximum): the errors are 1.5e-4 and 6e-4, which is
        f16's rounding, at every position. Those of `tables` are the same up to a few thousand
        positions, then 1.9e-4 and 1.1e-3 for 0 to 32,000, 4.1e-4 and 3.1e-3 for 0 to 131,000,
        4.9e-4 and 5.4e-3 for 100,000 to 131,000. GPU backends round in other places."""
        chain = self.layers[layer].chain
        return _turn(
            chain(positions + np.asarray(delta, np.int32)).astype(np.float64) - chain(positions)
        )

    def row_tables(
        self, layer: int, positions: npt.NDArray[np.int32], *, back: bool
    ) -> tuple[Table, Table]:
        """cos and sin, float32[n, n_rot / 2], one line per row, that move keys from position 0 to where
        llama.cpp rotates them at `positions`, or back."""
        angles = self.layers[layer].chain(positions).astype(np.float64)
        return _turn(-angles if back else angles)


def _turn(angles: Angles) -> tuple[Table, Table]:
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
