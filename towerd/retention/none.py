"""No retention: everything stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from towerd.retention.base import Positions, Signal, View, check_view


@dataclass(frozen=True, slots=True)
class NoneConfig:
    n_min: ClassVar[int] = 0

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        return cls()


class KeepAll:
    """Keeps every position; one that does not fit is an error, not an eviction."""

    signals: frozenset[Signal] = frozenset()
    can_recall = False

    def __init__(self, config: NoneConfig) -> None:
        self.config = config

    def keep(self, view: View, n_max: int) -> Positions:
        check_view(self, view, n_max)
        if view.n > n_max:
            raise ValueError(f"{view.n} positions do not fit {n_max}, and none may be dropped")
        return view.positions

    def truncate(self, n: int) -> None:
        """Does nothing: the policy is stateless."""

    def fork(self) -> Self:
        return self
