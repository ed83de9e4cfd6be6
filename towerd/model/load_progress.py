"""LoadProgress: reports how far loading the weights is, for a router that waits for them."""

from __future__ import annotations

import json
import os
from typing import Any

from towerd.llama_library import lib

STEP = 0.01
"""Shares closer to each other are not told: llama.cpp tells one for each tensor."""


class LoadProgress:
    """What llama.cpp calls while it loads. It must live until the weights are loaded. The whole is
    not told: a model is loaded when requests are answered."""

    def __init__(self, pipe: int) -> None:
        """pipe: gets a line of JSON, `{"progress": 0.5}`, for each share. At most a hundred short
        lines: they fit into a pipe that nobody reads."""
        self._pipe = pipe
        self._told = 0.0
        self.callback: Any = lib.llama_progress_callback(self._on_progress)

    def _on_progress(self, share: float, _user: Any) -> bool:
        if self._told + STEP <= share < 1.0:
            self._told = share
            try:
                os.write(self._pipe, json.dumps({"progress": round(share, 4)}).encode() + b"\n")
            except OSError:  # the router has ended, and this process is about to
                pass
        return True  # go on loading
