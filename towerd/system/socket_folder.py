"""A private folder for Unix sockets."""

from __future__ import annotations

import os
import tempfile

SOCKET_BYTES_MAX = 100
"""The longest path of a Unix socket: macOS allows 103 bytes, Linux 107."""
NAME_BYTES_MAX = 12
"""Of a socket in the folder, with the separator before it."""


def socket_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder that only this user can enter; in /tmp if the path of a socket would be too
    long in the default place."""
    folder = tempfile.TemporaryDirectory(prefix=prefix)
    if len(os.fsencode(folder.name)) + NAME_BYTES_MAX <= SOCKET_BYTES_MAX:
        return folder
    folder.cleanup()
    return tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp")
