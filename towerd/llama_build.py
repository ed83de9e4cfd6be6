"""Which build of llama.cpp runs: the one that a wheel of towerd carries, else llama-cpp-python's.

A wheel has its own build in the folder `lib` of the package. A working copy has none: `make setup`
compiles llama-cpp-python for the machine, and towerd uses what that installs.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSION = "0.3.36"
"""The llama-cpp-python whose llama.cpp towerd knows: `slots` its state format, `wire` its server.
The build scripts read this line."""
DISTRIBUTION = "llama-cpp-python"
CARRIED = Path(__file__).parent / "lib"
"""In wheels: libraries, llama-server, and the package `llama_cpp` that declares the functions."""


SPIN_COUNT = 1000
"""Turns of a loop in which a thread of llama.cpp waits for another one before it sleeps (libgomp). By itself libgomp
waits for milliseconds, hundreds of times a token: beside other work two threads on two cores mostly wait for one
that does not run (docs/log.md, 2026-11-29)."""


def waiting_env(env: Mapping[str, str]) -> dict[str, str]:
    """What the environment must add before llama.cpp is loaded, unless the user has said how its threads wait."""
    said = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & env.keys()
    return {} if said else {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def is_carried() -> bool:
    """Whether this installation has a llama.cpp of its own."""
    return (CARRIED / "llama_cpp").is_dir()


def installed_version() -> str | None:
    """The version of llama-cpp-python whose llama.cpp is used; None if there is none."""
    if is_carried():
        return VERSION
    try:
        return version(DISTRIBUTION).partition("+")[0]
    except PackageNotFoundError:
        return None


def server_path() -> Path:
    """Where the llama-server of this build is, if it was built."""
    folder = CARRIED if is_carried() else Path(sysconfig.get_path("purelib")) / "bin"
    return folder / "llama-server"
