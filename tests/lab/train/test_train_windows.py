from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lab.train.data.corpus import CYCLE, Corpus, Windows
from lab.train.errors import TrainError

N_CTX = 16


def corpus(**sizes: int) -> Corpus:
    """Every token of every source is another number."""
    train, first = {}, 0
    for name, n in sizes.items():
        train[name] = np.arange(first, first + n, dtype=np.uint32)
        first += n
    return Corpus(train, {}, {name: i + 1.0 for i, name in enumerate(sizes)})


def test_a_batch_is_consecutive_text_of_one_source() -> None:
    windows = Windows(corpus(a=500, b=700), N_CTX, seed=3)
    rows = windows.batch(5, 40)
    assert rows.shape == (40, N_CTX + 1)
    assert (np.diff(rows.astype(np.int64), axis=1) == 1).all()
    assert ((rows < 500).all(axis=1) | (rows >= 500).all(axis=1)).all()


def test_windows_depend_on_their_number_alone() -> None:
    windows, again = (Windows(corpus(a=500, b=700), N_CTX, seed=3) for _ in range(2))
    later = again.batch(100, 8)
    assert (windows.batch(96, 16)[4:12] == later).all()
    assert (Windows(corpus(a=500, b=700), N_CTX, seed=4).batch(100, 8) != later).any()


def test_a_few_windows_come_again_and_again() -> None:
    whole = Windows(corpus(a=500, b=700), N_CTX, seed=3).batch(0, 5)
    few = Windows(corpus(a=500, b=700), N_CTX, seed=3, n_windows=5)
    assert (few.batch(3, 7) == whole[[3, 4, 0, 1, 2, 3, 4]]).all()


def test_sources_have_their_share() -> None:
    windows = Windows(corpus(a=500, b=700, c=600), N_CTX, seed=3)
    counts = Counter(windows.window(k)[0] for k in range(CYCLE))
    assert counts == {"a": 167, "b": 333, "c": 500}


def test_every_window_once_before_any_again() -> None:
    """Starts of one epoch are a whole number of windows apart and never repeat."""
    n_tokens = 50 * N_CTX
    windows = Windows(corpus(a=n_tokens), N_CTX, seed=3)
    n_windows = n_tokens // N_CTX - 1
    epochs = [[windows.window(e * n_windows + k)[1] for k in range(n_windows)] for e in range(4)]
    for starts in epochs:
        assert len(set(starts)) == n_windows
        assert len({start % N_CTX for start in starts}) == 1
        assert max(starts) + N_CTX + 1 <= n_tokens
    assert len({tuple(starts) for starts in epochs}) == 4


def test_too_little_text() -> None:
    with pytest.raises(TrainError, match="give more data"):
        Windows(corpus(a=2 * N_CTX), N_CTX, seed=1)
