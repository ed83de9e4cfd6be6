"""`towerd` with the laboratory's policies besides its own, which counts what its decisions cost.

    python server.py OPTIONS.json serve -m MODEL ...

OPTIONS.json: `walks`, the agents of each workflow's steps for policies with an oracle; `costs`, where to
write the CPU time of each kind of decision at the end.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from towerd.cli.lab import found
from towerd.policy import factory
from towerd.policy.base import Policy, Tree

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


def told_pbkv(tree: Tree) -> Policy:
    """PBKV that knows the walks."""
    from lab.policies.told import Oracle, ToldPBKV

    return ToldPBKV(tree, Oracle(_options["walks"]))


def told_foresight(tree: Tree) -> Policy:
    """foresight that knows the walks."""
    from lab.policies.told import Oracle, ToldForesight

    return ToldForesight(tree, Oracle(_options["walks"]))


def main() -> None:
    """Serve."""
    from towerd.cli.main import towerd

    towerd(sys.argv[2:])


if __name__ == "__main__":
    found()
    # the module's other name: what the policies import
    from lab.bench.workflows import server

    server._options |= json.loads(Path(sys.argv[1]).read_text())
    for name, where in LABORATORY.items():
        factory.register(name, where)
    server.main()
