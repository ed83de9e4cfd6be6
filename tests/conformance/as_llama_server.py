#!/usr/bin/env python3
"""`towerd serve` under llama-server's own command line, for llama.cpp's server tests. The engine is
that of TOWERD_TEST_ENGINE.

Where the two differ by default, llama-server's way is asked for: endpoints that are off unless
named, web pages of all sites unless tools run, and (of a llama-server behind towerd) slots with cells of
their own. The store is a new one at every start.
"""

from __future__ import annotations

import os
import sys
import tempfile

OURS = (
    *("--host", "--port", "--api-key", "--cors-origins", "--sleep-idle-seconds"),
    "--slot-save-path",
)
"""What towerd answers for, with a value each."""
OUR_SWITCHES = ("--ui-mcp-proxy",)
"""The same without a value."""
CORS = ("--cors-methods", "GET, POST, DELETE, OPTIONS", "--cors-headers", "*", "--cors-credentials")
"""llama-server's defaults of its flags for web pages."""
SWITCHES = {"--metrics": "--no-metrics", "--slots": "--no-slots"}
"""Endpoints that llama-server serves when asked, towerd unless told not to."""


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """towerd's flags, and those for the llama-server behind it."""
    ours, theirs = [], []
    words = iter(args)
    for word in words:
        if word in OURS:
            ours += [word, next(words)]
        elif word in OUR_SWITCHES:
            ours.append(word)
        elif word not in SWITCHES and word not in SWITCHES.values():
            theirs.append(word)
    ours += [off for on, off in SWITCHES.items() if on not in args]
    if "--parallel" in args and "--kv-unified" not in args:
        theirs.append("--no-kv-unified")
    return ours, theirs


def cors(args: list[str]) -> list[str]:
    """llama-server's defaults: all pages, or those of this machine if tools are run for them."""
    if "--cors-origins" in args:
        return [*CORS]
    return [*CORS, "--cors-origins", "localhost" if "--tools" in args else "*"]


def embedded(args: list[str]) -> list[str]:
    """The command line as it is, but for what is off by default."""
    args = [*args, *(no for on, no in SWITCHES.items() if on not in args and no not in args)]
    if "--parallel" in args and "--kv-unified" not in args and "--ctx-size" in args:
        n_slots, at = int(args[args.index("--parallel") + 1]), args.index("--ctx-size") + 1
        args[at] = str(int(args[at]) // n_slots)  # towerd's is that of one conversation
    projector = os.environ.get("LLAMA_ARG_MMPROJ")
    return [*args, "--mmproj", projector] if projector else args


def main() -> None:
    work = tempfile.mkdtemp(prefix="towerd-suite-")
    engine = os.environ.get("TOWERD_TEST_ENGINE", "llama-server")
    own = ["--engine", engine, "--store-dir", f"{work}/store", "--socket", f"{work}/s"]
    own += cors(sys.argv[1:])
    if engine == "embedded":
        args = embedded(sys.argv[1:])
    else:
        ours, theirs = split(sys.argv[1:])
        args = [*ours, "--", *theirs]
    command = [sys.executable, "-P", "-m", "towerd", "serve", *own, *args]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
