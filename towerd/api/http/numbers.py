"""Numbers by which a tenant knows what the store counts for all: segments, turns, sessions.

The store's own numbers rise with whatever anybody stores. A tenant among several gets others for
them, one for one, that tell nothing; it may use them in later requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from aiohttp import web

from towerd.api.http.keys import TENANT, service_of

if TYPE_CHECKING:
    from towerd.store import Store

SECRET = "tenants_numbers"
"""The name of the secret that the numbers are made with, in the store."""
NOTHING = -1
"""The number of nothing in the store."""
_HALF_BITS = 26  # two halves are what a JSON number holds exactly
_HALF = (1 << _HALF_BITS) - 1
_ROUNDS = 4


class Numbers:
    """The numbers that one caller sees: the store's own, or with a key a permutation of [1, 2**52), which
    is a Feistel network over keyed BLAKE2b. 0, the root, stays 0."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    @classmethod
    def of_tenant(cls, secret: bytes, tenant: str) -> Numbers:
        """Those of one tenant. secret: the store's."""
        return cls(blake2b(tenant.encode(), key=secret, digest_size=32).digest())

    def shown(self, number: int) -> int:
        """The caller's number for one of the store's."""
        if number == 0 or self._key is None:
            return number
        found = self._forward(number)
        return found or self._forward(found)  # what lands on the root's number takes another round

    def real(self, shown: int) -> int:
        """The store's number for one of the caller's; NOTHING if it cannot be one."""
        if shown == 0 or self._key is None:
            return shown
        if not 0 < shown <= _HALF << _HALF_BITS | _HALF:
            return NOTHING
        found = self._backward(shown)
        return found or self._backward(found)

    def with_shown(self, facts: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """`facts` with the caller's numbers in the fields `names`; None stays None."""
        numbers = {name: facts[name] for name in names}
        return {**facts, **{n: v if v is None else self.shown(v) for n, v in numbers.items()}}

    def _forward(self, number: int) -> int:
        left, right = number >> _HALF_BITS, number & _HALF
        for place in range(_ROUNDS):
            left, right = right, left ^ self._mixed(place, right)
        return left << _HALF_BITS | right

    def _backward(self, number: int) -> int:
        left, right = number >> _HALF_BITS, number & _HALF
        for place in reversed(range(_ROUNDS)):
            left, right = right ^ self._mixed(place, left), left
        return left << _HALF_BITS | right

    def _mixed(self, place: int, half: int) -> int:
        assert self._key is not None
        data = half.to_bytes(4, "little")
        digest = blake2b(data, key=self._key, digest_size=4, salt=bytes([place])).digest()
        return int.from_bytes(digest, "little") & _HALF


PLAIN = Numbers()
"""The store's own."""


async def numbers_of(request: web.Request) -> Numbers:
    """The numbers that the caller sees: the store's own if it may see how much all tenants ask."""
    tenant = request[TENANT]
    if tenant.sees_all:
        return PLAIN
    secret = await asyncio.to_thread(_secret, service_of(request).store)
    return Numbers.of_tenant(secret, tenant.scope)


def _secret(store: Store) -> bytes:
    """32 random bytes that the store keeps, made when they are first needed."""
    with store.locked():
        known = store.get_meta(SECRET)
        if known is None:
            known = secrets.token_hex(32)
            store.set_meta(SECRET, known)
    return bytes.fromhex(known)
