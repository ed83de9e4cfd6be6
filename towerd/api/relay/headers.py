"""Selects the headers that cross the proxy.

Not sent to llama-server: headers about the client's connection and its identity. Not sent to the
client: headers about llama-server's connection, and its own answers about keys and origins.
"""

from __future__ import annotations

from collections.abc import Mapping

from multidict import CIMultiDict

from towerd.api.http.tenants import CALLER

HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""Headers for one connection only (RFC 9110 section 7.6.1)."""
OWN_TO_US = frozenset(
    (
        "host",
        "authorization",
        "x-api-key",
        "cookie",
        "origin",
        "expect",
        "content-length",
        "content-encoding",
    )
)
"""Headers between the client and towerd: its key, its origin, the host that it addressed, and the
encoding of the body, which is decoded here."""
OWN_TO_UPSTREAM = frozenset(("server", "set-cookie", "www-authenticate"))
_OURS = "x-towerd-"
_CORS = "access-control-"


def to_upstream(headers: Mapping[str, str], auth: Mapping[str, str]) -> CIMultiDict[str]:
    """The client's headers for llama-server, with towerd's own key."""
    kept = _kept(headers, OWN_TO_US, (_OURS,))
    kept.update(auth)
    return kept


def to_towerd(headers: Mapping[str, str], caller: str) -> CIMultiDict[str]:
    """The client's headers for a model's process, with who calls; see `CALLER`."""
    kept = _kept(headers, OWN_TO_US)
    kept[CALLER] = caller
    return kept


def to_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """llama-server's headers for the client."""
    return _kept(headers, OWN_TO_UPSTREAM, (_OURS, _CORS))


def from_towerd(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers of a model's process for the client."""
    return _kept(headers, OWN_TO_UPSTREAM, (_CORS,))


def _kept(
    headers: Mapping[str, str], own: frozenset[str], prefixes: tuple[str, ...] = ()
) -> CIMultiDict[str]:
    """Headers that are not for one connection only, nor `own`, nor begin with one of `prefixes`."""
    dropped = HOP_BY_HOP | own | _named(headers)
    kept = CIMultiDict[str]()
    for name, value in headers.items():
        low = name.lower()
        if low not in dropped and not low.startswith(prefixes):
            kept.add(name, value)
    return kept


def _named(headers: Mapping[str, str]) -> frozenset[str]:
    """Headers that `Connection` declares to be hop-by-hop."""
    words = headers.get("Connection", "").lower().split(",")
    return frozenset(word.strip() for word in words)
