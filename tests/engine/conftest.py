"""Real models and a real service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import OpenService, Oracle
from services import EmbeddedService

from towerd.models.bundled import bundled_model
from towerd.models.random_gguf import PRESETS, make_random_gguf
from towerd.service import open_service
from towerd.settings.config import Config


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, 2 KV heads of 64."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=2))
    return path


@pytest.fixture(scope="session", params=["random", "bundled"])
def model_path(request: pytest.FixtureRequest, tiny_model: Path) -> Path:
    return tiny_model if request.param == "random" else bundled_model()


@pytest.fixture
def service_on(tmp_path: Path) -> OpenService:
    """`async with service_on(model, ctx_size=...)`: a service on this test's own store."""

    @asynccontextmanager
    async def open_it(model: Path, **settings: Any) -> AsyncIterator[EmbeddedService]:
        values: dict[str, Any] = {
            "model": model,
            "store_dir": tmp_path / "store",
            "socket": tmp_path / "s",
            "ctx_size": 512,
            "live_tokens": 2048,
            "live_sequences": 8,
            "parallel": 4,
            "threads": 1,
            "hot_bytes": 1 << 30,
            "warm_bytes": 1 << 30,
        }
        async with open_service(Config(**(values | settings))) as service:
            yield service

    return open_it


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Iterator[Oracle]:
    made = Oracle(model_path)
    yield made
    made.close()
