"""Rows behind changed text in the slots of a real llama-server: composed, checked, labelled, stored."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from daemon import Daemon
from moved import ANYTHING, NOTHING, difference, moved_logprobs
from moved_slots import (
    AFTER,
    BEFORE,
    HEAD,
    MOVED_FROM,
    N_CHECKED,
    N_MOVED,
    N_RUN,
    NEW,
    NOISE,
    OLD,
    REST,
    RUN,
    allow,
    moved,
    n_same,
    probabilities,
    settled,
    values,
    whole,
)
from oracle import Oracle
from real_models import smollm2
from real_text import CLOCK, RIVER
from services import opener
from sidecar_tools import OpenSidecar, SteadyCosts, ask, prompt, running_again
from waiting import until

from towerd.models.bundled import bundled_model
from towerd.tiers.moved_limits import BLOCK_TOKENS, MovedLimits, block_offsets, save_moved_limits
from towerd.tokens import Ids, Provenance


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(bundled_model())
    yield made
    made.close()


async def test_a_run_is_kept_behind_changed_text(sidecar_on: OpenSidecar) -> None:
    """What changed is evaluated, and blocks of the run; everything that is said of the request says so."""
    async with sidecar_on() as sidecar:
        done = await moved(sidecar)
        reuse, timings = done.reuse, done.timings
        assert (reuse.checked, reuse.refused) == (N_CHECKED, 0)
        assert reuse.approximate == N_MOVED
        assert reuse.live + reuse.hot + reuse.warm == len(HEAD) + N_MOVED
        assert reuse.prefill == len(NEW) + N_CHECKED + len(REST)
        assert (timings.cache_n, timings.prompt_n) == (len(HEAD) + N_MOVED, reuse.prefill)
        assert f"moved={N_MOVED},checked={N_CHECKED}" in reuse.header()
        assert reuse.drift is not None
        stats = sidecar.engine.stats()
        assert (stats["tokens_moved"], stats["tokens_move_checked"]) == (N_MOVED, N_CHECKED)
        assert (stats["restores_missed"], stats["live_missed"]) == (0, 0)


async def test_the_answer_is_that_of_the_moved_rows(
    sidecar_on: OpenSidecar, oracle: Oracle
) -> None:
    """The same rows in a context of llama.cpp give the same log-probabilities, and prefill others."""
    async with sidecar_on(flash_attn="off") as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        answer = await probabilities(sidecar, AFTER, 64)
        source, at = len(HEAD) + len(OLD), len(HEAD) + len(NEW)
        expected = moved_logprobs(oracle, BEFORE, AFTER, source, at, N_RUN, answer)
        assert difference(expected, answer) <= NOISE
        tokens = np.concatenate([AFTER, np.array(answer.ids[:-1], np.int32)])
        exact = oracle.logprobs(tokens, len(AFTER) - 1)
        assert difference(exact, answer) > 2 * NOISE


@pytest.mark.parametrize("flash_attn", ["on", "off"])
async def test_the_moved_rows_are_those_of_the_old_prompt(
    sidecar_on: OpenSidecar, flash_attn: str
) -> None:
    """Their values to the bit, also where a state has them transposed; those of blocks are new."""
    async with sidecar_on(flash_attn=flash_attn) as sidecar:
        await moved(sidecar)
        await settled(sidecar)
        old, new = [await asyncio.to_thread(values, sidecar, ids) for ids in (BEFORE, AFTER)]
        at, source = len(HEAD) + len(NEW), len(HEAD) + len(OLD)
        same = (new[at : at + N_RUN] == old[source : source + N_RUN]).all(axis=1)
        evaluated = np.zeros(N_RUN, np.bool_)
        for offset in block_offsets(N_RUN):
            evaluated[offset : offset + BLOCK_TOKENS] = True
        assert np.array_equal(same, ~evaluated)


async def test_a_run_that_deviates_is_evaluated(sidecar_on: OpenSidecar, oracle: Oracle) -> None:
    async with sidecar_on(flash_attn="off") as sidecar:
        allow(sidecar, NOTHING)
        await ask(sidecar, BEFORE)
        _, done = await ask(sidecar, AFTER, 1)
        reuse = done.reuse
        assert (reuse.moved, reuse.checked) == (0, 2 * BLOCK_TOKENS)  # the first tells nothing
        assert (reuse.refused, reuse.approximate) == (N_MOVED, 0)
        assert done.timings.prompt_n == reuse.prefill == len(AFTER) - len(HEAD)
        answer = await probabilities(sidecar, AFTER, 0)
        tokens = np.concatenate([AFTER, np.array(answer.ids[:-1], np.int32)])
        assert difference(oracle.logprobs(tokens, len(AFTER) - 1), answer) <= NOISE
        await settled(sidecar)
        assert sidecar.tiers.stats()["moved_bytes"] == 0


async def test_who_gets_none(sidecar_on: OpenSidecar) -> None:
    """Other tenants, requests that ask for none or for longer runs; before anything was measured."""
    async with sidecar_on() as sidecar:
        await ask(sidecar, BEFORE)
        _, unmeasured = await ask(sidecar, AFTER)
        assert (unmeasured.reuse.moved, unmeasured.reuse.checked) == (0, 0)
        allow(sidecar)
        asked: list[dict[str, Any]] = [{"may_move": False}, {"cache_prompt": False}]
        asked += [{"reuse_tokens_min": 0}, {"reuse_tokens_min": N_RUN + 10}, {"scope": "bob"}]
        for i, fields in enumerate(asked):
            ids = np.concatenate([HEAD, prompt(45, 50 + i), RUN, REST])
            _, done = await ask(sidecar, ids, 2, **fields)
            assert (done.reuse.moved, done.reuse.approximate) == (0, 0), fields


@pytest.mark.parametrize("settings", [{"fidelity": "exact"}, {"cache_reuse": 0}])
async def test_a_daemon_that_keeps_none(sidecar_on: OpenSidecar, settings: dict[str, Any]) -> None:
    async with sidecar_on(**settings) as sidecar:
        assert sidecar.engine.why_not_movable
        sidecar.tiers.moved_limits = ANYTHING
        await ask(sidecar, BEFORE)
        _, done = await ask(sidecar, AFTER)
        assert (done.reuse.moved, done.reuse.prefill) == (0, len(AFTER) - len(HEAD))


async def test_a_model_with_windows_has_prefixes_alone(
    sidecar_on: OpenSidecar, window_model: Path
) -> None:
    async with sidecar_on(window_model) as sidecar:
        assert "sliding-window" in sidecar.engine.why_not_movable
        sidecar.tiers.moved_limits = ANYTHING
        await ask(sidecar, BEFORE)
        _, done = await ask(sidecar, AFTER)
        assert (done.reuse.moved, done.reuse.checked) == (0, 0)


async def test_rows_that_only_another_slot_has(sidecar_on: OpenSidecar) -> None:
    """It is saved first: the chat's last turn may have ended a moment ago."""
    async with sidecar_on() as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        assert sidecar.engine.stats()["saves"] == 0
        _, done = await ask(sidecar, np.concatenate([NEW, RUN, REST]))
        assert done.reuse.moved == N_MOVED
        assert done.slot != 0


