"""towerctl lab cluster on a file and on a store: the variants of a prompt come together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from daemon import Daemon
from store_tools import ROW_IDENTITY

from lab.commands.cluster import own_ids
from towerd.cli.client.target import Target, connect
from towerd.store import Store

Ctl = Callable[..., Result]
CtlJson = Callable[..., Any]

COMMON = (
    "She has a big red ball and a little dog named Max. Every day they play outside in the park, and "
    "when it rains they stay at home and read a book about the sea."
)
BAKERY = (
    "Ask for the number of the order, look it up in the list of the day, and say when the bread and "
    "the cakes will be ready. Never promise a time before eight."
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "SPEC.yaml"
    path.write_text(
        "platform:\n  name: acme\n  public: true\n  text: Once upon a time.\n  communities:\n"
        f'    - {{name: lily, text: " Lily. {COMMON}"}}\n'
        f'    - {{name: anna, text: " Anna is four. {COMMON}"}}\n'
        f'    - {{name: mia, text: " Mia likes cats. {COMMON} The end."}}\n'
        f'    - {{name: shop, text: " {BAKERY}", bots: [{{name: night, text: " {BAKERY} Nobody is there."}}]}}\n'
    )
    return path


def sets(found: Any) -> list[list[str]]:
    return sorted(
        sorted([c["medoid"], *(m["name"] for m in c["members"])]) for c in found["clusters"]
    )


WANTED = [["acme/anna", "acme/lily", "acme/mia"], ["acme/shop", "acme/shop/night"]]


def test_variants_come_together(spec: Path, ctl: Ctl, ctl_json: CtlJson) -> None:
    found = ctl_json("lab", "cluster", spec)
    assert sets(found) == WANTED
    assert found["prompts"] == 5
    assert found["bytes_saved"] == found["bytes_alone"] - found["bytes"] > 0
    for each in found["clusters"]:
        assert each["radius_bits"] == max(member["bits"] for member in each["members"])
        assert all(member["bits"] < member["bits_alone"] / 2 for member in each["members"])
    one = ctl_json("lab", "cluster", spec, "--clusters", 1)
    assert len(one["clusters"]) == 1
    assert one["bytes"] >= found["bytes"]
    said = ctl("lab", "cluster", spec).stdout
    assert "5 prompts in 2 clusters" in said
    assert "acme/shop" in said


def test_bases_of_a_store(
    spec: Path, tmp_path: Path, server: Daemon, ctl: Ctl, ctl_json: CtlJson
) -> None:
    """The same clusters from the ids that the store holds, with a daemon and without."""
    store = ("--store-dir", tmp_path / "store")
    ctl("precache", spec, *store)
    assert sets(ctl_json("lab", "cluster", "--store", *store)) == WANTED
    ctl("precache", spec, "--socket", server.socket)
    assert sets(ctl_json("lab", "cluster", "--store", "--socket", server.socket)) == WANTED


def test_tenants_with_bases_of_one_name(tmp_path: Path) -> None:
    """Each base is cut by what its own tenant has above it."""
    with closing(Store.open(tmp_path / "store", ROW_IDENTITY)) as store:
        for scope, above, own in (("a", [1, 2, 3], [4, 5]), ("b", [6, 7], [8])):
            store.bases.add("p", np.array(above, np.int32), scope, 0, False)
            store.bases.add("p/q", np.array(above + own, np.int32), scope, 1, False)
    with connect(Target(store_dir=str(tmp_path / "store"))) as backend:
        found = [(name, np.asarray(ids).tolist()) for name, ids in own_ids(backend)]
    assert sorted(found) == [("p/q", [4, 5]), ("p/q", [8])]


def test_what_cannot_be_clustered(tmp_path: Path, ctl: Ctl) -> None:
    said = ctl("lab", "cluster", code=2).stderr
    assert "Name a file SPEC.yaml, or --store" in said
    assert "--store" in ctl("lab", "cluster", tmp_path / "x.yaml", "--store", code=2).stderr
    lonely = tmp_path / "lonely.yaml"
    lonely.write_text("platform:\n  name: acme\n  text: Hello.\n")
    assert (
        "0 community and bot prompts here: 2 are needed"
        in ctl("lab", "cluster", lonely, code=1).stderr
    )
