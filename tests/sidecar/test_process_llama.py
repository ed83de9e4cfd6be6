"""The supervised child: it serves with a key of its own, comes back when it dies, goes with us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
from sidecar_tools import alone
from waiting import until

from towerd.engine.llama_server.process.binary import Build, build_of, find_binary, library_env
from towerd.engine.llama_server.process.flags import clashing, names_model, server_env
from towerd.engine.llama_server.process.process import describe_exit
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.errors import ConfigError, Unauthorized
from towerd.model.row_flags import CacheFraming, cache_framing, row_overrides, whole_arch
from towerd.models.bundled import bundled_model


async def test_it_serves_with_its_key_only(llama_server: Path, tmp_path: Path) -> None:
    """The key is in no command line."""
    async with alone(llama_server, bundled_model(), tmp_path) as process:
        assert await process.upstream.is_healthy()
        assert (await process.upstream.get("/props"))["total_slots"] == 1
        async with aclosing(UpstreamClient(process.upstream.url)) as stranger:
            with pytest.raises(Unauthorized):
                await stranger.get("/props")
        assert process.pid is not None
        command = " ".join(psutil.Process(process.pid).cmdline())
        assert process.upstream.key is not None
        assert process.upstream.key not in command
        await asyncio.to_thread(until, lambda: process.log_path.stat().st_size > 0)
        pid = process.pid
    assert not psutil.pid_exists(pid)


def setter(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    """What sets the event when it is awaited."""

    async def set_it() -> None:
        event.set()

    return set_it


async def test_it_comes_back(llama_server: Path, tmp_path: Path) -> None:
    """Killed, it is started again on another port; the reason is kept."""
    events: list[str] = []
    async with alone(llama_server, bundled_model(), tmp_path) as process:
        back = asyncio.Event()
        process.on_exit = lambda: events.append(process.exit_reason)
        process.on_start = setter(back)
        for _ in range(2):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            await back.wait()
            back.clear()
            assert process.is_running
            assert await process.upstream.is_healthy()
        assert process.restarts == 2
    assert events == ["was killed by SIGKILL"] * 2


async def test_it_comes_back_when_it_can(llama_server: Path, tmp_path: Path) -> None:
    """Whatever keeps it from starting, it is tried again: here something in its log's place."""
    async with alone(llama_server, bundled_model(), tmp_path) as process:
        back = asyncio.Event()
        process.on_start = setter(back)
        process.log_path.unlink()
        process.log_path.mkdir()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(back.wait(), 0.3)
        assert not process.is_running
        process.log_path.rmdir()
        await back.wait()
        assert await process.upstream.is_healthy()


async def test_a_bad_start_says_why(llama_server: Path, tmp_path: Path) -> None:
    """A model that cannot be loaded, a flag that does not exist, a binary that is none."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"status \d+ while starting: .*[a-z]"):
        async with alone(llama_server, broken, tmp_path):
            pytest.fail("it cannot start")
    with pytest.raises(ConfigError, match="--no-such-flag"):
        async with alone(llama_server, bundled_model(), tmp_path, "--no-such-flag"):
            pytest.fail("it cannot start")
    with pytest.raises(ConfigError, match="while starting"):
        async with alone(Path("/bin/true"), bundled_model(), tmp_path):
            pytest.fail("it cannot start")


@pytest.mark.parametrize("method", ["kernel", "watch"])
def test_it_dies_with_us(llama_server: Path, tmp_path: Path, method: str) -> None:
    """However we end: no llama-server is left when towerd is killed."""
    if method == "kernel" and sys.platform != "linux":
        pytest.skip("only Linux's kernel does it")
    script = f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent.parent / "support")!r})
        from pathlib import Path
        from sidecar_tools import alone
        from towerd.engine.llama_server.process import process
        from towerd.models.bundled import bundled_model

        async def main():
            process.GUARD_METHOD = {method!r}
            binary, root = Path({str(llama_server)!r}), Path({str(tmp_path)!r})
            async with alone(binary, bundled_model(), root) as started:
                print(started.pid, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started = psutil.Process(int(parent.stdout.readline()))
        family = [started, *started.children(recursive=True)]
        assert len(family) == (2 if method == "watch" else 1)
        parent.kill()
        assert psutil.wait_procs(family, timeout=30)[1] == []


async def test_a_watched_one_ends_as_the_other(
    llama_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a watching guard too it stops when asked, comes back when killed, and its exit is
    told as its own; a killed guard leaves nothing behind."""
    monkeypatch.setattr("towerd.engine.llama_server.process.process.GUARD_METHOD", "watch")
    async with alone(llama_server, bundled_model(), tmp_path) as process:
        back = asyncio.Event()
        process.on_start = setter(back)
        for kill_guard in (False, True):
            assert process.pid is not None
            (child,) = psutil.Process(process.pid).children()
            os.kill(process.pid if kill_guard else child.pid, signal.SIGKILL)
            await back.wait()
            back.clear()
            assert process.exit_reason == "was killed by SIGKILL"
            assert await process.upstream.is_healthy()
            assert psutil.wait_procs([child], timeout=30)[1] == []
        (child,) = psutil.Process(process.pid).children()
    assert psutil.wait_procs([child], timeout=30)[1] == []
    with pytest.raises(ConfigError, match=r"status \d+ while starting: .*--no-such-flag"):
        async with alone(llama_server, bundled_model(), tmp_path, "--no-such-flag"):
            pytest.fail("it cannot start")


