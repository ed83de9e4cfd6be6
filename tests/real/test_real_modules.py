"""A few sentences that are a module of SmolLM2, spliced in where they stand."""

from __future__ import annotations

from pathlib import Path

from oracle import Oracle, ask, settle
from real_checks import check_bits, divergence_in, ids_of, joined, noise
from real_text import BREAD, QUESTIONS, RIVER
from services import OpenService

from towerd.tiers.formats.calibration import allows

N = 24
SENTENCES = RIVER[: RIVER.index(" In dry")]


async def test_measured_and_spliced(
    service_on: OpenService, smollm2: Path, smollm2_oracle: Oracle
) -> None:
    """What is evaluated again is chosen so that the drift is within what `small` allows; a prompt
    with the module in its middle says so, and its reply is near that of a prefill. `near`
    allows less and evaluates all of it, to the bit."""
    formats = {"level_formats": "0=native"}
    async with service_on(smollm2, fidelity="small", **formats) as service:
        maker = service.engine.modules
        assert maker is not None
        inner = await ids_of(service, SENTENCES)
        module = await maker.measure(inner, 15.0)
        assert module.floor_kl > 1e-4  # its weights have 4 bits
        assert allows("small", module.drift)
        n_kept = len(inner) - module.n_recomputed
        assert n_kept >= len(inner) / 4
        path = maker.path(inner)
        await ask(service, path, 0, precache="river")
        service.store.bases.add("river", path, "local", 0, False, None, module)
        await settle(service)
        before = await ids_of(service, BREAD, begins=True)
        prompt = joined(before, inner, await ids_of(service, QUESTIONS[2]))
        answer = await ask(service, prompt, N)
        assert (answer.finish.reuse.approximate, answer.finish.reuse.drift) == (
            n_kept,
            module.drift,
        )
        assert answer.finish.reuse.prefill <= len(prompt) - n_kept
        await settle(service)
    sizes = [len(prompt)]
    found = divergence_in(smollm2_oracle, prompt, sizes, answer)
    floor = noise(smollm2_oracle, prompt, sizes, answer)
    assert 0 < found <= floor + 0.04
    assert not allows("near", module.drift)
    async with service_on(smollm2, fidelity="near", **formats) as service:
        again = await ask(service, prompt, N)
        assert (again.finish.reuse.approximate, again.finish.reuse.prefill) == (0, len(prompt))
        check_bits(smollm2_oracle, prompt, sizes, again)
