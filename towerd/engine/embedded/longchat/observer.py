"""Observer: measures the attention of chats with a budget, for the policies that use it.

Queries are tapped from the compute graph (`towerd.engine.embedded.context.taps`) and held against the
cached keys. Where every query counts (`Signal.MASS`) this is done batch by batch, and only the last
queries are kept until the eviction. Where the last ones alone count (`Signal.RECENT`), no
others are tapped: batches without them are evaluated as if there were no tap. Called by the inference
thread only.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.memory import SequenceMemory, open_memory
from towerd.engine.embedded.context.taps import QUERIES, Taps
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.live_set import BoundedSet, Observed
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.live.prompt_keys import PromptKeys
from towerd.errors import ConfigError, TowerdError
from towerd.model.attention_sinks import attention_sinks
from towerd.model.llama_model import LlamaModel
from towerd.model.row_flags import has_rotation, is_rotated
from towerd.retention import Mass, Positions, Retention, Rows, Signal
from towerd.retention.attention import attention_mass, faded, rotated
from towerd.settings.config import Config
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout
from towerd.slots.rows import Bytes2D, KVRows

QUERIES_MAX = 32
"""The last queries before an eviction that are held, at most."""
_COUNTED_MIN = 32
"""Queries that are held against the keys at once, as keys have to be read and unpacked each time."""
_PROBE_TOKENS = 16
_PROBE_SEQS = 3
"""A sequence, that which rows pass through, and what holds on to the rows of its window."""
_PROBE_ERROR_MAX = 0.05
"""Largest error of a mass, which is at most 16; f16 keys explain a tenth of it."""


class AttentionShape(NamedTuple):
    """The dimensions of a model's attention, in the layers that attend to everything."""

    scale: float
    """Factor of the scores before the softmax."""
    numbers: tuple[int, ...]
    """The layers among all of the model, in the order of their rows."""
    heads: int
    head_size: int
    sinks: tuple[Mass | None, ...]
    """For each layer float32[heads], or None: see `attention_mass`."""
    tensor: str
    """What the queries are watched by."""
    hadamard: int
    """How many numbers of a query are rotated together before they are multiplied with keys; 0: none."""

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.numbers)


