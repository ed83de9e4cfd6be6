"""A real service, and the codec of the bundled model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from services import OpenService, opener

from towerd.codec import Codec
from towerd.codec.prior import file as prior
from towerd.codec.vocabulary import GgufVocabulary
from towerd.cold.coding import SessionModel
from towerd.models.bundled import bundled_model


@pytest.fixture(scope="session")
def codec() -> Iterator[Codec]:
    with GgufVocabulary(bundled_model()) as vocabulary:
        yield Codec(vocabulary)


@pytest.fixture
def here(codec: Codec) -> SessionModel:
    return SessionModel("here.gguf", "hash", codec)


@pytest.fixture
def there() -> Iterator[SessionModel]:
    """A model with another vocabulary."""
    with GgufVocabulary(prior.PATH) as vocabulary:
        yield SessionModel("there.gguf", "other", Codec(vocabulary))


@pytest.fixture
def service_on(tmp_path: Path) -> OpenService:
    return opener(tmp_path, ctx_size=512, live_tokens=2048, freeze_after_s=-1.0, anticipate=False)
