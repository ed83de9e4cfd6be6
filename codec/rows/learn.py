"""Learning a basis: means and principal directions of rows, and the tables of its codings.

The Karhunen-Loeve transform of a group of planes makes its components uncorrelated; with one step for all of
them, bits go where variance is (reverse water-filling). Planes are weighted first, by how much an error in
them costs, so that the step is one of cost and not of size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.codec.errors import CodecError
from towerd.codec.rows.basis import Basis, PlaneGroup, RowCoding
from towerd.codec.rows.plain import flattened
from towerd.kernels import dispatch, row_coding
from towerd.kernels.row_coding import ESCAPE, HALF, SHIFT_MAX, SYMBOLS, TABLE_SUM
from towerd.slots.layout import KVLayout
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows

RATIO_MIN = 0.2
"""Components whose standard deviation is a smaller share of the step are left out: nearly all of their values are
rounded to 0."""
CLASSES_OF_OCTAVE = 2
"""Classes of components by their standard deviation, in an octave."""
RATIO_OF_SYMBOLS = 4.0
"""Standard deviations in steps above which lower bits are written as they are."""
ROWS_PER_ELEMENT_MIN = 2
"""Rows that a group must have for each of its elements, or its directions are those of the sample."""
_ROWS_OF_CALL = 512
_ROWS_OF_PRODUCT = 256

Eigh: TypeAlias = Callable[
    [npt.NDArray[np.float64]], tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
]
"""As `numpy.linalg.eigh`."""
_CALLS_OF_TABLES = 8
"""Calls whose rows the symbols of the tables are counted in: more of them change no table by much."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a coding rounds: the step, the share of it by which zero is wider, and that by which values are taken
    to be nearer to zero."""

    step: float
    dead_zone: float = 0.0
    shrink: float = 0.0


def groups_of(layout: KVLayout, n_layers: int) -> tuple[tuple[int, ...], ...]:
    """Planes of `n_layers` consecutive layers each, keys and values apart; the rest of the layers are the last
    group. Layers of the window's cache are apart from the others."""
    n_full = layout.n_layer - layout.n_window
    groups = []
    for first in (0, layout.n_layer) if layout.v else (0,):
        for begin, end in ((0, n_full), (n_full, layout.n_layer)):
            for at in range(begin, end, n_layers):
                groups.append(tuple(range(first + at, first + min(at + n_layers, end))))
    return tuple(groups)


def learn(
    samples: Sequence[KVRows],
    rope: Rope,
    codings: Mapping[str, Rounding],
    *,
    row_identity: bytes,
    groups: Sequence[tuple[int, ...]],
    weights: Sequence[float] | None = None,
    eigh: Eigh = np.linalg.eigh,
    pause: Callable[[], object] = lambda: None,
    rot_k: bool = False,
    n_threads: int = dispatch.THREADS,
) -> Basis:
    """The basis of native rows of one layout. groups: planes that are transformed together; weights: of each
    plane, None for 1; rot_k: see `Basis`

    eigh: what decomposes symmetric matrices; pause: called every few dozen milliseconds, returns when the
    next ones may be used

    CodecError if there are too few rows or some cannot be transform-coded."""
    layout = samples[0].layout
    flat = []
    for rows in samples:
        pause()
        flat.append(flattened(rows, rope, rot_k=rot_k, n_threads=n_threads))
    n_rows = sum(map(len, samples))
    weights = [1.0] * len(layout.planes) if weights is None else weights
    found, variances = [], []
    for planes in groups:
        n_elements = sum(layout.planes[plane].n_elements for plane in planes)
        if n_rows < ROWS_PER_ELEMENT_MIN * n_elements:
            raise CodecError(f"A basis of {n_elements} elements takes more than {n_rows} rows.")
        values = _floats(flat, planes)
        each = [np.full(layout.planes[plane].n_elements, weights[plane]) for plane in planes]
        of_each = np.concatenate(each).astype(np.float32)
        group, variance = _group(values, planes, of_each, codings, eigh, pause)
        found.append(group)
        variances.append(variance)
    made = _codings(codings, found, variances, flat, n_threads, pause)
    return Basis(row_identity, layout, tuple(found), made, rope, rot_k)


def _floats(samples: Sequence[KVRows], planes: Sequence[int]) -> npt.NDArray[np.float32]:
    """float32[n, n_elements] of the planes, side by side."""
    parts = []
    for rows in samples:
        each = [
            dispatch.transcoded(rows.plane(i), rows.layout.planes[i].format.name, "f32")
            for i in planes
        ]
        parts.append(np.concatenate([plane.view(np.float32) for plane in each], axis=1))
    return np.concatenate(parts)


