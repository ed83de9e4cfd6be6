"""Modules that a starting daemon does not import: each costs tens of milliseconds."""

from __future__ import annotations

import subprocess
import sys

NOT_NEEDED = {
    "torch",
    "mlx",
    "gguf",
    "yaml",
    "constriction",
    "rich",
    "scipy",
    "requests",
    "jinja2",
    "llama_cpp",
    "psutil",
    "towerd.codec.codec",
    "towerd.codec.forms.mix",
    "towerd.cli.bench",
    "towerd.models.local.names",
    "towerd.retention.icecache",
    "huggingface_hub",
}
SERVE = """
import sys
import towerd.cli.serve, towerd.app.daemon, towerd.service, towerd.engine.embedded.opening
print(*sys.modules)
"""


def test_imports_of_serve() -> None:
    """All that is imported before the model is loaded."""
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "towerd.engine.embedded.engine" in loaded
    assert not loaded & NOT_NEEDED
