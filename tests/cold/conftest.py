"""A real service, and the codec of the bundled model's vocabulary."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from oracle import OpenService
from services import EmbeddedService

from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model
from towerd.service import open_service
from towerd.settings.config import Config


@pytest.fixture(scope="session")
def codec() -> Iterator[Codec]:
    with GgufVocabulary(bundled_model()) as vocabulary:
        yield Codec(vocabulary)


@pytest.fixture
def service_on(tmp_path: Path) -> OpenService:
    """`async with service_on(model, name="a", ...)`: a service on a store of this test."""

    @asynccontextmanager
    async def open_it(
        model: Path, name: str = "a", **settings: Any
    ) -> AsyncIterator[EmbeddedService]:
        values: dict[str, Any] = {
            "model": model,
            "store_dir": tmp_path / name,
            "socket": tmp_path / "s",
            "ctx_size": 512,
            "live_tokens": 2048,
            "live_sequences": 8,
            "parallel": 4,
            "threads": 1,
            "hot_bytes": 1 << 30,
            "warm_bytes": 1 << 30,
            "freeze_after_s": -1.0,
            "anticipate": False,
        }
        async with open_service(Config(**(values | settings))) as service:
            yield service

    return open_it
