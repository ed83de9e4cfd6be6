"""Room: requests wait for RAM that towerd may have, and are refused when none gets free.

Before a body is read there has to be some room. Once it is there, what its parsing takes at most is claimed until it is
parsed. What the model takes for the request was set aside when the daemon started.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from towerd.errors import RamLimitReached, RequestTooBig
from towerd.system.ram_limit import NO_LIMIT, RamLimit

RAM = web.AppKey("ram", RamLimit)
WAIT_S = 10.0
"""How long a request waits for room."""
_LOOK_S = 0.02
_SMALL_BYTES = 64 * 1024
"""The values of smaller bodies are not counted."""
_PER_BYTE, _PER_VALUE, _PER_TEXT_BYTE, _PER_MEDIUM_BYTE = 4, 64, 42, 16
"""RAM that parsing takes for each byte of a body, each value in it, each byte of text that is tokenized, and each of
media: measured on texts, lists of numbers, and photographs."""
_TEXT_SHARE = 64
"""Longer texts are not tokenized: see `Core.text_bytes_max`."""
_MEDIUM = b";base64,"


def bytes_to_parse(data: bytes, room: int) -> int:
    """RAM that parsing a body takes beside its own bytes, at most. room: bytes that are left beside the model"""
    if _MEDIUM in data:
        return _PER_MEDIUM_BYTE * len(data)
    if len(data) <= _SMALL_BYTES:
        return _PER_TEXT_BYTE * len(data)
    n_values = data.count(b",")
    n_text = min(max(0, len(data) - 2 * n_values), room // _TEXT_SHARE)
    return _PER_BYTE * len(data) + _PER_VALUE * n_values + _PER_TEXT_BYTE * n_text


async def wait_for_room(ram: RamLimit, n_bytes: int, *, claim: bool) -> None:
    """Wait until so much may be taken; claim: and claim it. Raises RamLimitReached if that takes too long,
    RequestTooBig if it never may."""
    if not ram.is_limited:
        return
    if ram.room < NO_LIMIT and n_bytes > ram.room:
        ram.n_refused += 1
        raise RequestTooBig(
            f"Reading this request takes {_mib(n_bytes)} of RAM, and there are {_mib(ram.room)} beside the model: send "
            f"less at once, or raise {ram.text}"
        )
    deadline_s = time.monotonic() + WAIT_S
    while not (ram.claim(n_bytes) if claim else ram.has_room(n_bytes)):
        if time.monotonic() >= deadline_s:
            ram.n_refused += 1
            raise RamLimitReached(
                f"towerd has taken all the RAM that it may have ({ram.text}): try again in a few seconds"
            )
        ram.ask()
        await asyncio.sleep(_LOOK_S)


def _mib(n_bytes: int) -> str:
    return f"{-(-n_bytes // 2**20):,} MiB"
