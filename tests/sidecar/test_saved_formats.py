"""A llama-server stores rows in the formats that the embedded engine measured for its model before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from calibrations import calibration_of
from services import opener
from sidecar_tools import OpenSidecar, ask, prompt
from waiting import until_async

from towerd.drift import DecodedRun
from towerd.models.bundled import bundled_model
from towerd.tiers.formats.calibration import save_calibration

TABLE = ("q4h", "q6h", "q8h")


async def test_a_saved_table_is_used(sidecar_on: OpenSidecar, tmp_path: Path) -> None:
    """Rows shrink, and what is reused of them says by how much they drift; exact fidelity uses none."""
    async with opener(tmp_path, ctx_size=512)(bundled_model()) as service:
        save_calibration(service.store, calibration_of(service.store.state.row_identity, TABLE))
    async with sidecar_on(shrink_after_s=0.0) as side:
        assert side.tiers.formats is not None
        assert side.tiers.formats.names == TABLE
        assert side.tiers.drift_of(np.zeros(0, bool), [], [DecodedRun(0, 9, "q8h")], 9) is not None
        await ask(side, prompt(300))
        await until_async(lambda: side.tiers.stats()["segments_shrunk"] > 0)
    async with sidecar_on(fidelity="exact") as side:
        assert side.tiers.formats is None
