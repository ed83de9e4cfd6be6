"""The process of one model: `python -m towerd.router.loading.child`, which only a router starts.

While it has no model, it imports what the embedded engine needs. Standard input is a length, a pickled
Config, orders of a byte each, and then open for as long as the router lives: so no secret is on a
command line. The order CHECK, which may come before LOAD, is for a model that has to wait for the room
of others. Standard output is lines of JSON: `{"checked": true}`; how far loading the weights is, as
`{"progress": 0.5}`; and at last `{}` once requests are answered, or why that did not come about. What
the process itself prints goes to the log.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import IO, TypeVar

from towerd import log
from towerd.app.start import preloading_quietly, start
from towerd.errors import ConfigError, TowerdError
from towerd.settings.config import Config
from towerd.system.process import die_with_parent, name_process

LENGTH_BYTES = 8
CHECK, LOAD = b"c", b"l"
"""What the router orders. Behind LOAD is the RAM that the process may take, in LENGTH_BYTES; 0: no limit."""
STDIN, STDOUT, STDERR = 0, 1, 2
T = TypeVar("T")


def main() -> int:
    """Serve the model until SIGTERM; the exit status."""
    # ^C is for the router, which then stops this in order. Not a session of its own: Linux would
    # share the cores between sessions, whatever the priority of their threads.
    os.setpgid(0, 0)
    report = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    name_process("towerd-reserve")
    with preloading_quietly() if _must_wait() else nullcontext():
        config = replace(_read(_config), progress_fd=report)
    name_process(f"towerd {config.alias}")
    try:
        _configure_log(config)
        while _read(_order) == CHECK:
            _check(config)
            _tell(report, {"checked": True})
        config = replace(config, ram_max=_read(_number))
        die_with_parent(STDIN)
        start(config, lambda url, model: _tell_last(report, {}))
    except TowerdError as error:
        kinds = " ".join(each.__name__ for each in type(error).__mro__)
        _tell_last(report, {"error": error.message, "public": error.public, "kinds": kinds})
        return 1
    return 0


def _must_wait() -> bool:
    """Whether this process has no model yet."""
    return not select.select((STDIN,), (), (), 0)[0]


def _check(config: Config) -> None:
    """Raises ModelError for a file that the engine would refuse for what its header says, and
    ConfigError for files beside it that are missing and flags that llama.cpp does not take. What
    another llama.cpp than ours will read is not known here."""
    from towerd.service import check_own_models

    check_own_models(config)
    if config.engine == "embedded":
        from towerd.engine.embedded.context.core import check_before_loading
        from towerd.model.llama_model import LlamaModel
        from towerd.models.bundled import find_model

        check_before_loading(config)
        path = find_model(config.model)
        LlamaModel(path, replace(config, progress_fd=None), vocab_only=True).close()


def _configure_log(config: Config) -> None:
    named = {"model": config.alias}
    try:
        log.configure(config.log_level, config.log_format, fields=named, path=config.log_file)
    except OSError as error:
        raise ConfigError(
            f"Cannot write the log to {config.log_file}: {error.strerror}."
        ) from error


def _read(what: Callable[[IO[bytes]], T]) -> T:
    with os.fdopen(STDIN, "rb", buffering=0, closefd=False) as pipe:
        return what(pipe)


def _config(pipe: IO[bytes]) -> Config:
    config = pickle.loads(_exactly(pipe, _number(pipe)))
    assert isinstance(config, Config)
    return config


def _number(pipe: IO[bytes]) -> int:
    return int.from_bytes(_exactly(pipe, LENGTH_BYTES))


def _order(pipe: IO[bytes]) -> bytes:
    return _exactly(pipe, len(LOAD))


def _exactly(pipe: IO[bytes], n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        piece = pipe.read(n_bytes - len(data))
        if not piece:
            os._exit(1)  # the router ended: an import that runs in a thread is not waited for
        data += piece
    return data


def _tell_last(pipe: int, line: dict[str, str]) -> None:
    """Report the end of loading."""
    _tell(pipe, line)
    with suppress(OSError):
        os.close(pipe)


def _tell(pipe: int, line: Mapping[str, str | bool]) -> None:
    """Write a line to the router, which may have ended."""
    with suppress(OSError):
        os.write(pipe, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
