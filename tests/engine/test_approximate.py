"""Rows from stored formats in a real service: labelled, near, and never taken for exact ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
from oracle import Oracle, TokenProbs, ask, check_answer, settle
from services import EmbeddedService, OpenService
from waiting import until_async

from towerd.store.segments.segment_header import decode_head
from towerd.tiers.shrink import SINKS, TAIL
from towerd.tokens import Ids, Provenance

N = 300
N_STORED = N - SINKS - TAIL
SHRINKING = {"level_formats": "0=q8h", "shrink_after_s": 0.0}


def _prompt(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(260, 500, n).astype(np.int32)


async def shrunk(service_on: OpenService, model: Path, n: int = N, **settings: object) -> list[int]:
    """Have a service answer a prompt and store it in a stored format; the reply."""
    async with service_on(model, **(SHRINKING | settings)) as service:
        answer = await ask(service, _prompt(n))
        await settle(service)
        await until_async(lambda: service.tiers.stats()["segments_shrunk"] > 0)
        await settle(service)
    return answer.ids


def deviation(oracle: Oracle, prompt: Ids, ids: list[int], probs: list[TokenProbs]) -> float:
    """The largest difference of the reported log-probabilities from monolithic prefill."""
    whole = np.concatenate([prompt, np.array(ids[:-1], np.int32)])
    expected = oracle.logprobs(whole, len(prompt) - 1)
    return max(
        float(abs(each.logprob - row[each.id])) for row, each in zip(expected, probs, strict=True)
    )


async def test_resumed_rows_are_labelled_and_near(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """After a restart the past comes from the stored format, the header says how much, and the
    distribution is near the exact one."""
    reply = await shrunk(service_on, model_path)
    async with service_on(model_path, **SHRINKING) as service:
        longer = np.concatenate([_prompt(N), np.array(reply, np.int32), _prompt(5, 1)])
        again = await ask(service, longer)
        reuse = again.finish.reuse
        assert (reuse.live, reuse.hot, reuse.warm) == (0, 0, N + 7)
        # the leaf ends 7 tokens after the prompt
        assert reuse.approximate == N_STORED + 7
        assert reuse.header().endswith(f",approx={N_STORED + 7}")
        assert deviation(oracle, longer, again.ids, again.probs) < 0.25
        await settle(service)


async def test_live_copies_are_labelled_too(service_on: OpenService, tiny_model: Path) -> None:
    """Who branches from a sequence with approximate rows has them as well."""
    reply = await shrunk(service_on, tiny_model)
    base = np.concatenate([_prompt(N), np.array(reply, np.int32)])
    async with service_on(tiny_model, **(SHRINKING | {"shrink_after_s": 1e6})) as service:
        first = await ask(service, np.concatenate([base, _prompt(5, 1)]))
        second = await ask(service, np.concatenate([base, _prompt(5, 2)]))
        assert first.finish.reuse.warm == N + 7
        assert second.finish.reuse.live == N + 8  # the reply's last token was evaluated since
        assert second.finish.reuse.approximate == first.finish.reuse.approximate > 0
        half = await ask(service, np.concatenate([base[:100], _prompt(5, 3)]))
        assert half.finish.reuse.live == 100
        assert half.finish.reuse.approximate == 100 - SINKS
        fresh = await ask(service, _prompt(50, 4))
        assert fresh.finish.reuse.approximate == 0
        assert "approx" not in fresh.finish.reuse.header()
        await settle(service)


async def test_rows_after_approximate_ones_are_marked(
    service_on: OpenService, tiny_model: Path
) -> None:
    """They are stored as computed, and as derived."""
    reply = await shrunk(service_on, tiny_model)
    base = np.concatenate([_prompt(N), np.array(reply, np.int32)])
    async with service_on(tiny_model, **(SHRINKING | {"shrink_after_s": 1e6})) as service:
        longer = np.concatenate([base, _prompt(20, 1)])
        answer = await ask(service, longer)
        await settle(service)
        whole = np.concatenate([longer, np.array(answer.ids, np.int32)])
        nodes = service.store.match(whole, "local").nodes
        new = [node for node in nodes if node.p0 >= N + 7]
        assert new
        for node in new:
            assert node.origin == Provenance.DERIVED
            assert node.file is not None
            assert set(node.file.provenance(node.p0, node.p1).tolist()) == {Provenance.DERIVED}


async def test_approximate_rows_never_become_stored_ones(
    service_on: OpenService, tiny_model: Path
) -> None:
    """Their file goes while they are live: the store keeps the tokens, and evaluates them anew
    when it has to."""
    reply = await shrunk(service_on, tiny_model)
    base = np.concatenate([_prompt(N), np.array(reply, np.int32)])
    async with service_on(tiny_model, **(SHRINKING | {"shrink_after_s": 1e6})) as service:
        await ask(service, np.concatenate([base, _prompt(5, 1)]))
        await settle(service)
        for file in service.store.files():
            service.store.rows.drop_file(file)
        for node in service.store.nodes():
            service.store.rows.drop_hot(node)
        await ask(service, np.concatenate([base, _prompt(5, 2)]))
        await settle(service)
        for node in service.store.nodes():
            if node.p1 <= N:
                assert node.hot is None
                assert node.file is None
    async with service_on(tiny_model, **SHRINKING) as service:
        again = await ask(service, np.concatenate([base, _prompt(5, 3)]))
        assert (again.finish.reuse.warm, again.finish.reuse.approximate) == (0, 0)
        await settle(service)


async def test_exact_fidelity_after_another(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """A store that was filled under near serves an exact daemon exactly: what is approximate,
    or was computed from it, is evaluated again and takes its place."""
    reply = await shrunk(service_on, model_path)
    base = np.concatenate([_prompt(N), np.array(reply, np.int32)])
    longer = np.concatenate([base, _prompt(20, 1)])
    async with service_on(model_path, **(SHRINKING | {"shrink_after_s": 1e6})) as service:
        derived = await ask(service, longer)
        assert derived.finish.reuse.approximate
        await settle(service)
    whole = np.concatenate([longer, np.array(derived.ids, np.int32)])
    async with service_on(model_path, fidelity="exact") as service:
        again = await ask(service, whole)
        assert again.finish.reuse.warm == 0
        check_answer(oracle, whole, again)
        await settle(service)
    async with service_on(model_path, fidelity="exact") as service:
        third = await ask(service, whole)
        assert third.finish.reuse.warm == len(whole) - 1
        assert third.finish.reuse.approximate == 0
        check_answer(oracle, whole, third)
        await settle(service)


async def test_preempted_requests_keep_their_label(
    service_on: OpenService, tiny_model: Path
) -> None:
    """A request that gives way and comes back knows which of its rows are approximate."""
    reply = await shrunk(service_on, tiny_model)
    base = np.concatenate([_prompt(N), np.array(reply, np.int32)])
    settings = SHRINKING | {"shrink_after_s": 1e6, "live_tokens": 512, "ctx_size": 448}
    async with service_on(tiny_model, **settings) as service:
        await run_all(
            service,
            [np.concatenate([base, _prompt(5, 1)]), _prompt(60, 2), _prompt(60, 3)],
        )
        assert service.engine.scheduler.room.n_preemptions > 0
        await settle(service)
        nodes = service.store.match(np.concatenate([base, _prompt(5, 1)]), "local").nodes
        for node in nodes:
            if node.p0 >= N + 7:
                assert node.origin == Provenance.DERIVED or node.file is None


async def run_all(service: EmbeddedService, prompts: list[Ids]) -> None:
    """All at once, long replies."""
    asked: list[Awaitable[object]] = [ask(service, prompt, 90) for prompt in prompts]
    await asyncio.gather(*asked)


async def test_damaged_stored_rows_are_evaluated(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """A flipped bit in a quantized file costs time and nothing else."""
    reply = await shrunk(service_on, model_path)
    async with service_on(model_path, **SHRINKING) as service:
        (file,) = {node.file for node in service.store.nodes() if node.file is not None}
        assert (file.provenance(0, N) == Provenance.APPROXIMATE).any()
        with file.path.open("r+b") as handle:
            head, start = decode_head(memoryview(handle.read()))
            at = start + head.runs[1].planes[0].offset
            handle.seek(at)
            byte = handle.read(1)[0]
            handle.seek(at)
            handle.write(bytes([byte ^ 1]))
        longer = np.concatenate([_prompt(N), np.array(reply, np.int32), _prompt(5, 1)])
        again = await ask(service, longer)
        # what stands before the damage, the first rows as computed, is sound
        assert (again.finish.reuse.warm, again.finish.reuse.approximate) == (SINKS, 0)
        check_answer(oracle, longer, again)
        await settle(service)
