"""Many short conversations behind shared bases, and a codec with a runtime for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from store_tools import turn_of

from towerd.codec import Codec
from towerd.codec.models.llama import LlamaPredictor
from towerd.codec.network import Same
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model
from towerd.store import Store

N_BASES = 20
BASE_TOKENS = 40
BOS = 1


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


@contextmanager
def coder(n_threads: int = 1) -> Iterator[Codec]:
    """The bundled model's vocabulary, and itself as the model of the form `same`."""
    path = bundled_model()
    with (
        GgufVocabulary(path) as vocabulary,
        LlamaPredictor(path, n_threads=n_threads, lanes_max=2, n_ctx=64) as predictor,
    ):
        yield Codec(vocabulary, [Same(vocabulary, predictor, first=BOS)])
