"""Trained models: each test skips without the one it wants (`make models` fetches both)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import real_models
from oracle import OpenService, Oracle
from real_checks import EXACT
from services import EmbeddedService

from towerd.service import open_service
from towerd.settings.config import Config


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return real_models.smollm2()


@pytest.fixture(scope="session")
def gemma() -> Path:
    return real_models.gemma()


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2: Path) -> Iterator[Oracle]:
    """Monolithic prefill with the attention and threads of EXACT."""
    made = Oracle(smollm2, flash_attn=EXACT["flash_attn"], threads=EXACT["threads"])
    yield made
    made.close()


@pytest.fixture(scope="session")
def gemma_oracle(gemma: Path) -> Iterator[Oracle]:
    made = Oracle(gemma, flash_attn=EXACT["flash_attn"], threads=EXACT["threads"])
    yield made
    made.close()


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
            "live_sequences": 8,
            "parallel": 4,
            "hot_bytes": 1 << 30,
            "warm_bytes": 1 << 30,
            "freeze_after_s": -1.0,
        }
        async with open_service(Config(**(values | EXACT | settings))) as service:
            yield service

    return open_it