async def test_runs_that_cost_more_to_bring_are_evaluated(sidecar_on: OpenSidecar) -> None:
    async with sidecar_on() as sidecar:
        allow(sidecar)
        sidecar.engine.holds.placer.policy.costs = SteadyCosts(prefill_ms=0.03)
        await ask(sidecar, BEFORE)
        await settled(sidecar)
        _, done = await ask(sidecar, AFTER)
        assert (done.reuse.moved, done.reuse.checked, done.reuse.refused) == (0, 0, 0)


async def test_limits_come_from_the_store(sidecar_on: OpenSidecar, tmp_path: Path) -> None:
    """What the embedded engine measured of the same rows."""
    async with sidecar_on() as sidecar:
        assert sidecar.tiers.moved_limits is None
    async with opener(tmp_path)(bundled_model(), ctx_size=512) as service:
        await asyncio.to_thread(save_moved_limits, service.store, NOTHING)
    async with sidecar_on() as sidecar:
        assert sidecar.tiers.moved_limits == NOTHING


async def test_a_chat_resumes_from_moved_rows(sidecar_on: OpenSidecar) -> None:
    """They are stored as what they are, and found after a restart by those who take them."""
    async with sidecar_on() as sidecar:
        done = await moved(sidecar)
        longer = np.concatenate([whole(done), prompt(5, 6)])
        _, again = await ask(sidecar, longer, 1)
        assert again.reuse.live == again.timings.cache_n >= len(AFTER)
        assert again.reuse.approximate >= N_MOVED
        await settled(sidecar)
    async with sidecar_on() as sidecar:
        allow(sidecar)
        nodes = sidecar.store.match(longer, "local").nodes
        assert {n.worst_file for n in nodes if n.p0 < MOVED_FROM} == {Provenance.EXACT}
        assert {n.worst_file for n in nodes if n.p0 >= MOVED_FROM} == {Provenance.AFTER_MOVED}
        _, none = await ask(sidecar, longer, 1, may_move=False)
        assert (none.reuse.approximate, none.timings.cache_n) == (0, MOVED_FROM)
        for node in sidecar.store.match(AFTER, "local").nodes:
            assert node.worst_hot == Provenance.EXACT or node.worst_file is not None
    async with sidecar_on() as sidecar:
        _, done = await ask(sidecar, np.append(longer, 300), 1)
        assert done.timings.cache_n == len(longer)
        assert done.reuse.approximate == 0  # they were evaluated meanwhile


