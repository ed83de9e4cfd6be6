"""The curves of LATEM's cost: their optima, the advice they are drawn over, the command."""

from __future__ import annotations

import json
import random

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.latem.algorithm import Item
from lab.latem.cases import CASES, TOKEN_COST, Advice
from lab.latem.curves import TwoLevelLRU, curve, harmonic, robustness, total_cost
from lab.latem.optimum import Request, optimum_cost, paging_cost
from towerd.cli.main import towerctl

REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.integers(0, 2)), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), max_size=14), st.integers(1, 3))
def test_paging_is_the_optimum_without_tokens(messages: list[int], k_m: int) -> None:
    """Belady's rule against the search over all states."""
    requests: list[Request] = [(m, None) for m in messages]
    assert paging_cost(messages, k_m) == optimum_cost(requests, k_m, 1, TOKEN_COST)


@settings(deadline=None, max_examples=60)
@given(REQUESTS, st.integers(1, 2), st.integers(1, 2))
def test_lru_at_both_levels(requests: list[Request], k_m: int, slots: int) -> None:
    """Against a list that is searched from its end; never below the optimum."""
    total = 0.0
    for i, (m, t) in enumerate(requests):
        recent = list(dict.fromkeys(x for x, _ in reversed(requests[:i])))[:k_m]
        if m not in recent:
            total += 1.0
            continue
        if t is None:
            continue
        since = i  # the message has been there from here on
        for j in range(i - 1, -1, -1):
            if m not in list(dict.fromkeys(x for x, _ in reversed(requests[:j])))[:k_m]:
                since = min(since, j)
                if requests[j][0] == m:
                    break
            since = min(since, j)
        mine = [y for x, y in reversed(requests[since:i]) if x == m and y is not None]
        total += 0.0 if t in list(dict.fromkeys(mine))[:slots] else TOKEN_COST
    assert total_cost(TwoLevelLRU(k_m, slots), requests) == pytest.approx(total)
    assert total >= optimum_cost(requests, k_m, slots, TOKEN_COST) - 1e-9


@given(REQUESTS)
def test_advice(requests: list[Request]) -> None:
    """Perfect: the true next use of everything that was used; adversarial: the reverse order."""
    perfect = Advice(requests, 0.0, random.Random(0))
    adverse = Advice(requests, 1.0, random.Random(0))
    assert perfect.total_error == 0.0
    used: set[Item] = set()
    n = len(requests)
    for i, (m, t) in enumerate(requests):
        used |= {m} if t is None else {m, (m, t)}
        perfect.at = adverse.at = i
        for item in used:
            later = [j for j, (x, y) in enumerate(requests) if j > i and item in (x, (x, y))]
            assert perfect(item) == (later[0] if later else n)
    last = max(i for i, (m, _) in enumerate(requests) if m == requests[-1][0])
    assert adverse(requests[-1][0]) == last, "never again is said to be at once"


def test_points() -> None:
    """Perfect advice is the best for each trust here; no cost is below the optimum; the robustness
    bound holds."""
    for name in ("in turn", "by tokens"):
        case = CASES[name]
        perfect, adverse = curve(case, (0.1, 0.9), (0.0, 1.0), 2)
        assert perfect.repaired[0.9] <= adverse.repaired[0.9]
        for point in (perfect, adverse):
            ratios = [*point.printed.values(), *point.repaired.values(), point.adaptive]
            assert min(*ratios, point.marking, point.lru) >= 1.0 - 1e-9
            assert all(ratio <= robustness(case, eps) for eps, ratio in point.repaired.items())
        assert perfect.consistency == 2.0 < adverse.consistency
    assert harmonic(4) == pytest.approx(25 / 12)


def test_command() -> None:
    """The JSON line has every curve, and what was found of the paper's claims."""
    result = CliRunner().invoke(towerctl, ["lab", "bench", "latem", "--quick"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert set(found["curves"]) == set(CASES)
    assert found["robustness_bound_share_max"] <= 1.0
    assert found["by_tokens_printed"] > found["by_tokens_repaired"]
    assert found["shared_pool_ratio"] > 2.0
    assert found["reversed_eps_0.05"] < found["reversed_eps_0.9"]
