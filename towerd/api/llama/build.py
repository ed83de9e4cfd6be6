"""The build that llama-server's endpoints name."""

from __future__ import annotations

from towerd import __version__

BUILD_INFO = f"towerd-{__version__}"
