"""`towerctl bench footprint`: what real conversations take after each layer of the store.

Chats of two turns over four system prompts of about 1,000 tokens are held with a daemon; the model reads texts
and writes replies, so that rows, their formats and the sharing of prefixes are real. Once everything is in the block
formats of its level, and again once it is transform-coded, the daemon says what they take, as `towerctl stats` does, and
the disk is looked at. At the end all are frozen: then their coded text is what they take.

Beside that: how long a request waits for its first token while rows are encoded.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lab.bench.disk import disk_bytes
from lab.bench.transform.given import give_transform
from towerd.cli.bench.harness.client import chat, daemon_stats, new_session
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, towerd_server
from towerd.cli.output import show_table
from towerd.codec.prior import sample
from towerd.errors import TowerdError
from towerd.models.bundled import default_model
from towerd.slots.row_identity import RowIdentity
from towerd.store.segments.coded_format import is_coded

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
_NAMES = {
    "slot": "a slot file each",
    "shared": "prefixes once",
    "levels": "block formats by level",
    "transform": "transform-coded",
    "kept": "files and token ids",
}


@dataclass(slots=True)
class FootprintReport(Report):
    """`layers`: (what rows and text are kept as, bytes a chat), each with all layers above it."""

    layers: list[tuple[str, float]] = field(default_factory=list)

    def show(self) -> None:
        whole = self.layers[0][1]
        show_table(
            ("what is kept", ">bytes a chat", ">slot files over it"),
            [(name, f"{each:,.0f}", f"{whole / each:,.1f}") for name, each in self.layers],
        )
        Report.show(self)


async def run(
    model: Path | None, quick: bool, chats: int | None, level_formats: str | None
) -> Report:
    """Hold the chats, let them be encoded and transform-coded, and freeze them."""
    path = model or default_model()
    n_chats = chats or (_QUICK_CHATS if quick else _CHATS)
    n_reply = _QUICK_REPLY_TOKENS if quick else _REPLY_TOKENS
    report, formats = FootprintReport("footprint", path.name), level_formats
    report.figures |= {"chats": n_chats, "bases": _BASES}
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        store = Path(folder) / "store"
        flags = ["-c", "4096", "--parallel", str(_STREAMS), "--freeze-after", "-1"]
        with towerd_server(path, store, *flags, "--shrink-after", _LATER) as server:
            await _talk(server, n_chats, n_reply)
            found = await _calibration(server)
            if found["calibration"] is None and formats is None:
                if quick:
                    formats = _QUICK_FORMATS
                else:
                    report.figures["calibrated_s"] = await _calibrated(server)
            idle_s = await _waits(server, lambda n: n >= _PROBES)
        flags += ["--level-formats", formats] if formats else []
        shrinks = (*flags, "--shrink-after", "0", "--transform-after")
        with towerd_server(path, store, *shrinks, "-1") as server:
            encoding_s = await _while_encoding(server)
            _add_layers(report, ("slot", "shared", "levels"), await _footprint(server))
        if quick and formats is None:
            given = give_transform(store, RowIdentity.from_json(found["row_identity"]), path)
            report.figures["transform_excess"] = given.cost.excess
        with towerd_server(path, store, *shrinks, "0") as server:
            if formats is None:
                report.figures["learned_s"] = await _learned(server)
                encoding_s += await _while_encoding(server)
                _add_layers(report, ("transform",), await _footprint(server))
            _add_kept(report, await _footprint(server), store)
            report.layers.append(("coded text alone", await _freeze(server)))
    report.figures |= {
        "wait_idle_ms": 1e3 * statistics.median(idle_s),
        "wait_encoding_ms": 1e3 * statistics.median(encoding_s),
        "wait_encoding_max_ms": 1e3 * max(encoding_s),
        "probes_while_encoding": len(encoding_s),
        "coded_text_bytes_per_chat": report.layers[-1][1],
    }
    report.target("ratio", least=8)
    return report


def _add_layers(
    report: FootprintReport, names: Sequence[str], footprint: Mapping[str, Any]
) -> None:
    """What the daemon says of these layers."""
    for name in names:
        n_bytes = footprint[f"{name}_bytes"] / report.figures["chats"]
        report.layers.append((_NAMES[name], n_bytes))
        report.figures[f"{name}_bytes_per_chat"] = n_bytes
        report.figures[f"{name}_ratio"] = report.layers[0][1] / n_bytes


def _add_kept(report: FootprintReport, footprint: Mapping[str, Any], store: Path) -> None:
    """What there is in the end, of each format and in all, without the bases of transform codings."""
    _add_layers(report, ("kept",), footprint)
    figures = report.figures
    for each in footprint["formats"]:
        name = "transform" if is_coded(each["format"]) else each["format"]
        for key in ("tokens", "bytes"):
            figures[f"{name}_{key}"] = figures.get(f"{name}_{key}", 0) + each[key]
    figures["tokens_per_chat"] = footprint["tokens"] / figures["chats"]
    figures["basis_bytes"] = disk_bytes(store / "bases") if (store / "bases").is_dir() else 0
    on_disk = (disk_bytes(store) - figures["basis_bytes"]) / figures["chats"]
    report.layers.append(("all on disk, bases apart", on_disk))
    figures["disk_bytes_per_chat"] = on_disk
    figures["ratio"] = report.layers[0][1] / on_disk


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


async def _calibration(server: ServerProcess, ask: bool = False) -> dict[str, Any]:
    """What the daemon says of its calibration. ask: begin one, unless there is a result"""
    url = f"{server.url}/towerd/v1/calibration"
    async with new_session() as session:
        asked = session.post(url, json={}) if ask else session.get(url)
        async with asked as reply:
            found: dict[str, Any] = (await reply.json())["calibration"]
    return found


async def _calibrated(server: ServerProcess) -> float:
    """Have the formats measured; the seconds that it took. Raises TowerdError."""
    began, found = time.monotonic(), await _calibration(server, ask=True)
    while found["state"] != "done":
        if found["state"] == "failed":
            raise TowerdError(f"The formats cannot be measured: {found['why']}.")
        await asyncio.sleep(1.0)
        found = await _calibration(server)
    return time.monotonic() - began


async def _learned(server: ServerProcess) -> float:
    """Wait until transform codings were learned; the seconds that it took."""
    began, found = time.monotonic(), await _calibration(server)
    while found["transform"] is None:
        await asyncio.sleep(1.0)
        found = await _calibration(server)
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
    n_encoded, since = -1, time.monotonic()
    waits: list[float] = []
    async with new_session() as session:
        while time.monotonic() - since < _SETTLED_S:
            tiers = (await daemon_stats(session, server.url))["tiers"]
            n_now = tiers["segments_shrunk"] + tiers["segments_transformed"]
            if n_now != n_encoded:
                n_encoded, since = n_now, time.monotonic()
                waits += await _waits(server, lambda n: n >= 1)
            await asyncio.sleep(_POLL_S)
    return waits


async def _footprint(server: ServerProcess) -> dict[str, Any]:
    """What the daemon says of each layer and format."""
    async with new_session() as session:
        found: dict[str, Any] = (await daemon_stats(session, server.url))["footprint"]
    return found


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
