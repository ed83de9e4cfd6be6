"""What the mixer starts from beside a model whose tokens have no table: how often each token occurs
in the bundled sample, and maps and weights that were trained on it.

On disk it is zstd of little-endian uint32: weights [n], then the mixer's state. It is derived once
and kept with the model, because another llama.cpp may cut the sample into other tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import zstandard

from towerd.codec.base import TokenVocabulary
from towerd.codec.errors import UnknownModel
from towerd.codec.forms import training
from towerd.codec.forms.mix import KINDS, MiniText
from towerd.codec.forms.training import untrained
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.prior import sample
from towerd.codec.prior.file import U32, Prior, kinds_of, ranks_of
from towerd.codec.text import MARK_FIRST
from towerd.kernels._native import Mixer, mixer_state_size
from towerd.kernels.mixing import FINAL, INPUTS, SETS, n_maps

SESSION_SYMBOLS = 1024
SESSIONS = 12
"""Sessions of the sample that the model reads: weights are trained on them."""
NETWORK_WEIGHT = 1 << 16
"""The first weight of the model's distribution: it counts as it is. All others start at 0."""
_ROLES = (b"user", b"assistant")
_LEVEL = 9


@dataclass(frozen=True)
class MixStart:
    """`weights` uint32[n], `state` uint32[mixer_state_size(n)]."""

    weights: U32
    state: U32

    @property
    def name(self) -> bytes:
        """8 bytes that name these numbers."""
        return hashlib.blake2b(self._raw(), digest_size=8).digest()

    def pack(self) -> bytes:
        """The bytes on disk."""
        return zstandard.ZstdCompressor(level=_LEVEL).compress(self._raw())

    def _raw(self) -> bytes:
        return np.concatenate([self.weights, self.state]).astype("<u4").tobytes()


def unpack(data: bytes, n_tokens: int) -> MixStart:
    """The numbers in a file. UnknownModel if it is not of so many tokens."""
    n = n_tokens + mixer_state_size(n_tokens)
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as stream:
            raw = stream.read(4 * n + 1)
    except zstandard.ZstdError as error:
        raise UnknownModel(f"What the mixer starts from is damaged: {error}.") from error
    if len(raw) != 4 * n:
        raise UnknownModel("What the mixer starts from is damaged: it is of another tokenizer.")
    numbers = np.frombuffer(raw, "<u4").astype(np.uint32)
    return MixStart(numbers[:n_tokens], numbers[n_tokens:])


def make_prior(vocabulary: TokenVocabulary, marks: Sequence[int], start: MixStart) -> Prior:
    """A prior without tables. `marks`: the vocabulary's token of each kind of mark."""
    pieces = vocabulary.pieces
    controls = [0] * len(marks)
    for kind, token in zip(KINDS, marks, strict=True):
        controls[kind] = token
    ranks = ranks_of(pieces)
    return Prior(
        vocabulary,
        pieces,
        start.name,
        ranks,
        np.argsort(ranks).astype(np.int32),
        tuple(controls),
        kinds_of(pieces, marks[0]),
        start.weights,
        (),
        {"network": start.state},
    )


def derive(
    vocabulary: TokenVocabulary, marks: Sequence[int], predictor: ExactPredictor
) -> MixStart:
    """Count and train: maps on all of the sample without the model, then weights on parts of it
    with the model, which takes some seconds."""
    n_tokens = len(vocabulary.pieces)
    blank = MixStart(np.zeros(n_tokens, np.uint32), untrained(n_tokens))
    prior = make_prior(vocabulary, marks, blank)
    symbols = MiniText(prior).symbols(_sample())
    weights = np.bincount(symbols, minlength=n_tokens).astype(np.uint32)
    prior = replace(prior, weights=weights)
    sessions = [
        symbols[at : at + SESSION_SYMBOLS] for at in range(0, len(symbols), SESSION_SYMBOLS)
    ]

    def make(state: U32) -> Mixer:
        return replace(prior, states={"state": state}).mixer()

    state = _last(training.trained(make, blank.state, sessions))
    state = _with_weights(training.capped(state, n_tokens), n_tokens)
    some = sessions[:: max(1, len(sessions) // SESSIONS)][:SESSIONS]
    counts = training.counts_of(predictor, prior)
    state = _last(training.trained(make, state, some, counts))
    return MixStart(weights, training.capped(state, n_tokens))


def _sample() -> bytes:
    """The sample as a chat in marks: people and assistants take turns."""
    start, end = bytes((MARK_FIRST,)), bytes((MARK_FIRST + 1,))
    return b"".join(
        b"%b%b\n%b%b\n" % (start, _ROLES[i % 2], record, end)
        for i, record in enumerate(sample.load().split(b"\f"))
    )


def _last(steps: Iterable[tuple[U32, float]]) -> U32:
    *_, (state, _) = steps
    return state


def _with_weights(state: U32, n_tokens: int) -> U32:
    """The state's maps, with weights that give the model's distribution as it is."""
    first, last = n_maps(n_tokens), len(state) - FINAL * SETS
    rows = np.zeros((last - first) // INPUTS * INPUTS, np.uint32).reshape(-1, INPUTS)
    rows[:, INPUTS - 1] = NETWORK_WEIGHT
    return np.concatenate([state[:first], rows.reshape(-1), untrained(n_tokens)[last:]])
