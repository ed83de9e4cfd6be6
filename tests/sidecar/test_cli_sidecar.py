"""Choosing and configuring the llama-server engine: flags, settings file, environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from daemon import Daemon, run_towerd

from towerd.cli.main import towerd
from towerd.errors import ConfigError
from towerd.settings.config import Config, with_server_args
from towerd.settings.sources import load

MakeDaemon = Callable[..., Daemon]
ATTACH = {"upstream": "http://127.0.0.1:8081", "slot_dir": "/tmp/slots"}


@pytest.fixture(autouse=True)
def no_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own towerd.toml out of these tests."""
    monkeypatch.setattr("towerd.system.paths.config_file", lambda: tmp_path / "absent.toml")


def test_engine_follows_the_upstream() -> None:
    """--upstream says which engine it is; without it the model is evaluated here."""
    assert load({}, {}).engine == "embedded"
    assert load({"engine": "llama-server"}, {}).engine == "llama-server"
    attached = load({**ATTACH, "upstream": "http://127.0.0.1:8081/prefix/"}, {})
    assert attached.engine == "llama-server"
    assert attached.upstream == "http://127.0.0.1:8081/prefix"


def test_settings_file_and_environment(tmp_path: Path) -> None:
    """Flags for llama-server are a list, or text as a shell splits it."""
    toml = tmp_path / "towerd.toml"
    toml.write_text('engine = "llama-server"\nllama_server_args = ["--samplers", "a,b c"]\n')
    config = load({}, {}, toml)
    assert config.llama_server_args == ("--samplers", "a,b c")
    env = {"TOWERD_ENGINE": "llama-server", "TOWERD_LLAMA_SERVER_ARGS": "--x 'a b' -y"}
    config = load({}, env)
    assert config.llama_server_args == ("--x", "a b", "-y")
    assert with_server_args(config, ("--z",)).llama_server_args == ("--x", "a b", "-y", "--z")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"upstream": "127.0.0.1:8081", "slot_dir": "d"}, "is not a URL such as"),
        ({"upstream": "ftp://host", "slot_dir": "d"}, "is not a URL such as"),
        ({"upstream": "http://", "slot_dir": "d"}, "is not a URL such as"),
        ({"upstream": "http://host:99999", "slot_dir": "d"}, "is not a URL such as"),
        ({"upstream": "http://me:pw@host", "slot_dir": "d"}, "is not a URL such as"),
        ({"upstream": "http://host"}, "needs --slot-dir"),
        ({"upstream_key": "k"}, "there is none"),
        ({"slot_dir": "d"}, "--slot-dir needs --engine llama-server"),
        ({"llama_server_bin": "b"}, "--llama-server-bin needs --engine llama-server"),
        ({"llama_server_args": "-x"}, "There is no flag -x"),
        ({"engine": "embedded", **ATTACH}, "--upstream needs --engine llama-server"),
        ({**ATTACH, "llama_server_bin": "b"}, "the one at --upstream runs already"),
        ({**ATTACH, "llama_server_args": "-x"}, "the one at --upstream runs already"),
        ({"engine": "llama-server", "llama_server_args": "'"}, "is not a command line"),
        ({"engine": "vllm"}, "must be one of embedded, llama-server"),
    ],
)
def test_what_does_not_go_together(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags, {})
    assert message in caught.value.message


def test_upstream_key_is_not_shown() -> None:
    config = load({**ATTACH, "upstream_key": "very-secret"}, {})
    assert config.upstream_key == "very-secret"
    assert "very-secret" not in repr(config)


def test_words_after_two_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to llama-server as they are; the embedded engine takes those that it can."""
    seen: list[Config] = []
    monkeypatch.setattr("towerd.cli.serve.run_daemon", seen.append)
    words = ["--", "--lora", "a b.gguf", "-np", "3"]
    done = CliRunner().invoke(towerd, ["serve", "--engine", "llama-server", "-np", "2", *words])
    assert done.exit_code == 0, done.output
    assert seen[0].llama_server_args == tuple(words[1:])
    assert seen[0].parallel == 2
    for wrong, why, status in (
        (words, "-np is towerd's own", 1),
        (["stray"], "'stray' is not a flag", 2),
    ):
        done = CliRunner().invoke(towerd, ["serve", *wrong])
        assert done.exit_code == status
        assert why in done.output
    done = CliRunner().invoke(towerd, ["serve", "--temp", "0.1", "--", "--top-k", "7"])
    assert done.exit_code == 0, done.output
    assert seen[1].llama_server_args == ("--temp", "0.1", "--top-k", "7")


@pytest.mark.parametrize(
    "words",
    [["--mmproj-url", "p"], ["--", "--jinja", "--mmproj-url", "p"], ["--", "--mmproj-url=p"]],
)
def test_a_flag_that_is_llama_servers(words: list[str]) -> None:
    """Whoever gives one elsewhere is told in one sentence what is possible."""
    done = CliRunner().invoke(towerd, ["serve", "-m", "x.gguf", *words])
    assert done.exit_code == 1
    assert done.output == (
        "Error: --mmproj-url is not taken by the embedded engine: leave it out, or use --engine "
        "llama-server and put --mmproj-url after --.\n"
    )


def test_start_and_stop(make_sidecar: MakeDaemon, tmp_path: Path) -> None:
    """llama-server gets its flags, runs below towerd, and is gone when towerd is, killed or not;
    the slot directory goes with it."""
    slots = tmp_path / "ram"
    slots.mkdir(mode=0o700)
    # What was set up for a llama-server of one's own does not lead this one astray.
    env = {
        "LLAMA_ARG_API_PREFIX": "/x",
        "LLAMA_ARG_PORT": "1",
        "LLAMA_API_KEY": "k",
        "AIP_MODE": "PREDICTION",
        "AIP_HTTP_PORT": "0",
    }
    flags = ("--slot-dir", str(slots), "--", "--no-warmup", "--alias", "sto ry")
    daemon = make_sidecar(*flags, **env)
    for end in (daemon.stop, daemon.kill):
        daemon.start()
        (child,) = psutil.Process(daemon.pid).children()
        assert {"--no-warmup", "sto ry", "--parallel"} <= set(child.cmdline())
        (model,) = daemon.get("/v1/models")["data"]
        assert (model["id"], model["aliases"]) == ("sto ry", ["sto ry"])
        (private,) = slots.iterdir()
        assert private.stat().st_mode & 0o777 == 0o700
        end()
        child.wait(20)
        if end == daemon.stop:
            assert list(slots.iterdir()) == []


def test_embedded_needs_no_llama_server(tmp_path: Path) -> None:
    """The default is what it was."""
    done = run_towerd(tmp_path, "serve", "--help")
    assert "--engine [embedded|llama-server|auto]" in done.stdout
    with Daemon(tmp_path / "d") as daemon:
        assert psutil.Process(daemon.pid).children() == []
        assert daemon.get("/towerd/v1/stats")["engine_name"] == "embedded"
        assert (
            daemon.post("/v1/audio/transcriptions", {}, 400)["error"]["type"]
            == "not_supported_error"
        )
