#!/usr/bin/env python3
"""Agent programs, as people install them, in a session with `towerd serve`.

    make agents                               all, on both engines
    make agents ARGS="embedded llm codex"     some, on one

Each is installed from its registry into build/agents, gets a home of its own, and asks two questions.
The model is one of 32k context that calls a tool of the program once and then answers: what is
tried is the protocol, not the prose. A run of everything writes docs/clients.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import requests
from agent_clients import CLIENTS, NOTES, Client
from agent_model import make_agent_model
from daemon import Daemon

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "agents"
RESULTS = BUILD / "results.json"
PAGE = ROOT / "docs" / "clients.md"
START, END = "<!-- written by make agents -->", "<!-- end -->"
ENGINES = {"embedded": (), "llama-server": ("--engine", "llama-server")}
TEMPLATE = ROOT / "towerd" / "data" / "templates" / "Qwen3.jinja"
ANSWER = "The notes say forty-two."
CTX_SIZE = 32768
INSTALL_S_MAX, SESSION_S_MAX = 900, 300


@dataclass
class Outcome:
    """Of one session. `reused`: tokens of the second question's prompts that were not evaluated, and
    all of them."""

    why: str = ""
    reused: int = 0
    prompt: int = 0

    def __str__(self) -> str:
        return self.why or f"ok, {self.reused:,} of {self.prompt:,}"


def main() -> None:
    """Run what the command line asks for."""
    asked = sys.argv[1:]
    engines = [word for word in asked if word in ENGINES] or list(ENGINES)
    names = [word for word in asked if word not in ENGINES]
    BUILD.mkdir(parents=True, exist_ok=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for client in CLIENTS:
        if names and client.title.split()[0].lower() not in names:
            continue
        version = install(client)
        kept[client.title] = kept.get(client.title, {}) | {"version": version}
        for engine in engines:
            outcome = session(client, engine) if version else Outcome("not to be had here")
            kept[client.title][engine] = str(outcome)
            print(f"{client.title:12} {engine:13} {outcome}", flush=True)
            RESULTS.write_text(json.dumps(kept, indent=1))
    if all(engine in kept.get(client.title, {}) for client in CLIENTS for engine in ENGINES):
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(f"{before}{START}\n\n{table(kept)}\n{END}{rest.partition(END)[2]}")
        print(f"{PAGE.relative_to(ROOT)} is written")


# --- programs -----------------------------------------------------------------------------


def name_of(client: Client) -> str:
    return client.title.lower().replace(" ", "-")


def folder_of(client: Client) -> Path:
    """Where a client's programs are found."""
    folder = BUILD / name_of(client)
    return folder / ("node_modules/.bin" if client.registry == "npm" else "bin")


def install(client: Client) -> str:
    """The version that is installed; empty if the registry does not give the program."""
    folder = BUILD / name_of(client)
    npm = client.registry == "npm"
    if not (folder_of(client) / client.first[0]).exists():
        folder.mkdir(parents=True, exist_ok=True)
        commands = [
            ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), client.package]
        ]
        if not npm:
            pip = [str(folder / "bin" / "pip"), "install", "-q", client.package]
            commands = [[sys.executable, "-m", "venv", str(folder)], pip]
        with (folder / "install.log").open("w") as log:
            for command in commands:
                try:
                    subprocess.run(
                        command, check=True, stdout=log, stderr=log, timeout=INSTALL_S_MAX
                    )
                except (OSError, subprocess.SubprocessError):
                    return ""
    if npm:
        about = folder / "node_modules" / client.package / "package.json"
        return str(json.loads(about.read_text())["version"])
    shown = subprocess.run(
        [str(folder / "bin" / "pip"), "show", client.package],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"^Version: (.*)$", shown.stdout, re.MULTILINE)
    return found[1] if found else ""


# --- sessions -----------------------------------------------------------------------------


def session(client: Client, engine: str) -> Outcome:
    """Two questions of a program to a new daemon, in a folder that is part of no repository."""
    with tempfile.TemporaryDirectory(prefix="towerd-agents-", ignore_cleanup_errors=True) as root:
        return _session(client, engine, Path(root))


