"""What /metrics says in front of a real llama-server."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import requests
from daemon import Daemon

TOTAL = re.compile(r"^(llamacpp:\w+_total) (\S+)$", re.MULTILINE)


def _totals(url: str) -> dict[str, float]:
    text = requests.get(f"{url}/metrics", timeout=10).text
    return {name: float(value) for name, value in TOTAL.findall(text)}


def test_totals_count_requests_and_nothing_else(make_sidecar: Callable[..., Daemon]) -> None:
    """The probe's tokens are left out: a fresh daemon has evaluated and predicted nothing, and
    then just what its clients asked for."""
    with make_sidecar() as daemon:
        assert not any(_totals(daemon.url).values()), _totals(daemon.url)
        body: dict[str, Any] = {"prompt": [1, 403, 407, 261], "n_predict": 3, "ignore_eos": True}
        reply = requests.post(f"{daemon.url}/completion", json=body, timeout=60).json()
        totals = _totals(daemon.url)
        assert totals["llamacpp:prompt_tokens_total"] == reply["timings"]["prompt_n"] == 4
        assert totals["llamacpp:tokens_predicted_total"] == 3
