"""Trained models with prompts that changed in the middle: answers know what changed, and drift within the bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from moved import allow
from oracle import Answer, ask, settle
from real_text import CLOCK, RIVER
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.tiers.moved_limits import MovedLimits
from towerd.tokens import Ids

SMOLLM2 = MovedLimits("", 0.0024, 0.0313, 0.158)
GEMMA = MovedLimits("", 0.0041, 0.055, 0.24)
"""As measured on them."""
FACTS = [
    ("Today's date is 3 May 2026.", "Today's date is 9 June 2026.", "Today's date is", "9 June"),
    (
        "The directory is /home/ann.",
        "The directory is /home/bob.",
        "The directory is /home/",
        "bob",
    ),
    (
        "The assistant's name is Ada.",
        "The assistant's name is Tom.",
        "The assistant's name is",
        "Tom",
    ),
    ("Answers must be in English.", "Answers must be in French.", "Answers must be in", "French"),
]


def tokens(service: EmbeddedService, text: str) -> Ids:
    return service.engine.core.vocab.tokenize(text, True, True)


async def answers(service: EmbeddedService, fact: tuple[str, str, str, str]) -> tuple[Answer, str]:
    """The reply to a prompt whose first line changed, from moved rows, and its text."""
    old, new, question, _ = fact
    texts = [f"{line}\n\n{CLOCK}\n\n{RIVER}\n\n{question}" for line in (old, new)]
    await ask(service, tokens(service, texts[0]), 1)
    answer = await ask(service, tokens(service, texts[1]), 8)
    said = service.engine.core.vocab.detokenize(np.array(answer.ids, np.int32))
    return answer, said.decode("utf-8", "replace")


@pytest.mark.parametrize("fact", FACTS, ids=[fact[3] for fact in FACTS])
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
async def test_an_answer_knows_what_changed(
    service_on: OpenService,
    request: pytest.FixtureRequest,
    name: str,
    fact: tuple[str, str, str, str],
) -> None:
    """It reads the new line if exact evaluation does, of which the model decides, and never the old one."""
    model: Path = request.getfixturevalue(name)
    async with service_on(model, anticipate=False, fidelity="small") as service:
        allow(service, SMOLLM2 if name == "smollm2" else GEMMA)
        moved, said = await answers(service, fact)
        assert moved.finish.reuse.moved > 100
    async with service_on(model, "exact", fidelity="exact") as service:
        exact, expected = await answers(service, fact)
        assert exact.finish.reuse.moved == 0
    old, _, question, new = fact
    before = old.removeprefix(question).strip(" .").removesuffix(" 2026")
    assert said.strip() == expected.strip() or before not in said
    if new in expected:
        assert new in said


async def test_what_is_served_is_measured(service_on: OpenService, smollm2: Path) -> None:
    """In idle time the answer's drift is found to be within what was told, and the rows are exact."""
    async with service_on(smollm2, fidelity="near") as service:
        allow(service, SMOLLM2)
        answer, _ = await answers(service, FACTS[0])
        assert answer.finish.reuse.drift is not None
        stats = service.sessions.stats
        await until_async(lambda: stats()["moved_answers_measured"] == 1)
        assert stats()["moved_excess_worst"] < 0.02
        await settle(service)
        assert service.tiers.stats()["moved_bytes"] == 0
