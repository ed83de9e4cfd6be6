"""A made-up calibration of a row identity."""

from __future__ import annotations

from towerd.slots.row_identity import RowIdentity
from towerd.tiers.formats.calibration import (
    Calibration,
    Floor,
    FormatChoice,
    FormatCost,
    Grid,
    Table,
    bits_of,
    formats_digest,
    sizes,
)


def calibration_of(row_identity: RowIdentity, table: Table, excess: float = 0.001) -> Calibration:
    """One that found `table` for both fidelities."""
    native = FormatCost(0.0, 0.0, 0.0, 1.0, 8.0, 1024)
    cost = FormatCost(0.003 + excess, excess, 0.0, 0.97, 8.0, 4096)
    bits = sizes(row_identity.layout)
    choice = FormatChoice(table, cost, bits_of(table, bits), 0.002)
    return Calibration(
        row_identity=row_identity.digest().hex(),
        formats=formats_digest(),
        ids="",
        made_unix=1.0,
        bits=bits,
        floor=Floor(0.003, 0.0001, 0.97, "one token at a time", {}, 4096),
        grid=Grid(native, {table[-1]: cost}, (0.2, 0.3, 0.5)),
        choices={"near": choice, "small": choice},
    )
