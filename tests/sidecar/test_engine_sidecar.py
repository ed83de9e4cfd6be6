"""The engine on a real llama-server: slots, tenants, failures, and a store that both engines
read."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidecar_tools import GREEDY, OpenSidecar, Sidecar, alone, ask, prompt, running_again
from waiting import until_async

from towerd.engine.base import GenerateRequest, Piece, encode
from towerd.engine.llama_server.process.process import free_port
from towerd.engine.llama_server.slots.holds import SlotHold
from towerd.errors import ContextExceeded, InvalidRequest, TowerdError, Unavailable
from towerd.models.bundled import bundled_model
from towerd.tokens import Ids


async def complete(sidecar: Sidecar, hold: SlotHold, ids: Ids, n: int = 8) -> dict[str, Any]:
    """A request in a slot that it holds."""
    body = {"prompt": ids.tolist(), "id_slot": hold.slot, "n_predict": n, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_tokens": True}
    reply: dict[str, Any] = await sidecar.engine.upstream.post("/completion", body)
    hold.launched()
    return reply


def ended(hold: SlotHold, reply: dict[str, Any]) -> None:
    """Tell the hold what its reply was."""
    timings = reply["timings"]
    hold.observe(timings["cache_n"], timings["prompt_ms"])
    hold.replied(np.array(reply["tokens"], np.int32))


async def test_a_chat_comes_back(sidecar_on: OpenSidecar) -> None:
    """Captured, evicted and restored: the reply says that it was used, and is the same."""
    async with sidecar_on() as sidecar:
        engine = sidecar.engine
        _, done = await ask(sidecar, prompt(60))
        assert done.timings.cache_n == 0
        longer = np.concatenate([prompt(60), done.ids, prompt(5, 1)])
        text, again = await ask(sidecar, longer)
        assert again.reuse.live == again.timings.cache_n == 67
        assert again.session == done.session
        assert engine.stats()["saves"] == 0
        for seed in (2, 3, 4):
            await ask(sidecar, prompt(60, seed))
        back, restored = await ask(sidecar, longer)
        assert back == text
        assert restored.reuse.hot == restored.timings.cache_n == 72
        assert engine.stats()["restores_missed"] == 0


async def test_turns(sidecar_on: OpenSidecar) -> None:
    """The slot, where tokens came from, the recorded session."""
    async with sidecar_on() as sidecar:
        _, done = await ask(sidecar, prompt(50))
        assert (done.reuse.prefill, done.timings.cache_n) == (50, 0)
        longer = np.concatenate([prompt(50), np.array(done.ids, np.int32), prompt(9, 1)])
        _, again = await ask(sidecar, longer)
        assert (again.slot, again.session) == (done.slot, done.session)
        assert again.timings.cache_n == again.reuse.live == 57
        _, named = await ask(sidecar, prompt(30, 2), session="my-chat")
        assert named.session == "my-chat"
        infos = await asyncio.to_thread(sidecar.store.sessions)
        assert {info.id for info in infos} == {done.session, "my-chat"}


async def test_a_slot_keeps_nothing_of_a_deleted_session(sidecar_on: OpenSidecar) -> None:
    """It has the tokens until another request needs it, and would then be captured."""
    async with sidecar_on(parallel=1) as sidecar:
        store, ids = sidecar.store, prompt(70)
        _, done = await ask(sidecar, ids)
        await asyncio.to_thread(store.delete_session, done.session)
        await asyncio.to_thread(store.gc)
        await ask(sidecar, prompt(70, 1))
        await sidecar.engine.settle()
        match = await asyncio.to_thread(store.match, ids, "local")
        assert match.n <= 1  # the first token begins every prompt
        assert len(await asyncio.to_thread(store.sessions)) == 1


async def test_tenants_do_not_share_slots(sidecar_on: OpenSidecar) -> None:
    """The same prompt of another tenant is computed anew: nothing tells that it was asked."""
    async with sidecar_on(parallel=1) as sidecar:
        ids = prompt(70)
        await ask(sidecar, ids, scope="alice")
        _, done = await ask(sidecar, ids, scope="bob")
        assert done.timings.cache_n == done.reuse.live == 0
        _, back = await ask(sidecar, ids, scope="alice")
        assert back.timings.cache_n == back.reuse.hot == 69


async def test_a_public_base_is_shared(sidecar_on: OpenSidecar) -> None:
    """What the operator marked public is restored for all tenants, and only that."""
    async with sidecar_on(parallel=1) as sidecar:
        base = prompt(80)
        add = sidecar.store.bases.add
        await asyncio.to_thread(add, "base", base, "local", 0, True)
        request = GenerateRequest(base, n_predict=0, precache="base")
        async for _ in sidecar.sessions.run(request):
            pass
        await sidecar.engine.settle()
        for tenant in ("alice", "bob"):
            own = np.concatenate([base, prompt(20, ord(tenant[0]))])
            _, done = await ask(sidecar, own, scope=tenant)
            assert done.timings.cache_n == done.reuse.live + done.reuse.hot == 80


async def test_opaque_prompts(sidecar_on: OpenSidecar) -> None:
    """Unknown tokens: pinned to the slot that such a prompt had last, never stored, and gone before another tenant comes."""
    async with sidecar_on() as sidecar:
        engine = sidecar.engine
        async with await engine.holds.hold_opaque("alice") as hold:
            await complete(sidecar, hold, prompt(40))
        async with await engine.holds.hold_opaque("alice") as again:
            assert again.slot == hold.slot
            reply = await complete(sidecar, again, prompt(40))
            assert reply["timings"]["cache_n"] == 39
        first = again.slot
        seen = set()
        async with AsyncExitStack() as stack:
            for _ in range(2):
                other = await stack.enter_async_context(await engine.holds.hold_opaque("bob"))
                reply = await complete(sidecar, other, prompt(40))
                assert reply["timings"]["cache_n"] == 0
                seen.add(other.slot)
        assert first in seen
        await engine.settle()
        assert engine.stats()["saves"] == 0


async def test_requests_that_the_server_places(sidecar_on: OpenSidecar) -> None:
    """After one of those, slots are asked what they hold before anything is believed."""
    async with sidecar_on(parallel=1) as sidecar:
        engine = sidecar.engine
        _, first = await ask(sidecar, prompt(60))
        async with engine.holds.unpinned() as launched:
            body = {"prompt": prompt(45, 5).tolist(), "n_predict": 4}
            await engine.upstream.post("/completion", body)
            launched()
        longer = np.concatenate([prompt(60), np.array(first.ids, np.int32), prompt(4, 1)])
        _, done = await ask(sidecar, longer)
        assert done.reuse.live == 0  # it was overwritten, and that was noticed
        assert done.timings.cache_n == 0


async def test_an_unstreamed_reply_blocks_no_other(sidecar_on: OpenSidecar) -> None:
    """Its first byte is its last, so that it runs is seen in the slots."""
    async with sidecar_on() as sidecar:
        engine = sidecar.engine
        hold = await engine.holds.hold(prompt(30), "local")
        body = {"prompt": prompt(30), "id_slot": hold.slot, "n_predict": 470, "ignore_eos": True}
        long = asyncio.create_task(engine.upstream.post("/completion", body))
        async with engine.holds.unpinned():
            assert not long.done()
        await long
        hold.release()


async def test_shifted_rows_are_never_stored(sidecar_on: OpenSidecar) -> None:
    """A context shift and --cache-reuse move rows; a slot in which that happened is not saved."""
    async with sidecar_on(None, "--context-shift", parallel=1, ctx_size=256) as sidecar:
        _, done = await ask(sidecar, prompt(40), 300)
        assert len(done.ids) == 300
        await sidecar.engine.settle()
        assert sidecar.engine.stats()["saves"] == 0
    async with sidecar_on(None, parallel=1) as sidecar:
        engine = sidecar.engine
        await ask(sidecar, prompt(120))
        moved = np.concatenate([prompt(120)[:10], prompt(120)[30:], prompt(4, 2)])
        async with await engine.holds.hold(moved, "local") as hold:
            body = {"prompt": moved, "id_slot": hold.slot, "n_predict": 4, "n_cache_reuse": 16}
            reply = await engine.upstream.post("/completion", {**body, "return_tokens": True})
            cache_n = reply["timings"]["cache_n"]
            assert cache_n >= 90
            ended(hold, reply)
        saves = engine.stats()["saves"]
        await engine.settle()
        assert engine.stats()["saves"] == saves


async def test_a_server_that_clears_idle_slots(
    sidecar_on: OpenSidecar, llama_server: Path, tmp_path: Path
) -> None:
    """llama-server's own defaults: every change of chat is a save and a restore, but exact."""
    shared = tmp_path / "slots"
    shared.mkdir(mode=0o700)
    flags = ("--slot-save-path", str(shared), "-np", "2", "-kvu", "-c", "512", "--cache-ram", "64")
    async with alone(llama_server, bundled_model(), tmp_path, *flags) as process:
        settings = {"slot_dir": shared, "llama_server_args": ()}
        settings |= {"upstream": process.upstream.url, "upstream_key": process.upstream.key}
        async with sidecar_on(**settings) as sidecar:
            chats = [prompt(60, 1), prompt(60, 2)]
            texts: list[list[str]] = [[], []]
            for _ in range(3):
                for i in range(2):
                    text, done = await ask(sidecar, chats[i])
                    texts[i].append(text)
                    chats[i] = np.concatenate([chats[i], done.ids, prompt(3, i)])
            _, done = await ask(sidecar, chats[0])
            assert done.reuse.hot == done.timings.cache_n == len(chats[0]) - 4
            assert sidecar.engine.stats()["restores_missed"] == 0
            assert sidecar.engine.stats()["live_missed"] == 0


