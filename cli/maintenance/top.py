"""`towerctl top`: what a daemon does, again and again."""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

from towerd.cli.client.api_client import ApiClient
from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json
from towerd.errors import ConfigError

COLUMNS = 100
_ENTER = "\x1b[?1049h\x1b[?25l"
"""The terminal's other screen, without a cursor."""
_LEAVE = "\x1b[?25h\x1b[?1049l"
_BEGIN = "\x1b[H"
_LINE_END = "\x1b[K\n"
_END = "\x1b[J"


@click.command()
@click.option("--once", is_flag=True, help="Show it once, as without a terminal.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two views.",
)
@json_option
@target_options
def top(once: bool, interval_s: float, as_json: bool, target: Target) -> None:
    """Show the requests that run, what each tier holds and what leaves it, until Ctrl-C."""
    from towerd.cli.output import echo_json

    with connect(target) as backend:
        view = _look(backend)
        if as_json:
            echo_json(view)
        elif once or not sys.stdout.isatty():
            click.echo("\n".join(frame(view, None)))
        else:
            _watch(backend, view, interval_s)


def _watch(backend: ApiClient, view: Json, interval_s: float) -> None:
    """Show view after view until the user ends it. Raises TowerdError if the daemon ends."""
    before: Json | None = None
    click.echo(_ENTER, nl=False)
    try:
        with suppress(KeyboardInterrupt), _interrupts() as interrupted:
            while True:
                lines = _LINE_END.join(frame(view, before))
                click.echo(f"{_BEGIN}{lines}{_LINE_END}{_END}", nl=False)
                if select.select([interrupted], [], [], interval_s)[0]:
                    return
                before, view = view, _look(backend)
    finally:
        click.echo(_LEAVE, nl=False)


@contextmanager
def _interrupts() -> Iterator[socket.socket]:
    """A socket that has something to read once Ctrl-C was pressed. As an exception the first one could
    come while an object is freed, where Python drops it. The second one is a KeyboardInterrupt."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def on_interrupt(number: int, at: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, on_interrupt)
    waker = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGINT, before)
        reader.close()
        writer.close()


def _look(backend: ApiClient) -> Json:
    """`stats`, `slots` (None if they are not shown), a router's `processes`, and the time."""
    stats = backend.stats()
    if stats["engine"] is None:
        raise ConfigError(
            f"No daemon runs on {backend.where}: start one with towerd serve, or name it with "
            "--socket, --url or --store-dir."
        )
    # A router has the statistics of one of its loaded models.
    return {
        "stats": stats,
        "slots": backend.slots(stats["model"]),
        "processes": backend.processes(),
        "at": time.monotonic(),
    }


def frame(view: Json, before: Json | None) -> list[str]:
    """The lines of one view. before: the view before it, which tells what changed."""
    from towerd.cli.output import clean

    lines = [
        *_head(view["stats"]),
        *_processes(view["processes"]),
        "",
        *_tiers(view, before),
        "",
        *_slots(view, before),
    ]
    return [clean(line)[:COLUMNS] for line in lines]


def _head(stats: Json) -> Iterator[str]:
    from towerd.cli.progress import duration

    engine = stats["engine"]
    yield (
        f"towerd {stats['version']}, up {duration(stats['uptime_s'])}   {stats['model']}, "
        f"context {stats['n_ctx']:,}"
    )
    yield f"requests  {engine['running']} running, {engine['waiting']} waiting"
    if (memory := ram_fact(stats.get("ram"))) is not None:
        yield f"memory    {memory}"
    total = sum(stats["reuse"].values())
    parts = ", ".join(f"{name} {tokens:,}" for name, tokens in stats["reuse"].items() if tokens)
    yield f"prompts   {total:,} tokens{f': {parts}' if parts else ''}"


def ram_fact(ram: Json | None) -> str | None:
    """What the daemon takes of the RAM, and may take; None if it does not tell."""
    from towerd.cli.output import size

    if not ram:
        return None
    most = f" of {size(ram['ram_bytes_max'])} (--ram-max)" if ram["ram_bytes_max"] else ""
    refused = f", {ram['ram_refusals']:,} requests refused" if ram["ram_refusals"] else ""
    return f"{size(ram['ram_bytes'])}{most}{refused}"


