"""The time to thaw one conversation: decoding it, and up to the first token of a request."""

from __future__ import annotations

import asyncio
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from towerd.cli.bench.harness.report import Report
from towerd.codec import Codec
from towerd.codec.forms.form import Coded
from towerd.codec.forms.network import Network
from towerd.codec.text import from_ids
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold import decode
from towerd.engine.base import GenerateRequest, Started
from towerd.service import Service, open_service
from towerd.settings.config import Config
from towerd.store import Turn
from towerd.tokens import Ids

_NEW_TOKENS = 8
_DECODES = 9


def measure_decoding(report: Report, vocabulary: GgufVocabulary, ids: Ids) -> bool:
    """Decode one conversation in the form `network` as it is written, on all cores and on one, and
    written in one chunk with the model's whole context, which one core reads in order; in turn, so
    that other work on the machine slows all of them; the fastest of nine times counts. False if there
    is no mini model."""
    as_written = Codec(vocabulary).text_coder()
    if not isinstance(as_written, Network):
        return False
    one_core = copy.copy(as_written)
    one_core.n_threads = 1
    in_order = copy.copy(one_core)
    in_order.n_ctx, in_order.chunk_symbols = (
        0,
        len(as_written.mini.symbols(from_ids(ids, vocabulary).text)),
    )
    ways = {"": as_written, "one_core_": one_core, "in_order_": in_order}
    nothing = ids[:0]
    coded = {name: way.encode(ids, nothing) for name, way in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_DECODES):
        for name, way in ways.items():
            began = time.perf_counter()
            found = way.decode(coded[name], len(ids), nothing)
            taken[name].append(time.perf_counter() - began)
            assert np.array_equal(found, ids)
    figures = report.figures
    for name, each in taken.items():
        figures[f"decode_{name}tok_s"] = len(ids) / min(each)
    figures["decode_cores"] = as_written.n_threads
    figures["decode_chunks"] = len(coded[""].chunks)
    figures["decode_speedup"] = figures["decode_tok_s"] / figures["decode_in_order_tok_s"]
    figures["decode_bytes_ratio"] = _n_bytes(coded[""]) / _n_bytes(coded["in_order_"])
    return True


def _n_bytes(coded: Coded) -> int:
    return len(coded.side) + sum(len(chunk.bits) for chunk in coded.chunks)


async def measure_thaw(
    report: Report, model: Path, store: Path, text: Ids, name: str, n_thaws: int
) -> None:
    """Thaw a session of this text by a request that continues it; measure reading, decoding,
    evaluating the prompt, and the total up to the first token. Figures begin with `name`."""
    times: dict[str, list[float]] = {}
    async with open_service(_thaw_config(model, store, len(text))) as service:
        turn = Turn("local", name, text[:-300], text[-300:], len(text) - 1, time.time())
        service.store.commit_turn(turn)
        for number in range(n_thaws):
            await service.cold.freeze(name, "local")
            began = time.monotonic()
            frozen = service.store.cold.read(name, "local")
            read = time.monotonic()
            assert frozen is not None
            await asyncio.to_thread(decode, service.cold.coding.codec, frozen)
            times.setdefault("read_ms", []).append((read - began) * 1e3)
            times.setdefault("decode_ms", []).append((time.monotonic() - read) * 1e3)
            first_token_s, prefill_ms = await _first_token(service, text, name, number)
            times.setdefault("first_token_ms", []).append(first_token_s * 1e3)
            times.setdefault("prefill_ms", []).append(prefill_ms)
    for what, each in times.items():  # figures over all sessions take precedence
        report.figures.setdefault(f"{name}{what}", statistics.median(each))


async def resume_with_rows(model: Path, store: Path, text: Ids) -> float:
    """Seconds up to the first token of a request that continues a session of this text whose rows
    are stored, but not in RAM."""
    async with open_service(_thaw_config(model, store, len(text))) as service:
        await _first_token(service, text, "kept", 0)
        await asyncio.to_thread(service.tiers.flush)
        first_token_s, _ = await _first_token(service, text, "kept", 1)
        return first_token_s


def _thaw_config(model: Path, store: Path, n_tokens: int) -> Config:
    return Config(
        model=model,
        store_dir=store,
        socket=store.parent / "s",
        ctx_size=n_tokens + 64,
        live_sequences=1,
        parallel=1,
        freeze_after_s=-1,
        hot_bytes=0,
        anticipate=False,
    )


async def _first_token(
    service: Service[Any], text: Ids, session: str, number: int
) -> tuple[float, float]:
    """(seconds up to the first token, milliseconds of prefill) of a request that continues a
    session; its live rows are dropped afterwards."""
    asked = np.concatenate([text, text[: _NEW_TOKENS + number]])
    request = GenerateRequest(ids=asked, fields={"temperature": 0}, n_predict=1, session=session)
    began, found = time.monotonic(), (0.0, 0.0)
    async for event in service.sessions.run(request):
        if isinstance(event, Started):
            found = time.monotonic() - began, event.prompt_ms
    await service.engine.settle()
    for seq in list(service.engine.pool):
        service.engine.pool.drop(seq)
    return found
