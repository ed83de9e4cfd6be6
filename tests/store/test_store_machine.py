"""Random operations against a model that only knows whole sequences."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from store_machine import StoreMachine

StoreMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStoreMachine = StoreMachine.TestCase
