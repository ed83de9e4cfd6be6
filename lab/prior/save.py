"""Writing the prior that `codec/prior/file.py` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.models.gguf_file import writing
from lab.models.vocabulary import Vocabulary
from towerd.codec.prior.file import U16, U32

ARCHITECTURE = "llama"
"""llama.cpp only reads the tokenizer of a known architecture; the file contains no model."""


def save(
    path: Path,
    vocabulary: Vocabulary,
    weights: U32,
    tables: Sequence[tuple[U32, U16]],
    states: Mapping[str, U32],
) -> None:
    """Write a prior whole or not at all."""
    arrays: dict[str, npt.NDArray[Any]] = {"mix.weights": weights.view(np.int32)}
    for order, (index, data) in enumerate(tables, start=1):
        arrays[f"mix.index.{order}"] = index.view(np.int32)
        arrays[f"mix.data.{order}"] = data.view(np.int16)
    arrays |= {f"mix.{name}": state.view(np.int32) for name, state in states.items()}
    with writing(path, ARCHITECTURE) as writer:
        vocabulary.write(writer, None)
        for name, array in arrays.items():
            writer.add_tensor(name, array)
