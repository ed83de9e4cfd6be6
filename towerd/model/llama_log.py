"""llama.cpp's log: routed into ours, and the reasons of failures, which its API does not return."""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from towerd.llama_library import lib

log = logging.getLogger("towerd.llama")

_recent: deque[str] = deque(maxlen=50)
_buffer_bytes: Counter[tuple[bool, str]] = Counter()
_BUFFER = re.compile(r"(\w+) +(\w+) buffer size = +([0-9.]+) MiB")
_IN_RAM = re.compile("CPU|.*_Host$|AMX|BLAS")
"""llama.cpp's names for what allocates main memory."""
_HARMLESS = re.compile(
    "n_ctx_seq.*n_ctx_train"  # sequences share the context's cells, and towerd limits each of them
    # llama.cpp adds it; a story of the bundled model ends where the next begins
    "|special_eot_id is not in special_eog_ids"
    "|using full-size SWA cache"  # rows that slid out of a window are stored as well
    # llama.cpp corrects it, and who serves the model can do nothing else
    "|was not control-type; this is probably a bug in the model"
    # of a head that predicts several tokens, where drafts are not asked for
    r"|has unused tensor blk\.\d+\."
    # of pictures in recurrent layers, whose tokens share a position (M-RoPE)
    "|non-consecutive token position"
    # of the tables of the codec, of which llama.cpp reads the vocabulary alone
    "|unknown type i32$"
)
"""Warnings that ask for nothing."""
_mode = threading.local()


def _on_log(level: int, text: bytes, _user: Any) -> None:
    line = text.decode("utf-8", "replace").strip()
    if not line or line == ".":
        return
    if (made := _BUFFER.search(line)) is not None:
        _buffer_bytes[_IN_RAM.match(made[1]) is not None, made[2]] += int(float(made[3]) * 2**20)
    if _HARMLESS.search(line):
        level = 2
    # llama.cpp's levels: 1 debug, 2 info, 3 warn, 4 error, 5 continuation of the line before.
    if level in (3, 4):
        _recent.append(line)
    if getattr(_mode, "is_quiet", False):
        level = 2
    log.log({3: logging.WARNING, 4: logging.ERROR}.get(level, logging.DEBUG), line)


_callback = lib.llama_log_callback(_on_log)  # kept: llama.cpp holds the pointer for ever


def route_log() -> None:
    """Route llama.cpp's log into ours, which it does not undo."""
    lib.llama_log_set(_callback, ctypes.c_void_p(0))


@contextmanager
def demoted_log() -> Iterator[None]:
    """Log llama.cpp's warnings and errors on this thread at debug level meanwhile: it reports an
    interrupted evaluation as a failure."""
    _mode.is_quiet = True
    try:
        yield
    finally:
        _mode.is_quiet = False


def buffers_made(*, in_ram: bool | None = None) -> dict[str, int]:
    """Bytes of the buffers that llama.cpp made since the last call, by its own names for them: `model`, `KV`
    and `RS` (recurrent states), `compute`, `output`. Its API does not tell, only its log. in_ram: of those in
    main memory alone, or of those in other devices' memory alone; None: of all"""
    made: Counter[str] = Counter()
    for (is_in_ram, name), n_bytes in list(_buffer_bytes.items()):
        made[name] += n_bytes if in_ram in (None, is_in_ram) else 0
    _buffer_bytes.clear()
    return dict(made)


def forget_errors() -> None:
    """Before an attempt whose `last_errors` will be asked for."""
    _recent.clear()


def last_errors() -> str:
    """The last warnings and errors of llama.cpp, as one line."""
    return "; ".join(list(_recent)[-4:])
