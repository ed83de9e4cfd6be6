"""The type of a service with the embedded engine, for tests."""

from __future__ import annotations

from typing import TypeAlias

from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.service import Service

EmbeddedService: TypeAlias = Service[EmbeddedEngine]
