"""Persists what policies learned as a short text in the catalog: JSON, deflated, with a
checksum. Damage only loses what was learned.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

META_KEY = "learned"
BYTES_MAX = 1 << 20
"""Maximum size of the text; larger ones are not kept."""
_JSON_BYTES_MAX = 16 << 20
_DIGEST_BYTES = 16
_KEEP_S = 600.0


class Learner(Protocol):
    """The learning part of `towerd.tiers.ranking.Ranking`."""

    def learned(self) -> str | None:
        """The text for `recall`; None if there is nothing to keep."""
        ...

    def recall(self, text: str | None) -> None:
        """Resume from the text if it is valid."""
        ...


class Learned:
    """Restores the state in the catalog at once; `keep` is called by one thread."""

    def __init__(
        self,
        learner: Learner,
        get_meta: Callable[[str], str | None],
        set_meta: Callable[[str, str], None],
    ) -> None:
        self._learner = learner
        self._set_meta = set_meta
        self._due = time.monotonic() + _KEEP_S
        learner.recall(get_meta(META_KEY))

    def keep(self, *, now: bool) -> None:
        """Save to the catalog if it is due, or at once with `now`."""
        if not now and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _KEEP_S
        text = self._learner.learned()
        if text is not None:
            self._set_meta(META_KEY, text)


def pack(policy: str, learned: Mapping[str, Any]) -> str | None:
    """The text for `unpack`; None: it would be larger than BYTES_MAX."""
    raw = zlib.compress(json.dumps({"policy": policy, **learned}).encode())
    text = base64.b85encode(_digest(raw) + raw).decode()
    return text if len(text) <= BYTES_MAX else None


def unpack(policy: str, text: str) -> dict[str, Any]:
    """What was packed. Raises ValueError for anything else, and for what another policy learned."""
    if len(text) > BYTES_MAX:
        raise ValueError("it is too large")
    try:
        data = base64.b85decode(text)
        digest, raw = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if digest != _digest(raw):
            raise ValueError("its checksum is wrong")
        found = json.loads(zlib.decompressobj().decompress(raw, _JSON_BYTES_MAX))
    except (zlib.error, RecursionError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    if not isinstance(found, dict) or found.pop("policy", None) != policy:
        raise ValueError("another policy learned it")
    return found


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=_DIGEST_BYTES).digest()
