"""What the router answers and passes on, against the routes of its models' processes and its documentation."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from towerd.api.relay.routes import ROUTES as RELAY_ROUTES
from towerd.app.routes import LLAMA_ROUTES, UNSUPPORTED_ROUTES
from towerd.router.http.forward import forward, forward_named
from towerd.router.loading.metrics import RouterMetrics
from towerd.router.router import ROUTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "several-models.md"


def test_every_endpoint_of_a_model_is_reached() -> None:
    """Those of either engine, and no others."""
    inner = {(each.method, each.path) for each in (*LLAMA_ROUTES, *UNSUPPORTED_ROUTES)}
    inner |= {(method, path) for method, path, _ in RELAY_ROUTES}
    reached = {(each.method, each.path): each.handler for each in ROUTES}
    assert inner <= reached.keys()
    passed_on = {route for route, to in reached.items() if to in (forward, forward_named)}
    assert passed_on <= inner


def test_its_metrics_are_documented() -> None:
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", PAGE.read_text(), re.MULTILINE))
    exposed = {
        family.name + "_total" * (family.type == "counter")
        for family in text_string_to_metric_families(RouterMetrics().render([]).decode())
    }
    assert documented == exposed
