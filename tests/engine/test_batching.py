"""Who gets into the next batch, and how much."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle import GREEDY, ask, job_for
from services import OpenService

from towerd.engine.base import GenerateRequest, Piece
from towerd.engine.embedded.context.context import Batch
from towerd.engine.embedded.live.job import Job, JobPhase
from towerd.engine.embedded.live.pool import LiveSeq
from towerd.engine.embedded.run.batching import CHUNK_MS_MAX, Batching

N_BATCH = 128


class OneBatch:
    """A context as far as Batching knows it."""

    def __init__(self) -> None:
        self.batch = Batch(N_BATCH)


def job(seq: int, n: int, n_live: int, phase: JobPhase) -> Job:
    ids = np.arange(n, dtype=np.int32)
    made = job_for(GenerateRequest(ids=ids), phase=phase)
    made.seq = LiveSeq(seq, "local", ids.copy(), n_live)
    return made


@pytest.fixture
def context() -> OneBatch:
    return OneBatch()


@pytest.fixture
def batching(context: OneBatch) -> Batching:
    return Batching(context)  # type: ignore[arg-type]  # it only needs the batch


def test_alone_a_prompt_gets_whole_batches(batching: Batching) -> None:
    """No stream waits, so nothing is held back."""
    prompt = job(0, 1000, 0, JobPhase.PREFILL)
    assert batching.fill([prompt]) == [prompt]
    assert prompt.n_in_batch == N_BATCH
    assert prompt.logits_index == -1


def test_streams_go_first_and_bound_the_chunk(batching: Batching, context: OneBatch) -> None:
    """Every running stream is in every batch; the prompt beside it gets CHUNK_MS_MAX of time."""
    streams = [job(i, 50, 49, JobPhase.DECODE) for i in range(8)]
    prompt = job(9, 1000, 0, JobPhase.PREFILL)
    token_s = 0.005
    for _ in range(50):
        batching.learn(100, 100 * token_s)
    taken = batching.fill([*streams, prompt])
    assert taken == [*streams, prompt]
    assert [j.n_in_batch for j in streams] == [1] * 8
    assert prompt.n_in_batch * token_s * 1e3 <= CHUNK_MS_MAX + 1e-6
    assert context.batch.n == 8 + prompt.n_in_batch


def test_prompts_share_a_batch_shortest_first(batching: Batching, context: OneBatch) -> None:
    """A short prompt is done at once; what it leaves goes to the long ones."""
    prompts = [job(0, 900, 0, JobPhase.PREFILL), job(1, 10, 0, JobPhase.PREFILL)]
    prompts.append(job(2, 700, 0, JobPhase.PREFILL))
    batching.fill(prompts)
    assert prompts[1].n_in_batch == 10
    assert prompts[1].logits_index == 9
    assert prompts[0].n_in_batch + prompts[2].n_in_batch == N_BATCH - 10
    assert min(prompts[0].n_in_batch, prompts[2].n_in_batch) >= (N_BATCH - 10) // 2
    assert context.batch.n == N_BATCH


def test_positions_and_sequences_are_right(batching: Batching, context: OneBatch) -> None:
    """A job's tokens continue its sequence where that ends."""
    prompt = job(3, 40, 30, JobPhase.PREFILL)
    batching.fill([prompt])
    assert list(context.batch.pos[:10]) == list(range(30, 40))
    assert list(context.batch.token[:10]) == list(range(30, 40))
    assert set(context.batch.seq[:10].tolist()) == {3}
    assert list(context.batch.logits[:10]) == [0] * 9 + [1]


async def test_a_running_stream_gets_a_token_with_every_chunk(
    service_on: OpenService, tiny_model: Path
) -> None:
    """While a long prompt is evaluated beside it, a stream continues at every step."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(260, 500, 1500).astype(np.int32)
    async with service_on(tiny_model, ctx_size=2048, live_tokens=4096) as service:
        request = GenerateRequest(ids=prompt[:10], fields=GREEDY, n_predict=300)
        stream = service.sessions.run(request)
        async for event in stream:
            if isinstance(event, Piece):
                break
        running = next(j for j in service.engine.scheduler.slots.jobs if j is not None)
        steps = service.engine.scheduler.counters["decode_steps"]
        await ask(service, prompt, 1)
        spent = service.engine.scheduler.counters["decode_steps"] - steps
        assert spent >= 1500 / 512
        assert len(running.reply) >= spent or running.phase is JobPhase.DONE
        async for _ in stream:
            pass
