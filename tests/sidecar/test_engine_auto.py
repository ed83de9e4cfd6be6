"""`--engine auto` takes the engine that does more here, says why, and runs nothing unasked."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon
from gguf import GGUFWriter

from towerd.engine.llama_server.process.choice import chosen, devices
from towerd.errors import ConfigError
from towerd.llama_library import lib
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config

GPU = "CUDA0: Some GPU (24000 MiB, 23000 MiB free)"


def program(path: Path, listed: str, version: str = "version: 9999 (abcdef)") -> Path:
    """A stand-in for a llama-server: it notes each run, and says its version and its devices."""
    script = f"""#!/bin/sh
echo "$1" >> {path}.runs
if [ "$1" = --version ]; then echo "{version}"; else printf 'Available devices:\\n{listed}\\n'; fi
"""
    path.write_text(script)
    path.chmod(0o755)
    return path


def runs(path: Path) -> list[str]:
    noted = Path(f"{path}.runs")
    return noted.read_text().split() if noted.exists() else []


@pytest.fixture
def choose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """`choose(**settings)`: the Config that is chosen, and the sentence that is logged."""

    def choose_it(**settings: Any) -> tuple[Config, str]:
        values: dict[str, Any] = {"engine": "auto", "model": bundled_model()}
        values |= {"store_dir": tmp_path / "store", "socket": tmp_path / "s"}
        with caplog.at_level(logging.INFO, "towerd"):
            found = chosen(Config(**(values | settings)))
        said = [r.getMessage() for r in caplog.records if "--engine auto" in r.getMessage()]
        return found, said[-1] if said else ""

    return choose_it


def test_a_gpu_that_only_llama_server_has(
    choose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: False)
    binary = program(tmp_path / "llama-server", f"  {GPU}")
    assert devices(binary) == [GPU]
    found, said = choose(llama_server_bin=binary)
    assert (found.engine, found.llama_server_bin) == ("llama-server", binary)
    assert GPU in said
    found, said = choose(llama_server_bin=binary, gpu_layers=0)
    assert (found.engine, found.llama_server_bin) == ("embedded", None)
    assert "--gpu-layers 0" in said
    found, said = choose(llama_server_bin=binary, retention="streaming")
    assert found.engine == "embedded"
    assert "--retention" in said


def test_no_gpu_anywhere(choose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binary in PATH is asked only for auto."""
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: False)
    binary = program(tmp_path / "llama-server", "  (none)")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found, said = choose()
    assert found.engine == "embedded"
    assert "finds no GPU" in said
    asked = runs(binary)
    assert "--list-devices" in asked
    for engine in ("embedded", "llama-server"):
        found, _ = choose(engine=engine)
        assert found.engine == engine
    assert runs(binary) == asked


def test_an_embedded_engine_with_a_gpu(
    choose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: True)
    found, said = choose(llama_server_bin=program(tmp_path / "llama-server", f"  {GPU}"))
    assert found.engine == "embedded"
    assert "built for a GPU" in said


def test_a_model_that_the_embedded_engine_refuses(choose: Any, tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    writer = GGUFWriter(path, "nobody-knows-it")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    binary = program(tmp_path / "llama-server", "  (none)")
    found, said = choose(llama_server_bin=binary, model=path)
    assert found.engine == "llama-server"
    assert "refuses" in said
    found, said = choose(llama_server_bin=binary, llama_server_args=("--no-such-flag",))
    assert found.engine == "llama-server"
    assert "--no-such-flag" in said


def test_binaries_that_cannot_be_used(choose: Any, tmp_path: Path) -> None:
    """One that is not there, one that does not run, one with the known hole."""
    found, said = choose(llama_server_bin=tmp_path / "missing")
    assert found.engine == "embedded"
    assert "no program" in said
    broken = program(tmp_path / "broken", GPU, version="error")
    found, said = choose(llama_server_bin=broken)
    assert found.engine == "embedded"
    old = program(tmp_path / "old", GPU, version="version: 5000 (abc)")
    found, said = choose(llama_server_bin=old)
    assert found.engine == "embedded"
    assert "CVE" in said


def test_a_daemon_says_what_it_took(tmp_path: Path) -> None:
    """Here the only llama-server is towerd's own, if there is one."""
    with Daemon(tmp_path / "d", "--engine", "auto", "-m", str(bundled_model())) as daemon:
        assert daemon.get("/towerd/v1/stats")["engine_name"] == "embedded"
        assert "--engine auto is embedded: " in daemon.log


def test_an_upstream_is_no_choice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine llama-server"):
        Config(engine="auto", upstream="http://127.0.0.1:1", slot_dir=tmp_path)
