"""Observer: what the attention of chats with a budget says, for the policies that go by it.

The queries of the last tokens before an eviction are tapped from the compute graph
(`towerd.engine.embedded.longchat.taps`) and kept until then; there the mass that each live position gets
from them is computed from the cached keys, once. Batches without such tokens are evaluated as
without a tap. Called by the inference thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from towerd.config import UNQUANTIZED, Config
from towerd.engine.embedded.longchat.live_set import BoundedSet, Observed
from towerd.engine.embedded.longchat.taps import Taps
from towerd.engine.embedded.memory import Memory
from towerd.engine.embedded.model.context import LlamaContext
from towerd.engine.embedded.model.model import LlamaModel
from towerd.engine.embedded.scheduling.job import Job
from towerd.engine.embedded.scheduling.pool import LiveSeq
from towerd.errors import ConfigError, TowerdError
from towerd.retention import Mass, Positions, Rows
from towerd.retention.attention import attention_mass
from towerd.slots.blob import parse_rows
from towerd.slots.errors import StateError
from towerd.slots.rows import KVRows

QUERIES_MAX = 64
"""Queries that one eviction goes by: the last ones before it."""
_PROBE_TOKENS = 16
_PROBE_ERROR_MAX = 0.05
"""Of a mass of up to 16; f16 keys explain a tenth of it."""


class Attention(NamedTuple):
    """Of a model whose attention can be read."""

    scale: float
    """What its scores are multiplied by before the softmax."""
    layers: int
    heads: int
    head_size: int


class Observer:
    """Queries from the taps of one context, masses from its cells."""

    def __init__(self, taps: Taps, memory: Memory, attention: Attention) -> None:
        """attention: what `check_attention` found."""
        self.attention = attention
        self._taps = taps
        self._memory = memory
        self._wanted: dict[int, tuple[int, int]] = {}
        """[start, end) in the batch, of jobs by id."""
        self._n_batch = 0

    def watch(self, jobs: Iterable[tuple[Job, int]]) -> None:
        """The next batch is that of these jobs, in their order; of each the queries of so many of
        its last tokens there are wanted."""
        self._wanted, self._n_batch = {}, 0
        for job, n_wanted in jobs:
            self._n_batch += job.n_in_batch
            if n_wanted:
                self._wanted[id(job)] = (self._n_batch - n_wanted, self._n_batch)
        self._taps.watch(*(("Qcur",) if self._wanted else ()))

    def observe(self, job: Job, retained: BoundedSet) -> None:
        """The batch was evaluated, and the job's part of it is accounted for. Raises TowerdError
        if the queries cannot be had."""
        start, end = self._wanted.pop(id(job), (0, 0))
        if start == end:
            return
        # Without any layer, the first one says why there is none.
        taken = [self._taps.take("Qcur", layer) for layer in self._taps.layers or (0,)]
        if len(taken[0]) != self._n_batch:
            raise TowerdError("llama.cpp evaluated a batch in parts, and only the last was read.")
        queries = np.stack([each[start:end].transpose(1, 0, 2) for each in taken])
        if not self._wanted:
            self._taps.watch()  # the queries of all layers are large: nobody may ask again for long
        n = retained.n
        retained.observe(Observed(n - (end - start), queries), QUERIES_MAX)

    def asking(self, retained: BoundedSet, n_from: int) -> Rows:
        """float32[layers, heads, m, head size]: the observed queries of tokens from `n_from` on,
        which may be none, scaled so that scores are their products with keys by sqrt(head size);
        they stay observed."""
        a = self.attention
        found = [np.zeros((a.layers, a.heads, 0, a.head_size), np.float32)]
        for each in retained.observed:
            found.append(each.queries[:, :, max(0, n_from - each.p0) :])
        return np.concatenate(found, axis=2) * np.float32(a.scale * math.sqrt(a.head_size))

    def measure(self, seq: LiveSeq, retained: BoundedSet) -> None:
        """Add what the observed queries say to the account's masses; they are used up. Raises
        TowerdError if the model has computed numbers that are not finite."""
        observed, retained.observed = retained.observed, ()
        if not observed:
            retained.recent = np.zeros_like(retained.mass)
            return
        rows = self._memory.rows(seq.id, 0, retained.place_next)
        assert rows is not None
        queries = np.concatenate([each.queries for each in observed], axis=2)
        positions = np.concatenate([np.arange(each.p0, each.p1) for each in observed])
        places = retained.places[np.searchsorted(retained.kept, positions)]
        try:
            recent = _mass(queries, rows, places, retained.places, self.attention.scale)
        except ValueError as error:
            raise TowerdError(f"The attention of this chat cannot be read: {error}.") from error
        retained.recent = recent
        retained.mass = retained.mass + recent


def _mass(
    queries: Rows, rows: KVRows, query_places: Positions, key_places: Positions, scale: float
) -> Mass:
    """`attention_mass` of the keys in `rows`, whose type is the same in all layers."""
    name = rows.layout.k[0].format.name
    return attention_mass(queries, rows.k, name, query_places, key_places, scale)


def check_attention(model: LlamaModel, config: Config, *, cell_ext: bool) -> Attention:
    """This model's attention, proved on a few tokens: masses from queries and keys are those of
    llama.cpp's own weights.

    Raises ConfigError if they are not, or cannot be compared: then no policy can go by them."""
    if config.cache_type_k not in UNQUANTIZED:
        raise ConfigError(
            f"--retention {config.retention} reads cached keys, and --cache-type-k "
            f"{config.cache_type_k} quantizes them: take one of {', '.join(UNQUANTIZED)}."
        )
    try:
        error, attention = _probe(model, config, cell_ext)
    except (TowerdError, StateError, ValueError) as failure:
        raise ConfigError(f"{_cannot(config)}: {failure}") from failure
    if not error <= _PROBE_ERROR_MAX:
        raise ConfigError(f"{_cannot(config)}: it differs from what was expected by {error:.2g}.")
    return attention


def _cannot(config: Config) -> str:
    return (
        f"--retention {config.retention} goes by attention, and this model's cannot be read "
        "(take none, shift or streaming)"
    )


def _probe(model: LlamaModel, config: Config, cell_ext: bool) -> tuple[float, Attention]:
    """(the largest difference of a position's mass, what it was computed with)"""
    taps = Taps()
    config = replace(
        config, flash_attn="off", cache_type_v="f16",
        batch_size=_PROBE_TOKENS, ubatch_size=_PROBE_TOKENS,
    )  # fmt: skip
    context = LlamaContext(model, config, n_cells=256, n_seqs=1, taps=taps)
    try:
        taps.watch("Qcur", "kq_soft_max")
        ids = np.arange(_PROBE_TOKENS, dtype=np.int32) % context.n_vocab
        context.batch.add(ids, 0, 0, logits_last=True)
        context.decode()
        rows = parse_rows(context.get_state(0), cell_ext=cell_ext)
        layers = taps.layers
        queries = np.stack([taps.take("Qcur", layer).transpose(1, 0, 2) for layer in layers])
        weights = np.stack([taps.take("kq_soft_max", layer) for layer in layers])
    finally:
        context.close()
    size = queries.shape[3]
    scale = float(model.key("attention.scale", "0")) or 1 / math.sqrt(size)
    every = np.arange(_PROBE_TOKENS, dtype=np.int64)
    found = _mass(queries, rows, every, every, scale)
    expected = weights.mean(axis=(0, 1)).sum(axis=0)[:_PROBE_TOKENS]
    return float(np.abs(found - expected).max()), Attention(
        scale, len(layers), queries.shape[1], size
    )
