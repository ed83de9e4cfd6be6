"""`towerctl why`: why a segment is where it is, and why a request did not find more of its prompt."""

from __future__ import annotations

from collections.abc import Iterator

import click

from towerd.cli.client.target import Target, connect, json_option, target_options
from towerd.cli.client.transport import Json
from towerd.errors import TowerdError

_PLACES = {"hot": "RAM", "warm": "disk"}


@click.command()
@click.argument("which", metavar="SEGMENT|REQUEST")
@json_option
@target_options
def why(which: str, as_json: bool, target: Target) -> None:
    """Say where SEGMENT is and why it leaves sooner or later than others, or why REQUEST (an id, or what
    the log shows of it) evaluated as much of its prompt as it did."""
    from towerd.cli.output import echo_json

    with connect(target) as backend:
        if which.isdecimal():
            found = backend.why(int(which[:18]))
            said = sentences(found["segment"], found["why"])
        elif backend.has_model:
            found = backend.why_request(which)
            said = reasons(found)
        else:
            raise TowerdError(
                "Only the daemon knows this: start it with towerd serve and ask again."
            )
    if as_json:
        echo_json(found)
    else:
        for sentence in said:
            click.echo(sentence)


def reasons(found: Json) -> Iterator[str]:
    """What is said of a request."""
    from towerd.cli.output import clean

    request, divergence = found["request"], found["divergence"]
    reuse = request["reuse"]
    reused = reuse["live"] + reuse["hot"] + reuse["warm"]
    evaluated = f"{reused:,} tokens were reused, {reuse['prefill']:,} evaluated"
    yield f"Request {clean(request['id'])}: {evaluated}."
    if found["why"]:
        yield clean(found["why"])
    if divergence is None:
        return
    base, title = clean(divergence["base"]), clean(divergence["title"])
    of = f"the base {base}" if base else f'"{title}" ({clean(divergence["session"])})'
    yield f"Diverged from {of}, which has {divergence['known']:,} tokens of what follows, too."
    for name, side in (("both", "before"), ("stored", "stored"), ("sent", "sent")):
        if divergence[side] is not None:
            yield f"  {name:<6}  {clean(divergence[side])}"
    yield clean(divergence["advice"])


def sentences(segment: Json, known: Json) -> Iterator[str]:
    """What is said of a segment, and of each tier that it is in."""
    tiers = [tier for tier in _PLACES if known[tier] is not None]
    where = " and on ".join(_PLACES[tier] for tier in tiers)
    held = f"is {'in' if 'hot' in tiers else 'on'} {where}" if tiers else "has no rows anywhere"
    pinned = ", and pinned: it stays on disk whatever comes" if segment["pinned"] else ""
    yield f"Segment {segment['id']}, tokens [{segment['p0']:,}, {segment['p1']:,}), {held}{pinned}."
    for tier in tiers:
        order = _order(known[tier]["place"], known[f"n_{tier}"])
        reasons = ", and ".join(_reasons(known[tier]))
        yield f"From {_PLACES[tier]} {order}: {reasons} ({known['policy']})."


def _order(place: int | None, n: int | None) -> str:
    """Where it stands in the order of eviction. place: how many of n leave before it; n is None for
    one of several tenants, who is not told."""
    if n is None:
        return "its place in the order is not shown"
    if place is None:
        return "it leaves after its continuations"
    if place == 0:
        return f"it is the first of {n:,} to leave"
    return f"{place:,} of {n:,} leave before it"


def _reasons(known: Json) -> Iterator[str]:
    """What the policy knows of it, as ends of a sentence."""
    from towerd.cli.output import ago
    from towerd.cli.progress import duration

    yield f"it was last used {ago(known['used'])}"
    if known.get("expected"):
        yield "a running workflow is about to want it"
    if known.get("retired"):
        yield "no workflow has a step left that wants it"
    if known.get("ended"):
        yield "its workflow has ended"
    elif known.get("returns_per_s"):
        expected = f"it is expected back once in {duration(1 / known['returns_per_s'])}"
        trusts = "" if known["trusts"] else ", though the order goes by the last use for now"
        yield f"{expected}{trusts}"