class Observer:
    """Collects queries from the taps of one context, and computes masses from its cells."""

    def __init__(self, taps: Taps, memory: SequenceMemory, attention: AttentionShape) -> None:
        """attention: the result of `check_attention`"""
        self.attention = attention
        self.taps = taps
        """Where the queries are taken from."""
        self.observe_s = 0.0
        """Seconds spent on queries and masses, beside the evaluation."""
        self._memory = memory
        self._wanted: dict[int, tuple[int, int]] = {}
        """[start, end) in the batch, by the id() of the job."""
        self._n_batch = 0

    def watch(self, jobs: Iterable[tuple[Job, int]]) -> None:
        """Prepare for the batch of these (job, number of last tokens whose queries are needed), in
        this order."""
        self._wanted, self._n_batch = {}, 0
        for job, n_wanted in jobs:
            self._n_batch += job.n_in_batch
            if n_wanted:
                self._wanted[id(job)] = (self._n_batch - n_wanted, self._n_batch)
        self.taps.watch(*((self.attention.tensor,) if self._wanted else ()))

    def observe(self, job: Job, live_set: BoundedSet) -> None:
        """Collect the job's queries of the batch that was just evaluated and accounted for. Raises
        TowerdError if they are missing."""
        start, end = self._wanted.pop(id(job), (0, 0))
        if start == end:
            return
        started = time.perf_counter()
        n_held = n_queries_of(live_set.policy)
        if Signal.MASS in live_set.policy.signals:
            # A draft may be refused: its queries do not count yet.
            n_held = self._count(job, live_set, start, end, n_held + len(job.draft))
        queries = self._taken(max(start, end - n_held), end)
        if not self._wanted:
            self.taps.watch()  # queries of all layers are large; collect none until needed
        live_set.observe(Observed(live_set.n - queries.shape[2], queries), n_held)
        self.observe_s += time.perf_counter() - started

    def scaled_queries(self, live_set: BoundedSet, n_from: int) -> Rows:
        """float32[layers, heads, m, head size]: the observed queries of tokens from `n_from` on (m
        may be 0), scaled so that a score is the product with a key over sqrt(head size). The live
        set keeps its queries."""
        a = self.attention
        found = [np.zeros((a.layers, a.heads, 0, a.head_size), np.float32)]
        for each in live_set.observed:
            found.append(each.queries[:, :, max(0, n_from - each.p0) :])
        return np.concatenate(found, axis=2) * np.float32(a.scale * math.sqrt(a.head_size))

    def measure(self, seq: LiveSeq, live_set: BoundedSet) -> None:
        """Give the live set the attention from the observed queries, and clear these. Raises TowerdError if
        the model has computed numbers that are not finite."""
        started = time.perf_counter()
        observed, live_set.observed = live_set.observed, ()
        positions = _positions_of(observed)
        if not len(positions):
            return
        layers = (np.concatenate(_of_layer(observed, i)) for i in range(self.attention.layers))
        if Signal.RECENT in live_set.policy.signals:
            live_set.voted(self._attention(seq, live_set, layers, positions))
        else:
            self._attend(seq, live_set, layers, positions)
        self.observe_s += time.perf_counter() - started

    def _count(self, job: Job, live_set: BoundedSet, start: int, end: int, n_held: int) -> int:
        """Add the mass from all queries but the last `n_held`, if there are enough of them, to the live
        set. [start, end): the job's part of the batch. Returns how many queries are to be kept."""
        observed, n = live_set.observed, live_set.n
        before = _positions_of(observed)
        positions = np.concatenate([before, np.arange(n - (end - start), n)])
        n_counted = len(positions) - n_held
        if job.phase is not JobPhase.PREFILL:
            live_set.keys = None
        if n_counted < _COUNTED_MIN:
            return len(positions)
        if job.phase is JobPhase.PREFILL and live_set.keys is None:
            row_bytes = [plane.row_bytes for plane in self._memory.full_layout.k]
            live_set.keys = PromptKeys(live_set.n_places, row_bytes)
        assert job.seq is not None
        layers = (
            np.concatenate([*_of_layer(observed, i), self._of_batch(layer)[start:end]])[:n_counted]
            for i, layer in enumerate(self.attention.numbers)
        )
        self._attend(job.seq, live_set, layers, positions[:n_counted])
        return n_held

    def _attend(
        self, seq: LiveSeq, live_set: BoundedSet, queries: Iterator[Rows], positions: Positions
    ) -> None:
        """Add the mass from the queries of `positions`, which ascend, to the live set. queries: see
        `attention_mass`. Raises TowerdError."""
        weights = faded(positions[-1] - positions, live_set.policy.config.half_life)
        masses = self._attention(seq, live_set, queries, positions, weights)
        live_set.attended(masses, len(positions))

    def _attention(
        self,
        seq: LiveSeq,
        live_set: BoundedSet,
        queries: Iterator[Rows],
        positions: Positions,
        weights: Mass | None = None,
    ) -> Mass:
        """float32[layers, KV heads, m]: the attention that the m live positions get from the queries of
        `positions`. queries, weights: see `attention_mass`. Raises TowerdError."""
        places = live_set.places[np.searchsorted(live_set.kept, positions)]
        keys = self._keys(seq, live_set)
        name = self._memory.full_layout.k[0].format.name
        try:
            scale, sinks = self.attention.scale, self.attention.sinks
            seen = places, live_set.places
            return attention_mass(queries, keys, name, *seen, scale, sinks, weights)
        except ValueError as error:
            raise TowerdError(f"The attention of this chat cannot be read: {error}.") from error

    def _keys(self, seq: LiveSeq, live_set: BoundedSet) -> Sequence[Bytes2D]:
        """For each layer uint8[m, row_bytes]: the keys of all live positions."""
        keys, n_live = live_set.keys, len(live_set.kept)
        first = 0 if keys is None else len(keys)
        rows = None
        if first < n_live:
            rows = self._memory.full_rows(seq.id, int(live_set.places[first]), live_set.place_next)
        if keys is None:
            assert rows is not None
            return rows.k
        if rows is not None:
            keys.add(rows)
        return keys.rows()

    def _taken(self, start: int, end: int) -> Rows:
        """float32[layers, heads, end - start, head size]: these queries of the batch."""
        taken = [self._of_batch(layer)[start:end] for layer in self.attention.numbers]
        return np.stack([each.transpose(1, 0, 2) for each in taken])

    def _of_batch(self, layer: int) -> Rows:
        """float32[tokens, heads, head size]: the queries of the batch. Raises TowerdError."""
        taken = self.taps.queries(self.attention.tensor, layer)
        if len(taken) != self._n_batch:
            raise TowerdError("llama.cpp evaluated a batch in parts, and only the last was read.")
        return rotated(taken, self.attention.hadamard)


