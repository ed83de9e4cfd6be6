"""What was learned is found again only as it can be used."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from transformed import IDENTITY, basis, transform

from towerd.store import Store
from towerd.tiers.formats.calibration import FormatCost
from towerd.tiers.formats.fidelity import DYNAMIC
from towerd.tiers.formats.transform import (
    VERSION,
    TransformChoice,
    TransformCost,
    load_transform,
    save_transform,
)

COST = FormatCost(0.004, 0.001, 0.0, 0.97, 8.0, 1024)
NAME = transform()[-16:]
KEY = IDENTITY.digest().hex()


def choice_of(*levels: str) -> TransformChoice:
    cost = TransformCost(levels, COST, 2.0, 0.002)
    return TransformChoice(VERSION, NAME, 900, 1.0, basis().nbytes, {"near": cost})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", IDENTITY) as opened:
        opened.rows.bases.add(basis())
        save_transform(opened, KEY, choice_of(transform("small"), transform()))
        yield opened


def test_what_was_saved_is_loaded(store: Store) -> None:
    assert load_transform(store, KEY) == choice_of(transform("small"), transform())
    why = TransformChoice(VERSION, "", 0, 1.0, 0, {}, "There are too few tokens.")
    save_transform(store, KEY, why)
    assert load_transform(store, KEY) == why


def test_a_coarser_coding_reaches_as_far_as_it_was_measured() -> None:
    """Into what many prompts share: its end takes what one chat's own rows do."""
    coarse, fine = transform("small"), transform()
    table = TransformCost((coarse, coarse, fine), COST, 2.0, 0.002).formats
    assert table.stretches(0, 0, 1000) == [(0, 400, coarse), (400, 700, coarse), (700, 1000, fine)]
    assert table.stretches(1, 0, 1000) == [(0, 700, coarse), (700, 1000, fine)]
    assert table.stretches(DYNAMIC, 0, 1000) == [(0, 1000, fine)]
    alone = TransformCost((fine,), COST, 2.0, 0.002).formats
    assert {name for _, _, name in alone.stretches(0, 0, 1000)} == {fine}
    assert alone.stretches(0, 0, 1000)[-1][1] == 1000


@pytest.mark.parametrize("levels", [(), (transform("none"),), (transform(seed=2),)])
def test_codings_that_the_basis_does_not_have_are_none(
    store: Store, levels: tuple[str, ...]
) -> None:
    save_transform(store, KEY, choice_of(*levels))
    assert load_transform(store, KEY) is None


def test_other_versions_are_none(store: Store) -> None:
    save_transform(store, KEY, msgspec.structs.replace(choice_of(transform()), version=VERSION + 1))
    assert load_transform(store, KEY) is None


@pytest.mark.parametrize("how", ["lost", "damaged", "newer"])
def test_a_basis_that_cannot_be_read_is_none(tmp_path: Path, store: Store, how: str) -> None:
    """A later towerd has written it, and this one starts all the same."""
    path = store.rows.bases.path(NAME)
    store.close()
    data = bytearray(path.read_bytes())
    if how == "newer":
        struct.pack_into("<H", data, 6, 99)
    data[-1] ^= how == "damaged"
    path.write_bytes(data)
    if how == "lost":
        path.unlink()
    with Store.open(tmp_path / "store", IDENTITY) as again:
        assert load_transform(again, KEY) is None
