"""Freezing and thawing over HTTP: access, listings and refusals."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from store_tools import turn_of
from tenants_talk import KEYS, Client, key, talk

from towerd.models.bundled import bundled_model

MakeClient = Callable[..., Awaitable[Client]]

OWN = "/towerd/v1/sessions"


async def value(reply: Any, status: int = 200) -> Any:
    assert reply.status == status, await reply.text()
    return await reply.json()


async def test_there_and_back(client: Client) -> None:
    """Frozen it is listed with its bytes, shows its turns, ids and text, and is not due again;
    thawed it is as before."""
    id = await talk(client)
    before = await value(await client.get(f"{OWN}/{id}?ids=1&text=1"))
    due = await value(await client.get(f"{OWN}?idle_s=0"))
    assert [each["id"] for each in due["sessions"]] == [id]
    found: Any = None
    for changed in (True, False):
        found = await value(await client.post(f"{OWN}/{id}/freeze", json={}))
        assert found["changed"] is changed
        assert found["session"]["cold_bytes"] > 0
    assert (await value(await client.get(f"{OWN}?idle_s=0")))["sessions"] == []
    (listed,) = (await value(await client.get(OWN)))["sessions"]
    assert listed == found["session"]
    shown = await value(await client.get(f"{OWN}/{id}?ids=1&text=1"))
    assert (shown["ids"], shown["text"]) == (before["ids"], before["text"])
    assert [turn["id"] for turn in shown["turns"]] == [turn["id"] for turn in before["turns"]]
    exported = await client.get(f"{OWN}/{id}/export")
    assert exported.status == 200
    frozen_file = await exported.read()
    for changed in (True, False):
        found = await value(await client.post(f"{OWN}/{id}/thaw", json={"ahead": False}))
        assert found["changed"] is changed
        assert found["session"]["cold_bytes"] == 0
    assert await (await client.get(f"{OWN}/{id}/export")).read() == frozen_file
    after = await value(await client.get(f"{OWN}/{id}?ids=1&text=1"))
    assert after["session"] == before["session"]
    assert (after["ids"], after["text"]) == (before["ids"], before["text"])


async def test_looking_does_not_thaw_and_a_post_warms_up(client: Client, service: Any) -> None:
    """Whatever is shown of a frozen session, its row in the catalog stays; warming up makes its rows
    live, also where only the rows are gone."""
    id = await talk(client)
    await value(await client.post(f"{OWN}/{id}/freeze", json={}))
    before = service.store.session(id)
    for query in ("", "?text=1", "?ids=1", "?kept=1"):
        await value(await client.get(f"{OWN}/{id}{query}"))
    await service.cold.ahead.idle()
    assert service.store.session(id) == before
    assert service.cold.stats()["thaws"] == 0
    n_tokens = before.n_tokens
    for was_frozen in (True, False):
        for seq in list(service.engine.pool):
            service.engine.pool.drop(seq)
        found = await value(await client.post(f"{OWN}/{id}/thaw", json={}))
        assert found["changed"] is was_frozen
        await service.cold.ahead.idle()
        assert service.engine.pool.cells_used >= n_tokens - 1


async def test_a_file_is_imported_over_a_frozen_session(client: Client) -> None:
    """It is compared with what is here, whatever form that has."""
    id = await talk(client)
    data = await (await client.get(f"{OWN}/{id}/export")).read()
    await value(await client.post(f"{OWN}/{id}/freeze"))
    assert (await value(await client.post(f"{OWN}/import", data=data)))["added"] == 0


async def test_what_needs_its_tokens(client: Client, service: Any) -> None:
    """A frozen session has no segment to pin; one continued without its tokens is not exported
    in part. Both errors say to thaw it first."""
    id = await talk(client)
    await value(await client.post(f"{OWN}/{id}/freeze"))
    refused = await value(await client.post("/towerd/v1/pins", json={"session": id}), 409)
    assert "is frozen: thaw it" in refused["error"]["message"]
    service.store.commit_turn(turn_of([1, 2, 3], [4, 5], session=id))
    refused = await value(await client.get(f"{OWN}/{id}/export"), 409)
    assert "went on since: thaw it" in refused["error"]["message"]
    await value(await client.post(f"{OWN}/{id}/thaw", json={"ahead": False}))
    assert (await client.get(f"{OWN}/{id}/export")).status == 200


async def test_whose_it_is(make_client: MakeClient) -> None:
    """A tenant freezes and thaws its own."""
    client = await make_client(api_keys=KEYS)
    id = await talk(client, **key("ka"))
    for verb in ("freeze", "thaw"):
        refused = await value(await client.post(f"{OWN}/{id}/{verb}", headers=key("kb")), 404)
        assert "no session" in refused["error"]["message"]
        found = await value(await client.post(f"{OWN}/{id}/{verb}", headers=key("ka")))
        assert found["changed"] is True
    await value(await client.post(f"{OWN}/{id}/recode", headers=key("ka")), 403)


async def test_renewed(client: Client) -> None:
    """Frozen or a copy, its coded form is renewed; without one nothing is done."""
    id = await talk(client)
    for verb, changed in (("recode", False), ("freeze", True), ("recode", True), ("thaw", True)):
        found = await value(await client.post(f"{OWN}/{id}/{verb}", json={}))
        assert found["changed"] is changed
    (listed,) = (await value(await client.get(f"{OWN}?coded_after=0")))["sessions"]
    assert listed["id"] == id
    after = listed["pk"]
    assert (await value(await client.get(f"{OWN}?coded_after={after}")))["sessions"] == []


async def test_without_the_vocabulary(make_client: MakeClient, tmp_path: Path) -> None:
    """The error says what is missing; nothing is changed. An unknown session is unknown first."""
    path = shutil.copy(bundled_model(), str(tmp_path / "gone.gguf"))
    client = await make_client(model=Path(path))
    os.unlink(path)
    id = await talk(client)
    await value(await client.post(f"{OWN}/none/freeze"), 404)
    refused = await value(await client.post(f"{OWN}/{id}/freeze"), 400)
    assert "vocabulary" in refused["error"]["message"]
    assert path in refused["error"]["message"]
    (listed,) = (await value(await client.get(OWN)))["sessions"]
    assert listed["cold_bytes"] == 0


async def test_stats_and_metrics(client: Client) -> None:
    id = await talk(client)
    await value(await client.post(f"{OWN}/{id}/freeze"))
    cold = (await value(await client.get("/towerd/v1/stats")))["cold"]
    assert (cold["frozen_sessions"], cold["freezes"], cold["thaws"]) == (1, 1, 0)
    text = await (await client.get("/metrics")).text()
    assert f"\ntowerd_cold_bytes {float(cold['cold_bytes'])}\n" in text
    assert "\ntowerd_freezes_total 1.0\n" in text


async def test_a_named_session_is_thawed_while_its_prompt_is_made(
    client: Client, service: Any
) -> None:
    """A client that counts or renders the tokens of a session is about to send them."""
    id = await talk(client)
    for path, body in (
        ("/tokenize", {"content": "abc"}),
        ("/apply-template", {"messages": [{"role": "user", "content": "abc"}]}),
    ):
        await value(await client.post(f"{OWN}/{id}/freeze"))
        await value(await client.post(path, json=body))
        await service.cold.ahead.idle()
        assert service.store.session(id).cold_bytes
        for name in ("nobody", id):
            await value(await client.post(path, json=body, headers={"X-Towerd-Session": name}))
        await service.cold.ahead.idle()
        assert not service.store.session(id).cold_bytes
        await service.engine.settle()  # lets go of what was evaluated ahead
