"""The index of prefix hashes against a plain dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from towerd.store.sessions.prefix_hashes import PrefixHashIndex, prefix_hashes, prefix_hashes_at


@pytest.mark.parametrize("seed", range(40))
def test_an_index_finds_what_a_dictionary_has(seed: int) -> None:
    """Few values, so that many sessions share each; some sessions go again."""
    rng = np.random.default_rng(seed)
    space = int(rng.integers(2, 60))
    index, held = PrefixHashIndex(), {}
    for session in range(16):
        held[session] = rng.integers(0, space, rng.integers(0, 6)).astype("<u8")
    index.load([(session, held[session].tobytes()) for session in range(12)])
    for session in range(12, 16):
        index.add(session, held[session].tobytes())
    for session in range(0, 16, 1 if seed % 4 == 0 else 5):
        index.discard(session)
        del held[session]
    prompt = rng.integers(0, space + 9, 50).astype(np.uint64)
    expected = [
        (at + 1, sorted(s for s, marks in held.items() for each in marks if each == mark))
        for at, mark in reversed(list(enumerate(prompt)))
    ]
    found = [(n, sorted(sessions)) for n, sessions in index.find(prompt)]
    assert found == [(n, sessions) for n, sessions in expected if sessions]
    assert len(index) == sum(map(len, held.values()))


def test_a_prefix_hash_depends_on_all_tokens_and_on_the_tenant() -> None:
    ids = np.array([5, 6, 7, 5], "<i4")
    marks = prefix_hashes(ids.tobytes(), "a")
    assert prefix_hashes_at(ids.tobytes(), "a", (1, 4)) == [int(marks[0]), int(marks[3])]
    assert len({*marks.tolist(), *prefix_hashes(ids.tobytes(), "b").tolist()}) == 8
    swapped = np.array([6, 5, 7, 5], "<i4")
    assert not set(prefix_hashes(swapped.tobytes(), "a").tolist()) & set(marks.tolist())
