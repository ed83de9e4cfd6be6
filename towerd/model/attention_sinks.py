"""Attention sinks: scores that take their share of a layer's attention beside all keys (gpt-oss)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.errors import ModelError
from towerd.model.gguf_keys import GgufKeys
from towerd.models.hub.file_names import parts_of

Sinks: TypeAlias = npt.NDArray[np.float32] | None
"""float32[heads]; None: the layer has none."""


def attention_sinks(path: Path, layers: Sequence[int]) -> list[Sinks]:
    """Those of each of these layers of the model at `path`. Raises ModelError."""
    found: dict[int, Sinks] = {}
    for part in parts_of(path):
        try:
            keys = GgufKeys(part)
        except ValueError as error:
            raise ModelError(f"{error}.") from error
        try:
            for layer in layers:
                values = keys.floats(f"blk.{layer}.attn_sinks.weight")
                if values is not None:
                    found[layer] = np.array(values, np.float32)
        finally:
            keys.close()
    return [found.get(layer) for layer in layers]