async def test_an_exact_request_does_not_continue_in_a_slot_with_moved_rows(
    sidecar_on: OpenSidecar,
) -> None:
    async with sidecar_on(parallel=1) as sidecar:
        done = await moved(sidecar)
        longer = np.concatenate([whole(done), prompt(5, 6)])
        _, exact = await ask(sidecar, longer, 1, may_move=False)
        assert (exact.reuse.approximate, exact.reuse.moved) == (0, 0)
        assert exact.timings.cache_n <= MOVED_FROM
        _, again = await ask(sidecar, np.append(longer, 300), 1)
        assert (again.reuse.approximate, again.timings.cache_n) == (0, len(longer))
        await settled(sidecar)
        assert sidecar.tiers.stats()["moved_bytes"] == 0


async def test_a_ram_cache_gets_no_moved_rows(sidecar_on: OpenSidecar) -> None:
    """llama-server would bring them back for any request: those that are stored are not restored."""
    async with sidecar_on() as sidecar:
        done = await moved(sidecar)
        await settled(sidecar)
    longer = np.concatenate([whole(done), prompt(5, 6)])
    async with sidecar_on(None, "--cache-ram", "64", parallel=1) as sidecar:
        assert "RAM cache" in sidecar.engine.why_not_movable
        _, resumed = await ask(sidecar, longer, 2)
        assert (resumed.reuse.approximate, resumed.timings.cache_n) == (0, MOVED_FROM)
        await ask(sidecar, prompt(200, 90), 2)
        _, exact = await ask(sidecar, np.append(longer, 300), 2, may_move=False)
        assert exact.reuse.approximate == 0
        await settled(sidecar)
        assert sidecar.tiers.stats()["moved_bytes"] == 0
        at = len(HEAD) + len(NEW)
        assert await asyncio.to_thread(n_same, sidecar, AFTER, at) == 0


async def test_moved_rows_are_not_moved_once_more(sidecar_on: OpenSidecar) -> None:
    async with sidecar_on() as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        for i in range(4):
            ids = np.concatenate([HEAD, prompt(40, 60 + i), RUN, REST])
            _, done = await ask(sidecar, ids)
            # and not the tokens behind the run, which are no longer exact
            assert done.reuse.moved == N_MOVED


