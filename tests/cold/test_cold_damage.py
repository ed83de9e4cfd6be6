"""A frozen session whose bytes are damaged: requests have their prompts, and it gets its own back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from oracle import Answer, ask
from services import EmbeddedService, OpenService

from towerd.codec import varint
from towerd.errors import SessionFrozen, ThawError
from towerd.models.bundled import bundled_model
from towerd.store import Store
from towerd.store.sessions.frozen import row_digest

Damage: TypeAlias = Callable[[Store], None]


def words(n: int, seed: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(300, 440, n)]


def replace_row(store: Store, *, turns: bytes | None = None, marks: bytes | None = None) -> None:
    """Other bytes in the one frozen session's row, with the checksum that fits them."""
    catalog = store.state.catalog
    ((n_base, old_turns, old_marks, blob),) = catalog.rows(
        "SELECT n_base, turns, marks, blob FROM cold JOIN blobs USING (session)"
    )
    turns, marks = turns or old_turns, marks or old_marks
    with store.locked(), catalog.transaction():
        catalog.run(
            "UPDATE cold SET turns = ?, marks = ?, digest = ?",
            (turns, marks, row_digest(n_base, turns, marks, blob)),
        )


def flip(store: Store) -> None:
    """One bit of the coded tokens."""
    catalog = store.state.catalog
    ((blob,),) = catalog.rows("SELECT blob FROM blobs")
    bad = bytearray(blob)
    bad[-12] ^= 4
    with store.locked(), catalog.transaction():
        catalog.run("UPDATE blobs SET blob = ?", (bytes(bad),))


def lose(store: Store) -> None:
    """All of the coded tokens, and the hash of what they were."""
    with store.locked(), store.state.catalog.transaction():
        store.state.catalog.run("DELETE FROM blobs")


def misplace(store: Store) -> None:
    """Where the second turn takes its beginning from."""
    ((turns,),) = store.state.catalog.rows("SELECT turns FROM cold")
    reader = varint.VarintReader(turns)
    count, *numbers = reader.numbers(7)
    assert (count, numbers[4]) == (2, 1)
    numbers[4] = 100
    replace_row(store, turns=varint.put_all([count, *numbers]))


async def two_turns(
    service: EmbeddedService, session: str | None
) -> tuple[str, list[int], list[Answer]]:
    """A frozen session of two turns: its id, its tokens, its answers."""
    prompt = [1, *words(60, 13)]
    first = await ask(service, prompt, session=session)
    prompt += first.ids + words(9, 1)
    second = await ask(service, prompt, session=session)
    id = first.finish.session
    assert await service.cold.freeze(id) is not None
    return id, prompt + second.ids, [first, second]


@pytest.mark.parametrize("session", ["named", None])
@pytest.mark.parametrize("damage", [flip, lose, misplace])
async def test_it_gets_its_tokens_back_from_a_prompt(
    service_on: OpenService, damage: Damage, session: str | None
) -> None:
    """The request is evaluated and recorded where it belongs; nothing of the session is lost."""
    async with service_on(bundled_model()) as service:
        id, said, answers = await two_turns(service, session)
        damage(service.store)
        with pytest.raises(ThawError, match="cannot be thawed"):
            await service.cold.thaw(id)
        assert not service.store.verify().ok
        n_failed = service.cold.n_failed
        longer = said + words(9, 3)
        answer = await ask(service, longer, session=session)
        assert answer.finish.session == id
        assert answer.finish.reuse.cold == 0
        assert service.cold.n_failed == n_failed + 1
        assert [info.id for info in service.store.sessions()] == [id]
        assert service.store.session(id).cold_bytes == 0
        history = service.store.history(id)
        first = len(answers[0].ids) + 61
        assert history.ids(0).tolist() == said[:first]
        assert history.ids(1).tolist() == said
        assert history.ids(2).tolist() == longer + answer.ids
        assert [turn.current for turn in service.store.turns(id)] == [True] * 3
        assert service.store.verify().ok
        service.store.check_integrity(keys=True)
        assert await service.cold.freeze(id) is not None
        assert await service.cold.thaw(id)


async def test_what_a_prompt_does_not_have_stays(service_on: OpenService) -> None:
    """A session with a branch that the prompt lacks, or a prompt that ends earlier: the turn is
    recorded under it all the same, and with a copy of the blob put back all of it is there."""
    prompt = [1, *words(60, 13)]
    async with service_on(bundled_model()) as service:
        store = service.store
        first = await ask(service, prompt)
        id = first.finish.session
        branch = await ask(service, [*prompt, 310, 311])
        assert branch.finish.session == id
        assert await service.cold.freeze(id) is not None
        ((blob,),) = store.state.catalog.rows("SELECT blob FROM blobs")
        flip(store)
        longer = prompt + first.ids + words(9, 3)
        answers = [await ask(service, longer, session=name) for name in (None, id)]
        assert [answer.finish.session for answer in answers] == [id, id]
        assert store.session(id).cold_bytes
        assert store.session_ids(id).tolist() == longer + answers[1].ids
        with pytest.raises(SessionFrozen):
            store.history(id)
        with store.locked(), store.state.catalog.transaction():
            store.state.catalog.run("UPDATE blobs SET blob = ?", (blob,))
        assert await service.cold.thaw(id)
        history = store.history(id)
        assert history.ids(0).tolist() == prompt + first.ids
        assert history.ids(1).tolist() == [*prompt, 310, 311, *branch.ids]
        store.check_integrity(keys=True)


async def test_a_prompt_that_differs_proves_nothing(service_on: OpenService) -> None:
    """By name only: one token before the end of the session is another one."""
    async with service_on(bundled_model()) as service:
        _, said, _ = await two_turns(service, "s")
        lose(service.store)
        other = [*said[:-5], 301, *said[-4:], *words(9, 3)]
        answer = await ask(service, other, session="s")
        assert service.store.session("s").cold_bytes
        assert service.store.session_ids("s").tolist() == other + answer.ids


async def test_damaged_prefix_hashes_do_not_keep_the_daemon_from_starting(
    service_on: OpenService,
) -> None:
    async with service_on(bundled_model()) as service:
        id, said, _ = await two_turns(service, None)
        replace_row(service.store, marks=b"\1\2\3\4\5\6\7")
    async with service_on(bundled_model()) as service:
        assert await service.cold.thaw(id)
        assert service.store.session_ids(id).tolist() == said
