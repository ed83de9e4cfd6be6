"""The installed parts: llama.cpp, its server, our kernels, and whether they fit together."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from towerd import __version__, llama_build
from towerd.cli.doctor.check import Check, Finding, fail, ok, warn
from towerd.errors import ConfigError, TowerdError
from towerd.settings.config import Config

LLAMA = llama_build.DISTRIBUTION
SETUP = "Run make setup; if you have a wheel, install it again."
SERVER_TIMEOUT_S = 30


def versions(config: Config) -> Finding:
    """The versions of towerd and Python."""
    return ok(f"towerd {__version__} on Python {platform.python_version()}")


def llama_cpp(config: Config) -> Finding:
    """The llama.cpp in use, which must be the one whose state format towerd knows."""
    installed, wanted = llama_build.installed_version(), llama_build.VERSION
    if installed is None:
        return fail(f"{LLAMA} is not installed", SETUP)
    if installed != wanted:
        return fail(f"{LLAMA} {installed}, but towerd needs {wanted}", SETUP)
    return ok(f"{LLAMA} {installed}" + (", in towerd" if llama_build.is_carried() else ""))


def llama_server(config: Config) -> Finding:
    """The binary that benchmarks compare with and the llama-server engine runs."""
    from towerd.engine.llama_server.process.binary import find_binary, library_env

    advice = "Only benchmarks and the llama-server engine use it. " + SETUP
    try:
        binary = find_binary()
    except TowerdError:
        return warn("llama-server was not found", advice)
    env = os.environ | library_env(binary)
    try:
        run = subprocess.run(
            [str(binary), "--version"],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SERVER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return warn(f"{binary} does not run: {error}", advice)
    if run.returncode != 0:
        return warn(f"{binary} ends with status {run.returncode}", advice)
    said = re.search(r"^version: .*", run.stdout + run.stderr, re.MULTILINE)
    return ok(f"{binary}, {said[0]}" if said else str(binary))


def kernels(config: Config) -> Finding:
    """Our own C++: which instructions it uses."""
    from towerd.kernels import dispatch

    try:
        return ok(f"native kernels ({dispatch.name()})")
    except ValueError as error:
        return fail(str(error), f"{SETUP} Or unset {dispatch.ENV}.")


def state_format(config: Config) -> Finding:
    """Load the bundled model, let llama.cpp write a state, and read it back byte for byte."""
    from towerd.models.bundled import bundled_model

    small = replace(config, model=bundled_model(), ctx_size=256, live_tokens=256)
    load_model(small)
    return ok("self-test passed on the bundled model")


def load_model(config: Config) -> str:
    """Load `config.model` and test the state format on it; returns a line about the model.

    Raises ModelError, ConfigError."""
    from towerd.engine.embedded.context.core import load_core
    from towerd.store.catalog.sqlite import SqliteCatalog

    with tempfile.TemporaryDirectory(prefix="towerctl-") as folder:
        catalog = SqliteCatalog(Path(folder) / "catalog.sqlite")
        try:
            core = load_core(config, catalog)
        except OSError as error:
            raise ConfigError(f"Cannot read the model: {error.strerror or error}.") from error
        finally:
            catalog.close()
        try:
            per_token = core.info.kv_bytes_per_token
            return f"{core.info.description}, context {core.n_ctx:,}, {per_token:,} bytes a token"
        finally:
            core.close()


CHECKS = (
    Check("build", "towerd", versions),
    Check("build", "llama.cpp", llama_cpp),
    Check("build", "llama-server", llama_server),
    Check("build", "kernels", kernels),
    Check("build", "state format", state_format),
)