async def test_llama_server_is_killed(sidecar_on: OpenSidecar) -> None:
    """A chat with moved rows continues from what was saved of it."""
    async with sidecar_on() as sidecar:
        done = await moved(sidecar)
        await settled(sidecar)
        process = sidecar.engine.backend.process
        assert process is not None
        assert process.pid is not None
        again = asyncio.create_task(running_again(sidecar))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        await again
        longer = np.concatenate([whole(done), prompt(5, 6)])
        _, restored = await ask(sidecar, longer)
        assert restored.timings.cache_n == restored.reuse.hot >= len(AFTER)
        assert restored.reuse.approximate >= N_MOVED
        _, other = await ask(sidecar, np.concatenate([HEAD, prompt(33, 8), RUN, REST]))
        assert other.reuse.moved == N_MOVED


async def test_several_at_once(sidecar_on: OpenSidecar) -> None:
    """Each gets the run, with more of them than slots, and none what another has in its slot."""
    async with sidecar_on(parallel=3, ctx_size=2048) as sidecar:
        allow(sidecar)
        await ask(sidecar, BEFORE)
        prompts = [np.concatenate([HEAD, prompt(30, 50 + i), RUN, REST]) for i in range(6)]
        asked = await asyncio.gather(*(ask(sidecar, ids) for ids in prompts))
        assert [done.reuse.moved for _, done in asked] == [N_MOVED] * 6
        stats = sidecar.engine.stats()
        assert (stats["restores_missed"], stats["restores_failed"]) == (0, 0)
        assert stats["tokens_moved"] == 6 * N_MOVED


async def test_an_answer_knows_what_changed(sidecar_on: OpenSidecar) -> None:
    """SmolLM2, with limits as measured on it: a few tokens are evaluated, and the answer has the new name."""
    limits = MovedLimits("", 0.0024, 0.030, 1.0)
    line = "The directory is /home/"
    texts = [f"{line}{name}.\n\n{CLOCK}\n\n{RIVER}\n\n{line}" for name in ("ann", "bob")]
    async with sidecar_on(smollm2(), ctx_size=2048) as sidecar:
        allow(sidecar, limits)
        tokenize = sidecar.engine.tokenize
        before, after = [
            await tokenize(text, add_special=True, parse_special=True) for text in texts
        ]
        await ask(sidecar, before, 1)
        text, done = await ask(sidecar, after, 8)
        assert text.startswith("bob")
        assert done.reuse.moved > len(after) / 2
        exact, _ = await ask(sidecar, after, 8, cache_prompt=False)
        assert exact.startswith("bob")


async def test_killed_and_resumed(
    sidecar_on: OpenSidecar, make_sidecar: Callable[..., Daemon]
) -> None:
    """A daemon says what it moved; killed at once, it finds again what it had stored."""
    daemon = make_sidecar()
    async with sidecar_on(store_dir=daemon.store_dir) as sidecar:
        await asyncio.to_thread(save_moved_limits, sidecar.store, ANYTHING)
        await ask(sidecar, BEFORE)

    def asked(ids: Ids, **fields: Any) -> requests.Response:
        body = {"prompt": ids.tolist(), "n_predict": 4, "temperature": 0, **fields}
        reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
        assert reply.ok, reply.text
        return reply

    def talk() -> None:
        daemon.start()
        new = np.concatenate([HEAD, prompt(45, 9), RUN, REST])
        reply = asked(new)
        assert f"moved={N_MOVED},checked={N_CHECKED}" in reply.headers["X-Towerd-Reuse"]
        timings = reply.json()["timings"]
        assert timings["cache_n"] == len(HEAD) + N_MOVED
        until(lambda: f"moved={N_MOVED}" in daemon.log)
        daemon.kill_both()
        daemon.start()
        again = asked(new)  # some of it may have been written
        assert "approx=" in again.headers["X-Towerd-Reuse"]
        assert again.json()["timings"]["prompt_n"] <= timings["prompt_n"]
        none = asked(AFTER, n_cache_reuse=0)
        assert "moved" not in none.headers["X-Towerd-Reuse"]

    await asyncio.to_thread(talk)
