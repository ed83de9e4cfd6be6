"""`towerctl lab scale`: what the shared tier asks, stores and costs for so many sessions, and where it pays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.output import echo_json, show_table, size

if TYPE_CHECKING:
    from lab.scale.sessions import Sample
    from lab.scale.work import TierHabits

_CHECKED_TOKEN_BYTES = 16
_KINDS = "put get head list".split()


@click.command()
@click.option(
    "--sessions",
    default="1e3,1e6,1e9",
    show_default=True,
    help="Sessions of a month, with commas between the numbers.",
)
@click.option(
    "--machine",
    type=click.Choice(["1b-cpu", "1b-h100", "8b-h100", "70b-4h100", "mla-8h100"]),
    default="8b-h100",
    show_default=True,
    help="Model and machine: bytes of rows, and what evaluating costs.",
)
@click.option("--bits", default=5.5, show_default=True, help="Bits of a number in stored rows.")
@click.option(
    "--store",
    type=click.Choice(["s3", "own"]),
    default="s3",
    show_default=True,
    help="Whose prices and limits.",
)
@click.option(
    "--puts",
    type=click.Choice(["turn", "end"]),
    default="turn",
    show_default=True,
    help="Put sessions at every pause of five seconds, as pinned ones are, or once at their end.",
)
@click.option(
    "--away",
    type=click.FloatRange(0, 1),
    default=0.1,
    show_default=True,
    help="Share of later turns that come to a machine without the session's rows.",
)
@click.option(
    "--pulled",
    type=click.FloatRange(0, 1),
    default=0.1,
    show_default=True,
    help="Share of sessions that are opened by their id elsewhere.",
)
@click.option(
    "--tenant-sessions",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Sessions of a tenant in a month.",
)
@click.option(
    "--machine-sessions",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Sessions of a machine in a month.",
)
@click.option("--peak", default=3.0, show_default=True, help="The busiest second over the mean.")
@click.option("--break-even", is_flag=True, help="Say where it pays, for all machines and stores.")
@click.option(
    "--check",
    type=click.IntRange(1),
    metavar="N",
    help="Put and fetch N sessions with the daemon's own shared tier, and compare the counts.",
)
@click.option(
    "--traces",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Learn the sessions from a trace instead of those in the package; may be given again.",
)
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the sessions of --traces to this file, and stop.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def scale(
    puts: str,
    away: float,
    pulled: float,
    break_even: bool,
    check: int | None,
    traces: tuple[Path, ...],
    save: Path | None,
    as_json: bool,
    **fleet: Any,
) -> None:
    """Count the requests, objects, bytes and dollars of the shared tier for many sessions a month."""
    from lab.scale.sessions import kept_samples, learn
    from lab.scale.sessions import save as save_samples
    from lab.scale.work import TierHabits

    if save is not None and not traces:
        raise click.UsageError("--save is for the sessions of --traces; there are none.")
    samples = [learn(path) for path in traces] if traces else kept_samples()
    if save is not None:
        save_samples(samples, save)
        return
    habits = TierHabits(puts, away, pulled)
    if check is not None:
        rows = list(_checked(samples, check, habits))
    elif break_even:
        rows = list(_break_even(samples, habits, fleet["bits"]))
    else:
        rows = list(_scaled(samples, habits, **fleet))
    if as_json:
        for row in rows:
            echo_json(row)
    elif check is not None:
        show_table(("trace", *(f">{key}" for key in list(rows[0])[1:])), map(_texts, rows))
    elif break_even:
        show_table(_BREAK_EVEN_HEADS, map(_texts, rows))
    else:
        _show_scaled(rows)
    if check is not None and not all(row["equal"] for row in rows):
        raise click.ClickException("The counts are not those of the daemon's own code.")


def _scaled(
    samples: Sequence[Sample],
    habits: TierHabits,
    *,
    sessions: str,
    machine: str,
    bits: float,
    store: str,
    tenant_sessions: int,
    machine_sessions: int,
    peak: float,
) -> Iterator[dict[str, Any]]:
    from lab.scale.prices import MACHINES, STORES
    from lab.scale.scaling import FleetSizes, breaks, count_tenant, scaled

    model, prices = MACHINES[machine], STORES[store]
    setting = FleetSizes(tenant_sessions, machine_sessions, peak)
    for sample in samples:
        for n in _numbers(sessions):
            of_tenant = min(n, tenant_sessions)
            tenant = count_tenant(sample, of_tenant, habits, model.stored_bytes(bits))
            found = scaled(n, tenant, setting, prices, model)
            total = found.requests
            yield {
                "trace": sample.trace,
                "sessions": n,
                "objects": total.n_objects,
                "objects_by_kind": dict(total.stored),
                "bytes": total.n_bytes,
                "bytes_by_kind": dict(total.stored_bytes),
                **{kind: getattr(total, kind) for kind in _KINDS},
                "bytes_down": total.bytes_down,
                "puts_a_second": found.puts_a_second,
                "gets_a_second": found.gets_a_second,
                "partitions": found.partitions,
                "listing_s": found.listing_s,
                "base_fetch_s": found.base_fetch_s,
                "storage_dollars": found.storage_cost,
                "requests_dollars": found.requests_cost,
                "outside_dollars": found.outside_cost,
                "saved_dollars": found.saved_cost,
                "breaks": list(breaks(found, prices)),
            }


def _numbers(text: str) -> list[int]:
    """Of `1e3,1e6`. Raises BadParameter."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(1 <= each <= 1e12 for each in found):  # also for what is not a number
        raise click.BadParameter(f"{text!r} is not numbers from 1 to 1e12 with commas between.")
    return [round(each) for each in found]


