"""Agent programs as people install them: from their registry into build/agents, each with a home of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from agent_clients import NOTES, Client

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "agents"
TOWERCTL = (sys.executable, "-P", "-c", "from towerd.cli.main import towerctl; towerctl()")
INSTALL_S_MAX, ANSWER_S_MAX = 1800, 300


def name_of(client: Client) -> str:
    """Of its folder, and of its heading."""
    return client.title.lower().replace(" ", "-")


def programs_of(client: Client) -> Path:
    """Where its programs are found."""
    folder = BUILD / name_of(client)
    return folder / ("node_modules/.bin" if client.registry == "npm" else "bin")


def install(client: Client) -> str:
    """The version that is installed; empty if the registry does not give the program."""
    folder = BUILD / name_of(client)
    if not version_of(client):
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
        pip = [str(folder / "bin" / "pip"), "install", "-q"]
        commands = [[sys.executable, "-m", "venv", str(folder)], [*pip, client.package]]
        if client.registry == "npm":
            commands = [[*npm, client.package]]
        failures = (OSError, subprocess.SubprocessError)
        with (folder / "install.log").open("w") as log, suppress(*failures):
            for command in commands:
                subprocess.run(
                    command, check=True, stdout=log, stderr=log, cwd=folder, timeout=INSTALL_S_MAX
                )
    return version_of(client)


def version_of(client: Client) -> str:
    """Empty if it is not installed."""
    folder = BUILD / name_of(client)
    if client.registry == "npm":
        about = folder / "node_modules" / client.package / "package.json"
        return str(json.loads(about.read_text())["version"]) if about.exists() else ""
    pip = folder / "bin" / "pip"
    if not pip.exists():
        return ""
    shown = subprocess.run(
        [str(pip), "show", client.package], capture_output=True, text=True, check=False
    )
    found = re.search(r"^Version: (.*)$", shown.stdout, re.MULTILINE)
    return found[1] if found else ""


class Desk:
    """A program with a home, and a folder to work in that is part of no repository. What it left
    running ends with the desk."""

    def __init__(self, client: Client, root: Path) -> None:
        self._client = client
        self._home, self._work = root / "home", root / "work"
        self._home.mkdir()
        self._work.mkdir()
        (self._work / NOTES).write_text("The answer is forty-two.\n")
        self.places = {"{home}": str(self._home), "{work}": str(self._work)}
        """What the words in braces stand for."""

    def tell(self, url: str, log: Path) -> None:
        """Write its files, and tell it where the daemon is. What it says is logged."""
        self.places["{url}"] = url
        for path, text in self._client.files.items():
            target = Path(filled(path, self.places))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(filled(text, self.places))
        if self._client.setup:
            self._run(self._client.setup, log)

    def ask(self, command: tuple[str, ...], log: Path) -> str | None:
        """What it says until it ends, which is logged; None if it does not end in time."""
        start = time.monotonic()
        try:
            self._run(command, log)
        except subprocess.TimeoutExpired:
            return None
        text = log.read_text(errors="replace")
        log.write_text(f"{text}\n{time.monotonic() - start:.1f} s\n")
        return text

    def launch(self, command: tuple[str, ...], url: str, log: Path) -> str | None:
        """As `ask`, but towerctl tells it of the daemon, and nothing else does."""
        words = (*self._client.launch_words, *without_model(command[1:]))
        return self.ask((*TOWERCTL, "launch", self._client.launch, "--url", url, "--", *words), log)

    def _run(self, command: tuple[str, ...], log: Path) -> subprocess.CompletedProcess[bytes]:
        program, *args = (filled(word, self.places) for word in command)
        programs = programs_of(self._client)
        env = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(self._home),
            "LANG": "C.UTF-8",
        }
        if "{url}" in self.places:
            env |= {name: filled(value, self.places) for name, value in self._client.env.items()}
        with log.open("wb") as out:
            return subprocess.run(
                [str(programs / program), *args],
                env=env,
                cwd=self._work,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=ANSWER_S_MAX,
                check=False,
            )

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("HOME") == str(self._home):
                    process.kill()


def without_model(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a command line that name no model or kind of API."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in ("--model", "--auth-type"):
            next(rest)
        else:
            kept.append(word)
    return tuple(kept)


def filled(text: str, places: dict[str, str]) -> str:
    """With what the words in braces stand for."""
    for name, value in places.items():
        text = text.replace(name, value)
    return text
