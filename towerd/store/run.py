"""Run: consecutive rows of a segment file that are kept in one format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, stored_format

RUNS_MAX = 1 << 16
"""Runs of one file: each costs a header entry per plane."""

Taint: TypeAlias = npt.NDArray[np.uint8]
"""uint8[n]: what became of each token's rows. On disk EXACT, DERIVED or APPROXIMATE; live ones
can also be SPLICED, AFTER_SPLICE or THINNED."""
EXACT = 0
"""As monolithic prefill computes them."""
DERIVED = 1
"""Computed as always, but after tokens whose rows were approximate."""
APPROXIMATE = 2
"""Decoded from a stored format."""
SPLICED = 3
"""A module's, moved here from after other text; never stored."""
AFTER_SPLICE = 4
"""Computed as always, but after tokens whose rows were spliced; never stored."""
THINNED = 5
"""Computed while some of what stands before was not live; never stored."""


def computed_after(before: Taint) -> int:
    """What rows are that are computed after rows of these taints."""
    worst = int(before.max(initial=EXACT))
    if worst == THINNED:
        return THINNED
    return EXACT if worst == EXACT else DERIVED if worst < SPLICED else AFTER_SPLICE


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [row0, row0 + n_rows) of a file, all planes in `format` where it gains."""

    row0: int
    n_rows: int
    format: str
    """`native` or a stored format."""
    derived: bool = False
    """Whether approximate rows went into computing these."""

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.row0 + self.n_rows

    @property
    def taint(self) -> int:
        """EXACT, DERIVED or APPROXIMATE."""
        return APPROXIMATE if self.format != NATIVE else DERIVED if self.derived else EXACT


def native_run(n_rows: int) -> tuple[Run, ...]:
    """What files held before there were stored formats: everything, as computed."""
    return (Run(0, n_rows, NATIVE),)


def check_runs(runs: Sequence[Run], n_rows: int) -> None:
    """StateError unless the runs cover [0, n_rows) one after the other, in known formats."""
    if not 0 < len(runs) <= RUNS_MAX:
        raise StateError(f"{len(runs)} runs; expected 1 to {RUNS_MAX}")
    at = 0
    for run in runs:
        if run.row0 != at or run.n_rows <= 0:
            raise StateError("the runs of rows do not follow one another")
        if run.format != NATIVE:
            stored_format(run.format)
        at = run.end
    if at != n_rows:
        raise StateError(f"the runs hold {at} rows, not {n_rows}")


def taint_of(runs: Iterable[Run], row0: int, row1: int) -> Taint:
    """The taint of rows [row0, row1), uint8[row1 - row0]."""
    taint = np.zeros(row1 - row0, np.uint8)
    for run in runs:
        if run.taint and run.row0 < row1 and row0 < run.end:
            taint[max(run.row0 - row0, 0) : run.end - row0] = run.taint
    return taint


def encode_runs(runs: Sequence[Run]) -> str:
    """The catalog's text of a file's runs."""
    return msgspec.json.encode([[run.n_rows, run.format, run.derived] for run in runs]).decode()


_decode = msgspec.json.Decoder(list[tuple[int, str, bool]]).decode


def decode_runs(text: str, n_rows: int) -> tuple[Run, ...]:
    """The inverse; an empty text stands for one native run. Raises StateError."""
    if not text:
        return native_run(n_rows)
    runs: list[Run] = []
    try:
        for n, name, derived in _decode(text):
            runs.append(Run(runs[-1].end if runs else 0, n, name, derived))
    except msgspec.MsgspecError as error:
        raise StateError(f"the list of runs cannot be read: {error}") from error
    check_runs(runs, n_rows)
    return tuple(runs)
