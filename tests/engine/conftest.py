"""Real models and a real service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from oracle import Oracle
from services import OpenService, opener

from lab.models.random_gguf import PRESETS, make_random_gguf
from towerd.models.bundled import bundled_model


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
    return opener(tmp_path, ctx_size=512, live_tokens=2048)


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Iterator[Oracle]:
    made = Oracle(model_path)
    yield made
    made.close()
