"""`towerctl launch`, with programs on PATH that say what they were given and ask the daemon that they were told of."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from daemon import Daemon, clean_env
from waiting import until

from towerd.cli.launch.agents import AGENTS
from towerd.cli.main import towerctl
from towerd.models.bundled import bundled_model

TOWERCTL = (sys.executable, "-P", "-c", "from towerd.cli.main import towerctl; towerctl()")
DOCS = Path(__file__).resolve().parents[2] / "docs"
KEY = "a-secret"
STOP_S = 60
NOTHING: Mapping[str, str] = {}
PROGRAM = f"""#!{sys.executable}
import json, os, re, sys, urllib.request

told = [*sys.argv[1:], *(os.environ[name] for name in sorted(os.environ))]
url = next(found[0] for word in told if (found := re.search(r"http://[\\w.]+:\\d+", word)))
request = urllib.request.Request(url + "/v1/models")
request.add_header("Authorization", "Bearer {KEY}")
with urllib.request.urlopen(request) as reply:
    served = json.load(reply)["data"][0]
print(json.dumps(dict(args=sys.argv[1:], env=dict(os.environ), url=url, served=served)))
"""
WAITING = f"""#!{sys.executable}
import os, signal, sys, time

def caught(number, frame):
    print("caught", number, flush=True)
    sys.exit(40 + number)

signal.signal(signal.SIGTERM, caught)
signal.signal(signal.SIGINT, caught)
print("waiting", os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def desk() -> Iterator[Path]:
    """A home, a folder to work in, and programs, all empty. Not below pytest's own folder, which is too
    deep for a socket on some systems."""
    with tempfile.TemporaryDirectory(prefix="towerd-") as name:
        for folder in ("home", "work", "bin", "tmp"):
            (Path(name) / folder).mkdir()
        yield Path(name)


@pytest.fixture(scope="module")
def server() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="towerd-") as name:
        flags = ("--api-key", KEY, "--ctx-size", "512")
        with Daemon(Path(name) / "daemon", *flags) as running:
            yield running


def program(desk: Path, name: str, text: str) -> None:
    path = desk / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def begin(desk: Path, *args: str, env: Mapping[str, str] = NOTHING) -> subprocess.Popen[str]:
    """`towerctl launch`, in the desk's folder, as the leader of a process group."""
    env = {**clean_env(desk / "home"), "TMPDIR": str(desk / "tmp"), **env}
    env["PATH"] = f"{desk / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        [*TOWERCTL, "launch", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=desk / "work",
        start_new_session=True,
    )  # fmt: skip


def launched(
    desk: Path, *args: str, code: int = 0, env: Mapping[str, str] = NOTHING
) -> tuple[str, str]:
    """What it said on stdout and on stderr."""
    process = begin(desk, *args, env=env)
    out, said = process.communicate(timeout=STOP_S)
    assert process.returncode == code, said
    return out, said


@pytest.mark.parametrize("name", AGENTS)
def test_the_agent_reaches_the_daemon(desk: Path, server: Daemon, name: str) -> None:
    """It has the address, the key and the model; the user's words come last; nothing is left behind."""
    program(desk, AGENTS[name].program, PROGRAM)
    words = ("--flag", "a word", "--", "-x")
    at = ("--url", server.url, "--api-key", KEY)
    out, said = launched(
        desk, name, *at, "--", *words, env={"OPENAI_API_KEY": "another", "EDITOR": "vi"}
    )
    found: dict[str, Any] = json.loads(out)
    assert found["url"] == server.url
    assert tuple(found["args"][-len(words) :]) == words
    assert found["env"]["EDITOR"] == "vi"
    told = json.dumps([found["args"], found["env"]])
    assert KEY in told
    assert found["served"]["id"] in told
    assert "a context of 512 tokens" in said
    assert f"Warning: {AGENTS[name].title} sends " in said
    for folder in ("home", "work", "tmp"):
        assert list((desk / folder).iterdir()) == [], folder


def test_what_is_documented_is_what_is_given(desk: Path, server: Daemon) -> None:
    """Values of several kinds, of the agents that take them in a format of their own."""
    at = ("--url", server.url, "--api-key", KEY)
    program(desk, "opencode", PROGRAM)
    config = json.loads(
        json.loads(launched(desk, "opencode", *at)[0])["env"]["OPENCODE_CONFIG_CONTENT"]
    )
    provider, _, model = config["model"].partition("/")
    assert config["provider"][provider]["options"]["baseURL"] == f"{server.url}/v1"
    assert config["provider"][provider]["models"][model]["limit"]["context"] == 512
    program(desk, "codex", PROGRAM)
    args = json.loads(launched(desk, "codex", *at)[0])["args"]
    settings = tomllib.loads("\n".join(args[1::2]))
    assert set(args[::2]) == {"-c"}
    assert settings["model_context_window"] == 512
    assert settings["model_providers"][settings["model_provider"]]["base_url"] == f"{server.url}/v1"
    program(desk, "claude", PROGRAM)
    env = json.loads(launched(desk, "claude", *at, env={"ANTHROPIC_API_KEY": "theirs"})[0])["env"]
    assert "ANTHROPIC_API_KEY" not in env
    assert env["ANTHROPIC_AUTH_TOKEN"] == KEY