async def test_big_prompts_do_not_stop_the_loop(sidecar_on: OpenSidecar) -> None:
    """Megabytes go to the template and back."""
    async with sidecar_on() as sidecar:
        text = "word " * 400_000
        body = {"messages": [{"role": "user", "content": text}]}
        wire, data = sidecar.engine.wire, encode(body)
        rendered = await wire.call(len(data), wire.model.apply_template, data)
        assert text.strip() in rendered.decode()


async def test_the_queue_is_bounded(sidecar_on: OpenSidecar) -> None:
    """One slot, one that may wait: the third is told 503, and the second gets its turn."""
    async with sidecar_on(parallel=1, queue_max=1) as sidecar:
        engine = sidecar.engine
        hold = await engine.holds.hold(prompt(10), "local")
        waiting = asyncio.create_task(engine.holds.hold(prompt(10, 1), "local"))
        await until_async(lambda: engine.stats()["waiting"] == 1)
        with pytest.raises(Unavailable, match="waiting"):
            await engine.holds.hold(prompt(10, 2), "local")
        hold.release()
        (await waiting).release()
        assert engine.stats()["running"] == 0


async def test_bad_prompts(sidecar_on: OpenSidecar) -> None:
    """Ids that are no tokens, none at all, too many of them, a bad grammar."""
    async with sidecar_on() as sidecar:
        engine = sidecar.engine
        with pytest.raises(TowerdError, match="invalid tokens"):
            await ask(sidecar, [1, 99999])
        with pytest.raises(InvalidRequest, match="no tokens"):
            engine.generate(GenerateRequest(np.zeros(0, np.int32)))
        with pytest.raises(ContextExceeded):
            engine.generate(GenerateRequest(prompt(600)))
        bad = {**GREEDY, "grammar": "root ::= ("}
        with pytest.raises(TowerdError, match="grammar"):
            async for _ in sidecar.sessions.run(
                GenerateRequest(prompt(5), fields=bad, n_predict=3)
            ):
                pass
        _, done = await ask(sidecar, prompt(20))
        assert done.stop == "limit"
        assert engine.stats()["running"] == 0


