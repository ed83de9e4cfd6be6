"""`towerctl why`: why a segment is where it is."""

from __future__ import annotations

import click

from towerd.cli.client.api_client import Json
from towerd.cli.client.target import Target, connect, json_option, target_options

_WORDS = {
    "score": "score",
    "place": "goes",
    "used": "last use",
    "returns_per_s": "returns per second",
    "away_s": "away for",
}


@click.command()
@click.argument("segment", type=click.IntRange(1, 2**62))
@json_option
@target_options
def why(segment: int, as_json: bool, target: Target) -> None:
    """Show how the eviction policy ranks SEGMENT: score, prediction, pin and place, per tier."""
    from towerd.cli.output import echo_json, show_facts

    with connect(target) as backend:
        found = backend.why(segment)
    if as_json:
        echo_json(found)
    else:
        show_facts(_facts(found["segment"], found["why"]))


def _facts(segment: Json, known: Json) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("segment", segment["id"]),
        ("tokens", f"[{segment['p0']:,}, {segment['p1']:,})"),
        ("pinned", "yes: it stays on disk" if segment["pinned"] else "no"),
        ("policy", known["policy"]),
    ]
    for tier, place in (("hot", "RAM"), ("warm", "disk")):
        if known[tier] is None:
            facts.append((tier, f"not in {place}"))
            continue
        for name, value in known[tier].items():
            said = _said(name, value, known[f"n_{tier}"])
            facts.append((f"{tier}: {_WORDS.get(name, name)}", said))
    return facts


def _said(name: str, value: object, n: int) -> object:
    from towerd.cli.output import moment

    if name == "place":
        return f"after {value} others of {n}" if value is not None else "after its continuations"
    if name == "used" and isinstance(value, float):
        return moment(value)
    return f"{value:.6g}" if isinstance(value, float) else value