def test_builds() -> None:
    """A build number is found wherever it is written; the vulnerable range is refused."""
    assert Build.parse("version: 0.5.0-dev (build 1, commit 0c1e570)\nbuilt with").number == 1
    assert Build.parse("version: 6123 (abcdef0)").number == 6123
    assert Build.parse("b9058-abcdef0").number == 9058
    assert Build.parse("something else").number == 0
    for number in (4882, 9058):
        with pytest.raises(ConfigError, match="CVE-2026-43629"):
            Build("", number).check(allow_vulnerable=False)
        Build("", number).check(allow_vulnerable=True)
    for number in (0, 1, 4881, 9059):
        Build("", number).check(allow_vulnerable=False)


def test_the_binary_is_found(
    llama_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, on PATH before the one beside llama-cpp-python; what does not run is refused."""
    assert build_of(llama_server).number >= 1
    fake = tmp_path / "llama-server"
    fake.write_text("#!/bin/sh\necho something else\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_binary() == fake
    with pytest.raises(ConfigError, match="something else"):
        build_of(fake)
    with pytest.raises(ConfigError, match="There is no program"):
        find_binary(tmp_path / "missing")
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_binary().name == "llama-server"
    assert library_env(Path("/bin/sh")) == {}


def test_exit_reasons() -> None:
    assert describe_exit(1) == "ended with status 1"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-63) == "was killed by signal 63"


def test_flags_that_change_rows() -> None:
    """RoPE overrides and the like enter the row identity as the settings do, however written."""
    flags = [
        "--rope-freq-base",
        "1000000",
        "--yarn-ext-factor=0.5",
        "--rope-scaling",
        "yarn",
        "-c",
        "8",
    ]
    assert row_overrides(flags, {"LLAMA_ARG_ROPE_FREQ_SCALE": "0.5"}) == {
        "override.freq_base": "1000000.0",
        "override.yarn_ext_factor": "0.5",
        "override.scaling": "yarn",
        "override.freq_scale": "0.5",
    }
    assert row_overrides(["--rope_scale", "2", "--override_kv", "a=int:1"], {}) == {
        "override.scale": "2.0",
        "override.override_kv": "a=int:1",
    }
    assert row_overrides(["-np", "4"], {}) == {}
    env = {"LLAMA_ARG_PORT": "1", "LLAMA_ARG_API_PREFIX": "/x", "LLAMA_ARG_THREADS": "3"}
    assert server_env(env) == {"LLAMA_ARG_THREADS": "3"}
    assert clashing(["--port=80", "-np", "2", "--api-key", "x"]) == ["--port=80", "--api-key"]
    assert clashing(["--slot_save_path", "/x", "--api_key=k"]) == [
        "--slot_save_path",
        "--api_key=k",
    ]
    assert names_model(["-hf", "a/b"])
    assert names_model(["--hf_repo", "a/b"])
    assert not names_model(["-np", "2"])


def test_what_whole_states_depend_on() -> None:
    """Flags that say what is so anyway, and others, change nothing; the last word wins."""
    plain = cache_framing([], {}, 1)
    assert plain == CacheFraming("f16", "f16")
    for flags in (["-ctk", "f16", "-fa", "auto"], ["--flash-attn=on"], ["-np", "4", "--swa-full"]):
        assert cache_framing(flags, {}, 1) == plain
    env = {"LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_FLASH_ATTN": "off"}
    assert cache_framing(["--cache_type_v", "bf16"], env, 1) == CacheFraming("q8_0", "bf16", True)
    assert cache_framing(["-ctk", "f32", "-fa", "1"], env, 2) == CacheFraming("f32", n_stream=2)
    archs = {
        whole_arch("x", framing, is_rotated=is_rotated)
        for framing in (
            plain,
            CacheFraming("q8_0"),
            CacheFraming(v_trans=True),
            CacheFraming(n_stream=2),
        )
        for is_rotated in (True, False)
    }
    assert len(archs) == 8
    assert whole_arch("x", plain, is_rotated=True) == "x:f16:f16:0"  # that of older stores
