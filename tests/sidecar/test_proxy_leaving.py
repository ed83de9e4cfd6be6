"""The daemon is told to go while requests run at llama-server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from towerd.api.limits import Limits
from towerd.app import build_app
from towerd.config import Config
from towerd.sidecar import open_sidecar
from towerd.store import Store, latest_fingerprint

LONG: dict[str, Any] = {
    "prompt": "Once", "stream": True, "ignore_eos": True, "n_predict": 7000, "temperature": 0,
}  # fmt: skip


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize(
    "headers", [{}, {"X-Conversation-Id": "c/1 ?"}], ids=["plain", "resumable"]
)
async def test_leaving(
    slow_model: Path, llama_server: Path, tmp_path: Path, headers: dict[str, str], is_read: bool
) -> None:
    """Streams that last longer than the grace are ended at llama-server too, those that go on
    for a client who left as well, and what was said is kept."""
    config = Config(
        engine="llama-server", model=slow_model, store_dir=tmp_path / "store", parallel=2,
        socket=tmp_path / "s", ctx_size=16384, threads=1, hot_bytes=1 << 28, warm_bytes=1 << 28,
    )  # fmt: skip
    limits = Limits(grace_s=0.2)
    async with open_sidecar(config) as service:
        app = build_app(config, service=service, limits=limits)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=limits.grace_s
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        named = {"X-Towerd-Session": "cut", **headers}
        async with aiohttp.ClientSession() as http:
            reply = await http.post(f"http://{host}:{port}/completion", json=LONG, headers=named)
            assert reply.status == 200
            line = await reply.content.readline()
            first = json.loads(line.removeprefix(b"data: "))["tokens"][0]
            if not is_read:
                reply.close()
            await service.engine.drain(limits.grace_s)
            await runner.cleanup()
            reply.close()
    with Store.open(config.store_dir, latest_fingerprint) as store:
        (turn,) = store.turns("cut")
        assert not turn.finished
        assert 1 <= turn.n_reply < LONG["n_predict"]
        assert store.session_ids("cut").tolist()[turn.n_prompt] == first


async def test_leaving_while_a_chat_goes_on(
    slow_model: Path, llama_server: Path, tmp_path: Path
) -> None:
    """A llama-server that has stopped answering does not keep the daemon: not by a chat whose
    tokens were asked for beside its request, either."""
    config = Config(
        engine="llama-server", model=slow_model, store_dir=tmp_path / "store", parallel=2,
        socket=tmp_path / "s", ctx_size=4096, threads=1, hot_bytes=1 << 28, warm_bytes=1 << 28,
    )  # fmt: skip
    limits = Limits(grace_s=0.2)
    async with open_sidecar(config) as service:
        app = build_app(config, service=service, limits=limits)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=limits.grace_s
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}/v1/chat/completions"
        messages: list[dict[str, Any]] = []
        body: dict[str, Any] = {"messages": messages, "max_tokens": 4, "temperature": 0}
        process = service.engine.backend.process
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
                with pytest.raises(TimeoutError):
                    await http.post(url, json=body, timeout=aiohttp.ClientTimeout(total=0.5))
                assert service.engine.stats()["chats_gone_on"] == 1
                await service.engine.drain(limits.grace_s)
                await runner.cleanup()
                assert service.engine.stats()["running"] == 0
            finally:
                child.resume()
