"""A llama-server that towerd cannot stand in front of is told with one sentence that helps; one
that it can, but that costs reuse, is served and says what it costs."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, run_towerd
from fake_llama_server import answering, props
from windowed_hybrid import make_windowed_hybrid

from lab.models.random_gguf import PRESETS
from towerd.cli.bench.harness.servers import ServerProcess
from towerd.cli.bench.harness.servers import llama_server as start_llama_server
from towerd.engine.llama_server.opening import open_llama_server
from towerd.engine.llama_server.process.binary import find_binary
from towerd.engine.llama_server.process.process import free_port
from towerd.errors import TowerdError
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config

Fails = Callable[..., str]
FLAGS = ("-c", "512", "-np", "2", "-t", "1", "--no-warmup")


@pytest.fixture
def slot_dir(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def fails(llama_server: Path, tmp_path: Path) -> Fails:
    """`fails(setting=...)`: what opening such a sidecar says, which has to fail."""

    def run(**settings: Any) -> str:
        config = Config(
            engine="llama-server",
            threads=1,
            parallel=1,
            store_dir=tmp_path / "store",
            socket=tmp_path / "s",
            **settings,
        )

        async def open_it() -> None:
            async with open_llama_server(config):
                pass

        with pytest.raises(TowerdError) as caught:
            asyncio.run(open_it())
        assert caught.value.message.count("\n") == 0
        return caught.value.message

    return run


def attach(url: str, slot_dir: Path) -> dict[str, Any]:
    return {"upstream": url, "slot_dir": slot_dir}


# --- what cannot be served ----------------------------------------------------------------


def test_nothing_there(fails: Fails, slot_dir: Path) -> None:
    said = fails(**attach(f"http://127.0.0.1:{free_port()}", slot_dir))
    assert "Nothing answers at http://127.0.0.1" in said


def test_something_else(fails: Fails, slot_dir: Path) -> None:
    """A web server that is not a llama-server, whatever it says to /props."""
    for answers in ({}, {"/props": {"name": "ollama"}}, {"/props": ["no object"]}):
        with answering(answers) as url:
            assert f"{url} is not a llama-server" in fails(**attach(url, slot_dir))


def test_vulnerable_build(fails: Fails, slot_dir: Path) -> None:
    """Builds whose restore can be made to overflow are refused."""
    with answering(props("b5000-0123abc")) as url:
        said = fails(**attach(url, slot_dir), model=bundled_model())
    assert "CVE-2026-43629" in said
    assert "--allow-vulnerable" in said


def test_a_model_that_is_not_here(fails: Fails, slot_dir: Path, tiny_model: Path) -> None:
    """Its vocabulary is asked for, and has to be the right one."""
    with answering(props("b99999-0123abc"), save_to=slot_dir) as url:
        said = fails(**attach(url, slot_dir))
        assert "none.gguf" in said
        assert "-m FILE" in said
    answers = props("b99999-0123abc") | {"/v1/models": {"data": [{"meta": {"n_vocab": 77}}]}}
    with answering(answers, save_to=slot_dir) as url:
        said = fails(**attach(url, slot_dir), model=tiny_model)
        assert "one of 77" in said
        assert "-m" in said


def test_wrong_key(fails: Fails, slot_dir: Path) -> None:
    flags = (*FLAGS, "--api-key", "right", "--slot-save-path", str(slot_dir))
    with start_llama_server(bundled_model(), *flags) as server:
        for key in (None, "wrong"):
            said = fails(**attach(server.url, slot_dir), upstream_key=key)
            assert "wants a key" in said
            assert "--upstream-key" in said
            assert "wrong" not in said


def test_slot_directories(fails: Fails, slot_dir: Path, tmp_path: Path) -> None:
    """Missing, open to others, and not the one that llama-server saves to."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with start_llama_server(bundled_model(), *FLAGS, "--slot-save-path", str(slot_dir)) as server:
        assert "slot directory" in fails(**attach(server.url, tmp_path / "none"))
        said = fails(**attach(server.url, other))
        assert f"not to {other}" in said
        assert "--slot-save-path" in said
        other.chmod(0o755)
        assert f"chmod 700 {other}" in fails(**attach(server.url, other))


