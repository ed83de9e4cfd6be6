"""Runs pure work whose size a client chooses: small work on the loop, big work in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

ITEMS_INLINE_MAX = 1000
"""Python takes about a microsecond per item, and the loop must never block for 5 ms."""


async def by_size(items: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)`, in a worker thread when it handles more than `ITEMS_INLINE_MAX` items."""
    if items <= ITEMS_INLINE_MAX:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def size_of(value: object) -> int:
    """The number of items at the top level of a decoded JSON value, as a measure of work."""
    return len(value) if isinstance(value, list | dict) else 1


def count(value: object) -> int:
    """The number of values in a decoded JSON value; counting stops above ITEMS_INLINE_MAX."""
    n, todo = 0, [value]
    while todo and n <= ITEMS_INLINE_MAX:
        each = todo.pop()
        n += size_of(each)
        if n <= ITEMS_INLINE_MAX:
            if isinstance(each, list):
                todo += each
            elif isinstance(each, dict):
                todo += each.values()
    return n


async def release(body: dict[str, Any]) -> None:
    """Empty a body that is no longer needed. Freeing it is work as well: a hundred thousand
    objects take milliseconds."""
    big = [value for value in body.values() if count(value) > ITEMS_INLINE_MAX]
    if big:
        await asyncio.to_thread(_empty, big)


def _empty(values: list[Any]) -> None:
    for value in values:
        if isinstance(value, list):
            while value:
                del value[-ITEMS_INLINE_MAX:]
        elif isinstance(value, dict):
            while value:
                value.popitem()
