"""Checks of addresses and URLs."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._~-]+))(?::\d{0,5})?")


def host_of(authority: str) -> str | None:
    """The name or address of a host with or without a port, in lower case and without brackets;
    None if it is anything else. Nothing else may stand there, such as a user or text behind a
    bracket, since others read it otherwise."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return None
    address, name = found.groups()
    if address is None:
        return str(name).lower()
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return None
    return str(address).lower()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_http_url(text: str) -> bool:
    """Whether `text` names a server: http or https, a host, maybe a port and a path prefix."""
    try:
        parts = urlsplit(text)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        return False
    plain = not (parts.username or parts.password or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port_ok and plain
