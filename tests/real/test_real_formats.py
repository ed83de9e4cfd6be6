"""What SmolLM2's rows cost in the stored formats, and what they never do."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Oracle, ask, settle
from real_checks import check_bits, divergence_in, ids_of, joined, noise
from real_text import BREAD, CLOCK, QUESTIONS
from services import OpenService
from waiting import until_async

from towerd.tiers.shrink import SINKS, TAIL

N = 24


@pytest.mark.parametrize(("level_formats", "bound"), [("0=q5h", 0.005), ("0=q4h", 0.01)])
async def test_from_fewer_bits(
    service_on: OpenService,
    smollm2: Path,
    smollm2_oracle: Oracle,
    level_formats: str,
    bound: float,
) -> None:
    """After a restart the text's rows come from the stored format, labelled; replies diverge from
    those over exact rows by little more than other batches make them. A daemon of fidelity exact
    evaluates the text again, to the bit."""
    formats = {"fidelity": "near", "level_formats": level_formats}
    async with service_on(smollm2, **formats, shrink_after_s=0.0) as service:
        text = await ids_of(service, CLOCK + BREAD, begins=True)
        asked = [joined(text, await ids_of(service, question)) for question in QUESTIONS]
        await ask(service, text, 1)
        await settle(service)
        await until_async(lambda: service.tiers.stats()["segments_shrunk"] > 0)
        await settle(service)
        stats = service.tiers.stats()
        assert 0 < stats["warm_quantized_bytes"] < 0.5 * len(text) * 23040
    found, floors = [], []
    async with service_on(smollm2, **formats, shrink_after_s=1e6) as service:
        for prompt in asked:
            n_new = len(prompt) - len(text)
            answer = await ask(service, prompt, N)
            assert answer.finish.reuse.approximate == len(text) - SINKS - TAIL
            assert answer.finish.reuse.prefill == n_new
            sizes = [len(text), n_new]
            found.append(divergence_in(smollm2_oracle, prompt, sizes, answer))
            floors.append(noise(smollm2_oracle, prompt, sizes, answer))
        await settle(service)
    excess = (sum(found) - sum(floors)) / len(found)
    assert sum(found) > 0
    assert excess <= bound
    async with service_on(smollm2) as service:
        answer = await ask(service, asked[0], N)
        assert (answer.finish.reuse.approximate, answer.finish.reuse.warm) == (0, 0)
        check_bits(smollm2_oracle, asked[0], [len(asked[0])], answer)
        await settle(service)
