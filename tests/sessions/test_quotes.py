"""Quotations found by sampled hashes, against a search that compares every run."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from towerd.sessions.workflows import quotes
from towerd.sessions.workflows.quotes import EVIDENCE_MIN, SAMPLE, WINDOW, Quotes, sample


def text(seed: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 32000, n).astype(np.int32)


def test_a_quotation_is_found_wherever_it_stands() -> None:
    known = Quotes()
    known.add(text(1, 400), "a")
    known.add(text(2, 400), "b")
    quoted = np.concatenate([text(3, 33), text(2, 400)[100:160], text(4, 50)])
    assert known.source(quoted) == "b"
    assert known.source(text(5, 400)) is None


def test_what_two_workflows_say_is_evidence_for_neither() -> None:
    known = Quotes()
    common = text(7, 200)
    known.add(common, "a")
    assert known.source(common) == "a"
    known.add(common, "b")
    assert known.source(common) is None
    known.add(text(8, 200), "b")
    assert known.source(np.concatenate([common, text(8, 200)])) == "b"


@given(st.lists(st.integers(-5, 2**31 - 1), max_size=80), st.integers(0, 30), st.integers(0, 30))
def test_the_sample_depends_on_the_text_alone(ids: list[int], before: int, after: int) -> None:
    """Every hash of a text is among those of any text that contains it, and none is invented."""
    inner = np.array(ids, np.int32)
    outer = np.concatenate([text(1, before), inner, text(2, after)])
    assert set(sample(inner)) <= set(sample(outer))
    assert len(sample(inner)) <= max(0, len(ids) - WINDOW + 1)


def test_a_sample_is_a_quarter() -> None:
    n = len(sample(text(9, 40_000)))
    assert 0.8 < n / (40_000 / SAMPLE) < 1.2
    assert EVIDENCE_MIN >= 2


def test_memory_is_bounded(monkeypatch: object) -> None:
    known = Quotes()
    for i in range(40):
        known.add(text(i, 8000), f"w{i}")
    assert len(known) <= quotes.HASHES_MAX
    assert known.source(text(39, 8000)) == "w39"
    assert known.source(text(0, 8000)) is None
