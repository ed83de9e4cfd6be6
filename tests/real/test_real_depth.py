"""SmolLM2 with the table that comes with the package: what chats share is coded coarser, within the bound."""

from __future__ import annotations

from pathlib import Path

from oracle import Oracle, ask, settle
from real_checks import divergence_in, ids_of, joined, noise
from real_text import BREAD, CLOCK, QUESTIONS, RIVER
from services import OpenService
from waiting import until_async

from towerd.tiers.formats.calibration import BOUNDS
from towerd.tiers.formats.packaged import packaged_calibration

N = 24


async def test_what_chats_share_is_labelled_with_what_it_costs(
    service_on: OpenService, smollm2: Path, smollm2_oracle: Oracle
) -> None:
    """From the first day, nothing calibrated: nearly all of each prompt is level 0, and replies diverge by no
    more than the label says, which stays within the bound."""
    async with service_on(smollm2, fidelity="near", shrink_after_s=0.0) as service:
        identity = service.engine.core.info.row_identity
        table = packaged_calibration(identity)
        assert table is not None
        assert service.engine.calibrator.view()["calibration"] == table.to_json()
        text = await ids_of(service, CLOCK + BREAD + RIVER, begins=True)
        asked = [joined(text, await ids_of(service, question)) for question in QUESTIONS]
        for i in range(4):
            question = await ids_of(service, f"Question {i}: {i} or {i + 1}?")
            await ask(service, joined(text, question), 1)
        await settle(service)
        shallow = set(table.choices["near"].levels) - {table.choices["near"].levels[-1]}
        await until_async(
            lambda: any(
                run.format in shallow for file in service.store.files() for run in file.runs
            )
        )
        await settle(service)
    found, labels = [], []
    async with service_on(smollm2, fidelity="near", shrink_after_s=1e6) as service:
        for prompt in asked[:2]:
            answer = await ask(service, prompt, N)
            reuse = answer.finish.reuse
            assert reuse.approximate > 0.5 * len(text)
            assert reuse.drift is not None
            assert 0 < reuse.drift.excess <= BOUNDS["near"] * 1.0001
            n = reuse.live + reuse.hot + reuse.warm
            sizes = [n, len(prompt) - n]
            measured = divergence_in(smollm2_oracle, prompt, sizes, answer)
            found.append(measured - noise(smollm2_oracle, prompt, sizes, answer))
            labels.append(reuse.drift.excess)
        await settle(service)
    # 48 tokens tell no more than this from the mean.
    assert sum(found) / len(found) < sum(labels) / len(labels) + 0.004
