"""The form `network`: context mixing with a language model's distribution.

Text is coded in the tokens of the mini model, whose numbers are the same on every machine. It is cut
into chunks, which are read side by side: one step of the model is one batch with the next token of
each chunk. The chunks share one mixer, so what it learns from one helps the others from the next
step on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np

from towerd.codec.base import TokenVocabulary
from towerd.codec.container import BY_NAME, CodedChunk
from towerd.codec.errors import Damaged, UnknownModel
from towerd.codec.forms.form import Coded
from towerd.codec.forms.mix import MiniCoder, MixerPool, Symbols
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.prior.file import Prior
from towerd.codec.text import Text, from_ids, parse
from towerd.kernels._native import Mixer, RangeDecoder, RangeEncoder, read_side_by_side
from towerd.tokens import Ids

TEXT_SYMBOLS = 1300
"""Symbols of a chunk, about. A text of 8,000 tokens has eight, which take some 2.5 % more bytes than
one with the model's whole context and are read about three times as fast on two cores."""
CHUNKS = (1, 2, 4, 8, 12, 16)
"""Numbers of chunks, which cores share evenly."""
_FORMAT = b"2"


def n_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class PredictorPool:
    """Gives each of several users at a time a predictor, so that thawing a session does not wait for
    another session that is being frozen in idle time. Thread-safe."""

    def __init__(self, first: ExactPredictor, kept_max: int) -> None:
        """`kept_max`: copies that are kept for later users; each has lanes of its own."""
        self.first, self.kept_max = first, kept_max
        self._free = [first]

    @contextmanager
    def borrow(self) -> Iterator[ExactPredictor]:
        """A predictor that has read nothing."""
        try:
            predictor = self._free.pop()
        except IndexError:
            predictor = self.first.copy()
        try:
            predictor.reset()
            yield predictor
        finally:
            if predictor is self.first or len(self._free) < self.kept_max:
                self._free.append(predictor)


class Lanes:
    """Codes lists of ranks, one per chunk, with a mixer and a model in step."""

    def __init__(self, predictor: ExactPredictor, prior: Prior, state: str) -> None:
        """`state`: the name of the mixer's state in `prior`."""
        self.lanes_max, self.window = predictor.lanes_max, predictor.window
        self.first = prior.controls[0]
        """The id that every text starts with."""
        self.order = prior.ids.astype(np.int64)
        """The model's id of each rank."""
        self.mixers = MixerPool(lambda: prior.mixer(state))
        self.predictors = PredictorPool(predictor, n_cores())

    def encode(self, chunks: Sequence[Symbols], context: Symbols) -> list[bytes]:
        """The bits of each chunk."""
        sizes = [len(chunk) for chunk in chunks]
        encoders = [RangeEncoder() for _ in chunks]
        # All symbols are known, so the model evaluates several steps of a lane at once.
        before = [[self.first, *self.order[chunk[:-1]].tolist()][: len(chunk)] for chunk in chunks]
        with self.predictors.borrow() as predictor, self.mixer(sizes, context) as mixer:
            for start in range(0, max(sizes, default=0), self.window):
                some = [tokens[start : start + self.window] for tokens in before]
                pairs = [(lane, token) for lane, tokens in enumerate(some) for token in tokens]
                found = iter(predictor.feed(pairs))
                counts = [[next(found) for _ in tokens] for tokens in some]
                for i in range(self.window):
                    for lane, rows in enumerate(counts):
                        if i < len(rows):
                            rank = chunks[lane][start + i : start + i + 1]
                            encoders[lane].put(*mixer.encode(lane, rank, rows[i][self.order]))
        return [encoder.finish() for encoder in encoders]

    def decode(
        self, sizes: Sequence[int], bits: Sequence[bytes], context: Symbols, n_threads: int
    ) -> list[list[int]]:
        """The ranks of each chunk, read on that many cores. Raises Damaged.

        Each chunk is a lane of the mixer, which takes a token of each in turn, so the order is the
        same for any number of cores."""
        decoders = [RangeDecoder(each) for each in bits]
        with self.mixer(sizes, context) as mixer, ExitStack() as stack:
            users = [self.predictors.borrow() for _ in range(min(n_threads, len(sizes)))]
            models = [stack.enter_context(each) for each in users]
            if not models:
                return []
            lms, instead = [each.lm for each in models], models[0].instead
            try:
                return read_side_by_side(
                    lms, mixer, decoders, list(sizes), self.order, self.first, instead
                )
            except ValueError as error:
                raise Damaged(f"The blob is damaged: {error}.") from error

    def mixer(self, sizes: Sequence[int], context: Symbols) -> AbstractContextManager[Mixer]:
        """A mixer that has only read `context`, for chunks of these sizes."""
        if len(sizes) > self.lanes_max:
            raise Damaged(f"The blob is damaged: it has {len(sizes)} chunks side by side.")
        return self.mixers.borrow(sum(sizes), context, max(1, len(sizes)))


