"""What a head has of the words around pictures that share positions (M-RoPE) comes back with the chat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from heads import N_EMBD, make_head_gguf
from seeing import HIGH, WIDE, Part, letters, look
from services import EmbeddedService, OpenService
from speculating import EVEN

from lab.models.vision import make_projector
from towerd.engine.embedded.live.job import Job
from towerd.engine.embedded.run.drafts import HeadDrafts
from towerd.tokens import Ids

FLAGS = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "2")


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """What heads draft while a test runs, behind how many tokens."""
    made: list[tuple[int, list[int]]] = []
    draft = HeadDrafts.draft

    def noted(self: HeadDrafts, asked: Sequence[tuple[Job, int]]) -> list[Ids]:
        found = draft(self, asked)
        made.extend((job.n, each.tolist()) for (job, _), each in zip(asked, found, strict=True))
        return found

    monkeypatch.setattr(HeadDrafts, "draft", noted)
    return made


async def turn(service: EmbeddedService, *parts: Part) -> list[int]:
    looked = await look(service, *parts, n_predict=30)
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    assert (await asyncio.to_thread(service.store.verify)).ok
    return list(looked.answer.ids)


@pytest.mark.parametrize("arch", ["qwen35"])
async def test_they_draft_behind_a_picture_what_they_would_have_drafted(
    service_on: OpenService, drafts: list[tuple[int, list[int]]], tmp_path: Path, arch: str
) -> None:
    model, projector = tmp_path / "model.gguf", tmp_path / "projector.gguf"
    make_head_gguf(model, arch, "of rows")
    make_projector(projector, N_EMBD, kind="qwen2vl")
    seeing = ("--mmproj", str(projector), "--no-warmup")
    start: tuple[Part, ...] = (letters(80, 1), (1, WIDE), letters(60, 2), (2, HIGH), letters(30, 3))
    fixed = {"ctx_size": 1024, "anticipate": False, "checkpoint_tokens": 16} | EVEN
    found: list[tuple[list[int], list[tuple[int, list[int]]]]] = []
    both = (*seeing, *FLAGS)
    async with service_on(model, "stayed", llama_server_args=both, **fixed) as service:
        await turn(service, *start)
        drafts.clear()
        stayed = await turn(service, *start, letters(20, 4)), list(drafts)
    for name, flags in (("restored", both), ("bare", seeing)):
        async with service_on(model, name, llama_server_args=flags, **fixed) as service:
            await turn(service, *start)
        async with service_on(model, name, llama_server_args=both, **fixed) as service:
            drafts.clear()
            found.append((await turn(service, *start, letters(20, 4)), list(drafts)))
            assert int(service.engine.stats()["media_encoded"]) == 0
    restored, bare = found
    assert len(stayed[1]) > 5
    assert restored == stayed
    assert bare[0] == stayed[0]
    assert bare[1] != stayed[1]
