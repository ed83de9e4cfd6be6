"""The part of docs/clients.md that `agent_sessions.py` writes: a table, and a recipe for each program."""

from __future__ import annotations

from collections.abc import Mapping

from agent_clients import CLIENTS, Client
from agent_programs import filled, name_of

PLACES = {"{url}": "http://127.0.0.1:8080", "{home}": "~", "{work}/": ""}
HEAD = """\
| program | version | tried | endpoint | embedded engine | llama-server engine | refused: requests until it ends | [`towerctl launch`](commands.md#towerctl-launch-agent): tokens of a prompt |
|---|---|---|---|---|---|---|---|"""


def written(results: Mapping[str, Mapping[str, str]]) -> str:
    """A row for each program, then how each was told of towerd. results: by title, then by column."""
    lines = [HEAD, *(_row(client, results[client.title]) for client in CLIENTS)]
    for client in CLIENTS:
        lines += ["", *_recipe(client)]
    return "\n".join(lines) + "\n"


def _row(client: Client, found: Mapping[str, str]) -> str:
    cells = (
        f"[{client.title}](#{name_of(client)})",
        found["version"],
        found["tried"],
        f"`{client.endpoint}`",
        found["embedded"],
        found["llama-server"],
        f"{found['embedded refused']}; {found['llama-server refused']}",
        f"`{client.launch}`: {found['launch']}" if client.launch else "",
    )
    return f"| {' | '.join(cells)} |"


def _recipe(client: Client) -> list[str]:
    tool = "npm install -g" if client.registry == "npm" else "pip install"
    lines = [f"### {client.title}", ""]
    lines += [client.remark, ""] if client.remark else []
    lines += [f"    {tool} {client.package}"]
    if client.launch:
        lines += ["", f"    towerctl launch {client.launch}", "", "or by hand:"]
    for path, text in client.files.items():
        lines += ["", f"`{filled(path, PLACES)}`:", ""]
        lines += [f"    {line}".rstrip() for line in filled(text, PLACES).splitlines()]
    exports = [f"    export {name}={filled(value, PLACES)}" for name, value in client.env.items()]
    lines += ["", *exports] if exports else []
    lines += ["", _typed(client.setup)] if client.setup else []
    lines += ["", _typed(client.shown or client.first)]
    return lines


def _typed(command: tuple[str, ...]) -> str:
    """A command as one types it, indented."""
    words = (f'"{word}"' if " " in word else word for word in command)
    return f"    {filled(' '.join(words), PLACES)}"
