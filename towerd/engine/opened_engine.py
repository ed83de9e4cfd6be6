"""OpenedEngine: an engine with its store and tiers, ready for the rest of a service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from towerd.store import Node, Store
from towerd.tiers.manager import Tiers

EngineT = TypeVar("EngineT")


@dataclass(frozen=True, slots=True)
class OpenedEngine(Generic[EngineT]):
    """The result of opening an engine. The context manager that opened it closes it."""

    engine: EngineT
    store: Store
    tiers: Tiers
    forget: Callable[[Sequence[Node]], None]
    """Called with the segments of a session that was frozen, on another thread than the loop's."""
    has_checkpoint: Callable[[Node], bool] | None = None
    """Whether a state checkpoint is at a segment's end, asked under the store's lock; None: the
    model resumes from any row."""
    is_quiet: Callable[[], bool] | None = None
    """Whether the engine is idle or only decodes; None: it has no background requests, so nothing
    is evaluated or fetched ahead."""
    anticipate_tokens_max: int = 0
    """Tokens that may be evaluated ahead of a chat's next turn."""
