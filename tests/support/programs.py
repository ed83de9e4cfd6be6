"""Programs in processes of their own that can import the test tools."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent


def run_python(code: str, *args: str, status: int = 0) -> str:
    """Run a program that can import the test tools and ends with `status`; its output."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), *args],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    return done.stdout
