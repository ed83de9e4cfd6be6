"""towerctl doctor: no failure here, and every problem comes with advice."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from daemon import Daemon
from encrypted_stores import KINDS, vault_of
from gguf import GGUFWriter

from towerd.cli.doctor import build, machine, model, store
from towerd.cli.doctor.check import Check, Finding
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config
from towerd.store.catalog.sqlite import SqliteCatalog

Ctl = Callable[..., Result]
both_kinds = pytest.mark.parametrize("with_store", KINDS, indirect=True)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(store_dir=tmp_path / "store", socket=tmp_path / "s", warm_bytes=2**20)


@pytest.fixture
def with_store(config: Config, request: pytest.FixtureRequest) -> Path:
    """A store directory with an empty catalog. param: a kind of store."""
    KINDS[getattr(request, "param", "plain")](config.store_dir)
    for name in ("", "segments", "tmp", "quarantine"):
        (config.store_dir / name).mkdir(mode=0o700, exist_ok=True)
    SqliteCatalog(config.store_dir / "catalog.sqlite", vault=vault_of(config.store_dir)).close()
    return config.store_dir


def find(name: str, config: Config) -> Finding:
    """The finding of one check, by its name."""
    checks = [*machine.CHECKS, *build.CHECKS, *model.CHECKS, model.LOADS, *store.CHECKS]
    (check,) = [check for check in checks if check.name == name]
    finding = check.run(config)
    assert (finding.status == "OK") != bool(finding.advice)
    return finding


def test_a_sound_installation(tmp_path: Path, ctl: Ctl, ctl_json: Callable[..., Any]) -> None:
    """On the machine that runs this nothing FAILs, with a daemon and without."""
    args = ("doctor", "--store-dir", tmp_path / "store", "--socket", tmp_path / "s")
    found = ctl_json(*args, "--load")
    assert found["ok"]
    assert all(set(c) == {"group", "name", "status", "found", "advice"} for c in found["checks"])
    assert {c["name"]: c["status"] for c in found["checks"]}["state format"] == "OK"
    assert not (tmp_path / "store").exists()


def test_with_a_daemon(server: Daemon, ctl: Ctl) -> None:
    args = ("doctor", "--store-dir", server.store_dir, "--socket", server.socket)
    said = ctl(*args).output
    assert "serves stories260K.gguf" in said
    assert f"held by process {server.pid}, the daemon" in said
    assert "0 failed" in said
    said = ctl("doctor", "--store-dir", server.store_dir, "--socket", server.root / "x").output
    assert "WARN  store lock" in said


def test_a_failure_is_exit_code_1(tmp_path: Path, ctl: Ctl) -> None:
    args = ("--store-dir", tmp_path / "store", "--socket", tmp_path / "s")
    said = ctl("doctor", "-m", tmp_path / "no.gguf", *args, code=1).output
    assert "FAIL  model file" in said
    assert "\n      -> " in said


def test_what_a_check_raises_is_a_failure(config: Config) -> None:
    def burst(config: Config) -> Finding:
        raise RuntimeError("boom")

    finding = Check("g", "n", burst).run(config)
    assert (finding.status, finding.found) == ("FAIL", "RuntimeError: boom")


def test_unknown_kernels_are_a_failure(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("kernels", config).status == "OK"
    monkeypatch.setenv("TOWERD_KERNELS", "fastest")
    assert find("kernels", config).status == "FAIL"


def test_no_llama_server(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "llama-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    finding = find("llama-server", config)
    assert (finding.status, finding.found) == ("WARN", f"{broken} ends with status 3")


@pytest.mark.parametrize("cut", [0, 3, 100, 5000, -1000])
def test_damaged_models(cut: int, config: Config, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(bundled_model().read_bytes()[:cut])
    damaged = replace(config, model=path)
    for name in ("file", "loads"):
        finding = find(name, damaged)
        assert finding.status == "FAIL"
        assert str(path) in finding.found


def write_gguf(path: Path, arch: str, **keys: int | list[int]) -> Path:
    """Metadata of a model, without tensors; `__` in a key is a dot."""
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        name = f"{arch}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "keys", "where"),
    [
        ("llama", {"context_length": 4096}, "any token"),
        ("gemma3", {"attention__sliding_window": 1024}, "any token"),
        ("mamba", {"ssm__state_size": 16}, "state checkpoints"),
        ("lfm2", {"shortconv__l_cache": 3}, "state checkpoints"),
        ("rwkv7", {"wkv__head_size": 64}, "state checkpoints"),
        ("qwen2vl", {"rope__dimension_sections": [16, 24, 24, 0]}, "any token"),
    ],
)
def test_architectures(
    arch: str, keys: dict[str, Any], where: str, config: Config, tmp_path: Path
) -> None:
    finding = find("architecture", replace(config, model=write_gguf(tmp_path / "m", arch, **keys)))
    assert finding.status == "OK"
    assert f"resumed at {where}" in finding.found


def test_chat_template(config: Config, tmp_path: Path) -> None:
    assert find("chat template", config).found == "in the model"
    bare = replace(config, model=write_gguf(tmp_path / "m", "llama"))
    assert find("chat template", bare).status == "WARN"
    assert find("chat template", replace(bare, chat_template="chatml")).status == "OK"
    lost = replace(bare, chat_template_file=tmp_path / "no.jinja")
    assert find("chat template", lost).status == "FAIL"


def test_store_rights(config: Config, with_store: Path) -> None:
    assert find("directory", config).status == "OK"
    with_store.chmod(0o755)
    finding = find("directory", config)
    assert (finding.status, f"chmod 700 {with_store}" in finding.advice) == ("WARN", True)


def test_a_store_that_no_disk_can_have(config: Config) -> None:
    """The checks of the disk look above it."""
    long = replace(config, store_dir=config.store_dir / ("x" * 300))
    assert str(config.store_dir.parent) in find("disk", long).found


def test_store_is_a_file(config: Config) -> None:
    config.store_dir.write_text("hello")
    assert find("directory", config).status == "FAIL"


def test_store_lock(config: Config, with_store: Path) -> None:
    assert find("lock", config).found == "free"
    with (with_store / "lock").open("w") as file:
        file.write("123\n")
        file.flush()
        assert find("lock", config).found == "free"
        fcntl.flock(file, fcntl.LOCK_EX)
        finding = find("lock", config)
    assert finding.status == "WARN"
    assert finding.found.startswith("held by process 123")


@both_kinds
def test_a_sound_catalog_is_left_as_it_was(config: Config, with_store: Path) -> None:
    before = sorted(with_store.rglob("*"))
    assert find("catalog", config).status == "OK"
    assert sorted(with_store.rglob("*")) == before


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("PRAGMA user_version = 99", "schema version 99"),
        ("PRAGMA application_id = 7", "not a towerd catalog"),
    ],
)
def test_foreign_catalogs(sql: str, said: str, config: Config, with_store: Path) -> None:
    db = sqlite3.connect(with_store / "catalog.sqlite")
    db.execute(sql)
    db.close()
    finding = find("catalog", config)
    assert finding.status == "FAIL"
    assert said in finding.found


@pytest.mark.parametrize("with_store", ["encrypted"], indirect=True)
def test_without_the_key_a_catalog_is_not_checked(config: Config, with_store: Path) -> None:
    with_store.with_name("store.key").unlink()
    finding = find("catalog", config)
    assert finding.status == "WARN"
    assert "store.key cannot be read" in finding.advice


@both_kinds
def test_a_damaged_catalog(config: Config, with_store: Path) -> None:
    path = with_store / "catalog.sqlite"
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    assert find("catalog", config).status == "FAIL"
    path.write_bytes(b"x" * 8192)
    assert find("catalog", config).status == "FAIL"


def test_space_and_quarantine(config: Config, with_store: Path) -> None:
    assert find("space", config).status == "OK"
    finding = find("space", replace(config, warm_bytes=2**60))
    assert finding.status == "WARN"
    assert "--warm-bytes" in finding.advice
    assert find("quarantine", config).status == "OK"
    (with_store / "quarantine" / "x").write_text("")
    assert find("quarantine", config).status == "WARN"
