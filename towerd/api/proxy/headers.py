"""Which headers cross the proxy, and which are each side's own.

Towards llama-server: what is about this connection, and who the caller is, stays here. Towards the
client: what is about that connection, and llama-server's own answers about keys and origins.
"""

from __future__ import annotations

from collections.abc import Mapping

from multidict import CIMultiDict

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
"""RFC 9110 section 7.6.1: for one connection only."""
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
"""The client's business with towerd: its key, its page, the name it called us by, and how the
body was packed, which is unpacked here."""
OWN_TO_UPSTREAM = frozenset(("server", "set-cookie", "www-authenticate"))
_OURS = "x-towerd-"
_CORS = "access-control-"


def to_upstream(headers: Mapping[str, str], auth: Mapping[str, str]) -> CIMultiDict[str]:
    """The client's headers as llama-server gets them, with towerd's own key."""
    dropped = HOP_BY_HOP | OWN_TO_US | _named(headers)
    kept = CIMultiDict[str]()
    for name, value in headers.items():
        low = name.lower()
        if low not in dropped and not low.startswith(_OURS):
            kept.add(name, value)
    kept.update(auth)
    return kept


def to_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """llama-server's headers as the client gets them."""
    dropped = HOP_BY_HOP | OWN_TO_UPSTREAM | _named(headers)
    kept = CIMultiDict[str]()
    for name, value in headers.items():
        low = name.lower()
        if low not in dropped and not low.startswith((_OURS, _CORS)):
            kept.add(name, value)
    return kept


def _named(headers: Mapping[str, str]) -> frozenset[str]:
    """Headers that `Connection` declares to be hop-by-hop."""
    words = headers.get("Connection", "").lower().split(",")
    return frozenset(word.strip() for word in words)
