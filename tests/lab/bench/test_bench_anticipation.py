"""`towerctl lab bench anticipation`: its loads are as long in tokens whatever the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.prediction import anticipation
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import RETRIEVAL_NAME, bundled_model


@pytest.mark.parametrize(
    "model", [bundled_model(), bundled_model(RETRIEVAL_NAME)], ids=lambda path: path.name
)
def test_lengths_are_in_tokens_of_the_model(model: Path) -> None:
    words = anticipation.Words.of(anticipation.AnticipationLoad(answer_tokens=200), model)
    text = " ".join((anticipation.WORDS * 40)[: words.answer])
    with GgufVocabulary(model) as vocabulary:
        assert len(vocabulary.tokenize(text.encode())) == pytest.approx(200, rel=0.1)
