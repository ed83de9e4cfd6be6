"""`towerctl lab bench codec`: bits per byte of chat by kind, ours beside general-purpose compressors.

Our sizes are whole blobs, header and checksums included. All compressors run on the same sessions
of 16 KB from the development split of the data; the training split built our table and primes
theirs.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.progress import track

from lab.bench.codec.baselines import PRIME_BYTES, baselines
from lab.bench.codec.texts import KINDS, sessions, training
from lab.codec.lossy import reduce
from lab.texts.chat_template import MARKS, tokenized
from towerd.cli.bench.harness.report import Report
from towerd.codec import Codec, container
from towerd.codec.forms.mini import PATH, mini_network
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary

SESSIONS, SESSIONS_QUICK = 24, 3
CHUNK_SYMBOLS = (256, 512, 1024, 2048, 4096, 8192)
CHUNK_SYMBOLS_QUICK = (256, 1024, 8192)
OURS = ("ranked", "text", "mix", *(["network"] if PATH.exists() else []))
"""The forms to measure. The last one is the best; the daemon stores it."""
BEST = OURS[-1]
CLASSICAL = ("zstd", "zstd_dict", "xz", "brotli", "ppmd", "ppmd_primed", "ranked")
_BUNDLED = Path(file.PATH).parents[2] / "towerd" / "data" / "stories260K.gguf"


async def run(
    model: Path | None,
    quick: bool,
    data: Path,
    vocabs: tuple[Path, ...],
    mini: Path | None,
    p_mins: tuple[float, ...],
) -> Report:
    """Measure with the first vocabulary; sessions are also counted in tokens of the others."""
    texts = sessions(data, SESSIONS_QUICK if quick else SESSIONS)
    classical = baselines(training(data, 2 * PRIME_BYTES))
    paths = vocabs or (_BUNDLED,)
    report = Report("codec", ", ".join(path.stem for path in paths))
    vocabularies = {path.stem.removeprefix("ggml-vocab-"): GgufVocabulary(path) for path in paths}
    first = next(iter(vocabularies.values()))
    codec = Codec(first)
    totals = {"tokens": 0, "encode_s": 0.0, "decode_s": 0.0}
    for kind in KINDS:
        sizes = {
            name: sum(map(size, track(texts[kind], f"{kind}, {name}")))
            for name, size in classical.items()
        }
        for form in OURS:
            sizes[form] = sum(_coded(codec, first, text, form, totals) for text in texts[kind])
        _kind(report, kind, texts[kind], sizes, vocabularies)
    _summary(report, next(iter(vocabularies)), totals)
    some = [each[0] for each in texts.values()][: 1 if quick else None]
    for p_min in p_mins:
        _lossy(report, codec, first, some, p_min)
    if mini is not None or BEST == "network":
        network = mini_network(first, mini or PATH)
        for n_symbols in CHUNK_SYMBOLS_QUICK if quick else CHUNK_SYMBOLS:
            network.chunk_symbols = n_symbols
            _chunked(report, Codec(first, [network]), first, some, n_symbols)
    return report


def _coded(
    codec: Codec, vocabulary: GgufVocabulary, text: bytes, form: str, totals: dict[str, float]
) -> int:
    """Returns the bytes of the blob; adds the times of the best form to `totals`."""
    ids = tokenized(text, vocabulary)
    started = time.perf_counter()
    blob = codec.encode(ids, form=form)
    encoded = time.perf_counter()
    if codec.decode(blob).tolist() != ids:
        raise click.ClickException(f"The form {form} does not give back what it was given.")
    if form == BEST:
        decode_s = time.perf_counter() - encoded
        totals["tokens"] += len(ids)
        totals["decode_s"] += decode_s
        totals["encode_s"] += encoded - started  # with the decoding that checks it
    return len(blob)


def _kind(
    report: Report,
    kind: str,
    texts: list[bytes],
    sizes: dict[str, int],
    vocabularies: dict[str, GgufVocabulary],
) -> None:
    n_bytes = sum(map(len, texts))
    figures = report.figures
    figures[f"{kind}_sessions"] = len(texts)
    for name, size in sizes.items():
        figures[f"{kind}_{name}_bits_per_byte"] = round(8 * size / n_bytes, 3)
    figures[f"{kind}_bytes_per_session"] = round(sizes[BEST] / len(texts))
    for name, vocabulary in vocabularies.items():
        n_tokens = sum(len(tokenized(text, vocabulary)) for text in texts)
        figures[f"{kind}_{name}_bits_per_token"] = round(8 * sizes[BEST] / n_tokens, 3)
    figures[f"{kind}_vs_ppmd_primed"] = round(sizes["ppmd_primed"] / sizes[BEST], 3)
    figures[f"{kind}_vs_zstd_dict"] = round(sizes["zstd_dict"] / sizes[BEST], 3)
    figures[f"{kind}_vs_best_classical"] = round(
        min(sizes[name] for name in CLASSICAL) / sizes[BEST], 3
    )


def _summary(report: Report, vocabulary: str, totals: dict[str, float]) -> None:
    figures = report.figures
    for kind in ("assistant", "human"):
        figures[f"{kind}_bits_per_token"] = figures[f"{kind}_{vocabulary}_bits_per_token"]
    for key in ("vs_zstd_dict", "vs_best_classical"):
        figures[key] = min(figures[f"{kind}_{key}"] for kind in KINDS)
    figures["encode_tok_s"] = round(totals["tokens"] / totals["encode_s"])
    figures["decode_tok_s"] = round(totals["tokens"] / totals["decode_s"])
    report.target("vs_best_classical", least=1.3)
    report.target("decode_tok_s", least=1000)


def _chunked(
    report: Report, codec: Codec, vocabulary: GgufVocabulary, texts: list[bytes], n_symbols: int
) -> None:
    """Code one session of each kind in chunks of `n_symbols`: bits per byte, and decoding speed."""
    n_bytes = n_tokens = n_chunks = 0
    decode_s = 0.0
    for text in track(texts, f"chunks of {n_symbols}"):
        ids = tokenized(text, vocabulary)
        blob = codec.encode(ids, form="network")
        started = time.perf_counter()
        codec.decode(blob)
        decode_s += time.perf_counter() - started
        n_bytes += len(blob)
        n_tokens += len(ids)
        n_chunks = max(n_chunks, len(container.read(blob).chunks))
    key = f"network_{n_symbols}"
    report.figures[f"{key}_chunks"] = n_chunks
    report.figures[f"{key}_bits_per_byte"] = round(8 * n_bytes / sum(map(len, texts)), 3)
    report.figures[f"{key}_decode_tok_s"] = round(n_tokens / decode_s)


def _lossy(
    report: Report, codec: Codec, vocabulary: GgufVocabulary, texts: list[bytes], p_min: float
) -> None:
    """Code one session of each kind without the symbols less likely than `p_min`."""
    n_bytes = n_lost = n_symbols = 0
    for text in track(texts, f"p_min {p_min:g}"):
        loss = reduce(text.decode(), p_min, MARKS)
        n_bytes += len(codec.encode(tokenized(loss.text.encode(), vocabulary), form=BEST))
        n_lost += loss.n_lost
        n_symbols += loss.n_symbols
    report.figures[f"p_min_{p_min:g}_lost"] = round(n_lost / n_symbols, 4)
    report.figures[f"p_min_{p_min:g}_bits_per_byte"] = round(8 * n_bytes / sum(map(len, texts)), 3)
