"""Services with the embedded engine, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.service import Service, open_service
from towerd.settings.config import Config

EmbeddedService: TypeAlias = Service[EmbeddedEngine]
OpenService: TypeAlias = Callable[..., AbstractAsyncContextManager[EmbeddedService]]
"""`async with service_on(model, name="store", ...)`: a service on a store of this test, by its name."""


def opener(folder: Path, **defaults: Any) -> OpenService:
    """Opens services with these settings on stores in `folder`."""

    @asynccontextmanager
    async def open_it(
        model: Path, name: str = "store", **settings: Any
    ) -> AsyncIterator[EmbeddedService]:
        values: dict[str, Any] = {
            "model": model,
            "store_dir": folder / name,
            "socket": folder / "s",
            "live_sequences": 8,
            "parallel": 4,
            "threads": 1,
            "hot_bytes": 1 << 30,
            "warm_bytes": 1 << 30,
        }
        async with open_service(Config(**(values | defaults | settings))) as service:
            yield service

    return open_it
