"""Copies, freezes, recodes and thaws sessions of a store at random until it is killed: `freezer.py ROOT SEED N`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
from cold_population import coder, name_of, some_form

from towerd.cold import freeze, recode, thaw, write_copy
from towerd.store import Store, latest_row_identity


def main() -> None:
    """At least a tenth of what is frozen is coded with the mini model."""
    root, seed, n = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    with Store.open(root, latest_row_identity) as store, coder(store.tables) as codec:
        freeze(store, codec, name_of(0), form="packed")
        store.match(np.zeros(1, np.int32), "local")
        print("ready", flush=True)
        while True:
            name = name_of(chance.randrange(n))
            if chance.random() < 0.2:
                recode(store, codec, name)
            elif store.session(name).cold_bytes:
                thaw(store, codec, name)
            elif chance.random() < 0.3:
                write_copy(store, codec, name, form=some_form(chance))
            elif chance.random() < 0.5:
                freeze(store, codec, name)
            else:
                freeze(store, codec, name, form=some_form(chance))


main()
