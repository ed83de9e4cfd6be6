"""`towerctl stats`: statistics of the daemon and its store."""

from __future__ import annotations

from collections.abc import Iterator

import click

from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json
from towerd.cli.maintenance.top import ram_fact


@click.command()
@json_option
@target_options
def stats(as_json: bool, target: Target) -> None:
    """Show what is stored, in which tiers, and what was reused."""
    from towerd.cli.output import echo_json, show_facts

    with connect(target) as backend:
        found = backend.stats()
        where = backend.where
    if as_json:
        echo_json(found)
    else:
        show_facts([("asked", where), *_facts(found)])


def _facts(found: Json) -> Iterator[tuple[str, object]]:
    from towerd.cli.output import layer_facts, size

    if found["engine"] is not None:
        yield from _running(found)
    else:
        yield "daemon", "not running; figures of the model that was served last"
    store = found["store"]
    yield "sessions", f"{store['sessions']:,}"
    if store["frozen_sessions"]:
        yield "frozen", f"{store['frozen_sessions']:,} of them, in {size(store['cold_bytes'])}"
    yield "bases", f"{store['bases']:,}"
    yield "segments", f"{store['segments']:,} with {store['tokens']:,} tokens"
    yield "segment files", f"{store['files']:,}, all models {size(store['disk_bytes'])}"
    yield from layer_facts(found["footprint"])
    written = found["written"]
    budget = f" of {size(written['budget_bytes'])}" if written["budget_bytes"] else ""
    kinds = ", ".join(f"{kind} {size(n)}" for kind, n in written["kinds"].items() if n)
    yield (
        "written today",
        f"{size(written['today_bytes'])}{budget}" + (f" ({kinds})" if kinds else ""),
    )
    yield "catalog", f"{size(store['catalog_bytes'])}, its journal {size(store['journal_bytes'])}"


def _running(found: Json) -> Iterator[tuple[str, object]]:
    from towerd.cli.output import size

    engine, tiers, reuse = found["engine"], found["tiers"], found["reuse"]
    yield "towerd", f"{found['version']}, up {found['uptime_s']:,.0f} s"
    yield "model", f"{found['model']}, context {found['n_ctx']:,} tokens"
    yield "requests", f"{engine['running']} running, {engine['waiting']} waiting"
    if (memory := ram_fact(found.get("ram"))) is not None:
        yield "memory", memory
    if not engine.get("can_slice", True):
        yield "reuse", f"live only: {engine['why_not_sliceable']}"
    if engine.get("state_cut", "anywhere") != "anywhere":
        yield "reuse", f"at state checkpoints ({engine['state_kind']} model)"
    total = sum(reuse.values())
    shares = ", ".join(f"{name} {tokens:,}" for name, tokens in reuse.items())
    yield "prompt tokens", f"{total:,} ({shares})"
    yield "live", f"{engine['live_cells_used']:,} of {engine['live_cells']:,} tokens"
    for tier in ("hot", "warm"):
        used, most = size(tiers[f"{tier}_bytes"]), size(tiers[f"{tier}_bytes_max"])
        yield tier, f"{used} of {most}, {tiers[f'{tier}_evictions']:,} evictions"
    space = found["space"]
    yield "resumable", f"{space['tokens_resumable']:,} tokens resume without prefill"
    if space["tokens_to_prefill"]:
        more = size(space["bytes_wanted"])
        yield (
            "without rows",
            f"{space['tokens_to_prefill']:,} tokens; {more} more disk keeps as many",
        )
    if tiers["damaged_segments"] or tiers["write_errors"]:
        damaged, failed = tiers["damaged_segments"], tiers["write_errors"]
        yield "trouble", f"{damaged} damaged segments, {failed} failed writes: see the log"
