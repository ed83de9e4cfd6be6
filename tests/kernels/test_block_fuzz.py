"""A few seconds of the sanitizer fuzzer (`fuzz/`); `make -C tests/kernels/fuzz run` runs long."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
SANITIZED = ["-fsanitize=address,undefined", "-x", "c++", "-", "-o"]


def _can_sanitize(compiler: str, folder: Path) -> bool:
    probe = folder / "probe"
    try:
        built = subprocess.run(
            [compiler, *SANITIZED, str(probe)], input=b"int main() {}", capture_output=True
        )
        return built.returncode == 0 and subprocess.run([probe]).returncode == 0
    except OSError:
        return False


@pytest.mark.timeout(900)
def test_fuzz_finds_nothing(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """All kernels of all instruction sets: no bad access, nothing undefined, the same bytes."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which("make") is None or not _can_sanitize(compiler, tmp_path):
        pytest.skip("needs make and a compiler with AddressSanitizer")
    assert pytestconfig.cache is not None
    build = pytestconfig.cache.mkdir("kernel_fuzz")  # objects stay for the next run
    command = ["make", "-C", str(FUZZ), "-j2", f"CXX={compiler}", f"BUILD={build}"]
    built = subprocess.run([*command, "all"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([*command, "run", "SECONDS=5"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
