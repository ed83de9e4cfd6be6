"""llama-server's flags about weights, devices and RoPE, as llama.cpp's own code reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from towerd.errors import ConfigError
from towerd.llama_library import lib
from towerd.settings.config import Config
from towerd.settings.llama_flags import words_of

if TYPE_CHECKING:  # imported when there are such flags: most command lines have none
    from towerd.wire import LoadFlags


def take_load_flags(config: Config) -> LoadFlags | None:
    """The flags of `config`, with the NUMA strategy among them in force; None: there are none.

    Call it after llama.cpp's backend was initialised. Raises ConfigError: a value that llama.cpp does not take."""
    words = config.load_words
    if not words:
        return None
    flags = _read(words)
    if flags.numa:
        lib.llama_numa_init(flags.numa)
    return flags


def check_reply_flags(config: Config) -> None:
    """Read the flags about replies, which are used once the model is loaded. Raises ConfigError: a
    value that llama.cpp does not take."""
    words = words_of(config.llama_server_args, "wire")
    if words:
        _read(words)


def _read(words: list[str]) -> LoadFlags:
    from towerd.wire import LoadFlags

    try:
        return LoadFlags(words)
    except RuntimeError as error:
        said = " ".join(str(error).split()).rstrip(" .")
        raise ConfigError(f"llama.cpp refuses a flag: {said}.") from error
