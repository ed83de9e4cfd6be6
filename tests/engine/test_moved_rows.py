"""Rows behind other text, stored as what they are: chats resume from them, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from moved import allow, difference, moved_logprobs
from oracle import Answer, Oracle, ask, check_answer, settle, some_ids
from services import EmbeddedService, OpenService

from towerd.store import Node
from towerd.tiers.moved_limits import BLOCK_TOKENS, block_offsets
from towerd.tokens import Ids, Provenance

NOISE = 0.01
N_RUN = 300
HEAD, OLD, NEW = some_ids(20, 1), some_ids(30, 2), some_ids(45, 3)
RUN, REST = some_ids(N_RUN, 4), some_ids(9, 5)
BEFORE, PROMPT = np.concatenate([HEAD, OLD, RUN]), np.concatenate([HEAD, NEW, RUN, REST])
SOURCE, AT = len(HEAD) + len(OLD), len(HEAD) + len(NEW)
N_KEPT = N_RUN - BLOCK_TOKENS * len(block_offsets(N_RUN))
N_EXACT = AT + BLOCK_TOKENS
"""Where the first moved row of PROMPT is: the run's first tokens are evaluated again."""


def check_prefill(oracle: Oracle, prompt: Ids, answer: Answer) -> None:
    """The reply is what monolithic prefill gives."""
    whole = np.concatenate([prompt, np.array(answer.ids[:-1], np.int32)])
    assert difference(oracle.logprobs(whole, len(prompt) - 1), answer) <= NOISE


def whole(answer: Answer) -> Ids:
    """The prompt and its reply."""
    return np.concatenate([PROMPT, np.array(answer.ids, np.int32)])


def stored(service: EmbeddedService, ids: Ids, scope: str = "local") -> list[tuple[int, int, int]]:
    """(p0, p1, worst provenance on disk) of the segments along `ids` that have a file."""
    nodes = service.store.match(ids, scope).nodes
    return [(n.p0, n.p1, int(n.worst_file)) for n in nodes if n.worst_file is not None]


def moved_nodes(service: EmbeddedService) -> list[Node]:
    return [n for n in service.store.nodes() if n.worst_file == Provenance.AFTER_MOVED]


async def moved(service_on: OpenService, model: Path, scope: str = "local") -> Answer:
    """Have a service store a chat with moved rows, whose source is then forgotten."""
    async with service_on(model, anticipate=False) as service:
        allow(service)
        before = await ask(service, BEFORE, scope=scope)
        answer = await ask(service, PROMPT, scope=scope)
        assert answer.finish.reuse.moved == N_KEPT
        await settle(service)
        ids = whole(answer)
        found = stored(service, ids, scope)
        assert [part[:2] for part in found if part[2] == Provenance.EXACT][-1][1] == N_EXACT
        assert {part[2] for part in found if part[0] >= N_EXACT} == {Provenance.AFTER_MOVED}
        assert found[-1][1] >= len(PROMPT)
        assert 0 < service.tiers.stats()["moved_bytes"] < service.tiers.stats()["warm_bytes"]
        service.store.delete_session(before.finish.session, scope)
    return answer


async def test_a_chat_resumes_from_moved_rows(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """After a restart, from all of them: the reply is that of the same rows in a fresh context,
    its drift is not known, and what follows is stored in the same way."""
    answer = await moved(service_on, model_path)
    longer = np.concatenate([whole(answer), some_ids(5, 5)])
    async with service_on(model_path, anticipate=False) as service:
        again = await ask(service, longer)
        reuse = again.finish.reuse
        assert (reuse.live, reuse.hot, reuse.warm) == (0, 0, len(PROMPT) + 7)
        assert (reuse.approximate, reuse.drift) == (len(PROMPT) + 7 - N_EXACT, None)
        expected = moved_logprobs(oracle, BEFORE, longer, SOURCE, AT, N_RUN, again)
        assert difference(expected, again) <= NOISE
        third = await ask(service, np.concatenate([longer, np.array(again.ids, np.int32), REST]))
        assert (third.finish.reuse.live, third.finish.reuse.drift) == (len(longer) + 7, None)
        assert third.finish.reuse.approximate == len(longer) + 7 - N_EXACT
        await settle(service)
        found = stored(service, np.concatenate([longer, np.array(again.ids, np.int32)]))
        assert (len(longer) + 7, Provenance.AFTER_MOVED) in [part[1:] for part in found]
        assert service.store.verify().ok


async def test_exact_daemons_never_meet_them(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """To the bit; and their rows replace the moved ones, which no later daemon meets either."""
    answer = await moved(service_on, model_path)
    ids = whole(answer)
    async with service_on(model_path, fidelity="exact") as service:
        exact = await ask(service, ids)
        assert (exact.finish.reuse.warm, exact.finish.reuse.approximate) == (N_EXACT, 0)
        check_answer(oracle, ids, exact)
        await settle(service)
        assert {part[2] for part in stored(service, ids)} == {Provenance.EXACT}
        assert service.tiers.stats()["moved_bytes"] == 0
    async with service_on(model_path, anticipate=False) as service:
        again = await ask(service, ids)
        assert (again.finish.reuse.warm, again.finish.reuse.approximate) == (len(ids) - 1, 0)
        check_prefill(oracle, ids, again)
        await settle(service)


async def test_precached_prompts_never_meet_them(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """They are evaluated, whether the moved rows are stored or live, and are then stored exactly:
    under near, too, better rows replace moved ones."""
    answer = await moved(service_on, model_path)
    ids = whole(answer)[: len(PROMPT) + 7]
    async with service_on(model_path, anticipate=False) as service:
        live = await ask(service, np.concatenate([ids, REST]))
        assert live.finish.reuse.approximate == len(ids) - N_EXACT
        made = await ask(service, ids, 0, precache="p")
        reuse = made.finish.reuse
        assert (reuse.approximate, reuse.live + reuse.hot + reuse.warm) == (0, N_EXACT)
        await settle(service)
        assert {part[2] for part in stored(service, ids)} == {Provenance.EXACT}
        after = np.concatenate([ids, some_ids(6, 8)])
        again = await ask(service, after)
        assert (again.finish.reuse.approximate, again.finish.reuse.prefill) == (0, 6)
        check_prefill(oracle, after, again)
        await settle(service)
        assert service.store.verify().ok


async def test_other_tenants_never_meet_them(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """Nor do public segments get them, whose tokens a tenant's chat begins with."""
    answer = await moved(service_on, model_path, scope="a")
    ids = whole(answer)
    async with service_on(model_path, anticipate=False) as service:
        mine = await ask(service, ids, scope="a")
        assert mine.finish.reuse.approximate > 0
        theirs = await ask(service, ids, scope="b")
        assert theirs.finish.reuse.prefill == len(ids)
        check_prefill(oracle, ids, theirs)
        await ask(service, ids, 0, scope="public", precache="p")
        await settle(service)
        for node in service.store.nodes():
            if node.scope == "public":
                service.store.rows.drop_hot(node)
                if node.file is not None:
                    service.store.rows.drop_file(node.file)
        again = await ask(service, np.concatenate([ids, REST]), scope="a")
        assert again.finish.reuse.approximate > 0
        await settle(service)
        assert {node.scope for node in moved_nodes(service)} == {"a"}
        other = await ask(service, np.concatenate([ids, REST]), scope="c")
        assert other.finish.reuse.approximate == 0
        check_prefill(oracle, np.concatenate([ids, REST]), other)
        await settle(service)
