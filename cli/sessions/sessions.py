"""`towerctl sessions`: list, show and forget conversations."""

from __future__ import annotations

from typing import Any

import click

from towerd.cli.client.api_client import PAGE_MAX, ApiClient
from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json
from towerd.errors import TowerdError
from towerd.settings.setting import LOCAL_TENANT

SCOPE_HELP = "Only this tenant's."
TITLE_CHARS = 23
"""Of a title in the list, whose lines fit 100 columns."""
TEXT_HEAD = 300
TEXT_END = 700
DRAWING_CHARS = 64
_COLUMNS = (
    "SESSION", "TENANT", ">TURNS", ">TOKENS", ">SLOT FILE", ">KEPT", ">LAST USED", "TITLE",
)  # fmt: skip


@click.group()
def sessions() -> None:
    """List, show and forget conversations."""


@sessions.command()
@click.option(
    "--limit",
    type=click.IntRange(1, PAGE_MAX),
    default=50,
    show_default=True,
    help="Show at most this many.",
)
@click.option("--scope", metavar="TENANT", help=SCOPE_HELP)
@json_option
@target_options
def ls(limit: int, scope: str | None, as_json: bool, target: Target) -> None:
    """List sessions, most recently used first."""
    from towerd.cli.output import ago, echo_json, preview, short_ids, show_table

    with connect(target) as backend:
        found = backend.sessions(limit, scope)
        if as_json:
            echo_json({"sessions": found})
            return
        if not found:
            click.echo("No sessions yet.")
            return
        short = short_ids([each["id"] for each in found])
        rows = [
            (
                short[each["id"]],
                "" if each["scope"] == LOCAL_TENANT else each["scope"],
                each["n_turns"],
                f"{each['n_tokens']:,}",
                *_takes(each),
                ago(each["updated"]),
                preview(each["title"], TITLE_CHARS),
            )
            for each in found
        ]
    show_table(_COLUMNS, rows)


@sessions.command()
@click.argument("session")
@click.option("--scope", metavar="TENANT", help="Whose, if several tenants have one of this name.")
@click.option("--text", is_flag=True, help="The whole text of the conversation.")
@json_option
@target_options
def show(session: str, scope: str | None, text: bool, as_json: bool, target: Target) -> None:
    """Show SESSION: its turns, where its rows are, and its text."""
    from towerd.cli.output import echo_json

    with connect(target) as backend:
        with_text = text or (backend.has_model and not as_json)
        found = backend.session(session, scope, text=with_text)
        path = _path(backend, found["session"], found["turns"])
    if as_json:
        echo_json({**found, "path": path, "tiers": _by_tier(found["session"], path)})
    else:
        _print(found, path, whole_text=text)


def _takes(session: Json) -> tuple[str, str]:
    """What a slot file of a session would take, and what it does take; empty for another tokenizer's."""
    from towerd.cli.output import size

    footprint = session.get("footprint")
    if not footprint:
        return "", ""
    kept = size(footprint["kept_bytes"])
    return size(footprint["slot_bytes"]), f"frozen {kept}" if session["cold_bytes"] else kept


def kept_facts(kept: Json | None) -> list[tuple[str, str]]:
    """How much of a chat with a budget is live, and a drawing of which parts are."""
    if kept is None:
        return []
    n_kept = sum(p1 - p0 for p0, p1 in kept["runs"])
    return [
        ("live", f"{n_kept:,} of {kept['n']:,} ({kept['policy']}, budget {kept['budget']:,})"),
        ("kept", f"|{drawn(kept['runs'], kept['n'])}|"),
    ]


def drawn(runs: list[list[int]], n: int, width: int = DRAWING_CHARS) -> str:
    """Tokens [0, n) as one line: a character is full, half or empty if all, some or none of its
    tokens are kept."""
    width = min(width, n)
    line = ""
    for i in range(width):
        p0, p1 = i * n // width, (i + 1) * n // width
        n_kept = sum(max(0, min(p1, b) - max(p0, a)) for a, b in runs)
        line += "█" if n_kept == p1 - p0 else "▒" if n_kept else "·"
    return line


def _path(backend: ApiClient, session: Json, turns: list[Json]) -> list[Json]:
    """The segments of the current branch, first to last."""
    leaf = leaf_segment(turns)
    if leaf == 0 or session["tokenizer"]:  # its segments are not those of the served model
        return []
    last = backend.segment(leaf)
    above = [backend.segment(id) for id in last["path"][:-1]]
    return [*above, last]


def leaf_segment(turns: list[Json]) -> int:
    """The segment at which the current branch ends; 0 if it has none."""
    current = [turn for turn in turns if turn["current"]]
    return int(current[-1]["reply_node"] or 0) if current else 0


def _by_tier(session: Json, path: list[Json]) -> dict[str, int]:
    """Tokens whose rows are in RAM, else on disk, and those that would be evaluated again."""
    hot = sum(each["tokens"] for each in path if each["hot"])
    warm = sum(each["tokens"] for each in path if each["warm"] and not each["hot"])
    return {"hot": hot, "warm": warm, "tokens_only": session["n_tokens"] - hot - warm}


