"""Starting a daemon quickly. Imports of llama.cpp and aiohttp begin here, side by side."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from importlib import import_module

from towerd.settings.config import Config
from towerd.system.allocator import return_large_blocks


def preload(engine: str) -> None:
    """Import what a daemon with this engine needs, once its allocator is set."""
    return_large_blocks()
    gc.disable()  # until all is loaded: there is hardly any garbage, and collections take time
    # aiohttp reads the system's certificates, which no other import has to wait for.
    threading.Thread(target=import_module, args=("aiohttp",), name="towerd-import").start()
    if engine == "embedded":
        import_module("towerd.service")
        import_module("towerd.engine.embedded.opening")
    import_module("towerd.app.daemon")


def start(config: Config, on_ready: Callable[[str, str], None] | None = None) -> None:
    """As `towerd.app.daemon.run`, which is imported here."""
    preload(config.engine)
    from towerd.app.daemon import run, say_ready

    run(config, on_ready or say_ready)
