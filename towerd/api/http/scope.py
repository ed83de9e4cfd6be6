"""The scope of a request: its tenant, and the LoRA adapters that it asks for."""

from __future__ import annotations

from aiohttp import web

from towerd.api.http.keys import TENANT, service_of
from towerd.engine.base import Engine


def scope_of(engine: Engine, tenant: str, asked: object = None) -> str:
    """The scope of a tenant's request. asked: its field `lora`. Raises InvalidRequest."""
    return tenant if engine.adapters is None else engine.adapters.scope(tenant, asked)


def own_scope(request: web.Request) -> str:
    """The scope of a request that names no adapters."""
    return scope_of(service_of(request).engine, request[TENANT].scope)