def _group(
    values: npt.NDArray[np.float32],
    planes: tuple[int, ...],
    weights: npt.NDArray[np.float32],
    codings: Mapping[str, Rounding],
    eigh: Eigh,
    pause: Callable[[], object],
) -> tuple[PlaneGroup, npt.NDArray[np.float64]]:
    """The group, and the variance of each of its components."""
    mean = values.mean(axis=0, dtype=np.float64).astype(np.float32)
    covariance = np.zeros((values.shape[1],) * 2)
    for at in range(0, len(values), _ROWS_OF_PRODUCT):
        pause()
        some = (values[at : at + _ROWS_OF_PRODUCT] - mean) * weights
        if not np.isfinite(some).all():
            raise CodecError("A row is not finite.")
        covariance += some.T @ some
    variances, vectors = eigh(covariance / len(values))
    variances, vectors = variances[::-1], vectors.T[::-1]
    least = RATIO_MIN * min(rounding.step for rounding in codings.values())
    n = max(1, int((variances > least**2).sum()))
    kept = np.ascontiguousarray(vectors[:n]).astype(np.float16)
    return PlaneGroup(planes, kept, mean, weights), variances[:n]


def _codings(
    codings: Mapping[str, Rounding],
    groups: Sequence[PlaneGroup],
    variances: Sequence[npt.NDArray[np.float64]],
    samples: Sequence[KVRows],
    n_threads: int,
    pause: Callable[[], object],
) -> dict[str, RowCoding]:
    """The classes of the components, and tables from how often each symbol occurs in rows of the samples."""
    classed = {name: _classed(rounding, variances) for name, rounding in codings.items()}
    counts = {
        name: np.zeros((len(each.shifts), SYMBOLS), np.int64) for name, each in classed.items()
    }
    for i, group in enumerate(groups):
        for values in _components(group, samples, n_threads):
            pause()
            for name, rounding in codings.items():
                classes = classed[name].of_groups[i]
                symbols = _symbols(
                    values[:, : len(classes)], rounding, classed[name].shifts[classes]
                )
                for which in np.unique(classes):
                    found = np.bincount(symbols[:, classes == which].ravel(), minlength=SYMBOLS)
                    counts[name][which] += found
    return {
        name: RowCoding(
            rounding.step,
            rounding.dead_zone,
            rounding.shrink,
            classed[name].of_groups,
            classed[name].shifts,
            np.stack([table_of(row) for row in counts[name]]),
        )
        for name, rounding in codings.items()
    }


@dataclass(frozen=True, slots=True)
class _Classed:
    """The class of each component that a coding keeps, by group; the shift of each class."""

    of_groups: tuple[npt.NDArray[np.uint8], ...]
    shifts: npt.NDArray[np.uint8]


def _classed(rounding: Rounding, variances: Sequence[npt.NDArray[np.float64]]) -> _Classed:
    ratios = [np.sqrt(np.maximum(each, 0.0)) / rounding.step for each in variances]
    ratios = [ratio[: max(1, int((ratio > RATIO_MIN).sum()))] for ratio in ratios]
    octaves = [np.round(CLASSES_OF_OCTAVE * np.log2(np.maximum(r, RATIO_MIN))) for r in ratios]
    present = np.unique(np.concatenate(octaves))[: row_coding.CLASSES_MAX]
    classes = [np.clip(np.searchsorted(present, each), 0, len(present) - 1) for each in octaves]
    typical = 2 ** (present / CLASSES_OF_OCTAVE)
    shifts = np.clip(np.ceil(np.log2(typical / RATIO_OF_SYMBOLS)), 0, SHIFT_MAX).astype(np.uint8)
    return _Classed(tuple(each.astype(np.uint8) for each in classes), shifts)


def _components(
    group: PlaneGroup, samples: Sequence[KVRows], n_threads: int
) -> Iterator[npt.NDArray[np.float32]]:
    """[rows, components] for each of some calls of the kernel, spread over the samples."""
    transform = row_coding.RowTransform(group.vectors.view(np.uint16), group.mean, group.weights)
    format_name = samples[0].layout.planes[group.planes[0]].format.name
    calls = [(rows, at) for rows in samples for at in range(0, len(rows), _ROWS_OF_CALL)]
    which = np.linspace(0, len(calls) - 1, min(len(calls), _CALLS_OF_TABLES)).round().astype(int)
    for rows, at in (calls[i] for i in which):
        planes = [rows.plane(i)[at : at + _ROWS_OF_CALL] for i in group.planes]
        yield row_coding.components(transform, planes, format_name, n_threads)


def _symbols(
    values: npt.NDArray[np.float32], rounding: Rounding, shifts: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int64]:
    level = np.floor(np.abs(values) / rounding.step + 0.5 - rounding.dead_zone)
    upper = (np.sign(values) * level).astype(np.int64) >> shifts
    return np.where(np.abs(upper) <= HALF, upper + HALF, ESCAPE)


def table_of(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """uint16[64] that add up to TABLE_SUM, in proportion to the counts: at least 1 for symbols that occurred
    and for the escape."""
    wanted = counts.astype(np.float64)
    wanted[ESCAPE] += 1
    share = wanted / wanted.sum() * TABLE_SUM
    table = np.where(wanted > 0, np.maximum(1, np.floor(share)), 0).astype(np.int64)
    table[table.argmax()] += TABLE_SUM - table.sum()
    return table.astype(np.uint16)