def _processes(processes: list[Json]) -> Iterator[str]:
    """A router's."""
    if processes:
        said = (
            f"{each.get('model', each['role'])} {each['pid']}"
            f"{' (broker)' if each['is_broker'] else ''}"
            f"{' (does not answer)' if each.get('silent') else ''}"
            for each in processes
        )
        yield f"processes {', '.join(said)}"


def _tiers(view: Json, before: Json | None) -> Iterator[str]:
    from towerd.cli.output import size

    stats = view["stats"]
    engine, tiers, store = stats["engine"], stats["tiers"], stats["store"]
    yield f"{'TIER':<6}{'USED':>12}{'OF':>12}{'LEFT IT':>12}   MORE"
    used, cells = engine["live_cells_used"], engine["live_cells"]
    yield f"{'live':<6}{used:>12,}{cells:>12,}{'':>12}   tokens"
    for tier, more in (
        ("hot", f"{tiers['unwritten_segments']:,} segments to be written"),
        ("warm", f"{store['segments']:,} segments, {stats['space']['tokens_resumable']:,} tokens"),
    ):
        gone = tiers[f"{tier}_evictions"]
        since = gone - before["stats"]["tiers"][f"{tier}_evictions"] if before else 0
        left = f"{gone:,}" + (f" +{since:,}" if since else "")
        used, most = size(tiers[f"{tier}_bytes"]), size(tiers[f"{tier}_bytes_max"])
        yield f"{tier:<6}{used:>12}{most:>12}{left:>12}   {more}"
    frozen, copied = store["frozen_sessions"], store["copied_sessions"]
    more = f"{frozen:,} of {store['sessions']:,} conversations frozen, {copied:,} coded beside rows"
    yield f"{'cold':<6}{size(store['cold_bytes']):>12}{'':>12}{'':>12}   {more}"


def _slots(view: Json, before: Json | None) -> Iterator[str]:
    slots = view["slots"]
    if slots is None:
        yield "Its slots are not shown: it was started with --no-slots."
        return
    head = f"{'SLOT':>4}  {'STATE':<10}{'PROMPT':>9}{'REUSED':>9}{'EVALUATED':>11}"
    yield f"{head}{'WRITTEN':>9}{'TOKENS/S':>10}"
    earlier = {slot["id"]: slot for slot in (before or {}).get("slots") or ()}
    seconds = view["at"] - before["at"] if before else 0.0
    busy = [slot for slot in slots if slot["is_processing"]]
    for slot in busy:
        yield _slot(slot, earlier.get(slot["id"]), seconds)
    if len(busy) < len(slots):
        yield f"{len(slots) - len(busy)} of {len(slots)} slots are idle."


def _slot(slot: Json, before: Json | None, seconds: float) -> str:
    """The line of a request that runs; of another tenant's no more than that it does."""
    if "n_prompt_tokens" not in slot:
        return f"{slot['id']:>4}  busy"
    written, cached = _written(slot), slot.get("n_prompt_tokens_cache", 0)
    evaluated = slot.get("n_prompt_tokens_processed", 0)
    prompt = max(0, slot.get("n_prompt_tokens", 0) - written)
    rate = "-"
    if before is not None and seconds > 0 and before.get("id_task") == slot.get("id_task"):
        news = written - _written(before)
        news += evaluated - before.get("n_prompt_tokens_processed", 0)
        rate = f"{max(0, news) / seconds:,.1f}"
    state = "writing" if written else "prompt"
    head = f"{slot['id']:>4}  {state:<10}{prompt:>9,}{cached:>9,}{evaluated:>11,}"
    return f"{head}{written:>9,}{rate:>10}"


def _written(slot: Json) -> int:
    """Tokens of the reply so far."""
    return sum(token.get("n_decoded", 0) for token in slot.get("next_token") or ())
