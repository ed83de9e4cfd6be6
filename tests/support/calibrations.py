"""A made-up calibration of a row identity."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

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


FORMATS_COST = {"q4h": 0.0024, "q5h": 0.0007, "q6h": 0.0004}
"""Format -> excess of a whole prompt in it, about as of a model of 135M parameters."""


def graded_calibration(
    row_identity: RowIdentity, table: Table, weights: Sequence[float]
) -> Calibration:
    """One that found `table` for both fidelities, and measured each of FORMATS_COST: the table's excess is
    at most the bound of near."""

    def cost(excess: float, ci: float) -> FormatCost:
        return FormatCost(0.003 + excess, excess, ci, 0.97, 8.0, 4096)

    found = calibration_of(row_identity, table)
    excess = sum(w * FORMATS_COST[name] for w, name in zip(weights, table, strict=True))
    choice = FormatChoice(table, cost(excess, 0.002 - excess), bits_of(table, found.bits), 0.002)
    uniform = {name: cost(each, each / 2) for name, each in FORMATS_COST.items()}
    return msgspec.structs.replace(
        found,
        grid=Grid(found.grid.native, uniform, tuple(weights)),
        choices={"near": choice, "small": choice},
    )
