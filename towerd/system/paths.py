"""Default locations of towerd's files.

Linux follows the XDG base directories, macOS uses ~/Library (Application Support). Nothing here
creates a directory.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from platformdirs import PlatformDirs

_DIRS = PlatformDirs("towerd", appauthor=False)


def store_dir() -> Path:
    """The store of segments and conversations (~/.local/share/towerd/store)."""
    return _DIRS.user_data_path / "store"


def models_dir() -> Path:
    """The directory in which a bare model name is looked up (~/.local/share/towerd/models)."""
    return _DIRS.user_data_path / "models"


def config_file() -> Path:
    """The settings file that is read if it exists (~/.config/towerd/towerd.toml)."""
    return _DIRS.user_config_path / "towerd.toml"


def runtime_socket(store: Path) -> Path:
    """The Unix socket of the daemon that serves a store ($XDG_RUNTIME_DIR/towerd/towerd.sock; of
    another store than the default one, towerd-HASH.sock, so that each has its own).

    On a Linux without a runtime directory it is in ~/.local/state/towerd: in /tmp another user
    could take the name first.
    """
    folder = _DIRS.user_runtime_path if _has_runtime_dir() else _DIRS.user_state_path
    place = store.resolve()
    if place == store_dir().resolve():
        return folder / "towerd.sock"
    digest = hashlib.blake2b(os.fsencode(place), digest_size=4).hexdigest()
    return folder / f"towerd-{digest}.sock"


def _has_runtime_dir() -> bool:
    if sys.platform == "darwin" or os.environ.get("XDG_RUNTIME_DIR"):
        return True
    return os.access(f"/run/user/{os.getuid()}", os.W_OK)
