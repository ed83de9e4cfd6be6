"""What EAGLE-3, DFlash and DSpark know of a chat outlasts the chat's leaving, as what MTP knows does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from drafters import make_drafter, make_target, words
from services import EmbeddedService, OpenService
from speculating import EVEN, say

from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.run.drafts import HeadDrafts
from towerd.tokens import Ids

KINDS = {
    "draft-eagle3": 4,
    "draft-dflash": 7,
    "draft-dspark": 3,
}
"""Tokens of a draft."""


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """What was drafted while a test runs, by the number of tokens before it."""
    made: dict[int, list[int]] = {}
    draft = HeadDrafts.draft

    def noted(self: HeadDrafts, asked: Sequence[tuple[Job, int]]) -> list[Ids]:
        found = draft(self, asked)
        made.update((job.n, each.tolist()) for (job, _), each in zip(asked, found, strict=True))
        return found

    monkeypatch.setattr(HeadDrafts, "draft", noted)
    return made


async def turn(service: EmbeddedService, prompt: list[int]) -> list[int]:
    said = await say(service, prompt, n_predict=40, ignore_eos=True, cache_prompt=True)
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    assert (await asyncio.to_thread(service.store.verify)).ok
    return [*prompt, *said["ids"]]


@pytest.mark.parametrize("kind", list(KINDS))
async def test_they_draft_after_a_restart_what_they_would_have_drafted(
    service_on: OpenService, drafts: dict[int, list[int]], tmp_path: Path, kind: str
) -> None:
    """Nearly: rows where a turn ends are computed without a state, or not at all."""
    model, head = tmp_path / "model.gguf", tmp_path / "head.gguf"
    make_target(model, "llama")
    make_drafter(head, kind, "random")
    flags = ("-md", str(head), "--spec-type", kind, "--spec-draft-n-max", str(KINDS[kind]))
    fixed = {"ctx_size": 1024, "anticipate": False, "llama_server_args": flags} | EVEN
    found: list[tuple[list[int], dict[int, list[int]]]] = []
    for n_restarts in (0, 1, 1):
        name = f"store {len(found)}"
        bare = {"llama_server_args": ()} if len(found) == 2 else {}
        async with service_on(model, name, **(fixed | bare)) as service:
            chat = await turn(service, words(150, 1))
            if not n_restarts:
                drafts.clear()
                chat = await turn(service, chat + words(10, 2))
        if n_restarts:
            async with service_on(model, name, **fixed) as service:
                drafts.clear()
                chat = await turn(service, chat + words(10, 2))
        found.append((chat, dict(drafts)))
    (chat, stayed), (again, restored), (bare_chat, without) = found
    assert chat == again == bare_chat
    assert len(stayed) > 10
    assert share(stayed, restored) > 0.75
    assert share(stayed, without) < 0.5


def share(some: dict[int, list[int]], others: dict[int, list[int]]) -> float:
    """Of the drafts behind the same tokens, how many are the same."""
    both = some.keys() & others.keys()
    return sum(some[n] == others[n] for n in both) / len(both)
