"""docs/http-api.md has an entry for every route and every metric, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from towerd.api.http.metrics import Metrics
from towerd.app.routes import ROUTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http-api.md"


def test_every_route_is_documented() -> None:
    """Each method and path stands in a heading."""
    headings = re.findall(r"^### (.*)$", PAGE.read_text(), re.MULTILINE)
    documented = set(re.findall(r"`([A-Z]+ /[^`]*)`", "\n".join(headings)))
    assert documented == {f"{route.method} {route.path}" for route in ROUTES}


def test_every_metric_is_documented() -> None:
    """Each metric stands in the table, under the name a scraper sees."""
    text = PAGE.read_text()
    table = text[text.index("## Metrics") :]
    documented = set(re.findall(r"^\| `([a-z_:]+)` \|", table, re.MULTILINE))
    exposed = set()
    for family in text_string_to_metric_families(Metrics().render({}).decode()):
        exposed.add(family.name + "_total" * (family.type == "counter"))
    assert documented == exposed
