"""Reading a request's JSON body: bounded in size, in patience and in time on the loop."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from towerd.api import bigjson
from towerd.api.keys import CONFIG, LIMITS
from towerd.api.reply import PayloadTooLarge, RequestTimeout
from towerd.errors import InvalidRequest


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object.

    Raises InvalidRequest (not JSON, not an object), PayloadTooLarge, RequestTimeout."""
    data = await _read(request)
    if not data:
        return {}
    if len(data) <= request.app[LIMITS].inline_bytes_max:
        value = bigjson.decode(data)
    else:
        value = await asyncio.to_thread(bigjson.decode, data)
    if not isinstance(value, dict):
        raise InvalidRequest(f"The request body must be a JSON object, but is {json_type(value)}")
    return value


async def _read(request: web.Request) -> bytearray:
    bytes_max = request.app[CONFIG].request_bytes_max
    too_large = PayloadTooLarge(f"The request body exceeds the limit of {bytes_max} bytes")
    if (request.content_length or 0) > bytes_max:
        raise too_large
    data = bytearray()
    try:
        while True:
            async with asyncio.timeout(request.app[LIMITS].read_stall_s):
                chunk = await request.content.readany()
            if not chunk:
                return data
            data += chunk
            if len(data) > bytes_max:
                raise too_large
    except TimeoutError:
        raise RequestTimeout("The request body stopped arriving") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"The request body cannot be read: {error}") from error


def json_type(value: Any) -> str:
    """The JSON name of a decoded value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"