def test_upstream_without_slots(fails: Fails, slot_dir: Path) -> None:
    """Not started with --slot-save-path, or hiding its slots."""
    with start_llama_server(bundled_model(), *FLAGS) as server:
        assert "--slot-save-path" in fails(**attach(server.url, slot_dir))
    flags = (*FLAGS, "--slot-save-path", str(slot_dir), "--no-slots")
    with start_llama_server(bundled_model(), *flags) as server:
        assert "--no-slots" in fails(**attach(server.url, slot_dir))


def test_router(fails: Fails, slot_dir: Path, tmp_path: Path) -> None:
    """A llama-server that was started without a model."""
    binary, port = find_binary(), free_port()
    env = os.environ | {
        "LD_LIBRARY_PATH": str(binary.parent.parent / "lib"),
        "LLAMA_CACHE": str(tmp_path),
    }
    command = [str(binary), "--host", "127.0.0.1", "--port", str(port)]
    with ServerProcess(command, port=port, env=env) as server:
        said = fails(**attach(server.url, slot_dir))
        assert "router" in said
        assert "-m" in said


# --- a llama-server that towerd starts -----------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"llama_server_args": ("--port", "1")}, "towerd sets --port of llama-server itself"),
        ({"llama_server_args": ("--api-key=a",)}, "towerd sets --api-key"),
        ({"llama_server_args": ("--slot-save-path", ".")}, "towerd sets --slot-save-path"),
        ({"llama_server_args": ("--no-such-flag",)}, "--no-such-flag"),
        ({"llama_server_bin": Path("no-such-program")}, "no-such-program"),
        ({"llama_server_bin": Path("/bin/true")}, "while starting: it said nothing"),
        ({"model": Path("no-such-model.gguf")}, "no-such-model.gguf"),
    ],
)
def test_bad_flags(fails: Fails, settings: dict[str, Any], told: str) -> None:
    assert told in fails(**settings)


