"""Rows behind other text, stored as what they are: chats resume from them, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from oracle import Answer, Oracle, ask, check_answer, settle, some_ids
from services import EmbeddedService, OpenService
from spliced import (
    GAP,
    MODULE,
    N_KEPT,
    N_MODULE,
    PROMPT,
    REST,
    SPANS,
    add_module,
    check_prefill,
    check_spliced,
)

from towerd.store import Node
from towerd.tokens import Ids, Provenance

N_EXACT = len(GAP) + 16
"""Where the first moved row of PROMPT is: the module's first 16 tokens are evaluated again."""


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
    """Have a service store a chat with a module spliced in, which is then forgotten."""
    async with service_on(model) as service:
        await add_module(service, scope=scope)
        answer = await ask(service, PROMPT, scope=scope)
        await settle(service)
        ids = whole(answer)
        found = stored(service, ids, scope)
        assert [part[:2] for part in found if part[2] == Provenance.EXACT] == [(0, N_EXACT)]
        assert {part[2] for part in found if part[0] >= N_EXACT} == {Provenance.AFTER_MOVED}
        assert found[-1][1] >= len(PROMPT)
        (seq,) = [s for s in service.engine.pool if s.n > N_MODULE + 20]
        assert np.count_nonzero(seq.provenance == Provenance.MOVED) == N_KEPT
        assert 0 < service.tiers.stats()["moved_bytes"] < service.tiers.stats()["warm_bytes"]
        service.store.bases.remove("m", scope)
    return answer


async def test_a_chat_resumes_from_moved_rows(
    service_on: OpenService, model_path: Path, oracle: Oracle
) -> None:
    """After a restart, without the module, from all of them: the reply is that of the same splice,
    its drift is not known, and what follows is stored in the same way."""
    answer = await moved(service_on, model_path)
    longer = np.concatenate([whole(answer), some_ids(5, 5)])
    async with service_on(model_path) as service:
        again = await ask(service, longer)
        reuse = again.finish.reuse
        assert (reuse.live, reuse.hot, reuse.warm) == (0, 0, len(PROMPT) + 7)
        assert (reuse.approximate, reuse.drift) == (len(PROMPT) + 7 - N_EXACT, None)
        tail = longer[len(GAP) + N_MODULE :]
        check_spliced(oracle, [GAP, (MODULE, SPANS)], tail, again)
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
    async with service_on(model_path) as service:
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
    async with service_on(model_path) as service:
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
    async with service_on(model_path) as service:
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
