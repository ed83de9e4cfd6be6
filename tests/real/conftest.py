"""Trained models: each test skips without the one it wants (`make models` fetches both)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import real_models
from oracle import Oracle
from real_checks import EXACT
from services import OpenService, opener


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
    return opener(tmp_path, freeze_after_s=-1.0, **EXACT)
