"""Making and finding GGUF files: the bundled story model and random-weight models of any shape."""

from __future__ import annotations
