"""A basis that is learned in a minute from a part of the calibration text and given to a store, where a daemon
would learn one of all of it, and measure which step keeps its bound, in many.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from lab.bench.quality.formats import measurer_on
from lab.bench.transform.rates import QUICK, rope_of_model, texts
from towerd.codec.rows import coded
from towerd.codec.rows.learn import Rounding
from towerd.engine.embedded.calibration.transform_basis import learned, sandwiched, windows_of
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store
from towerd.store.segments.coded_format import basis_name, coded_format
from towerd.tiers.formats.calibration import bound_of
from towerd.tiers.formats.transform import VERSION, TransformChoice, TransformCost, save_transform

STEP = 0.27
"""About what a daemon finds for SmolLM2 within `near`."""
_CODING = f"s{STEP:g}"
_LAYERS = 5


def give_transform(root: Path, row_identity: RowIdentity, model: Path) -> TransformCost:
    """Learn a basis for a model, measure what one step of it costs, and have the daemon that serves the store in
    `root` next use it for `near`. Raises TowerdError."""
    first, second = (part[: int(QUICK.share * len(part))] for part in texts(None, None))
    rope, digest = rope_of_model(model), row_identity.digest()
    with measurer_on(model, first, QUICK.n_windows) as measurer:
        rounding = {_CODING: Rounding(STEP)}
        basis = learned(measurer, rope, rounding, _LAYERS, QUICK.n_weighed, digest)
        n_tokens = sum(map(len, windows_of(measurer)))
    with measurer_on(model, second, QUICK.n_measured) as measurer:
        coding = partial(sandwiched, basis=basis, coding=_CODING, rope=rope)
        (cost,) = measurer.costs_of([coding], measurer.n_max)
        inner = [rows.token_major() for rows in windows_of(measurer)]
    n_bytes = sum(len(coded.encode(rows, basis, _CODING, rope)) for rows in inner)
    n_values = sum(map(len, inner)) * sum(plane.n_elements for plane in basis.layout.planes)
    found = TransformCost(
        (coded_format(_CODING, basis.digest),),
        cost,
        8 * n_bytes / n_values,
        bound_of("near", cost.floor_kl),
    )
    name = basis_name(basis.digest)
    choice = TransformChoice(VERSION, name, n_tokens, time.time(), basis.nbytes, {"near": found})
    store = Store.open(root, row_identity)
    try:
        store.rows.bases.add(basis)
        save_transform(store, digest.hex(), choice)
    finally:
        store.close()
    return found
