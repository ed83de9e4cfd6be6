#!/usr/bin/env python3
"""Agent programs, as people install them, in a session with `towerd serve`.

    make agents                               all, on both engines
    make agents ARGS="embedded llm codex"     some, on one

Each is installed from its registry into build/agents, gets a home of its own, and asks two questions,
then one that is longer than the context: it must end, having said why.
The model is one of 32k context that calls a tool of the program once and then answers: what is
tried is the protocol, not the prose. A run of everything writes docs/clients.md.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from datetime import date
from pathlib import Path

import requests
from agent_clients import CLIENTS, QUESTION, Client
from agent_model import make_agent_model
from agent_page import written
from agent_programs import ANSWER_S_MAX, BUILD, ROOT, Desk, filled, install, name_of
from daemon import Daemon

RESULTS = BUILD / "results.json"
PAGE = ROOT / "docs" / "clients.md"
START, END = "<!-- written by make agents -->", "<!-- end -->"
ENGINES = {"embedded": (), "llama-server": ("--engine", "llama-server")}
TEMPLATE = ROOT / "towerd" / "data" / "templates" / "Qwen3.jinja"
ANSWER = "The notes say forty-two."
CTX_SIZE, CTX_SIZE_SMALL = 32768, 512
LONG_QUESTION = QUESTION + " Tell me all." * CTX_SIZE_SMALL
REASONS = (
    "exceeds the available context size",
    "prompt is too long",
    "ran out of room in the model's context window",
    "possibly exhausted context window",
)
"""What a program shows of a refusal: the words of its API, or Codex's and aider's own."""


def main() -> None:
    """Run what the command line asks for."""
    asked = sys.argv[1:]
    engines = [word for word in asked if word in ENGINES] or list(ENGINES)
    names = [word for word in asked if word not in ENGINES]
    BUILD.mkdir(parents=True, exist_ok=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for client in CLIENTS:
        if names and name_of(client) not in names:
            continue
        found = kept.setdefault(client.title, {})
        found["version"], found["tried"] = install(client), date.today().isoformat()
        for engine in engines:
            runs = [(engine, session), (f"{engine} refused", refusal)]
            if client.launch and engine == "embedded":
                runs.append(("launch", launched))
            for column, run in runs:
                found[column] = run(client, engine) if found["version"] else "not to be had here"
                print(f"{client.title:12} {column:22} {found[column]}", flush=True)
            RESULTS.write_text(json.dumps(kept, indent=1))
    columns = [f"{engine} refused" for engine in ENGINES]
    if all(column in kept.get(each.title, {}) for each in CLIENTS for column in columns):
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(f"{before}{START}\n\n{written(kept)}\n{END}{rest.partition(END)[2]}")
        print(f"{PAGE.relative_to(ROOT)} is written")


def session(client: Client, engine: str) -> str:
    """Two questions to a new daemon: ok with the tokens of the second question's prompts that were
    not evaluated, and all of them; or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="towerd-agents-", ignore_cleanup_errors=True) as name:
        root, log = Path(name), BUILD / f"{name_of(client)}-{engine}"
        with Desk(client, root) as desk, daemon_of(client, desk, root, engine, CTX_SIZE) as daemon:
            desk.tell(daemon.url, log.with_suffix(".setup.log"))
            why = fault(desk.ask(client.first, log.with_suffix(".first.log")))
            if why:
                return why
            before = tokens(daemon.url)
            why = fault(desk.ask(client.second, log.with_suffix(".second.log")))
            if why:
                return why
            prefill, reused = (b - a for a, b in zip(before, tokens(daemon.url), strict=True))
            failed = {status: n for status, n in daemon.statuses().items() if status >= "400"}
    also = "".join(f", {n} with status {status}" for status, n in failed.items())
    return f"ok, {reused:,} of {prefill + reused:,}{also}"


def launched(client: Client, engine: str) -> str:
    """The same two questions through `towerctl launch`: ok with the tokens of the first request's
    prompt, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="towerd-agents-", ignore_cleanup_errors=True) as name:
        root, log = Path(name), BUILD / f"{name_of(client)}-launch"
        with Desk(client, root) as desk, daemon_of(client, desk, root, engine, CTX_SIZE) as daemon:
            for number, command in enumerate((client.first, client.second)):
                why = fault(desk.launch(command, daemon.url, log.with_suffix(f".{number}.log")))
                if why:
                    return why
            asked = requests.get(f"{daemon.url}/towerd/v1/requests", timeout=30).json()["finished"]
    return f"ok, {max(sum(each['reuse'].values()) for each in asked):,}"


def refusal(client: Client, engine: str) -> str:
    """A question longer than the context: how many requests the program makes until it ends."""
    with tempfile.TemporaryDirectory(prefix="towerd-agents-", ignore_cleanup_errors=True) as name:
        root, log = Path(name), BUILD / f"{name_of(client)}-{engine}.refused.log"
        with (
            Desk(client, root) as desk,
            daemon_of(client, desk, root, engine, CTX_SIZE_SMALL) as daemon,
        ):
            desk.tell(daemon.url, log)
            command = tuple(word.replace(QUESTION, LONG_QUESTION) for word in client.first)
            text = desk.ask(command, log)
            counts = daemon.statuses()
    odd = {status: n for status, n in counts.items() if status >= "400" and status != "400"}
    also = "".join(f", {n} with status {status}" for status, n in odd.items())
    if text is None:
        also += f", no end within {ANSWER_S_MAX} s"
    elif not any(reason in " ".join(text.split()).lower() for reason in REASONS):
        also += ", does not say why"
    return f"{counts['400']}{also}"


def daemon_of(client: Client, desk: Desk, root: Path, engine: str, ctx_size: int) -> Daemon:
    """With a model that calls the program's tool."""
    model = root / "model.gguf"
    make_agent_model(model, call_of(client, desk.places), answer_of())
    flags = ("-m", str(model), "--ctx-size", str(ctx_size), "--chat-template-file", str(TEMPLATE))
    return Daemon(root / "daemon", *flags, *ENGINES[engine])


def call_of(client: Client, places: dict[str, str]) -> tuple[str, ...]:
    """What the model says first, in pieces."""
    if not client.tool:
        return ("<think>\nI", " wait.\n</think>\n\n", "Well.")
    arguments = json.loads(filled(json.dumps(client.arguments), places))
    call = json.dumps({"name": client.tool, "arguments": arguments})
    return ("<think>\nI", " read.\n</think>\n\n", "<tool_", "call>\n", call, "\n</tool_call>")


def answer_of() -> tuple[str, ...]:
    """What it says when it has read the notes, in pieces."""
    start, end = ANSWER[:9], ANSWER[9:]
    return ("<think>\nNow", " I know.\n</think>\n\n", start, end)


def fault(text: str | None) -> str:
    """Why a program did not say what the model did, or nothing."""
    if text is None:
        return f"no end within {ANSWER_S_MAX} s"
    if ANSWER in text:
        return ""
    return f"failed: {(text.strip().splitlines() or ['it said nothing'])[-1][:120]}"


def tokens(url: str) -> tuple[int, int]:
    """Evaluated and reused since the start."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    evaluated, reused = (
        sum(int(float(n)) for n in re.findall(rf"^{name} (\S+)$", text, re.MULTILINE))
        for name in (r"towerd_tokens_prefilled_total", r'towerd_tokens_reused_total\{tier="\w+"\}')
    )
    return evaluated, reused


if __name__ == "__main__":
    main()
