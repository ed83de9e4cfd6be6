"""One catalog for several processes, any of which is killed at any moment: nothing is found, and what is planted is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from broker_simulation import BrokerHouse
from simulate import simulate

from towerd.store.catalog.shared.broker import BrokerClient, CatalogBroker

SEEDS = 15
PLANTED_SEEDS = 200


def test_nothing_is_found() -> None:
    """Kills at every moment, power cuts, models that come back at once."""
    for seed in range(SEEDS):
        failure, _ = simulate(seed, kind=BrokerHouse)
        assert failure is None, failure.text()


def test_a_seed_is_the_same_again() -> None:
    """Down to the changes of the disk."""
    first, again = (simulate(3, kind=BrokerHouse)[1] for _ in range(2))
    assert first == again
    assert len(first) > 20


def the_dead_keep_their_turn(patch: pytest.MonkeyPatch) -> None:
    """A process that is killed in its turn keeps it."""
    leave: Callable[..., None] = CatalogBroker.leave

    def left(self: CatalogBroker, client: BrokerClient) -> None:
        leave(self, client)
        self.turn.acquire()

    patch.setattr(CatalogBroker, "leave", left)


def the_dead_are_served_still(patch: pytest.MonkeyPatch) -> None:
    """The model of a process that was killed cannot be opened until its thread has left."""
    patch.setattr(BrokerClient, "is_gone", False)


def changes_that_the_others_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """What one process writes is unknown to the others."""
    patch.setattr(CatalogBroker, "changed", lambda *_: None)


def changes_that_are_told_once(patch: pytest.MonkeyPatch) -> None:
    """Of several other processes one is told."""
    others: Callable[..., Any] = CatalogBroker.others
    patch.setattr(CatalogBroker, "others", lambda self, client: others(self, client)[:1])


PLANTED = (
    the_dead_keep_their_turn,
    pytest.param(the_dead_are_served_still, marks=pytest.mark.slow),
    changes_that_the_others_are_not_told,
    changes_that_are_told_once,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within the seeds."""
    plant(monkeypatch)
    found = (simulate(seed, kind=BrokerHouse)[0] for seed in range(PLANTED_SEEDS))
    assert next((each for each in found if each is not None), None) is not None
