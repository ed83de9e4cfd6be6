"""What recorded steps tell the policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_oracle import plane_of
from store_tools import ROW_IDENTITY

from towerd.sessions.traffic import Traffic
from towerd.slots.layout import KVLayout
from towerd.store import Store, Turn
from towerd.tiers.manager import Tiers

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))


@pytest.mark.parametrize(("pause_s", "n_steps"), [(60.0, 2), (7200.0, 1)])
def test_a_named_workflow_continues_after_a_pause(
    pause_s: float, n_steps: int, tmp_path: Path
) -> None:
    """It may count as over meanwhile, but its new step begins it anew."""
    now = 1.0
    store = Store.open(tmp_path, replace(ROW_IDENTITY, layout=LAYOUT), clock=lambda: now)
    tiers = Tiers(
        store, LAYOUT, v_trans=False, hot_bytes=1 << 30, warm_bytes=1 << 30, policy="pbkv",
        fidelity="exact", clock=lambda: now,
    )  # fmt: skip
    traffic = Traffic(store, tiers, clock=lambda: now)
    for at in (1.0, 1.0 + pause_s):
        now = at
        ids = np.arange(40, dtype=np.int32)
        turn = Turn("local", "s", ids, ids[:0], 40, at, workflow="w", agent="a")
        store.insert(ids, "local", [40])
        result = store.commit_turn(turn)
        traffic.recorded(turn, result.node, result.session_id)
        (running,) = traffic.running(None)
        assert tiers.ranking.n_steps([running.name]) == {running.name: n_steps if at > 1.0 else 1}
    traffic.close()
    tiers.close()
    store.close()
