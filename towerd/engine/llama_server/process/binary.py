"""Which llama-server to run, and which builds must not be run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from towerd.errors import ConfigError
from towerd.llama_build import server_path

NAME = "llama-server"
VULNERABLE_BUILDS = range(4882, 9059)
"""CVE-2026-43629: restoring a slot file can overflow the heap in builds b4882 to b9058."""
_VERSION_S_MAX = 30.0
_BUILD_PATTERNS = (r"build (\d+)", r"\bb(\d+)-", r"version: (\d+) \(")


@dataclass(frozen=True, slots=True)
class Build:
    """What a llama-server says about itself. `number` is 0 when it does not say; builds from a
    source tree without history call themselves 1."""

    text: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Build:
        """From `--version` or from `build_info` of /props."""
        found = (re.search(pattern, text) for pattern in _BUILD_PATTERNS)
        number = next((int(match[1]) for match in found if match), 0)
        return cls(text.strip(), number)

    def check(self, *, allow_vulnerable: bool) -> None:
        """Raises ConfigError for a build with the heap overflow in its restore."""
        if self.number in VULNERABLE_BUILDS and not allow_vulnerable:
            raise ConfigError(
                f"llama-server build {self.number} overflows its heap when it restores a bad slot "
                "file (CVE-2026-43629, builds 4882 to 9058): install a newer one, or accept the "
                "risk with --allow-vulnerable."
            )


def find_binary(wanted: Path | None = None) -> Path:
    """The binary to run: `wanted`, else `llama-server` on $PATH, else that of the build that
    towerd itself uses. Raises ConfigError."""
    if wanted is not None:
        named = shutil.which(str(wanted))
        if named is None:
            raise ConfigError(f"There is no program at {wanted}: name a llama-server binary.")
        return Path(named).absolute()
    on_path = shutil.which(NAME)
    if on_path is not None:
        return Path(on_path).absolute()
    own = server_path()
    if os.access(own, os.X_OK):
        return own
    raise ConfigError(
        "llama-server was found neither on PATH nor in towerd's build of llama.cpp: install one, "
        "or name the binary with --llama-server-bin."
    )


def library_env(binary: Path) -> dict[str, str]:
    """What the environment must add so that `binary` finds its libraries: builds that come
    with llama-cpp-python have theirs in ../lib and no RPATH."""
    library = binary.resolve().parent.parent / "lib"
    if not any(library.glob("libllama*")):
        return {}
    paths = [str(library), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths)}


def build_of(binary: Path) -> Build:
    """What `binary --version` says. Raises ConfigError when it cannot be run."""
    try:
        done = subprocess.run(
            [str(binary), "--version"],
            env=os.environ | library_env(binary),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{binary} cannot be run: {error}.") from error
    text = done.stdout + done.stderr
    if done.returncode != 0 or "version" not in text:
        last = text.strip().splitlines()[-1:] or ["no output"]
        raise ConfigError(f"{binary} is not a llama-server that runs here: {last[0]}")
    return Build.parse(text)