async def test_events(sidecar_on: OpenSidecar) -> None:
    """Started comes before the text, a stop string ends it."""
    async with sidecar_on() as sidecar:
        request = GenerateRequest(prompt(30), fields=GREEDY, n_predict=6, return_progress=True)
        kinds = []
        async for event in sidecar.sessions.run(request):
            kinds.append(type(event).__name__)
        assert kinds[0] == "Progress"
        assert kinds.index("Started") < kinds.index("Piece")
        assert kinds[-1] == "Finish"
        text, _ = await ask(sidecar, prompt(30), 8)
        word = text.split()[1]
        _, done = await ask(sidecar, prompt(30), 8, stop=(word,))
        assert (done.stop, done.stopping_word) == ("word", word)


async def test_cancelled(sidecar_on: OpenSidecar) -> None:
    """A client that leaves frees its slot; what it got is recorded."""
    async with sidecar_on(parallel=1) as sidecar:
        run = sidecar.sessions.run(GenerateRequest(prompt(40), fields=GREEDY, n_predict=400))
        async for event in run:
            if isinstance(event, Piece) and event.ids:
                break
        await run.aclose()
        await sidecar.sessions.drain()
        assert sidecar.engine.stats()["running"] == 0
        infos = await asyncio.to_thread(sidecar.store.sessions)
        assert [info.n_tokens > 40 for info in infos] == [True]
        _, done = await ask(sidecar, prompt(40))
        assert done.timings.cache_n == 39


