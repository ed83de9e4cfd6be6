"""Many short conversations behind shared bases, and a codec for them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from store_tools import turn_of

from towerd.codec import Codec
from towerd.codec.forms import mini
from towerd.codec.forms.form import FormCoder
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model
from towerd.store import Store

N_BASES = 20
BASE_TOKENS = 40
ALL_NETWORK = os.environ.get("TOWERD_TEST_COLD") == "network"
"""Whether all sessions are coded with the mini model: some 15 minutes instead of a minute."""


def name_of(number: int) -> str:
    return f"chat-{number}"


def said(number: int) -> list[list[int]]:
    """Prompt and reply, token by token, of both turns of a conversation."""
    rng = np.random.default_rng(number % N_BASES)
    base = rng.integers(3, 512, BASE_TOKENS).tolist()
    own = np.random.default_rng(1000 + number).integers(3, 512, 12).tolist()
    return [base + own[:6], base + own]


def record(store: Store, number: int) -> None:
    """Enter a conversation: two turns, of which the last tokens have no rows."""
    for whole in said(number):
        store.commit_turn(turn_of(whole[:-3], whole[-3:], session=name_of(number)))


def form_of(number: int) -> str:
    """What a conversation is coded in at first: a fortieth or all with the mini model."""
    return "network" if ALL_NETWORK or number % 40 == 1 else "packed"


def some_form(chance: random.Random) -> str:
    """What one is coded in when it is frozen again."""
    return chance.choice(("network", *["network" if ALL_NETWORK else "packed"] * 8))


@contextmanager
def coder(tables: Path, n_threads: int = 1) -> Iterator[Codec]:
    """For the bundled model's vocabulary; `tables` as for `Codec`. With more than one thread the
    mini model of the package has as many."""
    with GgufVocabulary(bundled_model()) as vocabulary:
        networks: list[FormCoder] = []
        if n_threads > 1:
            networks.append(mini.mini_network(vocabulary, mini.PATH, n_threads=n_threads))
        yield Codec(vocabulary, networks, tables)
