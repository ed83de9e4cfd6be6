"""What the probe finds out about a llama-server that towerd did not start, and what it says."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sidecar_tools import OpenSidecar, alone, ask, prompt
from windowed_hybrid import make_windowed_hybrid

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.engine.llama_server.process.attached import command_behind
from towerd.engine.llama_server.process.binary import library_env
from towerd.engine.llama_server.process.probe import ProbeResult, probe
from towerd.engine.llama_server.process.process import LlamaServerProcess
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.slot_files.slotdir import SlotDir
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model

Probe = Callable[..., AbstractAsyncContextManager[ProbeResult]]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def probed(llama_server: Path, tmp_path: Path, shared: Path) -> Probe:
    """`async with probed(model, *flags)`: what the probe says about such a server."""

    @asynccontextmanager
    async def run(
        model: Path, *flags: str, window: int = 0, np: int = 2
    ) -> AsyncIterator[ProbeResult]:
        flags = ("-c", "1024", "-np", str(np), "--slot-save-path", str(shared), *flags)
        async with alone(llama_server, model, tmp_path, *flags) as process:
            slotdir = SlotDir.shared(shared)
            yield await probe(process.upstream, slotdir, window=window)
            slotdir.close()
            held = [slot.get("n_prompt_tokens", 0) for slot in await process.upstream.slots()]
            assert held == [0] * np  # it leaves nothing behind
            assert not os.listdir(shared)

    return run


SETUPS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "streams": ((), {"n_stream": 2, "v_trans": False}),
    "unified": (("-kvu",), {"n_stream": 1, "v_trans": False}),
    "transposed": (("-fa", "off"), {"n_stream": 2, "v_trans": True}),
    "quantized": (("-ctk", "q8_0", "-ctv", "q4_0"), {"n_stream": 2, "v_trans": False}),
}


@pytest.mark.parametrize("name", SETUPS)
async def test_dense(probed: Probe, tiny_model: Path, name: str) -> None:
    """Streams, transposed V and cache types are learnt from a saved slot; reuse is seen."""
    flags, expected = SETUPS[name]
    async with probed(tiny_model, *flags) as found:
        assert found.can_compose, found.notes
        assert found.spec is not None
        assert (found.spec.n_stream, found.spec.v_trans) == (
            expected["n_stream"],
            expected["v_trans"],
        )
        assert found.n_slots == 2
        assert found.n_ctx == (1024 if name == "unified" else 512)
        assert found.cells == (1024 if name == "unified" else 0)
        types = [plane.format.name for plane in (found.spec.layout.k[0], found.spec.layout.v[0])]
        assert types == (["q8_0", "q4_0"] if name == "quantized" else ["f16", "f16"])
        assert not found.spec.has_window
        assert not found.notes


@pytest.mark.parametrize("flags", [(), ("-kvu",), ("--swa-full",), ("-fa", "off")])
async def test_sliding_window(probed: Probe, window_model: Path, flags: tuple[str, ...]) -> None:
    """The window is seen, and a composed slot gets past the gate that a saved one does not."""
    async with probed(window_model, *flags, window=48) as found:
        assert found.can_compose, found.notes
        assert found.spec is not None
        assert found.spec.has_window
        assert (found.spec.window, found.spec.n_full) == (48, 2)
        assert any("--no-kv-unified" in note for note in found.notes) == ("-kvu" in flags)


@pytest.mark.parametrize(
    ("arch", "flags", "kind"),
    [
        ("mamba", (), "recurrent"),
        ("lfm2", (), "hybrid"),
        ("qwen35", ("-kvu", "-fa", "off"), "hybrid"),
        ("windowed", ("--swa-full",), "whole"),
    ],
)
async def test_states(
    probed: Probe, tmp_path: Path, arch: Any, flags: tuple[str, ...], kind: str
) -> None:
    """Kinds are told by their bytes, and restored in each way of framing."""
    async with probed(state_model(tmp_path, arch), *flags) as found:
        assert found.can_compose, found.notes
        assert found.spec is not None
        assert found.spec.kind.name == kind
        assert found.extends_only
        assert found.cells == (1024 if "-kvu" in flags else 0)
        assert found.notes == ()


async def test_a_whole_state_that_is_not_taken_up(probed: Probe, tmp_path: Path) -> None:
    """llama-server evaluates all of it again; the note names the flag that changes it."""
    async with probed(state_model(tmp_path, "windowed")) as found:
        assert not found.can_compose
        assert found.extends_only
        (note,) = found.notes
        assert "--swa-full" in note


def state_model(root: Path, arch: Any) -> Path:
    path, shape = root / "model.gguf", replace(PRESETS["tiny"], n_layer=4)
    if arch == "windowed":
        make_windowed_hybrid(path, replace(shape, arch="lfm2"), 8)
    else:
        make_random_gguf(path, replace(shape, arch=arch))
    return path


async def test_idle_slots_are_cleared(probed: Probe) -> None:
    """llama-server's own default costs reuse; the note names the flag that stops it."""
    flags = ("-kvu", "--cache-ram", "64")
    async with probed(bundled_model(), *flags) as found:
        assert not found.keeps_idle_slots
        assert any("--no-cache-idle-slots" in note for note in found.notes)


