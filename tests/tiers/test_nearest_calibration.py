"""Which calibration serves a model: its own, that of the same weights, or the package's."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from calibrations import calibration_of
from format_oracle import plane_of
from store_tools import ROW_IDENTITY

from towerd.slots.layout import KVLayout
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store
from towerd.tiers.formats.calibration import (
    ALL_NATIVE,
    Calibration,
    load_calibration,
    save_calibration,
)
from towerd.tiers.formats.packaged import (
    FOLDER,
    nearest_calibration,
    packaged_calibration,
    table_file,
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


def packaged() -> list[dict[str, Any]]:
    folder = files("towerd") / "data" / FOLDER
    return [{"name": each.name, **json.loads(each.read_bytes())} for each in folder.iterdir()]


def test_the_packages_tables_are_of_what_they_are_found_by() -> None:
    """Every one loads for its rows under any RoPE, and for no others."""
    assert packaged()
    for body in packaged():
        identity = RowIdentity.from_json(body["row_identity"])
        assert table_file(identity, body["calibration"]) == (
            body["name"],
            (files("towerd") / "data" / FOLDER / body["name"]).read_text(),
        )
        found = packaged_calibration(replace(identity, rope={"freq_base": 2e4}))
        assert found == Calibration.from_json(body["calibration"])
        assert found.choices["near"].levels != ALL_NATIVE
        assert all(each.cost.excess_max <= each.bound for each in found.choices.values())
        others = (
            replace(identity, model_hash="other"),
            replace(identity, lora=("adapter:1.0",)),
            replace(identity, layout=LAYOUT),
            replace(identity, rot_k=not identity.rot_k),
            replace(identity, format_version=identity.format_version + 1),
        )
        assert [packaged_calibration(each) for each in others] == [None] * len(others)


def test_a_daemons_own_comes_before_the_packages(tmp_path: Path) -> None:
    identity = RowIdentity.from_json(packaged()[0]["row_identity"])
    root = tmp_path / "store"
    with Store.open(root, identity) as store:
        assert nearest_calibration(store) == packaged_calibration(identity)
    keep(root, identity)
    with Store.open(root, identity) as store:
        own = nearest_calibration(store)
        assert own is not None
        assert own.choices["near"].levels == ("q4h", "q6h", "q8h")
