"""A predictor for each tenant: what one tenant's workflows do is no evidence of another's.

The daemon's policies know an agent as "tenant\\nname"; the models of one tenant never meet another's
names, nor how often its workflows end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towerd.policy.base import Learning
from towerd.policy.predict.base import Forecast, Predictor, Share

MARK = "\n"
"""Separates tenant and agent in the names that policies get."""
TENANTS_MAX = 64
"""Tenants with a predictor; beyond that the one without a step for longest loses what it learned."""


class TenantPredictors:
    """A Predictor that asks, and teaches, only that of the path's own tenant."""

    def __init__(self, make: Callable[[Share], Predictor]) -> None:
        """make: a predictor that has learned nothing"""
        self._make = make
        self._of: OrderedDict[str, Predictor] = OrderedDict()

    def of(self, tenant: str) -> Predictor:
        """The predictor of a tenant, made if there is none."""
        found = self._of.get(tenant)
        if found is None:
            found = self._of[tenant] = self._make(self._share)
            if len(self._of) > TENANTS_MAX:
                self._of.popitem(last=False)
        self._of.move_to_end(tenant)
        return found

    def forecast(self, path: Sequence[str]) -> Forecast:
        """See Predictor.forecast."""
        return self.of(tenant_in(path)).forecast(path)

    def observe(self, path: Sequence[str]) -> None:
        """See Predictor.observe."""
        self.of(tenant_in(path)).observe(path)

    def learned(self) -> Mapping[str, Any]:
        """See Learning.learned: of each tenant, the one that stepped last at the end."""
        return {
            tenant: each.learned()
            for tenant, each in self._of.items()
            if isinstance(each, Learning)
        }

    def recall(self, learned: Mapping[str, Any]) -> None:
        """See Learning.recall. Changes nothing if any tenant's part is damaged."""
        if len(learned) > TENANTS_MAX:
            raise ValueError(f"there are {len(learned)} tenants")
        found: OrderedDict[str, Predictor] = OrderedDict()
        for tenant, part in learned.items():
            found[tenant] = each = self._make(self._share)
            if isinstance(each, Learning):
                each.recall(part)
        self._of = found

    def _share(self) -> float:
        return 1.0 / max(1, len(self._of))


def tenant_in(path: Sequence[str]) -> str:
    """The tenant of the steps of a workflow; empty for names without one, such as END."""
    return next((name.partition(MARK)[0] for name in path if MARK in name), "")
