"""Scopes: the tenant that owns segments, and the LoRA adapters that affected their rows.

A scope is a tenant's name. Adapters change the rows, so the name is followed by the
adapters:

    local                       alice~59ce0aab@0.5,7d10c2f4@1.0

Keys, the prefix tree, live sequences and sessions are separated by scope. Ownership checks
compare only the tenant.
"""

from __future__ import annotations

from collections.abc import Iterable

from towerd.store.tree.node import PUBLIC

MARK = "~"
"""Separates the tenant's name, which never contains it, from the adapters."""
TENANT_SQL = f"substr(scope, 1, instr(scope, '{MARK}') - 1)"
"""SQL for the tenant of a row whose column `scope` has adapters; otherwise empty."""


def tenant_of(scope: str) -> str:
    """The tenant of a scope."""
    return scope.partition(MARK)[0]


def adapters_of(scope: str) -> str:
    """The part after the tenant's name: `hash@scale` of each adapter, comma-separated; empty
    for none."""
    return scope.partition(MARK)[2]


def scope_of(tenant: str, adapters: str) -> str:
    """The scope of a tenant's rows under these adapters."""
    return f"{tenant}{MARK}{adapters}" if adapters else tenant


def public_of(scope: str) -> str:
    """The scope of the public segments that `scope` may reuse."""
    return scope_of(PUBLIC, adapters_of(scope))


def readable_scopes(scopes: Iterable[str]) -> frozenset[str]:
    """The scopes of the segments that requests of these scopes may reuse."""
    return frozenset(each for scope in scopes for each in (scope, public_of(scope)))


def is_public(scope: str) -> bool:
    """Whether the scope holds public segments."""
    return tenant_of(scope) == PUBLIC


def is_of(scope: str, asked: str) -> bool:
    """Whether `asked`, a tenant's name or a scope, covers `scope`."""
    return asked in (scope, tenant_of(scope))
