"""`towerd` with the laboratory's policies besides its own, which counts what its decisions cost.

    python server.py OPTIONS.json serve -m MODEL ...

OPTIONS.json: `walks`, the agents of each workflow's steps for policies with an oracle; `costs`, where to
write the CPU time of each kind of decision at the end.
"""

from __future__ import annotations

import atexit
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from towerd.cli.lab import found
from towerd.policy import factory
from towerd.policy.base import Policy, ReuseForecaster, Tree
from towerd.policy.workflow_tree import WorkflowTree

LABORATORY = {
    "lifecycle": "lab.policies.lifecycle:Lifecycle",
    "hierarchy": "lab.policies.hierarchy:Hierarchy",
    "pbkv-lied": "lab.policies.told:lied_pbkv",
    "foresight-lied": "lab.policies.told:lied_foresight",
    "pbkv-told": "lab.bench.workflows.server:told_pbkv",
    "foresight-told": "lab.bench.workflows.server:told_foresight",
}
"""The rows that only the laboratory has."""
_options: dict[str, Any] = {}
_costs: dict[str, list[float]] = {}


def told_pbkv(tree: Tree) -> Policy:
    """PBKV that knows the walks."""
    from lab.policies.told import Oracle, ToldPBKV

    return ToldPBKV(tree, Oracle(_options["walks"]))


def told_foresight(tree: Tree) -> Policy:
    """foresight that knows the walks."""
    from lab.policies.told import Oracle, ToldForesight

    return ToldForesight(tree, Oracle(_options["walks"]))


def timed(
    name: str, call: Callable[..., Any], per: Callable[[], int] = lambda: 1
) -> Callable[..., Any]:
    """`call`, with the CPU time of each call noted, shared by as many items as `per` says afterwards."""
    spent = _costs.setdefault(name, [])

    def run(*args: Any, **named: Any) -> Any:
        start = time.thread_time()
        found = call(*args, **named)
        n = per()
        if n:
            spent.append((time.thread_time() - start) / n)
        return found

    return run


def observed(policy: Policy) -> Policy:
    """Note what the decisions of one policy cost, by the names and units of PBKV's Table 4. Patched on the
    object, so that policies carry no timers for the sake of a benchmark."""
    ranked: list[int] = []
    rank_each = policy._rank_each

    def count(entries: list[Any]) -> list[Any]:
        ranked.append(len(entries))
        return rank_each(entries)

    each: Any = policy
    each._rank_each = count
    each._rank_leaves = timed("score_update_s", policy._rank_leaves, lambda: ranked[-1])
    each.victims = timed("evict_s", policy.victims)
    if isinstance(policy, WorkflowTree):
        predictor: Any = policy.predictor
        predictor.forecast = timed("predict_s", predictor.forecast)
    if isinstance(policy, ReuseForecaster):
        each.wanted = timed("prefetch_s", policy.wanted)
    return policy


def main() -> None:
    """Serve."""
    from towerd.cli.main import towerd

    ranking: Any = importlib.import_module("towerd.tiers.ranking")
    make = ranking.make_policy
    ranking.make_policy = lambda *args: observed(make(*args))
    costs = Path(_options["costs"])
    atexit.register(lambda: costs.write_text(json.dumps(_costs)))
    towerd(sys.argv[2:])


if __name__ == "__main__":
    found()
    # the module's other name: what the policies import
    from lab.bench.workflows import server

    server._options |= json.loads(Path(sys.argv[1]).read_text())
    for name, where in LABORATORY.items():
        factory.register(name, where)
    server.main()
