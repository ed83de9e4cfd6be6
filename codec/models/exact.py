"""A small llama-architecture GGUF whose numbers are the same on every machine.

The kernel `lm` evaluates it (`lab/reference/lm.py` says why it is exact), so a text that is
coded with it here can be decoded on any machine with any number of threads. Before first use, the
kernel evaluates a tiny model whose counts are known: a build or a CPU that gets other numbers is
refused, and never writes a blob.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from towerd.codec.errors import UnknownModel
from towerd.codec.models.marks import BEGIN, MarkedVocabulary
from towerd.codec.models.rotation import rotation
from towerd.codec.models.weights import LmWeights, load_weights
from towerd.kernels import dispatch
from towerd.kernels._native import Lm
from towerd.kernels.lm import BLOCK, Counts, LmShape, make_lm, pack, pack_norm, pack_q8

LANES_MAX = 64
WINDOW = 16
KNOWN = "295316f9"
"""Hash of the counts of the tiny model."""
_TINY = LmShape(40, 32, 2, 4, 2, 8, 64, 4, 1, 1e-5)


class ExactPredictor:
    """A model that reads several texts (lanes) side by side. Not thread-safe.

    With a `MarkedVocabulary`, it reads, for each token that is not the model's own, the mark that
    starts a text, or else token 0, and such tokens have a count of 1."""

    window = WINDOW
    """Tokens of one lane that may be fed at once without changing the counts."""

    def __init__(
        self,
        path: Path,
        n_threads: int = 1,
        lanes_max: int = LANES_MAX,
        n_ctx: int = 0,
        vocabulary: MarkedVocabulary | None = None,
    ) -> None:
        """`n_ctx`: tokens per lane; 0: what the model was trained on, at most N_CTX_MAX.

        UnknownModel if the file is not such a model, has another number of tokens than its
        tokenizer, or if this machine's kernel gives other numbers."""
        check_kernel(dispatch.name())
        weights = load_weights(path, n_ctx)
        self.n_tokens = self._n_own = weights.shape.n_vocab
        self.instead = 0
        if vocabulary is not None:
            if self._n_own != vocabulary.n_own:
                raise UnknownModel(
                    f"The model has {self._n_own} tokens and its tokenizer {vocabulary.n_own}."
                )
            begin = vocabulary.marks[BEGIN]
            self.n_tokens = len(vocabulary.pieces)
            self.instead = begin if begin < self._n_own else 0
        self.n_ctx, self.lanes_max, self.name = weights.shape.n_ctx, lanes_max, weights.name
        self.n_threads = n_threads
        self._weights = weights
        self.lm = build_lm(weights)

    def copy(self) -> ExactPredictor:
        """A new predictor on the same weights, with lanes of its own."""
        return self.within(self.n_ctx)

    def within(self, n_ctx: int) -> ExactPredictor:
        """The same, attending to at most `n_ctx` tokens."""
        other = copy.copy(self)
        other._weights = self._weights.within(n_ctx)
        other.n_ctx, other.lm = other._weights.shape.n_ctx, build_lm(other._weights)
        return other

    def reset(self) -> None:
        """Forget all texts."""
        self.lm.reset()

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[Counts]:
        """Append tokens to some lanes, as (lane, id) in order of lane, up to `window` for each; a
        full lane is cut to its last quarter first.

        Returns for each token the distribution of the next one: uint32[n_tokens] counts that are
        proportional to the probabilities, each from 1 to COUNT_ONE + 1. UnknownModel if the model's
        numbers leave the range of float32."""
        pairs = np.array(tokens, np.int32).reshape(-1, 2).T.copy()
        n_more = self.n_tokens - self._n_own
        if n_more:
            pairs[1, pairs[1] >= self._n_own] = self.instead
        try:
            counts = self.lm.counts(self.lm.step(pairs[0], pairs[1], self.n_threads))
        except ValueError as error:
            raise UnknownModel(f"The mini model cannot be evaluated: {error}.") from error
        return list(np.pad(counts, ((0, 0), (0, n_more)), constant_values=1) if n_more else counts)


def build_lm(weights: LmWeights) -> Lm:
    """The kernel's model with these weights."""
    cos, sin = rotation(weights.shape.n_ctx, weights.n_rot, weights.freq_base)
    return make_lm(weights.shape, weights.matrices, weights.norms, cos, sin)


@functools.cache
def check_kernel(name: str) -> None:
    """UnknownModel unless the kernels in use, called `name`, give the tiny model's counts."""
    if tiny_hash() != KNOWN:
        raise UnknownModel(
            f"The kernels {name} of this machine do not give the numbers of every other one: build "
            "towerd with IEEE 754 arithmetic (no fast-math)."
        )


def tiny_hash() -> str:
    """Hash of the counts that a model with weights in all formats, made from a sequence of
    integers, gives for some tokens."""
    rng = _sequence()
    matrices = []
    for i, (n_rows, n_columns) in enumerate(_TINY.matrices()):
        numbers = np.array([next(rng) for _ in range(n_rows * n_columns)], np.int32)
        values = (numbers.astype(np.float32) / np.float32(1 << 17)).reshape(n_rows, n_columns)
        if i % 3 == 2:
            blocks = np.empty((n_rows, n_columns // BLOCK, 2 + BLOCK), np.uint8)
            blocks[..., :2] = np.array([0x18 + i, 0x1C], np.uint8)  # a float16 of about 2^-8
            blocks[..., 2:] = (numbers & 0xFF).astype(np.uint8).reshape(n_rows, -1, BLOCK)
            matrices.append(pack_q8(blocks))
        else:
            matrices.append(pack(values.astype(np.float16) if i % 3 == 1 else values))
    norms = [
        pack_norm(np.array([1 + next(rng) / (1 << 17) for _ in range(_TINY.n_embd)], np.float32))
        for _ in range(2 * _TINY.n_layer + 1)
    ]
    model = make_lm(_TINY, matrices, norms, *rotation(_TINY.n_ctx, _TINY.head_dim, 10000.0))
    digest = hashlib.blake2b(digest_size=4)
    for step in range(_TINY.n_ctx + 3):
        tokens = np.array([step % _TINY.n_vocab, 7 * step % _TINY.n_vocab], np.int32)
        counts = model.counts(model.step(np.array([0, 3], np.int32), tokens))
        digest.update(counts.astype("<u4").tobytes())
    return digest.hexdigest()


def _sequence() -> Iterator[int]:
    """Integers from -2^15 to 2^15."""
    state = 1
    while True:
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        yield (state >> 8 & 0xFFFF) - (1 << 15)
