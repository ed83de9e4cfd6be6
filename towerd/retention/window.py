"""A plain sliding window of the last tokens: the baseline for StreamingLLM's sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from towerd.retention.base import Positions, Signal, View, check_view
from towerd.retention.choice import check_ends


@dataclass(frozen=True, slots=True)
class WindowConfig:
    window: int = 1
    """The fewest last tokens; as many stay as fit."""

    def __post_init__(self) -> None:
        check_ends(0, self.window)

    @property
    def n_min(self) -> int:
        return self.window

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        return cls(window=budget // 2)


class Window:
    """Keeps as many last tokens as fit."""

    signals: frozenset[Signal] = frozenset()
    can_recall = False

    def __init__(self, config: WindowConfig) -> None:
        self.config = config

    def keep(self, view: View, n_max: int) -> Positions:
        check_view(self, view, n_max)
        return view.positions[-n_max:]

    def truncate(self, n: int) -> None:
        """Does nothing: the policy is stateless."""

    def fork(self) -> Self:
        return self
