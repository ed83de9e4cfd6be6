"""LATEM in chats: what it evicted comes back, by the messages of the chat template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import ask, settle, some_ids
from services import OpenService

from towerd.engine.base import LiveBudget
from towerd.models.bundled import bundled_model
from towerd.retention import Positions, View
from towerd.retention.latem import Latem

BUDGET = 64


class Watched:
    """What the policy saw and kept."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.choices: list[tuple[View, Positions]] = []
        keep = Latem.keep_groups

        def keeping(policy: Latem, view: View, n_max: int, shape: tuple[int, int]) -> Positions:
            kept = keep(policy, view, n_max, shape)
            assert (kept == kept[0, 0]).all(), "all groups keep the same"
            self.choices.append((view, kept[0, 0]))
            return kept

        patch.setattr(Latem, "keep_groups", keeping)


@pytest.mark.parametrize("scope", ["all", "layer"])
async def test_misses_are_fetched(
    service_on: OpenService, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn after turn, beyond the end of the context, positions that had left come back, and the budget
    holds. Everything that was ever live can be chosen."""
    watched = Watched(monkeypatch)
    settings: dict[str, Any] = {"ctx_size": 256, "live_tokens": 256, "threads": 1}
    async with service_on(bundled_model(), retention="latem", **settings) as service:
        ids = some_ids(150)
        for turn in range(4):
            answer = await ask(service, ids, 30, live=LiveBudget("latem", BUDGET, scope))
            assert answer.finish.reuse.kept is not None
            assert answer.finish.reuse.kept <= BUDGET
            again = ids[20 * turn : 20 * turn + 20]  # what was said before is said again
            ids = np.concatenate([ids, np.array(answer.ids, np.int32), again])
        stats = service.engine.stats()
        assert stats["recall_tokens"] > 0
        assert stats["retention_moves"] > 0
        await settle(service)
    came_back = 0
    for view, kept in watched.choices:
        assert len(kept) <= BUDGET
        assert view.live is not None
        came_back += int((~view.live[np.searchsorted(view.positions, kept)]).sum())
    assert came_back > 0
    assert len(watched.choices[-1][0].positions) > BUDGET


async def test_messages_are_those_of_the_template(
    service_on: OpenService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message that the template renders has a number of its own."""
    watched = Watched(monkeypatch)
    async with service_on(bundled_model(), retention="latem", threads=1) as service:
        vocab = service.engine.core.vocab
        controls = [i for i in range(vocab.n_vocab) if vocab.names[i]][:2]
        names = list(vocab.names)
        names[controls[0]], names[controls[1]] = b"<|user|>", b"<|assistant|>"
        monkeypatch.setattr(vocab, "names", names)
        said = [some_ids(30, seed) for seed in range(5)]
        said = [ids[~np.isin(ids, controls)] for ids in said]
        marks = [np.array([controls[i % 2]], np.int32) for i in range(5)]
        parts = [part for pair in zip(marks, said, strict=True) for part in pair]
        await ask(service, np.concatenate(parts), 2, live=LiveBudget("latem", BUDGET))
        await settle(service)
    view, _ = watched.choices[0]
    assert view.messages is not None
    lengths = [len(ids) + 1 for ids in said]
    expected = np.repeat(np.arange(5), lengths)[view.positions]
    assert np.array_equal(view.messages - view.messages[0], expected)
