"""Leaving out tokens: only when asked, never control tokens, and it says how much."""

from __future__ import annotations

import pytest

from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary

TEXT = b"Please tell me more about the zyxqv, the pwmrtk, the qqjxzb, the vbnkmw and the hhgrtq of it.\n"


def test_reduced_ids_are_exact(codec: Codec, vocabulary: GgufVocabulary) -> None:
    control = next(i for i, piece in enumerate(vocabulary.pieces) if not piece)
    ids = [control, *vocabulary.tokenize(TEXT).tolist(), control]
    loss = codec.reduce(ids, 1e-4)
    assert 0 < loss.n_lost < loss.n_symbols
    assert [i for i in loss.ids.tolist() if i == control] == [control, control]
    text = b"".join(vocabulary.pieces[i] for i in loss.ids.tolist())
    assert len(text) < len(TEXT)
    assert b"tell me more about the" in text
    blob = codec.encode(loss.ids, form="mix")
    assert codec.decode(blob).tolist() == loss.ids.tolist()


def test_nothing_is_given_up_by_default(small: GgufVocabulary) -> None:
    codec = Codec(small)
    ids = small.tokenize(TEXT)
    loss = codec.reduce(ids, 0.0)
    assert loss.n_lost == 0
    assert loss.ids.tolist() == ids.tolist()
    for p_min in (-0.1, 1.0):
        with pytest.raises(ValueError, match="p_min"):
            codec.reduce(ids, p_min)
