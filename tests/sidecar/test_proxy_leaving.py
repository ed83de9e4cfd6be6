"""The daemon is told to go while requests run at llama-server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from waiting import until_async

from towerd.api.http.keys import GATE
from towerd.api.http.limits import Limits
from towerd.app.daemon import build_app
from towerd.engine.llama_server.engine import LlamaServerEngine
from towerd.service import Service, open_service
from towerd.settings.config import Config
from towerd.store import Store, latest_row_identity

GRACE_S = 0.2
LONG: dict[str, Any] = {
    "prompt": "Once",
    "stream": True,
    "ignore_eos": True,
    "n_predict": 7000,
    "temperature": 0,
}


@dataclass
class Daemon:
    """The daemon's API on a free port."""

    service: Service[LlamaServerEngine]
    url: str
    runner: web.AppRunner

    async def leave(self) -> None:
        """As on a signal: no new requests, those that run have the grace to end."""
        self.runner.app[GATE].closing = True
        await self.service.engine.drain(GRACE_S)
        await self.runner.cleanup()


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Daemon]:
    """A daemon in front of a llama-server of its own."""
    async with open_service(config) as service:
        app = build_app(config, service=service, limits=Limits(grace_s=GRACE_S))
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield Daemon(service, f"http://{host}:{port}", runner)


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize(
    "headers", [{}, {"X-Conversation-Id": "c/1 ?"}], ids=["plain", "resumable"]
)
async def test_leaving(
    slow_model: Path, llama_server: Path, tmp_path: Path, headers: dict[str, str], is_read: bool
) -> None:
    """Streams that last longer than the grace are ended at llama-server too, those that continue
    for a client who left as well, and what was said is kept."""
    config = Config(
        engine="llama-server",
        model=slow_model,
        store_dir=tmp_path / "store",
        parallel=2,
        socket=tmp_path / "s",
        ctx_size=16384,
        threads=1,
        hot_bytes=1 << 28,
        warm_bytes=1 << 28,
    )
    async with serving(config) as daemon, aiohttp.ClientSession() as http:
        named = {"X-Towerd-Session": "cut", **headers}
        reply = await http.post(f"{daemon.url}/completion", json=LONG, headers=named)
        assert reply.status == 200
        line = await reply.content.readline()
        first = json.loads(line.removeprefix(b"data: "))["tokens"][0]
        if not is_read:
            reply.close()
        await daemon.leave()
        reply.close()
    with Store.open(config.store_dir, latest_row_identity) as store:
        (turn,) = store.turns("cut")
        assert not turn.finished
        assert 1 <= turn.n_reply < LONG["n_predict"]
        assert store.session_ids("cut").tolist()[turn.n_prompt] == first


async def test_leaving_while_a_chat_goes_on(
    slow_model: Path, llama_server: Path, tmp_path: Path
) -> None:
    """A llama-server that has stopped answering does not keep the daemon."""
    config = Config(
        engine="llama-server",
        model=slow_model,
        store_dir=tmp_path / "store",
        parallel=1,
        socket=tmp_path / "s",
        ctx_size=4096,
        threads=1,
        hot_bytes=1 << 28,
        warm_bytes=1 << 28,
    )
    async with serving(config) as daemon:
        engine = daemon.service.engine
        url = f"{daemon.url}/v1/chat/completions"
        messages: list[dict[str, Any]] = []
        body: dict[str, Any] = {"messages": messages, "max_tokens": 4, "temperature": 0}
        process = engine.backend.process
        assert process is not None
        child = psutil.Process(process.pid)
        async with aiohttp.ClientSession() as http:
            for turn in range(3):
                messages.append({"role": "user", "content": f"Day {turn}?"})
                if turn == 2:
                    break
                async with http.post(url, json=body) as reply:
                    said = (await reply.json())["choices"][0]["message"]
                messages.append({"role": "assistant", "content": said["content"]})
            child.suspend()
            try:
                asking = asyncio.create_task(http.post(url, json=body))
                await until_async(lambda: engine.stats()["running"] == 1)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                await daemon.leave()
                assert engine.stats()["running"] == 0
            finally:
                child.resume()