def _show_scaled(rows: list[dict[str, Any]]) -> None:
    heads = (
        "trace", ">sessions", ">objects", ">stored", ">PUT", ">GET", ">HEAD", ">LIST", ">PUT/s", ">GET/s",
        ">storage $", ">requests $", ">outside $", ">saved $",
    )  # fmt: skip
    money = ("storage_dollars", "requests_dollars", "outside_dollars", "saved_dollars")
    counted = ("objects", "bytes", *_KINDS, "puts_a_second", "gets_a_second", *money)
    show_table(
        heads,
        (
            (
                row["trace"],
                f"{row['sessions']:.0e}",
                *(size(row[key]) if key == "bytes" else _short(row[key]) for key in counted),
            )
            for row in rows
        ),
    )
    for row in rows:
        for each in row["breaks"]:
            click.echo(f"{row['trace']}, {row['sessions']:.0e}: {each}.")


_BREAK_EVEN_HEADS = (
    "trace", "machine", "store", ">bytes a token", ">evaluating", ">putting", ">fetching", ">from outside", ">a month", ">fetches to pay",
    ">days for one",
)  # fmt: skip


def _break_even(
    samples: Sequence[Sample], habits: TierHabits, bits: float
) -> Iterator[dict[str, Any]]:
    """Dollars are for a million tokens."""
    from lab.scale.prices import MACHINES, STORES
    from lab.scale.scaling import break_even

    for sample in samples:
        for machine in MACHINES.values():
            for store in STORES.values():
                found = break_even(machine, bits, sample, habits, store)
                fetches = found.fetches_a_month
                yield {
                    "trace": sample.trace,
                    "machine": machine.name,
                    "store": store.name,
                    "token_bytes": found.token_bytes,
                    "prefill_dollars": found.prefill,
                    "put_dollars": found.put,
                    "fetch_dollars": found.fetch,
                    "outside_dollars": found.outside,
                    "month_dollars": found.month,
                    "fetches_a_month": fetches if math.isfinite(fetches) else None,
                    "days_for_one_fetch": max(0.0, found.days_for_one_fetch),
                }


def _checked(samples: Sequence[Sample], n: int, habits: TierHabits) -> Iterator[dict[str, Any]]:
    """With few bytes a token, so that they fit memory; a test compares large ones."""
    import tempfile

    from lab.scale.counted import CountedTier
    from lab.scale.real import RealTier
    from lab.scale.work import Fleet

    for sample in samples:
        shapes = [sample.shapes[i % len(sample.shapes)] for i in range(n)]
        counted = CountedTier(_CHECKED_TOKEN_BYTES)
        with (
            tempfile.TemporaryDirectory() as folder,
            RealTier(Path(folder), _CHECKED_TOKEN_BYTES) as real,
        ):
            for tier in (real, counted):
                fleet = Fleet(tier, habits)
                fleet.put_bases(shapes)
                for number, shape in enumerate(shapes):
                    fleet.play(number, shape)
        row: dict[str, Any] = {"trace": sample.trace, "sessions": n, "equal": True}
        for kind in ("put", "get", "head", "tokens_fetched"):
            row[kind] = getattr(real.requests, kind)
            row["equal"] &= row[kind] == getattr(counted.rows, kind)
        yield row


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(each if isinstance(each, str) else _short(each) for each in row.values())


def _short(value: float | None) -> str:
    """A number in three digits."""
    if value is None:
        return "never"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:.3g}"