def test_the_daemon_is_found_by_its_socket(desk: Path) -> None:
    """Its address is asked for; the key is that of the settings, or has to be given."""
    program(desk, "qwen", PROGRAM)
    with Daemon(desk / "d", "--api-key", KEY) as daemon:
        at = ("--socket", str(daemon.socket))
        out, _ = launched(desk, "qwen", *at, env={"TOWERD_API_KEYS": KEY})
        assert json.loads(out)["url"] == daemon.url
        assert KEY in json.loads(out)["env"]["OPENAI_API_KEY"]
        _, said = launched(desk, "qwen", *at, code=1)
        assert f"--url {daemon.url} --api-key KEY" in said
        _, said = launched(desk, "qwen", *at, "-c", "4096", env={"TOWERD_API_KEYS": KEY}, code=1)
        assert "--ctx-size would change nothing" in said


def test_one_of_several_models(desk: Path) -> None:
    """The one that is named, which is loaded, and from then on that one; none is guessed."""
    program(desk, "qwen", PROGRAM)
    (desk / "models").mkdir()
    for name in ("one", "two"):
        shutil.copy(bundled_model(), desk / "models" / f"{name}.gguf")
    with Daemon(desk / "d", "--models-dir", str(desk / "models"), "--ctx-size", "256") as daemon:
        at = ("--socket", str(daemon.socket))
        assert "name one with --model: one, two." in launched(desk, "qwen", *at, code=1)[1]
        for given in (("--model", "two"), ()):
            out, said = launched(desk, "qwen", *at, *given)
            assert f"Qwen Code with two at {daemon.url}: a context of 256 tokens." in said
            assert json.loads(out)["args"][-2:] == ["--model", "two"]


def test_a_daemon_is_started_and_ends_with_the_agent(desk: Path) -> None:
    """With the settings that were given, and those of the user; what it has recorded stays."""
    program(desk, "aider", PROGRAM)
    store, socket = desk / "store", desk / "s.sock"
    where = {"TOWERD_STORE_DIR": str(store), "TOWERD_SOCKET": str(socket), "TOWERD_API_KEYS": KEY}
    out, said = launched(desk, "aider", "-m", "stories", "-c", "384", env=where)
    assert "No daemon runs: one is started" in said
    assert "a context of 384 tokens" in said
    assert json.loads(out)["served"]["meta"]["n_ctx"] == 384
    assert not socket.exists()
    assert (store / "catalog.sqlite").exists()
    assert list((desk / "tmp").iterdir()) == []
    said = launched(desk, "aider", "-m", "nowhere.gguf", env=where, code=1)[1]
    assert "started has ended" in said
    assert "nowhere.gguf" in said


def test_the_end_is_the_agents(desk: Path, server: Daemon) -> None:
    """Its exit code, or its signal."""
    at = ("--url", server.url, "--api-key", KEY)
    program(desk, "claude", "#!/bin/sh\nexit 7\n")
    launched(desk, "claude", *at, code=7)
    program(desk, "claude", "#!/bin/sh\nkill -TERM $$\n")
    launched(desk, "claude", *at, code=-signal.SIGTERM)
    program(desk, "claude", "no program")
    assert "cannot be started" in launched(desk, "claude", *at, code=1)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_agent_once(desk: Path, server: Daemon, number: int) -> None:
    """Those sent to the command alone."""
    program(desk, "claude", WAITING)
    process = begin(desk, "claude", "--url", server.url, "--api-key", KEY)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("waiting")
    process.send_signal(number)
    assert process.communicate(timeout=STOP_S)[0] == f"caught {number}\n"
    assert process.returncode == 40 + number


def test_it_stops_with_the_agent(desk: Path, server: Daemon) -> None:
    """As a shell's job, which continues both."""
    program(desk, "claude", WAITING)
    process = begin(desk, "claude", "--url", server.url, "--api-key", KEY)
    assert process.stdout is not None
    agent = int(process.stdout.readline().split()[1])
    os.kill(agent, signal.SIGSTOP)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    os.killpg(process.pid, signal.SIGCONT)
    until(lambda: psutil.Process(agent).status() != psutil.STATUS_STOPPED)
    process.terminate()
    process.communicate(timeout=STOP_S)
    assert process.returncode == 40 + signal.SIGTERM


@pytest.mark.parametrize("name", AGENTS)
def test_the_figures_are_those_of_the_page(name: str) -> None:
    """docs/clients.md has the measured prompts, and docs/commands.md how an agent is installed."""
    row = AGENTS[name]
    page = (DOCS / "clients.md").read_text()
    (line,) = (
        each
        for each in page.splitlines()
        if each.endswith(f"| `{name}`: ok, {row.prompt_tokens:,} |")
    )
    assert line.startswith(f"| [{row.title}](#")
    assert f"| {row.version} |" in line
    assert f"| `{name}` | {row.title} | `{row.install}` |" in (DOCS / "commands.md").read_text()


@pytest.mark.parametrize("name", AGENTS)
def test_a_program_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence says how to install it, before any daemon is looked for."""
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(towerctl, ["launch", name])
    assert result.exit_code == 1
    row = AGENTS[name]
    assert (
        result.stderr == f"Error: {row.title} is not installed; this installs it: {row.install}\n"
    )