def n_queries_of(policy: Retention) -> int:
    """How many of the last queries before an eviction are held: where only the recent ones vote, those of
    the policy's window (the observation window of SnapKV)."""
    return (
        min(policy.config.window, QUERIES_MAX) if Signal.RECENT in policy.signals else QUERIES_MAX
    )


def _positions_of(observed: tuple[Observed, ...]) -> Positions:
    return np.concatenate(
        [np.empty(0, np.int64), *(np.arange(each.p0, each.p1) for each in observed)]
    )


def _of_layer(observed: tuple[Observed, ...], i: int) -> list[Rows]:
    """float32[m, heads, head size] each: the observed queries of one layer."""
    return [each.queries[i].transpose(1, 0, 2) for each in observed]


def check_attention(model: LlamaModel, config: Config) -> AttentionShape:
    """Check on a few tokens that masses computed from queries and keys equal those of llama.cpp's
    own weights, and return the dimensions of the layers that attend to everything.

    The queries are those that llama.cpp names; where it does not name them once they are rotated, those that
    go into the attention. Raises ConfigError if the masses differ or cannot be compared: then no policy can
    use them."""
    why = ""
    for tensor, scale in (("Qcur", None), (QUERIES, None), (QUERIES, 1.0)):
        try:
            error, attention = _probe(model, config, tensor, scale)
        except (TowerdError, StateError, ValueError) as failure:
            why = str(failure)
            continue
        if not error <= _PROBE_ERROR_MAX:
            why = f"it differs from what was expected by {error:.2g}."
        elif (
            tensor == QUERIES
            and config.flash_attn != "off"
            and not _is_shown(model, config, attention)
        ):
            why = "llama.cpp's fused attention hides its queries; --flash-attn off shows them."
            break
        else:
            return attention
    raise ConfigError(f"{_cannot(config)}: {why}")


def _cannot(config: Config) -> str:
    return (
        f"--retention {config.retention} goes by attention, and this model's cannot be read "
        "(take none, shift or streaming)"
    )


