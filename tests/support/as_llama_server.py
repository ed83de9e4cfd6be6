#!/usr/bin/env python3
"""`towerd serve --engine llama-server` under llama-server's own command line, for llama.cpp's
server tests: LLAMA_SERVER_BIN_PATH=.../as_llama_server.py (see tests/sidecar/README.md).

Where the two differ by default, llama-server's way is asked for: endpoints that are off unless
named, and slots with cells of their own. The store is a new one at every start.
"""

from __future__ import annotations

import os
import sys
import tempfile

OURS = ("--host", "--port", "--api-key", "--cors-origins")
"""What towerd answers for, with a value each."""
DROPPED = ("--slot-save-path",)
"""What towerd sets itself, with a value each."""
SWITCHES = {"--metrics": "--no-metrics", "--slots": "--no-slots"}
"""Endpoints that llama-server serves when asked, towerd unless told not to."""


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """towerd's flags, and those for the llama-server behind it."""
    ours, theirs = [], []
    words = iter(args)
    for word in words:
        if word in OURS:
            ours += [word, next(words)]
        elif word in DROPPED:
            next(words)
        elif word not in SWITCHES and word not in SWITCHES.values():
            theirs.append(word)
    ours += [off for on, off in SWITCHES.items() if on not in args]
    if "--parallel" in args and "--kv-unified" not in args:
        theirs.append("--no-kv-unified")
    return ours, theirs


def main() -> None:
    ours, theirs = split(sys.argv[1:])
    work = tempfile.mkdtemp(prefix="towerd-suite-")
    own = ["--engine", "llama-server", "--store-dir", f"{work}/store", "--socket", f"{work}/s"]
    command = [sys.executable, "-P", "-m", "towerd", "serve", *own, *ours, "--", *theirs]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
