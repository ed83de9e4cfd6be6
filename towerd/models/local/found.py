"""FoundModel: a model that is on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TOWERD, BUNDLED, LLAMA_CPP, HUB = "towerd", "bundled", "llama.cpp", "Hugging Face"
OLLAMA, LM_STUDIO = "Ollama", "LM Studio"
"""The sources of models."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's name and files; nothing was read of them yet."""

    name: str
    path: Path
    """Its file, or the first of several."""
    source: str
    """The program that keeps it there."""
    projector: Path | None = None
    """What encodes its pictures and sounds, if it is known."""

    @property
    def base(self) -> str:
        """The name without its tag or quantization."""
        return self.name.partition(":")[0]
