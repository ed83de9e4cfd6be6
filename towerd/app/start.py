"""Starting a daemon quickly. Imports of llama.cpp and aiohttp begin here, side by side."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from towerd.errors import ConfigError
from towerd.settings.config import AUTO, Config
from towerd.system.machine import address_bytes_max
from towerd.system.priority import lower_priority
from towerd.system.process import return_large_blocks, share_arenas

_MODULES = (
    "towerd.store",
    "towerd.engine.base",
    "towerd.cold",
    "towerd.tiers.manager",
    "towerd.service",
    "towerd.engine.embedded.context.core",
    "towerd.engine.embedded.run.scheduler",
    "towerd.engine.embedded.opening",
    "towerd.app.daemon",
)
"""What the embedded engine needs, each after what it needs itself: none of them takes long alone."""
ADDRESS_MIN = 512 << 20
"""Bytes of address space without which libraries end the process."""


def preload(engine: str) -> None:
    """Import what a daemon with this engine needs, once its allocator is set."""
    _prepare()
    # aiohttp reads the system's certificates, which no other import has to wait for.
    threading.Thread(target=import_module, args=("aiohttp",), name="towerd-import").start()
    for module in _MODULES if engine == "embedded" else _MODULES[-1:]:
        import_module(module)


def _prepare() -> None:
    return_large_blocks()
    if address_bytes_max():
        share_arenas()
    gc.disable()  # until all is loaded: there is hardly any garbage, and collections take time


@contextmanager
def preloading_quietly() -> Iterator[None]:
    """Do what `preload` does for the embedded engine beside the body, at low priority. What is not
    imported at its end is left to `preload`."""
    is_over = threading.Event()

    def run() -> None:
        lower_priority()
        for module in ("aiohttp", *_MODULES):
            if is_over.is_set():
                return
            import_module(module)

    _prepare()
    import_module("numpy")  # here: its threads have the priority of the one that imports it
    threading.Thread(target=run, name="towerd-import", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def start(config: Config, on_ready: Callable[[str, str], None] | None = None) -> None:
    """As `towerd.app.daemon.run`, which is imported here."""
    if 0 < (most := address_bytes_max()) < ADDRESS_MIN:
        raise ConfigError(
            f"ulimit -v {most >> 20} MiB is too little for towerd itself: raise it to {ADDRESS_MIN >> 20} MiB and what the "
            "model takes."
        )
    if config.engine == AUTO:
        _prepare()
        from towerd.engine.llama_server.process.choice import chosen

        config = chosen(config)
    preload(config.engine)
    from towerd.app.daemon import run

    run(config, on_ready)
