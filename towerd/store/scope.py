"""Scopes: whose segments they are, and which LoRA adapters had a part in their rows.

A scope is a tenant's name. Rows under adapters are other rows, so the adapters follow it:

    local                       alice~59ce0aab@0.5,7d10c2f4@1.0

Whatever goes by the scope (keys, the trie, live sequences, sessions) so keeps them apart; whatever
asks whose something is asks for the tenant.
"""

from __future__ import annotations

from towerd.store.node import PUBLIC

MARK = "~"
"""Between a tenant's name, which never has it, and the adapters."""
TENANT_SQL = f"substr(scope, 1, instr(scope, '{MARK}') - 1)"
"""Whose a row is, of a column `scope` that has adapters; else empty."""


def tenant_of(scope: str) -> str:
    """Whose it is."""
    return scope.partition(MARK)[0]


def adapters_of(scope: str) -> str:
    """What follows the tenant's name: `hash@scale` of each adapter, with commas; empty: none."""
    return scope.partition(MARK)[2]


def scope_of(tenant: str, adapters: str) -> str:
    """The scope of a tenant's rows under these adapters."""
    return f"{tenant}{MARK}{adapters}" if adapters else tenant


def public_of(scope: str) -> str:
    """The scope of the public segments that `scope` may reuse."""
    return scope_of(PUBLIC, adapters_of(scope))


def is_public(scope: str) -> bool:
    """Whether it is that of public segments."""
    return tenant_of(scope) == PUBLIC


def is_of(scope: str, asked: str) -> bool:
    """Whether whoever asks for `asked`, a tenant's name or a scope, means `scope` too."""
    return asked in (scope, tenant_of(scope))