def cut(symbols: Symbols, chunk_symbols: int, lanes_max: int) -> list[Symbols]:
    """Chunks of nearly equal length, the longest first: of the numbers in CHUNKS, up to `lanes_max`,
    the one that is nearest to chunks of `chunk_symbols`."""
    wanted = len(symbols) / chunk_symbols
    n_chunks = min((n for n in CHUNKS if n <= lanes_max), key=lambda n: abs(n - wanted))
    return [np.ascontiguousarray(part) for part in np.array_split(symbols, n_chunks)]


def _chunked(parts: Sequence[Symbols], bits: Sequence[bytes]) -> tuple[CodedChunk, ...]:
    return tuple(CodedChunk(len(part), each) for part, each in zip(parts, bits, strict=True))


class Network(MiniCoder):
    """The `FormCoder` of `network`."""

    name = "network"

    def __init__(
        self,
        vocabulary: TokenVocabulary,
        prior: Prior,
        predictor: ExactPredictor,
        chunk_symbols: int = TEXT_SYMBOLS,
    ) -> None:
        """UnknownModel if the model has another vocabulary than the prior."""
        if predictor.n_tokens != len(prior.ids):
            raise UnknownModel(
                f"The mini model has {predictor.n_tokens} tokens and its table "
                f"{len(prior.ids)}: both must come from the same release of towerd."
            )
        super().__init__(vocabulary, prior)
        self.chunk_symbols = chunk_symbols
        trained = "network" if "network" in prior.states else "state"
        self.predictor = predictor.name
        self.n_ctx = BY_NAME[self.name].n_ctx
        """What texts are coded with; see `Form.n_ctx`."""
        self.n_threads = n_cores()
        """Cores that read the chunks of one text."""
        self._lanes = {
            0: Lanes(predictor, prior, trained),
            self.n_ctx: Lanes(predictor.within(self.n_ctx), prior, trained),
        }
        self.model = network_hash(prior.name, predictor.name, predictor.n_ctx)

    def encode(self, ids: Ids, base: Ids) -> Coded:
        """Chunks of the text's symbols."""
        text = from_ids(ids, self.vocabulary)
        parts = cut(self.mini.symbols(text.text), self.chunk_symbols, self.lanes.lanes_max)
        bits = self.lanes.encode(parts, self._context(base, text.kinds))
        return Coded(text.side(), _chunked(parts, bits), self.n_ctx)

    def text(self, coded: Coded, n_ids: int, base: Ids) -> Text:
        """See `TextCoder.text`."""
        context = self._context(base, parse(b"", coded.side).kinds)
        sizes = [chunk.n_symbols for chunk in coded.chunks]
        bits = [chunk.bits for chunk in coded.chunks]
        ranks = self._lanes[coded.n_ctx].decode(sizes, bits, context, self.n_threads)
        text = self.mini.text([rank for part in ranks for rank in part])
        return parse(text, coded.side)

    @property
    def lanes(self) -> Lanes:
        """What texts are coded with."""
        return self._lanes[self.n_ctx]


def network_hash(prior: bytes, predictor: bytes, n_ctx: int) -> bytes:
    """8 bytes that name a table and a mini model together, for the form `network`."""
    parts = _FORMAT, prior, predictor, n_ctx.to_bytes(4, "little")
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()
