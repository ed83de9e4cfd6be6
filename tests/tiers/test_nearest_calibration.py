"""Which calibration of a store serves a model: its own, or that of the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from calibrations import calibration_of
from format_oracle import plane_of
from store_tools import ROW_IDENTITY

from towerd.slots.layout import KVLayout
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store
from towerd.tiers.formats.calibration import (
    load_calibration,
    nearest_calibration,
    save_calibration,
)

LAYOUT = KVLayout((plane_of("f16", 64),), (plane_of("f16", 64),))
SERVED = replace(ROW_IDENTITY, layout=LAYOUT)
OTHER_ROPE = replace(SERVED, rope={"freq_base": 2e4})
OTHERS = (
    replace(SERVED, model_hash="other"),
    replace(SERVED, lora=("adapter:1.0",)),
    replace(SERVED, layout=KVLayout((plane_of("f16", 64),), (plane_of("f32", 64),))),
    replace(SERVED, rot_k=True),
)


def keep(root: Path, row_identity: RowIdentity) -> None:
    with Store.open(root, row_identity) as store:
        save_calibration(store, calibration_of(row_identity, ("q4h", "q6h", "q8h")))


def test_that_of_the_same_weights_is_the_nearest(tmp_path: Path) -> None:
    """Other weights, adapters, cache types or rotations round otherwise."""
    root = tmp_path / "store"
    for other in OTHERS:
        keep(root, other)
    with Store.open(root, SERVED) as store:
        assert nearest_calibration(store) is None
    keep(root, OTHER_ROPE)
    with Store.open(root, SERVED) as store:
        found = nearest_calibration(store)
        assert found is not None
        assert found.row_identity == OTHER_ROPE.digest().hex()
        assert load_calibration(store, SERVED.digest().hex()) is None
    keep(root, SERVED)
    keep(root, OTHER_ROPE)  # opened later
    with Store.open(root, SERVED) as store:
        found = nearest_calibration(store)
        assert found is not None
        assert found.row_identity == SERVED.digest().hex()
