"""Runs the GGUFs of this project with llama.cpp itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

Run: TypeAlias = Callable[[Path, list[int], int], tuple[list[int], npt.NDArray[np.float32]]]
Tokenize: TypeAlias = Callable[[Path, str], tuple[list[int], bytes]]


@pytest.fixture
def greedy() -> Run:
    """(model, prompt ids, n) -> n greedy ids and the [n, n_vocab] logits they came from."""
    llama_cpp = pytest.importorskip("llama_cpp")

    def run(path: Path, prompt: list[int], n: int) -> tuple[list[int], npt.NDArray[np.float32]]:
        model = llama_cpp.Llama(str(path), n_ctx=512, verbose=False)
        try:
            ids: list[int] = []
            rows: list[npt.NDArray[np.float32]] = []
            model.eval(prompt)
            for _ in range(n):
                pointer = llama_cpp.llama_get_logits(model.ctx)
                rows.append(np.ctypeslib.as_array(pointer, shape=(model.n_vocab(),)).copy())
                ids.append(int(rows[-1].argmax()))
                model.eval([ids[-1]])
            return ids, np.stack(rows)
        finally:
            model.close()

    return run


@pytest.fixture
def tokenize() -> Tokenize:
    """(model, text) -> its ids without BOS, special tokens parsed, and the bytes they spell."""
    llama_cpp = pytest.importorskip("llama_cpp")

    def run(path: Path, text: str) -> tuple[list[int], bytes]:
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        try:
            ids = model.tokenize(text.encode(), add_bos=False, special=True)
            return ids, b"".join(model.detokenize([token], [0], special=True) for token in ids)
        finally:
            model.close()

    return run
