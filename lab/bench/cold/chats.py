"""`towerctl bench cold`: the size of frozen sessions, and the time to find and thaw them.

A few hundred sessions are recorded turn by turn and frozen as the daemon does it. The rest of a
hundred thousand are copies of them with names, turns and marks of their own, so that every row has
the size of a distinct session's. Thawing is measured on the coded sessions, and its prefill on the
model's own engine. Texts are from sources that the codec was not trained on.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import track

from lab.bench.cold.thawing import measure_decoding, measure_thaw, resume_with_rows
from lab.bench.disk import disk_bytes
from lab.texts.chat_template import held_out, tokenized
from lab.texts.documents import read_meetings, read_text
from towerd.cli.bench.harness.report import Report
from towerd.codec import Codec, container
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold import decode, freeze
from towerd.engine.embedded.calibration.calibrate import calibration_text
from towerd.kernels.formats import BY_NAME
from towerd.model.llama_model import init_backend
from towerd.models.bundled import default_model
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RowIdentity
from towerd.store import Store, Turn
from towerd.store.sessions.frozen import encode_turns, row_digest
from towerd.tokens import Ids, ids_bytes

TOKENS = 1000
BASE_TOKENS = 200
_BASES = 10
_TURNS = 4
_BATCH = 2000
_LOOKUPS = 500
_PROMPT_TOKENS = 8000
_THAWS = 3
LONG_TOKENS = 8000
"""Length of the long chat to thaw; with its new tokens it fits a context of 8,192."""
_BYTES_PER_TOKEN_MAX = 8
"""More than the mean of the texts; bounds how much of them is tokenized."""


@dataclass(slots=True)
class Population:
    """The store, and its sessions that were coded."""

    store: Store
    codec: Codec
    ids: list[Ids]
    """int32[BASE_TOKENS + TOKENS] of each coded session."""
    sources: list[str]
    """The source of each."""
    freeze_s: list[float]

    def bits_per_token(self) -> dict[str, float]:
        """Bits per token of whole blobs, by source and in total."""
        bits: dict[str, list[int]] = {}
        for number, source in enumerate(self.sources):
            frozen = self.store.cold.read(f"s{number}", "local")
            assert frozen is not None
            bits.setdefault(source, []).append(8 * len(frozen.blob))
        found = {f"bits_per_token {name}": sum(n) / len(n) / TOKENS for name, n in bits.items()}
        every = [n for each in bits.values() for n in each]
        return {**found, "bits_per_token": sum(every) / len(every) / TOKENS}

    def forms(self) -> str:
        """How many of the coded sessions use each form."""
        found = Counter(
            container.read(frozen.blob).form.name
            for number in range(len(self.ids))
            if (frozen := self.store.cold.read(f"s{number}", "local")) is not None
        )
        return ", ".join(f"{n} {form}" for form, n in found.most_common())


async def run(
    model: Path | None,
    quick: bool,
    *,
    data: Path | None,
    texts: Sequence[Path],
    meetings: Path | None,
    vocab: Path | None,
) -> Report:
    """Fill a store in a temporary directory and measure it."""
    n, n_coded = (2_000, 20) if quick else (100_000, 200)
    path = model or default_model()
    init_backend()
    report = Report("cold", (vocab or path).name)
    sources = _sources(data, texts, meetings)
    report.figures["text"] = ", ".join(sources)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        root = Path(folder) / "store"
        with GgufVocabulary(vocab or path) as vocabulary:
            n_each = max(-(-n_coded // len(sources)) * TOKENS + _BASES * BASE_TOKENS, LONG_TOKENS)
            streams = {key: _stream(parts, vocabulary, n_each) for key, parts in sources.items()}
            with Store.open(root, _row_identity()) as store:
                made = _fill(store, Codec(vocabulary, tables=store.tables), streams, n_coded)
                report.figures["forms"] = made.forms()
                report.figures |= made.bits_per_token()
                _copy(made, n)
            _measure(report, root, made, n)
        if vocab is None:
            long = next(iter(streams.values()))[:LONG_TOKENS]
            served = Path(folder) / "served"
            n_thaws = 1 if quick else _THAWS
            await measure_thaw(report, path, served, long[:TOKENS], "thaw_", n_thaws)
            await measure_thaw(report, path, served, long, "thaw_8k_", n_thaws)
            report.figures["resume_with_rows_s"] = await resume_with_rows(path, served, long)
            first_token_ms = report.figures.pop("thaw_8k_first_token_ms")
            report.figures["resume_without_rows_s"] = first_token_ms / 1e3
        with GgufVocabulary(vocab or path) as vocabulary:
            if measure_decoding(report, vocabulary, next(iter(streams.values()))[:LONG_TOKENS]):
                report.target("decode_speedup", least=3.0)
                report.target("decode_bytes_ratio", most=1.03)
    report.target("bytes_per_session", most=3000)
    report.target("lookup_p99_ms", most=1.0)
    return report


def _sources(
    data: Path | None, texts: Sequence[Path], meetings: Path | None
) -> dict[str, Iterator[bytes]]:
    """Name -> parts of its text; the calibration text if none is named."""
    found: dict[str, Iterator[bytes]] = {}
    if data is not None:
        found[data.name] = iter((held_out(data),))
    for path in texts:
        found[path.name] = iter((read_text(path).encode(),))
    if meetings is not None:
        found[meetings.name] = iter((read_meetings(meetings).encode(),))
    return found or {"shuffled sentences": _shuffled()}


def _row_identity() -> RowIdentity:
    plane = Plane(BY_NAME["f16"].ggml_type, 512)
    layout = KVLayout((plane,), (plane,))
    return RowIdentity("bench", "llama", "bench", {}, (), layout, False, False, False)


def _stream(parts: Iterator[bytes], vocabulary: GgufVocabulary, n: int) -> Ids:
    """int32[n] of a text, which is repeated if it is too short."""
    ids: list[int] = []
    for part in parts:
        ids += tokenized(part[: n * _BYTES_PER_TOKEN_MAX], vocabulary)
        if len(ids) >= n:
            break
    return np.resize(np.array(ids, np.int32), n)


def _shuffled() -> Iterator[bytes]:
    """The sentences of the calibration text, which the codec does not know, endlessly shuffled."""
    rng = np.random.default_rng(0)
    sentences = re.split(r"(?<=[.!?])\s+", calibration_text())
    while True:
        yield " ".join(sentences[i] for i in rng.permutation(len(sentences))).encode()


def _fill(store: Store, codec: Codec, streams: Mapping[str, Ids], n: int) -> Population:
    """Add bases, then sessions of four turns each, which are frozen at once, from each text in
    turn."""
    names = list(streams)
    n_bases = _BASES * BASE_TOKENS
    bases = np.split(streams[names[0]][-n_bases:], _BASES)
    for number, base in enumerate(bases):
        store.bases.add(f"base {number}", base, "local", 0, False)
    made = Population(store, codec, [], [], [])
    for number in track(range(n), "coding"):
        source = names[number % len(names)]
        at = number // len(names) * TOKENS
        ids = np.concatenate([bases[number % _BASES], streams[source][at : at + TOKENS]])
        for turn in range(1, _TURNS + 1):
            end = BASE_TOKENS + TOKENS * turn // _TURNS
            cut = end - TOKENS // _TURNS // 3
            store.commit_turn(
                Turn("local", f"s{number}", ids[:cut], ids[cut:end], end - 1, time.time())
            )
        began = time.monotonic()
        freeze(store, codec, f"s{number}", "local")
        made.freeze_s.append(time.monotonic() - began)
        made.ids.append(ids)
        made.sources.append(source)
    return made


def _copy(made: Population, n: int) -> None:
    """Fill the store up to `n` sessions with copies of the coded ones."""
    rng, n_coded = np.random.default_rng(0), len(made.ids)
    catalog = made.store.state.catalog
    ((next_turn,),) = catalog.rows("SELECT max(id) + 1 FROM turns")
    sources = [_CodedSession(made, number) for number in range(n_coded)]
    for first in range(n_coded, n, _BATCH):
        with catalog.transaction():
            for number in range(first, min(n, first + _BATCH)):
                source = sources[number % n_coded]
                next_turn = source.copy(number, next_turn, rng)


class _CodedSession:
    """A coded session to copy."""

    def __init__(self, made: Population, number: int) -> None:
        self.catalog = made.store.state.catalog
        self.frozen = made.store.cold.read(f"s{number}", "local")
        assert self.frozen is not None
        self.history = self.frozen.history(decode(made.codec, self.frozen))
        pk = self.frozen.session.pk
        ((self.session,),) = [
            self.catalog.rows(
                "SELECT tokenizer, scope, named, title, n_tokens, created, updated, cold_bytes"
                " FROM sessions WHERE pk = ?",
                (pk,),
            )
        ]
        self.turns = self.catalog.rows(
            "SELECT n_prompt, n_reply, n_cached, started, created, finished FROM turns"
            " WHERE session = ? ORDER BY id",
            (pk,),
        )
        ((self.base, self.n_base, self.n_marks),) = self.catalog.rows(
            "SELECT base, n_base, length(marks) FROM cold WHERE session = ?", (pk,)
        )

    def copy(self, number: int, first_turn: int, rng: np.random.Generator) -> int:
        """Add a copy whose turns begin with this id; returns the id after its last. Its blob has
        the same length but random bytes, as incompressible as coded text: the journal is
        compressed."""
        assert self.frozen is not None
        run, blob = self.catalog.run, rng.bytes(len(self.frozen.blob))
        ids = list(range(first_turn, first_turn + len(self.turns)))
        pk = run(
            "INSERT INTO sessions(tokenizer, scope, named, title, n_tokens, created, updated,"
            " cold_bytes, id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*self.session, f"{rng.integers(1 << 63):016x}"),
        )
        for id, turn in zip(ids, self.turns, strict=True):
            parent = None if id == first_turn else id - 1
            run(
                "INSERT INTO turns(id, session, parent, n_prompt, n_reply, n_cached, started,"
                " created, finished, tail) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, x'')",
                (id, pk, parent, *turn),
            )
        run("UPDATE sessions SET leaf = ? WHERE pk = ?", (ids[-1], pk))
        turns, marks = encode_turns(ids, self.history.turns), rng.bytes(self.n_marks)
        digest = row_digest(self.n_base, turns, marks, blob)
        run(
            "INSERT INTO cold(session, base, n_base, frozen, turns, marks, digest)"
            " VALUES (?, ?, ?, 1, ?, ?, ?)",
            (pk, self.base, self.n_base, turns, marks, digest),
        )
        run("INSERT INTO blobs(session, blob) VALUES (?, ?)", (pk, blob))
        return ids[-1] + 1


def _measure(report: Report, root: Path, made: Population, n: int) -> None:
    figures, n_coded = report.figures, len(made.ids)
    figures["sessions"], figures["coded_sessions"] = n, n_coded
    figures["tokens_per_session"] = TOKENS
    figures["bytes_per_session"] = disk_bytes(root) / n
    began = time.monotonic()
    with Store.open(root, _row_identity()) as store:
        figures["open_s"] = time.monotonic() - began
        figures["blob_bytes"] = store.cold.stats()["cold_bytes"] / n
        figures["freeze_ms"] = statistics.median(made.freeze_s) * 1e3
        found = _lookups(store, made)
        figures["lookup_p50_ms"] = float(np.percentile(found, 50))
        figures["lookup_p99_ms"] = float(np.percentile(found, 99))
        reads, decodes = [], []
        for number in range(n_coded):
            began = time.monotonic()
            frozen = store.cold.read(f"s{number}", "local")
            reads.append(time.monotonic() - began)
            assert frozen is not None
            began = time.monotonic()
            stream = decode(made.codec, frozen)
            decodes.append(time.monotonic() - began)
            assert stream[: len(made.ids[number])].tolist() == made.ids[number].tolist()
        figures["thaw_read_ms"] = statistics.median(reads) * 1e3
        figures["thaw_decode_ms"] = statistics.median(decodes) * 1e3


def _lookups(store: Store, made: Population) -> list[float]:
    """Milliseconds to find the session that a prompt of 8,000 tokens continues; half of the
    prompts continue one."""
    rng, found = np.random.default_rng(1), []
    for number in range(_LOOKUPS):
        more = rng.integers(0, 500, _PROMPT_TOKENS).astype(np.int32)
        coded = number // 2 % len(made.ids)
        continues = number % 2 == 0
        start = made.ids[coded] if continues else more[:0]
        prompt = np.concatenate([start, more])[:_PROMPT_TOKENS]
        data = ids_bytes(prompt)
        began = time.monotonic()
        session = store.cold.continued_by(data, "local")
        found.append((time.monotonic() - began) * 1e3)
        assert (session == f"s{coded}") == continues
    return found
