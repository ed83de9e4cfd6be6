"""`towerctl lab replay`: the hit rates of policies on a recorded trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.output import echo_json, show_table, size

if TYPE_CHECKING:
    from lab.replay.compare import Cell

_TOKEN_BYTES = 32768


@click.command()
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--policy",
    "policies",
    default="lru,foresight",
    show_default=True,
    help="Policies to compare, with commas between them.",
)
@click.option(
    "--capacity",
    default="1%,5%,20%",
    show_default=True,
    help="Sizes of the cache, as shares of the trace's distinct blocks.",
)
@click.option(
    "--users",
    type=click.IntRange(1, 100_000),
    default=24,
    show_default=True,
    help="Users in a closed loop, for traces of single sessions.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Another seed, another order of the sessions.",
)
@click.option("--ends", is_flag=True, help="Tell the policies when a conversation is over.")
@click.option(
    "--segment-tokens",
    type=click.IntRange(1, 1 << 20),
    default=2048,
    show_default=True,
    help="Maximum tokens that are kept or evicted as a whole.",
)
@click.option(
    "--token-bytes",
    type=click.IntRange(1),
    default=_TOKEN_BYTES,
    show_default=True,
    help="Bytes of a token's rows, to compute the bytes moved.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def replay(
    trace: Path,
    policies: str,
    capacity: str,
    users: int,
    seed: int,
    ends: bool,
    segment_tokens: int,
    token_bytes: int,
    as_json: bool,
) -> None:
    """Serve a recorded trace from a simulated cache: hit rate of each policy, and the gap to the
    best possible."""
    from lab.replay.compare import compare, parse_capacities
    from lab.replay.interleave import interleave
    from lab.replay.load import load

    names = [name.strip() for name in policies.split(",")]
    shares = parse_capacities(capacity)
    loaded = load(trace, segment_tokens)
    if not loaded.is_woven:
        loaded = interleave(loaded, users, seed)
    rows = (
        row
        for cell in compare(loaded, names, shares, end_hints=ends)
        for row in _rows(loaded.name, cell, token_bytes)
    )
    if as_json:
        for row in rows:
            echo_json(row)
        return
    heads = ("trace", "capacity", "policy", ">hit rate", ">gap closed", ">prefilled", ">moved")
    show_table(heads, (_as_text(row) for row in rows))


def _rows(trace: str, cell: Cell, token_bytes: int) -> Iterator[dict[str, Any]]:
    for name, outcome in cell.outcomes.items():
        yield {
            "trace": trace,
            "capacity": cell.capacity,
            "capacity_blocks": cell.n_blocks,
            "policy": name,
            "hit_rate": outcome.hit_rate,
            "gap_closed": cell.gap_closed(name),
            "prefilled_tokens": outcome.n_prefilled_tokens,
            "bytes_moved": outcome.bytes_moved(token_bytes),
        }


def _as_text(row: dict[str, Any]) -> tuple[str, ...]:
    gap = row["gap_closed"]
    return (
        row["trace"],
        f"{row['capacity']:.3g}",
        row["policy"],
        f"{100 * row['hit_rate']:.2f} %",
        "" if gap is None else f"{gap:.3f}",
        f"{row['prefilled_tokens']:,}",
        size(row["bytes_moved"]),
    )
