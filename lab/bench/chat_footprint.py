"""`towerctl bench footprint`: what real conversations take after each layer of the store.

Chats of two turns over four system prompts of about 1,000 tokens are held with a daemon; the model reads texts
and writes replies, so that rows, their formats and the sharing of prefixes are real. Once everything that is
to be encoded is, the daemon says what they take, as `towerctl stats` does, and the disk is looked at.
At the end all are frozen: then their coded text is what they take.

Beside that: how long a request waits for its first token while rows are encoded.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from lab.bench.disk import disk_bytes
from towerd.cli.bench.harness.client import chat, daemon_stats, new_session
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, towerd_server
from towerd.codec.prior import sample
from towerd.errors import TowerdError
from towerd.models.bundled import default_model

_CHATS, _QUICK_CHATS = 500, 32
_BASES = 4
_BASE_CHARS, _SAID_CHARS = 4000, 400
_REPLY_TOKENS, _QUICK_REPLY_TOKENS = 40, 16
_STREAMS = 4
_QUICK_FORMATS = "0=q5h,1=q5h,2=q5h"
"""About what calibration finds for SmolLM2, which takes longer than a quick benchmark may."""
_SETTLED_S = 5.0
_POLL_S = 0.25
_PROBES = 20
_LATER = "1e6"
LAYERS = ("slot", "shared", "levels", "transform", "kept")


async def run(
    model: Path | None, quick: bool, chats: int | None, level_formats: str | None
) -> Report:
    """Hold the chats, let them be encoded, and freeze them."""
    path = model or default_model()
    n_chats = chats or (_QUICK_CHATS if quick else _CHATS)
    n_reply = _QUICK_REPLY_TOKENS if quick else _REPLY_TOKENS
    formats = level_formats or (_QUICK_FORMATS if quick else None)
    report = Report("footprint", path.name)
    report.figures |= {"chats": n_chats, "bases": _BASES}
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        store = Path(folder) / "store"
        flags = ["-c", "4096", "--parallel", str(_STREAMS), "--freeze-after", "-1"]
        flags += ["--level-formats", formats] if formats else []
        with towerd_server(path, store, *flags, "--shrink-after", _LATER) as server:
            await _talk(server, n_chats, n_reply)
            if formats is None:
                report.figures["calibrated_s"] = await _calibrated(server)
            idle_s = await _waits(server, lambda n: n >= _PROBES)
        with towerd_server(path, store, *flags, "--shrink-after", "0") as server:
            encoding_s = await _while_encoding(server)
            await _report(report, server)
            report.figures["disk_bytes_per_chat"] = disk_bytes(store) / n_chats
            report.figures["coded_text_bytes_per_chat"] = await _freeze(server)
    report.figures |= {
        "wait_idle_ms": 1e3 * statistics.median(idle_s),
        "wait_encoding_ms": 1e3 * statistics.median(encoding_s),
        "wait_encoding_max_ms": 1e3 * max(encoding_s),
        "probes_while_encoding": len(encoding_s),
    }
    report.figures["ratio"] = (
        report.figures["slot_bytes_per_chat"] / report.figures["disk_bytes_per_chat"]
    )
    report.target("ratio", least=8)
    return report


async def _talk(server: ServerProcess, n_chats: int, n_reply: int) -> None:
    """Hold all chats, some at a time."""
    texts = _texts()
    bases = [
        "\n".join(next(texts)[:_SAID_CHARS] for _ in range(10))[:_BASE_CHARS] for _ in range(_BASES)
    ]
    streams = asyncio.Semaphore(_STREAMS)

    async def hold(session: aiohttp.ClientSession, number: int, said: tuple[str, str]) -> None:
        messages = [{"role": "system", "content": bases[number % _BASES]}]
        async with streams:
            for text in said:
                messages.append(
                    {"role": "user", "content": f"In short, what is this about?\n{text}"}
                )
                reply = await chat(session, server.url, messages, n_reply)
                messages.append({"role": "assistant", "content": reply.text})

    async with new_session() as session:
        said = [(next(texts), next(texts)) for _ in range(n_chats)]
        await asyncio.gather(*(hold(session, n, each) for n, each in enumerate(said)))


def _texts() -> Iterator[str]:
    """Pieces of the sample, which differ from each other however many are taken."""
    whole, n = sample.load().decode().replace("\f", "\n"), 0
    while True:
        at = n * _SAID_CHARS % (len(whole) - _SAID_CHARS)
        yield (f"({n}) " if n * _SAID_CHARS >= len(whole) else "") + whole[at : at + _SAID_CHARS]
        n += 1


async def _calibrated(server: ServerProcess) -> float:
    """Have the formats measured; the seconds that it took. Raises TowerdError."""
    began, url = time.monotonic(), f"{server.url}/towerd/v1/calibration"
    async with new_session() as session:
        async with session.post(url, json={}) as reply:
            found = (await reply.json())["calibration"]
        while found["state"] != "done":
            if found["state"] == "failed":
                raise TowerdError(f"The formats cannot be measured: {found['why']}.")
            await asyncio.sleep(1.0)
            async with session.get(url) as reply:
                found = (await reply.json())["calibration"]
    return time.monotonic() - began


async def _waits(server: ServerProcess, is_enough: Any) -> list[float]:
    """Seconds to the first token of short requests, one after the other."""
    waits: list[float] = []
    messages = [{"role": "user", "content": "Hello"}]
    async with new_session() as session:
        await chat(session, server.url, messages, 1)
        while not is_enough(len(waits)):
            waits.append((await chat(session, server.url, messages, 1)).ttft_s)
            await asyncio.sleep(_POLL_S)
    return waits


async def _while_encoding(server: ServerProcess) -> list[float]:
    """The same until nothing has been encoded for some time."""
    n_shrunk, since = -1, time.monotonic()
    waits: list[float] = []
    async with new_session() as session:
        while time.monotonic() - since < _SETTLED_S:
            tiers = (await daemon_stats(session, server.url))["tiers"]
            if tiers["segments_shrunk"] != n_shrunk:
                n_shrunk, since = tiers["segments_shrunk"], time.monotonic()
                waits += await _waits(server, lambda n: n >= 1)
            await asyncio.sleep(_POLL_S)
    return waits


async def _report(report: Report, server: ServerProcess) -> None:
    """What the daemon says of each layer and format."""
    async with new_session() as session:
        footprint = (await daemon_stats(session, server.url))["footprint"]
    n_chats, native = report.figures["chats"], footprint["slot_bytes"]
    for layer in LAYERS:
        report.figures[f"{layer}_bytes_per_chat"] = footprint[f"{layer}_bytes"] / n_chats
        report.figures[f"{layer}_ratio"] = native / footprint[f"{layer}_bytes"]
    for each in footprint["formats"]:
        report.figures[f"{each['format']}_tokens"] = each["tokens"]
        report.figures[f"{each['format']}_bytes"] = each["bytes"]
    report.figures["tokens_per_chat"] = footprint["tokens"] / n_chats


async def _freeze(server: ServerProcess) -> float:
    """Freeze every session; bytes of coded text a chat."""
    own = f"{server.url}/towerd/v1/sessions"
    async with new_session() as session:
        async with session.get(f"{own}?limit=1000") as reply:
            listed = (await reply.json())["sessions"]
        found = [each for each in listed if each["n_turns"] > 1 and each["n_tokens"] > _SAID_CHARS]
        sizes = []
        for each in found:
            async with session.post(f"{own}/{each['id']}/freeze", json={}) as reply:
                if reply.status != 200:
                    raise TowerdError(f"A chat could not be frozen: {await reply.text()}")
                sizes.append((await reply.json())["session"]["cold_bytes"])
    return float(statistics.mean(sizes))
