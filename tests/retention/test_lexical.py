"""Passages of a chat that have the words of its last message."""

from __future__ import annotations

import numpy as np

from towerd.retention.lexical import PASSAGE_TOKENS, passages


def common(n: int, seed: int = 0) -> np.ndarray:
    """int32[n] of few tokens."""
    return np.random.default_rng(seed).integers(0, 40, n).astype(np.int32)


def test_a_quoted_passage_is_found() -> None:
    text = common(3000)
    text[700:706] = [900, 901, 902, 903, 904, 905]
    asked = np.concatenate([common(20, 1), [901, 902, 903]]).astype(np.int32)
    found = passages(np.concatenate([text, asked]), len(asked), 128)
    assert set(range(700, 706)) <= set(found.tolist())
    assert len(found) <= 128
    assert found.max() < len(text)


def test_the_rarer_words_count_more() -> None:
    text = common(3000)
    for i, n in enumerate((1, 30)):
        text[100 + 50 * i : 3000 : 3000 // n] = 500 + i
    text[2000] = 500
    asked = np.array([3, 500, 501], np.int32)
    found = passages(np.concatenate([text, asked]), 3, 2 * PASSAGE_TOKENS)
    assert 100 in found or 2000 in found


def test_common_words_find_nothing() -> None:
    text = np.tile(np.arange(40, dtype=np.int32), 50)
    assert len(passages(np.concatenate([text, text[:2]]), 2, 200)) <= 200
    none = np.array([1000, -5, 1001], np.int32)  # words that are nowhere else, a picture
    assert not len(passages(np.concatenate([text, none]), 3, 200))
    for n_asked in (0, len(text)):
        assert not len(passages(text, n_asked, 200))
