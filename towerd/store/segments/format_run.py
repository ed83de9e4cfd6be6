"""FormatRun: consecutive rows of a segment file in one format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, stored_format
from towerd.tokens import Provenance, Provenances

RUNS_MAX = 1 << 16
"""Maximum number of runs in a file: each costs a header entry per plane."""


@dataclass(frozen=True, slots=True)
class FormatRun:
    """Rows [row0, row0 + n_rows) of a file, with all planes in `format` where it saves space."""

    row0: int
    n_rows: int
    format: str
    """`native` or a stored format."""
    derived: bool = False
    """These rows were computed from approximate rows."""

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.row0 + self.n_rows

    @property
    def provenance(self) -> Provenance:
        """EXACT, DERIVED or APPROXIMATE."""
        if self.format != NATIVE:
            return Provenance.APPROXIMATE
        return Provenance.DERIVED if self.derived else Provenance.EXACT


def native_run(n_rows: int) -> tuple[FormatRun, ...]:
    """The single native run of files from before stored formats."""
    return (FormatRun(0, n_rows, NATIVE),)


def check_runs(runs: Sequence[FormatRun], n_rows: int) -> None:
    """Raises StateError unless the runs cover [0, n_rows) consecutively, in known formats."""
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


def provenance_of(runs: Iterable[FormatRun], row0: int, row1: int) -> Provenances:
    """The provenance of rows [row0, row1), uint8[row1 - row0]."""
    provenance = np.zeros(row1 - row0, np.uint8)
    for run in runs:
        if run.provenance and run.row0 < row1 and row0 < run.end:
            provenance[max(run.row0 - row0, 0) : run.end - row0] = run.provenance
    return provenance


def encode_runs(runs: Sequence[FormatRun]) -> str:
    """The catalog's text of a file's runs."""
    return msgspec.json.encode([[run.n_rows, run.format, run.derived] for run in runs]).decode()


_decode = msgspec.json.Decoder(list[tuple[int, str, bool]]).decode


def decode_runs(text: str, n_rows: int) -> tuple[FormatRun, ...]:
    """The inverse; an empty text stands for one native run. Raises StateError."""
    if not text:
        return native_run(n_rows)
    runs: list[FormatRun] = []
    try:
        for n, name, derived in _decode(text):
            runs.append(FormatRun(runs[-1].end if runs else 0, n, name, derived))
    except msgspec.MsgspecError as error:
        raise StateError(f"the list of runs cannot be read: {error}") from error
    check_runs(runs, n_rows)
    return tuple(runs)
