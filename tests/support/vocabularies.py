"""Vocabularies to test with: the bundled model's, and llama.cpp's where a folder of them is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import towerd
from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary

BUNDLED = Path(towerd.__file__).parent / "data" / "stories260K.gguf"
FOLDER = os.environ.get("TOWERD_TEST_VOCABS", "")
"""A folder of vocabulary-only GGUFs, such as `models/` of llama.cpp's source."""
NAMES = ("llama-bpe", "llama-spm", "qwen2", "gemma-4", "phi-3", "gpt-2")


def vocabulary_paths() -> list[Path]:
    found = [Path(FOLDER, f"ggml-vocab-{name}.gguf") for name in NAMES] if FOLDER else []
    return [BUNDLED] + [path for path in found if path.exists()]


@pytest.fixture(scope="session", params=vocabulary_paths(), ids=lambda path: path.stem)
def vocabulary(request: pytest.FixtureRequest) -> Iterator[GgufVocabulary]:
    """Every vocabulary in turn."""
    with GgufVocabulary(request.param) as vocabulary:
        yield vocabulary


@pytest.fixture(scope="session")
def codec(vocabulary: GgufVocabulary) -> Codec:
    """A codec of the vocabulary."""
    return Codec(vocabulary)


@pytest.fixture(scope="session")
def small() -> Iterator[GgufVocabulary]:
    """The bundled model's vocabulary: 512 tokens, bytes among them."""
    with GgufVocabulary(BUNDLED) as vocabulary:
        yield vocabulary