async def test_one_slot(probed: Probe) -> None:
    async with probed(bundled_model(), np=1) as found:
        assert found.can_compose, found.notes
        assert found.cells == 0


async def test_a_draft_model(probed: Probe) -> None:
    """No slot file has its cache, so it begins with an empty one; the slot is restored nevertheless."""
    flags = ("-md", str(bundled_model()), "--spec-type", "draft-simple")
    async with probed(bundled_model(), *flags) as found:
        assert found.speculative
        assert found.can_compose, found.notes


async def refusal(url: str, slot_dir: Path, key: str | None = None) -> str:
    """What the probe refuses an upstream with."""
    async with aclosing(UpstreamClient(url, key)) as upstream:
        with pytest.raises(ConfigError) as error:
            await probe(upstream, SlotDir.shared(slot_dir))
    return error.value.message


async def test_keys_and_directories(llama_server: Path, tmp_path: Path, shared: Path) -> None:
    """Each mistake is named with what to do about it."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    async with alone(
        llama_server, bundled_model(), tmp_path, "--slot-save-path", str(other)
    ) as process:
        url, key = process.upstream.url, process.upstream.key
        assert "--upstream-key" in await refusal(url, shared)
        assert "--upstream-key" in await refusal(url, shared, "wrong")
        assert f"not to {shared}" in await refusal(url, shared, key)
    assert "Nothing answers" in await refusal(url, shared, key)
    async with alone(llama_server, bundled_model(), tmp_path) as process:
        assert "--slot-save-path" in await refusal(
            process.upstream.url, shared, process.upstream.key
        )
    flags = ("--slot-save-path", str(shared), "--no-slots")
    async with alone(llama_server, bundled_model(), tmp_path, *flags) as process:
        assert "--no-slots" in await refusal(process.upstream.url, shared, process.upstream.key)


async def test_a_router(llama_server: Path, tmp_path: Path, shared: Path) -> None:
    """A server of several models has no slots to own."""
    models = tmp_path / "models"
    models.mkdir()

    def command(port: int) -> list[str]:
        return ["--port", str(port), "--models-dir", str(models), "--offline"]

    process = LlamaServerProcess(
        llama_server,
        command,
        env={**os.environ, **library_env(llama_server)},
        log_path=tmp_path / "l",
    )
    try:
        await process.start()
        message = await refusal(process.upstream.url, shared, process.upstream.key)
    finally:
        await process.stop()
    assert "router" in message


PROPS = {
    "build_info": "b9000-abcdef",
    "total_slots": 1,
    "default_generation_settings": {"n_ctx": 64},
}


@pytest.mark.parametrize(
    ("props", "message"),
    [
        ("<html>hello</html>", "not a llama-server"),
        ({"error": "no"}, "no build_info"),
        (PROPS, "CVE-2026-43629"),
    ],
)
async def test_something_else(props: Any, message: str, shared: Path) -> None:
    """A web page, another API, a build whose restore can be attacked."""

    async def answer(_: web.Request) -> web.Response:
        if isinstance(props, str):
            return web.Response(text=props, content_type="text/html")
        return web.json_response(props)

    app = web.Application()
    app.router.add_get("/props", answer)
    async with TestServer(app) as server:
        assert message in await refusal(str(server.make_url("")), shared)


async def test_attached(
    sidecar_on: OpenSidecar, llama_server: Path, tmp_path: Path, shared: Path
) -> None:
    """An engine on an attached server: its flags are seen, its slots used, and it outlives us."""
    flags = ("--slot-save-path", str(shared), "-np", "2", "-c", "512", "--rope-freq-base", "20000")
    async with alone(llama_server, bundled_model(), tmp_path, *flags) as process:
        command = command_behind(process.upstream.url)
        assert command is not None
        assert "--rope-freq-base" in command.flags
        url, key = process.upstream.url, process.upstream.key
        settings = {
            "upstream": url,
            "upstream_key": key,
            "slot_dir": shared,
            "llama_server_args": (),
        }
        async with sidecar_on(**settings) as sidecar:
            assert sidecar.engine.info.row_identity.rope["override.freq_base"] == "20000.0"
            for seed in (1, 2, 3):
                await ask(sidecar, prompt(80, seed))
            _, done = await ask(sidecar, prompt(80, 1))
            assert done.reuse.hot == 79
            assert done.timings.cache_n == 79
        assert await process.upstream.is_healthy()
        assert not os.listdir(shared)
