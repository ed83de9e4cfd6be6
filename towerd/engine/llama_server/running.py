"""What llama-server does for the open leases: how far each request is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

from towerd.engine.base import SlotView, tokens_per_second
from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.engine.llama_server.slots.slot_lease import SlotLease
from towerd.errors import TowerdError

PATIENCE_S = 1.0
"""llama-server answers between two batches, which may be long ones."""


async def running_views(
    leases: Iterable[SlotLease], upstream: UpstreamClient, n_ctx: int
) -> list[SlotView]:
    """The slots of these leases. Of a llama-server that does not say what they do, only what towerd
    knows itself."""
    open_leases = {lease.slot: lease for lease in leases}
    said: dict[int, Mapping[str, Any]] = {}
    if open_leases:
        try:
            found = await asyncio.wait_for(upstream.slots(), PATIENCE_S)
            said = {each["id"]: each for each in found if each["is_processing"]}
        except (TowerdError, TimeoutError):
            pass
    return [_view(lease, said.get(slot, {}), n_ctx) for slot, lease in open_leases.items()]


def _view(lease: SlotLease, said: Mapping[str, Any], n_ctx: int) -> SlotView:
    """said: the slot as llama-server shows it; empty while the request is not in it."""
    n_prompt = 0 if lease.ids is None else len(lease.ids)
    cached = lease.reuse.live + lease.reuse.hot + lease.reuse.warm
    n_decoded = said["next_token"][0]["n_decoded"] if said else 0
    first = lease.t_first
    return SlotView(
        id=lease.slot,
        n_ctx=n_ctx,
        is_processing=True,
        session=lease.session,
        n_tokens=said.get("n_prompt_tokens", n_prompt),
        n_decoded=n_decoded,
        request=None,
        scope=lease.scope,
        n_prompt_processed=said.get("n_prompt_tokens_processed", 0),
        n_prompt_cached=said.get("n_prompt_tokens_cache", cached),
        ttft_s=None if first is None else first - lease.t_began,
        tokens_per_second=(
            None if first is None else tokens_per_second(n_decoded, time.monotonic() - first)
        ),
    )
