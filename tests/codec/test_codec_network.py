"""How a text is cut into the chunks that a model reads side by side."""

from __future__ import annotations

import numpy as np

from towerd.codec.network import cut


def test_chunks_are_nearly_equal() -> None:
    parts = cut(np.arange(10, dtype=np.int32), 4, 8)
    assert [len(part) for part in parts] == [4, 3, 3]
    assert len(cut(np.arange(100, dtype=np.int32), 4, 8)) == 8
    assert np.concatenate(parts).tolist() == list(range(10))
