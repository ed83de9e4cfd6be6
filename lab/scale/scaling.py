"""Scaling: what many sessions a month ask, store and cost, and when it pays.

One tenant's sessions are counted; tenants are alike and share the public bases. A session is kept for a month.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lab.scale.counted import CountedTier
from lab.scale.prices import GB, MONTH_S, Machine, StorePrices
from lab.scale.requests import Requests
from lab.scale.sessions import Sample
from lab.scale.work import Fleet, TierHabits
from towerd.tiers.shared.objects import count_parts

LIST_OBJECTS = 1000
"""Of one page of a listing, which is one request."""
LIST_S = 0.1
"""That a page takes: assumed."""


@dataclass(frozen=True, slots=True)
class FleetSizes:
    """A fleet."""

    tenant_sessions: int = 1000
    """Sessions of a tenant, which alone share marks."""
    machine_sessions: int = 1000
    """Sessions of a machine in a month: each machine fetches the bases once."""
    peak: float = 3.0
    """The busiest second over the mean."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What so many sessions a month come to."""

    n_sessions: int
    requests: Requests
    """Of the month."""
    puts_a_second: float
    """PUT and LIST, in the busiest second."""
    gets_a_second: float
    """GET and HEAD."""
    partitions: float
    """Of the store that take as many, or servers."""
    listing_requests: float
    listing_s: float
    """To list every object once, one page after the other: what a garbage collector would."""
    base_fetch_s: float
    """For all machines to fetch the largest base at once, from the one partition that has it."""
    storage_cost: float
    requests_cost: float
    outside_cost: float
    """On top, where all machines are outside of the store's region."""
    saved_cost: float
    """Of evaluating what was fetched."""

    @property
    def cost(self) -> float:
        """Of a month."""
        return self.storage_cost + self.requests_cost


@dataclass(frozen=True, slots=True)
class TenantRequests:
    """Requests of one tenant, and those for the bases of all."""

    own: Requests
    bases: Requests
    base_fetches: Requests
    """For a machine that fetches every base."""
    base_parts_max: int


def count_tenant(
    sample: Sample, n_sessions: int, habits: TierHabits, token_bytes: int
) -> TenantRequests:
    """Those of so many sessions like those of a sample, in turns. From the second round on, when the tenant's marks of
    the bases are there, a round is as the one before: more than two are not played."""
    shapes = sample.shapes
    tier = CountedTier(token_bytes)
    fleet = Fleet(tier, habits)
    fleet.put_bases(shapes)
    bases, own = tier.take(), Requests()
    n_played = min(n_sessions, 2 * len(shapes))
    for start in range(0, n_played, len(shapes)):
        for number in range(start, min(n_played, start + len(shapes))):
            fleet.play(number, shapes[number - start])
        own.add(tier.take(), 1 if start == 0 else (n_sessions - start) / (n_played - start))
    lengths = [n for _, n in {(shape.base, shape.shared) for shape in shapes if shape.base >= 0}]
    parts = [count_parts(n * token_bytes) for n in lengths]
    fetches = Requests(get=len(lengths) + sum(parts), list=len(lengths))
    fetches.bytes_down, fetches.tokens_fetched = sum(lengths) * token_bytes, sum(lengths)
    return TenantRequests(own, bases, fetches, max(parts, default=0))


def scaled(
    n_sessions: int,
    tenant: TenantRequests,
    setting: FleetSizes,
    store: StorePrices,
    machine: Machine,
) -> Scale:
    """tenant: of `min(n_sessions, setting.tenant_sessions)` sessions"""
    total, n_machines = Requests(), max(1.0, n_sessions / setting.machine_sessions)
    total.add(tenant.own, max(1.0, n_sessions / setting.tenant_sessions))
    total.add(tenant.bases)
    total.add(tenant.base_fetches, n_machines)
    puts = (total.put + total.list) / MONTH_S * setting.peak
    gets = (total.get + total.head) / MONTH_S * setting.peak
    pages = total.n_objects / LIST_OBJECTS
    return Scale(
        n_sessions,
        total,
        puts,
        gets,
        puts / store.puts_a_second + gets / store.gets_a_second,
        pages,
        pages * LIST_S,
        n_machines * tenant.base_parts_max / store.gets_a_second,
        store.storage_cost(total.n_bytes),
        store.requests_cost(total),
        total.bytes_down / GB * store.out_gb,
        total.tokens_fetched * machine.prefill_cost,
    )


@dataclass(frozen=True, slots=True)
class BreakEven:
    """When the rows of a token pay, in dollars alone. Costs are a million tokens'."""

    machine: Machine
    token_bytes: int
    prefill: float
    put: float
    fetch: float
    outside: float
    """On top of a fetch, outside of the store's region."""
    month: float
    """Of storage."""

    @property
    def fetches_a_month(self) -> float:
        """With fewer, evaluating is cheaper; infinite where a fetch costs more than that."""
        saved = self.prefill - self.fetch
        return (self.put + self.month) / saved if saved > 0 else float("inf")

    @property
    def days_for_one_fetch(self) -> float:
        """Within so many days one fetch pays; negative: never, since putting costs more."""
        return 30 * (self.prefill - self.fetch - self.put) / self.month


def break_even(
    machine: Machine, bits: float, sample: Sample, habits: TierHabits, store: StorePrices
) -> BreakEven:
    """Of a model's rows in so many bits a number, put as this sample's sessions are."""
    token_bytes = machine.stored_bytes(bits)
    quiet = replace(habits, away=0.0, pulled=0.0)
    n = len(sample.shapes)
    put = count_tenant(sample, n, quiet, token_bytes).own
    pulled = count_tenant(sample, n, replace(quiet, pulled=1.0), token_bytes).own
    n_tokens = put.stored_bytes["objects"] / token_bytes
    fetch = store.requests_cost(pulled) - store.requests_cost(put)
    n_fetched = max(1, pulled.tokens_fetched)
    return BreakEven(
        machine,
        token_bytes,
        1e6 * machine.prefill_cost,
        1e6 * store.requests_cost(put) / n_tokens,
        1e6 * fetch / n_fetched,
        1e6 * pulled.bytes_down / GB * store.out_gb / n_fetched,
        1e6 * store.storage_cost(put.n_bytes) / n_tokens,
    )


def breaks(scale: Scale, store: StorePrices) -> Iterator[str]:
    """What no longer holds at this scale, in sentences."""
    if scale.partitions > 1:
        yield (
            f"one partition or server takes {store.puts_a_second:,.0f} PUT or {store.gets_a_second:,.0f} GET a second; "
            f"{scale.partitions:,.1f} are needed"
        )
    if scale.listing_s > 86400:
        yield f"one listing of all objects takes {scale.listing_s / 86400:,.1f} days, page by page"
    if scale.base_fetch_s > 60:
        yield f"a new base reaches all machines after {scale.base_fetch_s / 60:,.0f} minutes at best"
    if scale.cost > scale.saved_cost:
        yield f"it costs {scale.cost / max(1e-9, scale.saved_cost):,.1f} times the evaluation that it saves"