def _session(client: Client, engine: str, root: Path) -> Outcome:
    home, work = root / "home", root / "work"
    home.mkdir()
    work.mkdir()
    (work / NOTES).write_text("The answer is forty-two.\n")
    places = {"{home}": str(home), "{work}": str(work)}
    make_agent_model(root / "model.gguf", call_of(client, places), answer_of())
    flags = (
        "-m",
        str(root / "model.gguf"),
        "--ctx-size",
        str(CTX_SIZE),
        "--chat-template-file",
        str(TEMPLATE),
        *ENGINES[engine],
    )
    with Daemon(root / "daemon", *flags) as daemon:
        places["{url}"] = daemon.url
        for path, text in client.files.items():
            target = Path(filled(path, places))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(filled(text, places))
        log = BUILD / f"{name_of(client)}-{engine}"
        outcome = Outcome(ask(client, client.first, places, log.with_suffix(".first.log")))
        if not outcome.why:
            before = counters(daemon.url)
            outcome.why = ask(client, client.second, places, log.with_suffix(".second.log"))
            prefill, reused = (b - a for a, b in zip(before, counters(daemon.url), strict=True))
            outcome.reused, outcome.prompt = reused, prefill + reused
    return outcome


def call_of(client: Client, places: dict[str, str]) -> tuple[str, ...]:
    """What the model says first, in pieces."""
    if not client.tool:
        return ("<think>\nI", " wait.\n</think>\n\n", "Well.")
    arguments = {key: filled(value, places) for key, value in client.arguments.items()}
    call = json.dumps({"name": client.tool, "arguments": arguments})
    return ("<think>\nI", " read.\n</think>\n\n", "<tool_", "call>\n", call, "\n</tool_call>")


def answer_of() -> tuple[str, ...]:
    """What it says when it has read the notes, in pieces."""
    start, end = ANSWER[:9], ANSWER[9:]
    return ("<think>\nNow", " I know.\n</think>\n\n", start, end)


def ask(client: Client, command: tuple[str, ...], places: dict[str, str], log: Path) -> str:
    """Run a program; why it did not say what the model did, or nothing."""
    program, *args = (filled(word, places) for word in command)
    env = {
        "PATH": f"{folder_of(client)}:{os.environ['PATH']}",
        "HOME": places["{home}"],
        "LANG": "C.UTF-8",
    }
    env |= {name: filled(value, places) for name, value in client.env.items()}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [str(folder_of(client) / program), *args],
            env=env,
            cwd=places["{work}"],
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SESSION_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SESSION_S_MAX} s"
    log.write_text(f"{done.stdout}\n{done.stderr}\n{time.monotonic() - start:.1f} s\n")
    if ANSWER in done.stdout:
        return ""
    lines = (
        done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
    ).splitlines()
    return f"failed: {lines[-1][:120]}"


def counters(url: str) -> tuple[int, int]:
    """Tokens evaluated and reused since the start."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    evaluated = sum(numbers(text, r"towerd_tokens_prefilled_total"))
    return evaluated, sum(numbers(text, r'towerd_tokens_reused_total\{tier="\w+"\}'))


def numbers(text: str, name: str) -> list[int]:
    return [int(float(n)) for n in re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)]


def filled(text: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


# --- page ---------------------------------------------------------------------------------


def table(results: dict[str, dict[str, str]]) -> str:
    """A row for each program, then how each was told of towerd."""
    places = {"{url}": "http://127.0.0.1:8080", "{home}": "~", "{work}/": ""}
    lines = [
        "| program | version | endpoint | embedded engine | llama-server engine |",
        "|---|---|---|---|---|",
    ]
    for client in CLIENTS:
        found = results[client.title]
        lines.append(
            f"| [{client.title}](#{name_of(client)}) | {found['version']} | `{client.endpoint}` "
            f"| {found['embedded']} | {found['llama-server']} |"
        )
    for client in CLIENTS:
        tool = "npm install -g" if client.registry == "npm" else "pip install"
        lines += ["", f"### {client.title}", "", f"    {tool} {client.package}"]
        for path, text in client.files.items():
            lines += ["", f"`{filled(path, places)}`:", ""]
            lines += [f"    {line}".rstrip() for line in filled(text, places).splitlines()]
        exports = [
            f"    export {name}={filled(value, places)}" for name, value in client.env.items()
        ]
        lines += ["", *exports] if exports else []
        words = (f'"{word}"' if " " in word else word for word in client.first)
        lines += ["", f"    {filled(' '.join(words), places)}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
