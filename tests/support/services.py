"""A service as tests of the embedded engine see it."""

from __future__ import annotations

from typing import TypeAlias

from towerd.engine.embedded.engine import EmbeddedEngine
from towerd.service import Service

EmbeddedService: TypeAlias = Service[EmbeddedEngine]
