"""SmolLM2 under a budget of live tokens, with every policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle, ask, settle
from real_checks import check_bits, ids_of, joined
from real_text import BREAD, CLOCK, LETTER, QUESTIONS, RIVER
from services import OpenService

from towerd.engine.base import LiveBudget
from towerd.settings.config import RETENTIONS, UNBOUNDED

BOUNDED = tuple(name for name in RETENTIONS if name not in UNBOUNDED)
N = 8
BUDGET = 256
KEY = "The pass key of the blue door is 48213. Remember it: 48213 is the pass key.\n"
ASKED = "The pass key of the blue door is"


@pytest.mark.parametrize("policy", BOUNDED)
async def test_a_text_beyond_its_budget(
    service_on: OpenService, smollm2: Path, smollm2_oracle: Oracle, policy: str
) -> None:
    """A prompt within the budget is answered to the bit; one beyond keeps to it, turn after turn,
    and the store has every token."""
    live = LiveBudget(policy, BUDGET)
    async with service_on(smollm2, retention=policy) as service:
        chat = await ids_of(service, CLOCK, begins=True)
        answer = await ask(service, chat, N, live=live, session="chat")
        assert answer.finish.reuse.kept == len(chat)
        check_bits(smollm2_oracle, chat, [len(chat)], answer)
        for more in (BREAD, QUESTIONS[1]):
            n_known = len(chat) + N - 1
            chat = joined(chat, answer.ids, await ids_of(service, more))
            answer = await ask(service, chat, N, live=live, session="chat")
            assert answer.finish.reuse.prefill == len(chat) - n_known
            kept = answer.finish.reuse.kept
            assert kept is not None
            assert BUDGET / 3 < kept <= BUDGET
            assert service.engine.pool.cells_used <= BUDGET
        await settle(service)
        stored = service.store.session_ids("chat", "local")
        assert np.array_equal(stored, joined(chat, answer.ids))


async def test_a_pass_key(service_on: OpenService, smollm2: Path) -> None:
    """Far behind, it is found by the full cache, and under less than half of it by the policies that
    keep or bring back what is asked for; not by the one that keeps what is recent."""
    async with service_on(smollm2, retention="icecache") as service:
        ids = await ids_of(service, BREAD + KEY + RIVER + LETTER + ASKED, begins=True)
        assert len(ids) > 2 * BUDGET
        said = {}
        for policy in ("none", "icecache", "snapkv", "streaming"):
            live = LiveBudget(policy, BUDGET) if policy in BOUNDED else LiveBudget()
            answer = await ask(service, ids, N, live=live, scope=policy)
            assert answer.finish.reuse.prefill == len(ids)
            said[policy] = "48213" in answer.text
        assert said == {"none": True, "icecache": True, "snapkv": True, "streaming": False}
        await settle(service)


async def test_a_value_among_others(service_on: OpenService, gemma: Path) -> None:
    """Of a model of which three layers attend to everything: what has to be told from its like by the key alone is
    found, too."""
    chance = np.random.default_rng(1)
    pairs = [(f"{key:04x}", f"{value:05d}") for key, value in chance.integers(0, 1 << 16, (16, 2))]
    told = "".join(f'"{key}": "{value}"\n' for key, value in pairs)
    async with service_on(gemma, retention="icecache") as service:
        found: dict[str, set[str]] = {"none": set(), "icecache": set()}
        for key, value in pairs[1:15:2]:
            text = BREAD + told + RIVER + LETTER + f'"{pairs[0][0]}": "{pairs[0][1]}"\n"{key}": "'
            ids = await ids_of(service, text, begins=True)
            assert len(ids) > 2 * BUDGET
            for policy in found:
                live = LiveBudget(policy, BUDGET) if policy in BOUNDED else LiveBudget()
                answer = await ask(service, ids, N, live=live, scope=policy)
                if answer.text.strip().startswith(value):
                    found[policy].add(key)
        assert len(found["none"]) >= 4
        assert len(found["none"] - found["icecache"]) <= 1, found
        await settle(service)
