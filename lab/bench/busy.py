"""How busy a server was while a benchmark ran."""

from __future__ import annotations

from collections.abc import Iterable


def busy_share(spans_s: Iterable[tuple[float, float]]) -> float:
    """Share of the time in which any request was waiting or served. spans_s: for each request, when it started
    to wait and when it was finished; at least one."""
    ordered = sorted(spans_s)
    first_s = until_s = ordered[0][0]
    busy_s = 0.0
    for start_s, end_s in ordered:
        busy_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return busy_s / (until_s - first_s)