def _rows(session: Json, by_tier: dict[str, int]) -> str:
    from towerd.cli.output import size

    if session["tokenizer"]:
        return "none here: its tokens are those of another tokenizer"
    if session["cold_bytes"]:
        return f"none: frozen, its tokens are coded in {size(session['cold_bytes'])}"
    hot, warm, rest = by_tier["hot"], by_tier["warm"], by_tier["tokens_only"]
    return f"hot {hot:,}, warm {warm:,}, tokens only {rest:,}"


def _other_models(rows: list[Json]) -> list[tuple[str, str]]:
    """A line for each model besides the served one that has rows of a conversation."""
    return [
        (
            "also rows for",
            f"{each['arch']} {each['model_hash'][:12]}, cache {each['cache_types']}: "
            f"{each['n_tokens']:,} tokens",
        )
        for each in rows
        if not each["is_served"]
    ]


def _print(found: Json, path: list[Json], *, whole_text: bool) -> None:
    from towerd.cli.output import layer_facts, moment, show_facts

    session, by_tier = found["session"], _by_tier(found["session"], path)
    is_recognised = "" if session["named"] else " (recognised by its tokens)"
    show_facts(
        (
            ("session", session["id"] + is_recognised),
            ("tenant", session["scope"]),
            ("title", session["title"] or "-"),
            ("created", moment(session["created"])),
            ("last used", moment(session["updated"])),
            ("tokens", f"{session['n_tokens']:,} in the current branch"),
            ("rows", _rows(session, by_tier)),
            *(layer_facts(session["footprint"]) if session.get("footprint") else ()),
            *_other_models(found["rows"]),
            *kept_facts(found["kept"]),
        )
    )
    _print_turns(found["turns"])
    _print_path(path)
    _print_text(found["text"], whole=whole_text)


def _print_turns(turns: list[Json]) -> None:
    from towerd.cli.output import moment, show_table

    show_table(
        ("TURN", "AFTER", ">PROMPT", ">REPLY", "AT", "STATE"),
        [
            (
                turn["id"],
                turn["parent"] or "-",
                f"{turn['n_prompt']:,}",
                f"{turn['n_reply']:,}",
                moment(turn["created"]),
                ("current" if turn["current"] else "abandoned branch")
                + ("" if turn["finished"] else ", cut off"),
            )
            for turn in turns
        ],
    )


def _print_path(path: list[Json]) -> None:
    from towerd.cli.output import show_table, size, tiers

    show_table(
        (">SEGMENT", "TOKENS", ">COUNT", "ROWS", ">BYTES", "PINNED"),
        [
            (
                each["id"],
                f"[{each['p0']:,}, {each['p1']:,})",
                f"{each['tokens']:,}",
                tiers(each),
                size(each["bytes"]),
                "pinned" if each["pinned"] else "",
            )
            for each in path
        ],
    )


def _print_text(text: str | None, *, whole: bool) -> None:
    from towerd.cli.output import clean

    if text is None:
        click.echo("The daemon has to run to show its text.")
    elif whole or len(text) <= TEXT_HEAD + TEXT_END:
        click.echo(clean(text, lines=True))
    else:
        left_out = len(text) - TEXT_HEAD - TEXT_END
        click.echo(clean(text[:TEXT_HEAD], lines=True))
        click.echo(f"… {left_out:,} characters left out; --text shows all …")
        click.echo(clean(text[-TEXT_END:], lines=True))


@sessions.command()
@click.argument("names", metavar="SESSION...", nargs=-1, required=True)
@click.option("--scope", metavar="TENANT", help="Whose, if several tenants have one of this name.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--shared", is_flag=True, help="In the store that the daemon shares, too.")
@json_option
@target_options
def rm(
    names: tuple[str, ...],
    scope: str | None,
    yes: bool,
    shared: bool,
    as_json: bool,
    target: Target,
) -> None:
    """Forget each SESSION. The next gc removes its segments, unless others need them."""
    from towerd.cli.output import echo_json

    with connect(target) as backend:
        asked = (backend.session(name, scope)["session"] for name in names)
        found = list({(each["scope"], each["id"]): each for each in asked}.values())
        if not yes:
            _confirm(found)
        may_be_left = False
        for session in found:
            which = session["id"], session["scope"], session["tokenizer"]
            may_be_left |= backend.delete_session(*which) and not shared
            if shared:  # after what is here, which an idle daemon may put meanwhile
                _shared_rm(backend, session)
    if as_json:
        echo_json({"deleted": [session["id"] for session in found]})
    else:
        click.echo(f"Forgot {_count(found)}; towerctl gc frees the space.")
        if may_be_left:
            click.echo(
                "What was put into the shared store stays there: towerctl shared rm deletes it."
            )


def _shared_rm(backend: ApiClient, session: Json) -> None:
    """Delete the copy of a session that is no more here. Raises TowerdError, which says how to try again."""
    try:
        backend.shared_rm({"session": session["id"], "scope": session["scope"]})
    except TowerdError as error:
        again = f"towerctl shared rm {session['id']} --scope {session['scope']}"
        error.message = (
            f"It was deleted here, not in the shared store: {error.message} Try {again} later."
        )
        raise


def _confirm(found: list[Json]) -> None:
    tokens = sum(session["n_tokens"] for session in found)
    click.confirm(f"Forget {_count(found)} with {tokens:,} tokens?", abort=True, err=True)


def _count(found: list[Any]) -> str:
    return "1 session" if len(found) == 1 else f"{len(found)} sessions"
