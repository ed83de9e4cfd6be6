"""Access to what all tenants do together: how much they ask, and when."""

from __future__ import annotations

from aiohttp import web

from towerd.api.http.keys import TENANT
from towerd.engine.base import SlotView
from towerd.errors import Forbidden
from towerd.settings.setting import LOCAL_TENANT
from towerd.store.prefix.scope import tenant_of


def require_overview(request: web.Request) -> None:
    """Raises Forbidden if the caller is one of several tenants."""
    if not request[TENANT].sees_all:
        raise Forbidden(
            "This shows what all tenants do: ask over the daemon's Unix socket, or with a key of "
            f"the tenant '{LOCAL_TENANT}'"
        )


def is_own_slot(request: web.Request, slot: SlotView) -> bool:
    """Whether the caller may see what a slot is doing, or did last: the owner, and whose request
    that is."""
    tenant = request[TENANT]
    return tenant.admin or tenant_of(slot.scope) == tenant.scope


def shows_busy(request: web.Request) -> bool:
    """Whether the caller may see that a slot works for another tenant."""
    return request[TENANT].sees_all
