"""Room: requests wait for RAM that towerd may have, and are refused when none gets free.

Before a body is read there has to be some room. Once it is there, what its parsing takes at most is claimed until it is
parsed. What the model takes for the request was set aside when the daemon started.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from towerd.errors import RamLimitReached, RequestTooBig
from towerd.system.ram_limit import MEDIA_SHARE, NO_LIMIT, TEXT_SHARE, RamLimit

RAM = web.AppKey("ram", RamLimit)
WAIT_S = 10.0
"""How long a request waits for room."""
_LOOK_S = 0.02
_SMALL_BYTES = 64 * 1024
"""The values of smaller bodies are not counted."""
_PER_BYTE, _PER_VALUE, _PER_TEXT_BYTE, _PER_DECODED_BYTE = 4, 64, 42, 4
"""RAM that parsing takes for each byte of a body, each value in it, each byte of text that is tokenized, and each byte of
decoded media: measured on texts, lists of numbers, and pictures."""
_MEDIA = (b";base64,", b'"multimodal_data"', b'"input_audio"', b'"images"')
"""What a body with media has in it."""
_SESSION_BYTES_AT = slice(5, 13)
"""Where a `.tower` file says how many bytes its session has: see `towerd/tower_file.py`, which loads the codec."""
_DECODED_PER_BYTE, _DECODED_FREE = 8192, 1 << 20
"""No picture is taken that is larger once it is decoded: `kPictureBytesPerByte` in towerd/wire/cpp/bounds.h."""


def bytes_to_parse(data: bytes, room: int) -> int:
    """RAM that parsing a body takes beside its own bytes, at most. room: bytes that are left beside the model"""
    if any(each in data for each in _MEDIA):
        decoded = min(room // MEDIA_SHARE, _DECODED_FREE + _DECODED_PER_BYTE * len(data))
        return _PER_BYTE * len(data) + _PER_DECODED_BYTE * decoded
    if len(data) <= _SMALL_BYTES:
        return _PER_TEXT_BYTE * len(data)
    n_values = data.count(b",")
    n_text = min(max(0, len(data) - 2 * n_values), room // TEXT_SHARE)
    return _PER_BYTE * len(data) + _PER_VALUE * n_values + _PER_TEXT_BYTE * n_text


def bytes_to_import(data: bytes, room: int) -> int:
    """RAM that importing a `.tower` file takes beside its own bytes, at most: its session is text, and each picture or sound
    behind it is there once more while it is written. room: as above"""
    n_bytes = int.from_bytes(data[_SESSION_BYTES_AT], "little")
    if n_bytes >= len(data):
        return bytes_to_parse(data, room)
    return bytes_to_parse(data[:n_bytes], room) + 2 * (len(data) - n_bytes)


async def wait_for_room(
    ram: RamLimit,
    n_bytes: int,
    in_turn: int = 0,
    *,
    claim: bool,
    what: str = "Reading this request takes",
) -> None:
    """Wait until so much may be taken; claim: and claim it. in_turn: see `RamLimit.claim`. what: the beginning of a refusal.
    Raises RamLimitReached if that takes too long, RequestTooBig if it never may."""
    if not ram.is_limited:
        return
    if ram.room < NO_LIMIT and n_bytes + in_turn > ram.room:
        ram.n_refused += 1
        raise RequestTooBig(
            f"{what} {_mib(n_bytes + in_turn)} of RAM, and there are {_mib(ram.room)} beside the model: send "
            f"less at once, or raise {ram.text}"
        )
    deadline_s = time.monotonic() + WAIT_S
    while not (ram.claim(n_bytes, in_turn) if claim else ram.has_room(n_bytes)):
        if time.monotonic() >= deadline_s:
            ram.n_refused += 1
            raise RamLimitReached(
                f"towerd has taken all the RAM that it may have ({ram.text}): try again in a few seconds"
            )
        ram.ask(ram.more(n_bytes, in_turn))
        await asyncio.sleep(_LOOK_S)
        while not ram.had_room(ram.more(n_bytes, in_turn)) and time.monotonic() < deadline_s:
            ram.ask(ram.more(n_bytes, in_turn))
            await asyncio.sleep(_LOOK_S)


def _mib(n_bytes: int) -> str:
    return f"{-(-n_bytes // 2**20):,} MiB"
