"""Authentication: API keys, tenants and the owner on the Unix socket."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from towerd.errors import Unauthorized
from towerd.settings.setting import LOCAL_TENANT


@dataclass(frozen=True, slots=True)
class Tenant:
    """The authenticated caller."""

    scope: str
    """Namespace of everything the caller stores; part of every segment key."""
    admin: bool
    """May see every tenant's state and change what all tenants share."""
    sees_all: bool
    """May see how much all tenants ask, and when."""


OWNER = Tenant(LOCAL_TENANT, admin=True, sees_all=True)
CALLER = "X-Towerd-Caller"
"""The header by which a router tells a model's process who calls: it has checked the key."""
SOCKET = "socket"
"""The value of `CALLER` for the owner on the router's Unix socket."""
_OWNER = "owner"
_TENANT = "tenant:"


def caller_name(tenant: Tenant, *, on_socket: bool) -> str:
    """The value of `CALLER` for a tenant."""
    if on_socket:
        return SOCKET
    return _OWNER if tenant.admin else _TENANT + tenant.scope


class Tenants:
    """The key table. Without keys every caller is the owner, which `Config` allows on loopback
    alone. Among several tenants the one named `local` sees what all do."""

    def __init__(self, api_keys: Sequence[tuple[str, str]]) -> None:
        is_alone = len({name for _, name in api_keys}) < 2
        self._keys = [
            (key.encode(), Tenant(name, admin=False, sees_all=is_alone or name == LOCAL_TENANT))
            for key, name in api_keys
        ]

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._keys)

    def named(self, caller: str) -> Tenant:
        """The tenant that `CALLER` names. Raises Unauthorized, also without a name."""
        if caller in (SOCKET, _OWNER):
            return OWNER
        for _, tenant in self._keys:
            if caller == _TENANT + tenant.scope:
                return tenant
        raise Unauthorized("Only the router may call this")

    def identify(self, authorization: str, x_api_key: str) -> Tenant:
        """The tenant of the offered key, as llama-server reads it: `Authorization`, with or
        without `Bearer `, else `X-Api-Key`. Always compares all keys, each in constant time.
        Raises Unauthorized."""
        if not self._keys:
            return OWNER
        offered = (
            (authorization or x_api_key).removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        )
        found: Tenant | None = None
        for key, tenant in self._keys:
            if hmac.compare_digest(key, offered):
                found = tenant
        if found is None:
            raise Unauthorized("Invalid API Key")
        return found