def test_llama_server_that_cannot_load(fails: Fails, tmp_path: Path) -> None:
    """What it said last is passed on."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(bundled_model().read_bytes()[:100_000])
    said = fails(model=broken)
    assert "while starting" in said or str(broken) in said


def test_the_program_says_it_too(slot_dir: Path, tmp_path: Path) -> None:
    """`towerd serve` ends with that sentence, and with nothing else."""
    url = f"http://127.0.0.1:{free_port()}"
    done = run_towerd(
        tmp_path,
        "serve",
        "--port",
        "0",
        "--store-dir",
        str(tmp_path / "store"),
        "--socket",
        str(tmp_path / "s"),
        "--upstream",
        url,
        "--slot-dir",
        str(slot_dir),
    )
    assert done.returncode == 1
    assert f"Error: Nothing answers at {url}" in done.stderr
    assert "Traceback" not in done.stderr


# --- what can be served, at a price ---------------------------------------------------------


def attached_to(root: Path, url: str, slot_dir: Path, *flags: str) -> Daemon:
    """A towerd that attaches to the llama-server at `url`."""
    return Daemon(root, "--upstream", url, "--slot-dir", str(slot_dir), *flags)


def test_attached(llama_server: Path, slot_dir: Path, tmp_path: Path) -> None:
    """An attached llama-server is used, and continues when towerd ends."""
    flags = (*FLAGS, "-kvu", "--cache-ram", "0", "--no-cache-idle-slots", "--api-key", "theirs")
    server = start_llama_server(bundled_model(), *flags, "--slot-save-path", str(slot_dir))
    with server:
        keys = ("--upstream-key", "theirs", "--api-key", "ours")
        with attached_to(tmp_path / "d", server.url, slot_dir, *keys) as daemon:
            key = {"Authorization": "Bearer ours"}
            body = {"prompt": "Once upon a time", "n_predict": 4}
            assert daemon.post("/completion", body, headers=key)["tokens_predicted"] == 4
            assert daemon.get("/towerd/v1/stats", headers=key)["engine"]["notes"] == []
            wrong = {"Authorization": "Bearer theirs"}
            assert daemon.post("/completion", body, 401, headers=wrong)
            assert daemon.stop() == 0
            assert "theirs" not in daemon.log
        assert requests.get(server.url + "/health", timeout=30).status_code == 200
    assert list(slot_dir.iterdir()) == []


def test_draft_model(llama_server: Path, slot_dir: Path, tmp_path: Path) -> None:
    """No slot file has its cache, which costs the quality of some drafts and nothing else."""
    model = str(bundled_model())
    flags = (*FLAGS, "--slot-save-path", str(slot_dir), "-md", model, "--spec-type", "draft-simple")
    with start_llama_server(bundled_model(), *flags) as server:
        with attached_to(tmp_path / "d", server.url, slot_dir) as daemon:
            assert daemon.get("/towerd/v1/stats")["engine"]["reuse_works"] == 1
            assert len(daemon.complete("Once upon a time", 4)["tokens"]) == 4


def test_slots_that_are_not_taken_up(llama_server: Path, slot_dir: Path, tmp_path: Path) -> None:
    """Requests pass through; why, and what would store the chats, is said once in the log, and in the
    stats."""
    model = tmp_path / "model.gguf"
    make_windowed_hybrid(model, replace(PRESETS["tiny"], n_layer=4, arch="lfm2"), 8)
    with start_llama_server(model, *FLAGS, "--slot-save-path", str(slot_dir)) as server:
        with attached_to(tmp_path / "d", server.url, slot_dir) as daemon:
            stats = daemon.get("/towerd/v1/stats")["engine"]
            (why,) = (note for note in stats["notes"] if "Nothing is restored" in note)
            (advice,) = (note for note in stats["notes"] if "The embedded engine" in note)
            assert "--swa-full" in why
            assert str(model) in advice
            assert why in stats["why_not_sliceable"]
            assert (daemon.log.count(why), daemon.log.count(advice)) == (1, 1)
            assert not stats["can_slice"]
            body = {"prompt": list(range(300, 340)), "n_predict": 4, "ignore_eos": True}
            assert daemon.post("/completion", body)["tokens_predicted"] == 4


def test_costly_flags(llama_server: Path, slot_dir: Path, tmp_path: Path) -> None:
    """llama-server's own caches clear idle slots, and its sleep all; towerd says what ends that."""
    flags = (*FLAGS, "-kvu", "--slot-save-path", str(slot_dir), "--sleep-idle-seconds", "3600")
    with start_llama_server(bundled_model(), *flags) as s:
        with attached_to(tmp_path / "d", s.url, slot_dir) as daemon:
            notes = " ".join(daemon.get("/towerd/v1/stats")["engine"]["notes"])
            assert "--no-cache-idle-slots" in notes
            assert "--cache-ram 0" in notes
            assert "--sleep-idle-seconds" in notes
            assert notes[:40] in daemon.log


def test_slot_files_of_another_version(slot_dir: Path, tmp_path: Path) -> None:
    """A newer llama-server passes through, without towers."""
    with answering(props("b99999-0123abc"), save_to=slot_dir) as url:
        model = ("-m", str(bundled_model()))
        with attached_to(tmp_path / "d", url, slot_dir, *model) as daemon:
            notes = " ".join(daemon.get("/towerd/v1/stats")["engine"]["notes"])
            assert "slot file version 99" in notes
            assert daemon.post("/completion", {"prompt": [5, 6], "n_predict": 1})["stop"]


def test_llama_server_binary_by_name(llama_server: Path, tmp_path: Path) -> None:
    """--llama-server-bin takes a wrapper as well: what it prints and passes on is its own."""
    wrapper = tmp_path / "my-llama-server"
    library = llama_server.parent.parent / "lib"
    wrapper.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH="{library}" exec "{llama_server}" "$@"\n', encoding="utf-8"
    )
    wrapper.chmod(0o755)
    assert subprocess.run([wrapper, "--version"], check=False, capture_output=True).returncode == 0
    flags = ("--engine", "llama-server", "--llama-server-bin", str(wrapper), "-np", "1")
    with Daemon(tmp_path / "d", *flags) as daemon:
        assert daemon.complete("Once", 2)["tokens"]
