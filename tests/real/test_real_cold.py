"""A SmolLM2 chat that was frozen continues from its text, evaluated anew."""

from __future__ import annotations

from pathlib import Path

from oracle import Oracle, ask, settle
from real_checks import check_bits, drop_live, ids_of, joined
from real_text import CLOCK, QUESTIONS, RIVER
from services import OpenService

N = 8


async def test_frozen_and_thawed(
    service_on: OpenService, smollm2: Path, smollm2_oracle: Oracle
) -> None:
    """Frozen beside the live chat and again before a restart: the same session continues, its
    tokens are evaluated in one batch with the new ones, and the reply is a prefill's to the bit."""
    async with service_on(smollm2) as service:
        text = await ids_of(service, CLOCK + RIVER, begins=True)
        first, second = [await ids_of(service, question) for question in QUESTIONS[:2]]
        one = await ask(service, text, N)
        name = one.finish.session
        await settle(service)
        await service.cold.freeze(name)
        await drop_live(service)
        cold_bytes = service.store.session(name).cold_bytes
        assert 0 < cold_bytes < len((CLOCK + RIVER).encode()) / 2
        assert service.store.stats()["segments"] == 0
        chat = joined(text, one.ids, first)
        two = await ask(service, chat, N)
        assert two.finish.session == name
        assert (two.finish.reuse.prefill, two.finish.reuse.cold) == (len(chat), len(text) + N - 1)
        check_bits(smollm2_oracle, chat, [len(chat)], two)
        await settle(service)
        await service.cold.freeze(name)
    async with service_on(smollm2) as service:
        chat = joined(chat, two.ids, second)
        assert (await service.cold.session_ids(name)).tolist() == chat[: -len(second)].tolist()
        three = await ask(service, chat, N)
        assert three.finish.session == name
        assert three.finish.reuse.prefill == len(chat)
        check_bits(smollm2_oracle, chat, [len(chat)], three)
        assert service.cold.stats()["thaws"] == 1
        await settle(service)
