"""What a caller may see and do: its scope, what only the owner may, what all tenants do together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from aiohttp import web

from towerd.api.http.keys import CONFIG, TENANT, service_of
from towerd.api.http.tenants import CALLER, SOCKET
from towerd.engine.base import SlotView
from towerd.errors import Forbidden
from towerd.settings.setting import LOCAL_TENANT
from towerd.store.tree.scope import tenant_of


def own_scope(request: web.Request) -> str:
    """The scope of a request that names no LoRA adapters."""
    return service_of(request).engine.adapters.scope(request[TENANT].scope)


def visible_scope(request: web.Request) -> str | None:
    """The scope that the caller sees: its own; the owner sees all (None), or that of `?scope=`."""
    tenant = request[TENANT]
    return (request.query.get("scope") or None) if tenant.admin else tenant.scope


def is_owner_socket(request: web.Request) -> bool:
    """Whether the request came over the Unix socket, which only the daemon's owner can open. Behind
    a router: over the router's."""
    if request.transport is None:
        return False
    if isinstance(request.transport.get_extra_info("sockname"), tuple):
        return False
    return not request.app[CONFIG].behind_router or request.headers.get(CALLER) == SOCKET


def require_admin(request: web.Request) -> None:
    """Raises Forbidden unless the caller is the owner: over the Unix socket, or if no keys are
    set."""
    if not request[TENANT].admin:
        raise Forbidden("Only the daemon's owner may do this, over its Unix socket")


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


def slot_numbers(request: web.Request, slots: Iterable[SlotView]) -> dict[int, int]:
    """By its id, the number by which the caller knows each slot. For one of several tenants its own
    running requests come first: which slots are theirs says what the other tenants take."""
    if request[TENANT].sees_all:
        return {slot.id: slot.id for slot in slots}

    def place(slot: SlotView) -> tuple[bool, int]:
        return not (slot.is_processing and is_own_slot(request, slot)), slot.id

    return {slot.id: number for number, slot in enumerate(sorted(slots, key=place))}


def seen_slots(request: web.Request, slots: list[SlotView]) -> list[SlotView]:
    """The slots as the caller may see them."""
    numbers, sees_all = slot_numbers(request, slots), request[TENANT].sees_all
    seen = []
    for slot in slots:
        # A slot that only did its last request would show when another tenant takes it.
        is_told = is_own_slot(request, slot) and (sees_all or slot.is_processing)
        view = slot if is_told else slot.hidden(shows_busy=sees_all)
        seen.append(replace(view, id=numbers[slot.id]))
    return sorted(seen, key=lambda slot: slot.id)