def _probe(
    model: LlamaModel, config: Config, tensor: str, scale: float | None
) -> tuple[float, AttentionShape]:
    """The largest error of a position's mass, and the dimensions that were used.

    tensor: what queries are watched by; scale: of their scores, 1 where the queries are scaled already; None:
    what the model says, or the usual one"""
    plain = replace(config, flash_attn="off", cache_type_v="f16")
    with _evaluated(model, plain, tensor, "kq_soft_max") as (taps, memory):
        rows = memory.rows(0, 0, _PROBE_TOKENS)
        # If there is no layer, taking the first raises with the reason.
        layers = taps.layers_of("kq_soft_max") or (0,)
        queries = [taps.queries(tensor, layer) for layer in layers]
        blocks = [0] * len(layers)
        if tensor != QUERIES:  # those are rotated already
            blocks = [_hadamard_block(memory.full_layout, each.shape[2]) for each in queries]
        queries = [rotated(each, block) for each, block in zip(queries, blocks, strict=True)]
        weights = [taps.take("kq_soft_max", layer) for layer in layers]
    assert rows is not None
    size = queries[0].shape[2]
    scale = scale or float(model.key("attention.scale", "0")) or 1 / math.sqrt(size)
    masses = [each.mean(axis=0).sum(axis=0)[:_PROBE_TOKENS] for each in weights]
    sinks = attention_sinks(model.path, layers)
    full = _full_layers(rows, queries, masses, scale, sinks)
    shapes = {queries[i].shape for i, _ in full}
    if len(full) != memory.full_layout.n_layer or len(shapes) != 1:
        raise TowerdError("its layers do not all have the same attention")
    error = np.abs(np.mean([errors for _, errors in full], axis=0)).max()
    _, heads, size = shapes.pop()
    numbers = tuple(layers[i] for i, _ in full)
    of_full, block = tuple(sinks[i] for i, _ in full), blocks[full[0][0]]
    return float(error), AttentionShape(scale, numbers, heads, size, of_full, tensor, block)


def _is_shown(model: LlamaModel, config: Config, attention: AttentionShape) -> bool:
    """Whether the queries are there with the attention that the model is served with."""
    with _evaluated(model, config, QUERIES) as (taps, _):
        return set(attention.numbers) <= set(taps.layers_of(QUERIES))


@contextmanager
def _evaluated(
    model: LlamaModel, config: Config, *names: str
) -> Iterator[tuple[Taps, SequenceMemory]]:
    """A context that has evaluated a few tokens, and what it watched by these names."""
    taps, n = Taps(), _PROBE_TOKENS
    config = replace(config, batch_size=n, ubatch_size=n)
    context = LlamaContext(model, config, n_cells=256, n_seqs=_PROBE_SEQS, taps=taps)
    try:
        memory = open_memory(context, model)
        taps.watch(*names)
        ids = np.linspace(0, context.n_vocab - 1, n).astype(np.int32)
        context.batch.add(ids, 0, 0, logits_last=True)
        context.decode()
        yield taps, memory
    finally:
        context.close()


def _hadamard_block(layout: KVLayout, head_size: int) -> int:
    """How many numbers of a query llama.cpp rotates together for keys in this layout; 0: none."""
    if not layout.k or not layout.v or not has_rotation(os.environ):
        return 0
    plane = layout.k[0]
    is_turned = is_rotated(plane, max(1, plane.n_elements // head_size))
    return head_size & -head_size if is_turned else 0


def _full_layers(
    rows: KVRows,
    queries: Sequence[Rows],
    masses: Sequence[Mass],
    scale: float,
    sinks: Sequence[Mass | None],
) -> list[tuple[int, Mass]]:
    """Which layers attend to everything, and by how much the mass of each position differs from what was
    expected. The rows of each cache are in the order of the layers, so those of a layer are the next ones
    of one of the caches; layers that are left use the rows of others.

    queries: of each layer float32[n, heads, head size]; masses: what each position got from them"""
    caches = [list(zip(cache.layout.k, cache.k, strict=True)) for cache in rows.sections()]
    every, full = np.arange(len(rows), dtype=np.int64), []
    for i, (asked, expected, sink) in enumerate(zip(queries, masses, sinks, strict=True)):
        errors: list[tuple[float, int, Mass]] = []
        for number, cache in enumerate(caches):
            if not cache:
                continue
            plane, keys = cache[0]
            try:
                by_head = attention_mass(
                    (asked,), (keys,), plane.format.name, every, every, scale, (sink,)
                )
            except ValueError:  # heads of another size
                continue
            difference = by_head.mean(axis=(0, 1)) - expected
            errors.append((float(np.abs(difference).max()), number, difference))
        if not errors:
            break
        _, number, difference = min(errors, key=lambda each: each[:2])
        del caches[number][0]
        if number == 0:
            full.append((i, difference))
    return full