async def test_killed_while_it_streams(sidecar_on: OpenSidecar) -> None:
    """The request fails with a clear error, and what it had said is recorded; the next one works,
    and what was recorded before is still there."""
    async with sidecar_on() as sidecar:
        _, done = await ask(sidecar, prompt(60))
        await sidecar.engine.settle()
        process = sidecar.engine.backend.process
        assert process is not None
        child, killed = process.pid, list[int]()
        assert child is not None
        again = asyncio.create_task(running_again(sidecar))

        async def stream() -> None:
            async for event in sidecar.sessions.run(
                GenerateRequest(prompt(40, 3), fields=GREEDY, n_predict=400)
            ):
                if isinstance(event, Piece) and killed.count(child) == 0:
                    killed.append(child)
                    os.kill(child, signal.SIGKILL)

        with pytest.raises(TowerdError, match="llama-server"):
            await stream()
        await sidecar.sessions.drain()
        infos = await asyncio.to_thread(sidecar.store.sessions)
        assert sorted(info.n_tokens > 40 for info in infos) == [True, True]
        await again
        assert sidecar.engine.stats()["restarts"] == 1
        longer = np.concatenate([prompt(60), done.ids, prompt(5, 1)])
        _, restored = await ask(sidecar, longer)
        assert restored.timings.cache_n == restored.reuse.hot == 67
        assert restored.session == done.session


async def test_who_waits_is_told(sidecar_on: OpenSidecar) -> None:
    """When llama-server dies, a queued request fails at once instead of waiting for ever."""
    async with sidecar_on(parallel=1) as sidecar:
        engine = sidecar.engine
        process = engine.backend.process
        assert process is not None
        hold = await engine.holds.hold(prompt(10), "local")
        waiting = asyncio.create_task(engine.holds.hold(prompt(10, 1), "local"))
        await until_async(lambda: engine.stats()["waiting"] == 1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="SIGKILL"):
            await waiting
        assert hold.is_stale
        hold.release()
        assert not engine.availability.is_running
        with pytest.raises(Unavailable, match="being started"):
            engine.generate(GenerateRequest(prompt(10)))


async def test_an_attached_server_goes_and_comes_back(
    sidecar_on: OpenSidecar,
    llama_server: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is waited for, and requests meanwhile are told so; then what was stored is restored."""
    port = free_port()
    monkeypatch.setattr("towerd.engine.llama_server.process.process.free_port", lambda: port)
    shared = tmp_path / "slots"
    shared.mkdir(mode=0o700)
    flags = ("--slot-save-path", str(shared), "-np", "2", "-c", "1024")
    async with alone(llama_server, tiny_model, tmp_path, *flags) as process:
        settings = {"slot_dir": shared, "llama_server_args": ()}
        settings |= {"upstream": process.upstream.url, "upstream_key": process.upstream.key}
        async with sidecar_on(tiny_model, **settings) as sidecar:
            await ask(sidecar, prompt(60))
            await sidecar.engine.settle()
            os.kill(process.pid or 0, signal.SIGKILL)
            with pytest.raises(Unavailable):
                await ask(sidecar, prompt(60))
            assert not sidecar.engine.availability.is_running
            await until_async(lambda: sidecar.engine.availability.is_running)
            _, again = await ask(sidecar, prompt(60))
            assert again.timings.cache_n == again.reuse.hot == 59


async def test_a_restore_that_does_not_take(sidecar_on: OpenSidecar) -> None:
    """A reply that reports fewer cached tokens than were restored is counted; after a few in a
    row nothing is restored any more, and the notes say why."""
    async with sidecar_on(parallel=1) as sidecar:
        engine = sidecar.engine
        for seed in range(2):
            await ask(sidecar, prompt(60, seed))
        for missed in range(1, 6):
            async with await engine.holds.hold(prompt(60, (missed + 1) % 2), "local") as hold:
                assert hold.reuse.hot > 0
                await engine.upstream.erase(hold.slot)  # as a build would that drops it
                reply = await complete(sidecar, hold, prompt(60, (missed + 1) % 2))
                ended(hold, reply)
            assert engine.stats()["restores_missed"] == missed
        assert any("Nothing is restored any more" in note for note in engine.notes)
        assert engine.stats()["reuse_works"] == 0
        _, done = await ask(sidecar, prompt(60, 1), 4)
        assert done.reuse.hot == 0
        assert done.timings.predicted_n == 4


async def test_a_slot_that_runs_something_else(sidecar_on: OpenSidecar) -> None:
    """A slot in doubt that turns out to be running is used again once it is free."""
    async with sidecar_on(parallel=1) as sidecar:
        engine = sidecar.engine
        stray = {"prompt": [300, 301], "n_predict": 400, "ignore_eos": True}
        running = asyncio.create_task(engine.upstream.post("/completion", stray))
        while not running.done() and not (await engine.upstream.slots())[0]["is_processing"]:
            pass
        engine.holds.upkeep.doubt()
        _, done = await ask(sidecar, prompt(20))
        assert done.timings.predicted_n == 8
        assert (await running)["tokens_predicted"] == 400


async def test_cells_that_all_slots_share(sidecar_on: OpenSidecar) -> None:
    """When the next prompt does not fit beside the idle chats, the longest unused is saved and
    emptied, before llama-server empties whichever it likes."""
    async with sidecar_on(parallel=4, ctx_size=512) as sidecar:
        engine = sidecar.engine
        assert engine.probe.cells == 512
        for seed in range(4):
            _, done = await ask(sidecar, prompt(150, seed))
        held = [slot["n_prompt_tokens"] for slot in await engine.upstream.slots()]
        assert sum(held) <= 512
        assert engine.stats()["live_cells_used"] == sum(held)
        assert engine.stats()["erases"] >= 1
        _, back = await ask(sidecar, np.concatenate([prompt(150, 0), prompt(5, 9)]))
        assert back.timings.cache_n == back.reuse.hot == 150
        assert engine.stats()["live_missed"] == 0


async def test_prompts_that_do_not_fit_together(sidecar_on: OpenSidecar) -> None:
    """They are answered one after the other; llama-server alone would fail them all."""
    async with sidecar_on(parallel=4, ctx_size=512) as sidecar:
        base = prompt(100, 1)
        prompts = [np.concatenate([base, prompt(220, seed)]) for seed in range(2, 5)]
        first = await asyncio.gather(*(ask(sidecar, each, 4) for each in prompts))
        longer = [np.append(each, 300) for each in prompts]
        again = await asyncio.gather(*(ask(sidecar, each, 4) for each in longer))
        assert [done.timings.predicted_n for _, done in (*first, *again)] == [4] * 6
        assert [done.reuse.prefill for _, done in again] == [1] * 3
        assert sidecar.engine.stats()["live_missed"] == 0


async def test_idle_chats_are_saved(sidecar_on: OpenSidecar) -> None:
    """A chat without requests for a while is in the store, so that a crash costs nothing."""
    async with sidecar_on() as sidecar:
        sidecar.engine.holds.upkeep.idle_s = 0.0
        await ask(sidecar, prompt(60))
        await until_async(lambda: sidecar.engine.stats()["saves"] == 1)
        assert sidecar.tiers.plan(sidecar.tiers.store.hold(prompt(60), "local"), 0).n == 60
