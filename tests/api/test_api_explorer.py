"""What the explorer shows of conversations, requests and settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from oracle import settle
from services import EmbeddedService
from tenants_talk import KEYS, Client, key, talk

from towerd.api.admin.requests import shown_settings
from towerd.settings.config import Config, settings

MakeClient = Callable[..., Awaitable[Client]]
OWN = "/towerd/v1"


async def value(reply: Any, status: int = 200) -> Any:
    assert reply.status == status, await reply.text()
    return await reply.json()


async def test_branches_are_read_by_their_turns(client: Client) -> None:
    """Each as it was said, frozen or not; all of them together are the turns' texts."""
    said: list[str] = []
    for prompt in ("Once upon", "Once upon a red", "Once upon a blue"):
        reply = await client.post(
            "/completion",
            json={"prompt": prompt, "n_predict": 4, "temperature": 0},
            headers={"X-Towerd-Session": "s"},
        )
        said.append(prompt + (await value(reply))["content"])
    path = f"{OWN}/sessions/s"
    turns = (await value(await client.get(path)))["turns"]
    for _ in range(2):
        for turn, text in zip(turns, said, strict=True):
            shown = await value(await client.get(f"{path}?messages=1&turn={turn['id']}"))
            assert shown["messages"] == [{"role": "", "text": text.strip()}]
        current = await value(await client.get(f"{path}?messages=1"))
        assert current["messages"] == [{"role": "", "text": said[-1].strip()}]
        await value(await client.get(f"{path}?messages=1&turn=99999"), 404)
        await value(await client.post(f"{path}/freeze", json={}))


async def test_the_cost_of_a_conversation(client: Client, service: EmbeddedService) -> None:
    """It agrees with its segments; pinned it says so; frozen nothing resumes."""
    id = await talk(client)
    await settle(service)
    path = f"{OWN}/sessions/{id}?cost=1"
    found = await value(await client.get(path))
    cost, leaf = found["cost"], found["turns"][-1]["reply_node"]
    whole = (await value(await client.get(f"{OWN}/segments/{leaf}")))["segment"]
    segments = [
        (await value(await client.get(f"{OWN}/segments/{each}")))["segment"]
        for each in whole["path"]
    ]
    assert cost["hot_bytes"] == sum(each["bytes"] for each in segments if each["hot"])
    assert cost["resumable_tokens"] == sum(
        each["tokens"] for each in segments if each["hot"] or each["warm"]
    )
    assert not cost["pinned"]
    await value(await client.post(f"{OWN}/pins", json={"session": id}))
    assert (await value(await client.get(path)))["cost"]["pinned"]
    await value(await client.delete(f"{OWN}/pins/{leaf}"))
    await value(await client.post(f"{OWN}/sessions/{id}/freeze", json={}))
    cost = (await value(await client.get(path)))["cost"]
    assert (cost["hot_bytes"], cost["warm_bytes"], cost["resumable_tokens"]) == (0, 0, 0)


async def test_requests_are_remembered_by_tenant(make_client: MakeClient) -> None:
    client = await make_client(api_keys=KEYS)
    ann, bob = await talk(client, **key("ka")), await talk(client, **key("kb"))
    for name, session in (("ka", ann), ("kb", bob)):
        found = await value(await client.get(f"{OWN}/requests", headers=key(name)))
        assert found["running"] == []
        (request,) = found["finished"]
        assert (request["session"], request["generated"]) == (session, 3)
        assert sum(request["reuse"].values()) == request["reuse"]["prefill"] > 0
        assert request["ttft_ms"] > 0
        since = int(request["finished"]) + 1
        later = await value(await client.get(f"{OWN}/requests?since={since}", headers=key(name)))
        assert later["finished"] == []


async def test_running_requests_are_the_tenants_own(
    make_client: MakeClient, held: Callable[[Client], AbstractContextManager[object]]
) -> None:
    """Also for the tenant that sees how much all do."""
    client = await make_client(api_keys=(*KEYS, ("kl", "local")), ctx_size=8192, live_tokens=8192)
    long = {"prompt": "Once", "n_predict": 8000, "ignore_eos": True, "stream": True}
    headers = key("ka") | {"X-Towerd-Session": "my divorce"}
    async with client.post("/completion", json=long, headers=headers) as stream:
        assert stream.status == 200  # the prompt is evaluated
        with held(client):
            for name, n in (("ka", 1), ("kb", 0), ("kl", 0)):
                shown = await value(await client.get(f"{OWN}/requests", headers=key(name)))
                assert len(shown["running"]) == n, name
        stream.close()


async def test_settings_without_secrets(make_client: MakeClient) -> None:
    client = await make_client(api_keys=(("very-secret", "local"),), ctx_size=321)
    reply = await client.get(f"{OWN}/settings", headers=key("very-secret"))
    assert "very-secret" not in await reply.text()
    shown = {each["name"]: each["value"] for each in (await value(reply))["settings"]}
    assert shown.keys() == settings().keys()
    assert (shown["ctx_size"], shown["api_keys"]) == (321, "(set)")
    assert (await client.get(f"{OWN}/settings")).status == 401


def test_secrets_among_llama_servers_flags() -> None:
    """However the flag is spelled."""
    words = ("--temp", "0.5", "--hf_token", "a secret", "--mcp-servers-json=[secret]", "-hft", "-x")
    config = Config(engine="llama-server", llama_server_args=words)
    shown = {each["name"]: each["value"] for each in shown_settings(config)}
    masked = ("--temp", "0.5", "--hf_token", "(set)", "--mcp-servers-json=(set)", "-hft", "(set)")
    assert shown["llama_server_args"] == masked


async def test_whether_listed_conversations_resume(
    client: Client, service: EmbeddedService
) -> None:
    """As each says by itself: with its rows, and without any; two branches after an edit."""
    id = await talk(client)
    await settle(service)
    (one,) = (await value(await client.get(f"{OWN}/sessions?cost=1")))["sessions"]
    whole = await value(await client.get(f"{OWN}/sessions/{id}?cost=1"))
    assert one["cost"] == whole["cost"]
    assert one["n_tokens"] - one["cost"]["resumable_tokens"] <= 1
    assert (one["cost"]["branches"], one["cost"]["pinned"]) == (1, False)
    assert "cost" not in whole["session"]
    await value(
        await client.post(
            "/completion",
            json={"prompt": "Something else entirely", "n_predict": 4},
            headers={"X-Towerd-Session": id},
        )
    )
    (two,) = (await value(await client.get(f"{OWN}/sessions?cost=1")))["sessions"]
    assert two["cost"]["branches"] == 2
    await settle(service)
    service.tiers.hot_bytes_max = service.tiers.warm_bytes_max = 0
    await settle(service)
    (gone,) = (await value(await client.get(f"{OWN}/sessions?cost=1")))["sessions"]
    assert gone["cost"]["resumable_tokens"] == 0


async def test_what_conversations_take(client: Client, service: EmbeddedService) -> None:
    """Of one conversation alone: what is told of it is what is told of all; /metrics agrees."""
    id = await talk(client)
    await settle(service)
    (one,) = (await value(await client.get(f"{OWN}/sessions?footprint=1")))["sessions"]
    whole = (await value(await client.get(f"{OWN}/sessions/{id}?footprint=1")))["session"]
    total = (await value(await client.get(f"{OWN}/stats")))["footprint"]
    assert one["footprint"] == whole["footprint"] == total
    assert 0 < total["shared_bytes"] < total["slot_bytes"]
    assert total["tokens"] == one["n_tokens"]
    assert "footprint" not in (await value(await client.get(f"{OWN}/sessions")))["sessions"][0]
    text = await (await client.get("/metrics")).text()
    assert f"towerd_slot_file_bytes {float(total['slot_bytes'])}" in text
    for each in total["formats"]:
        assert f'towerd_format_tokens{{format="{each["format"]}"}} {float(each["tokens"])}' in text


async def test_what_a_conversation_alone_needs(client: Client, service: EmbeddedService) -> None:
    """By layer all is what its segments take; what another one shares is not freed, and gc frees just that."""
    for name, prompt in (("a", "Once upon a time there was"), ("b", "Once upon a time she said")):
        await value(
            await client.post(
                "/completion",
                json={"prompt": prompt, "n_predict": 4, "ignore_eos": True},
                headers={"X-Towerd-Session": name},
            )
        )
    await settle(service)
    found = await value(await client.get(f"{OWN}/sessions/a?layers=1"))
    leaf = found["turns"][-1]["reply_node"]
    path = (await value(await client.get(f"{OWN}/segments/{leaf}")))["segment"]["path"]
    held = [(await value(await client.get(f"{OWN}/segments/{each}")))["segment"] for each in path]
    layers, freed = found["layers"], found["freed"]
    total = sum(each["k_bytes"] + each["v_bytes"] for each in layers)
    assert total == sum(each["bytes"] for each in held) > 0
    assert len({(each["k_bytes"], each["v_bytes"]) for each in layers}) == 1
    assert 0 < freed["tokens"] < found["session"]["n_tokens"]
    before = service.store.stats()
    await value(await client.delete(f"{OWN}/sessions/a"))
    await value(await client.post(f"{OWN}/gc", json={}))
    gone = {each.id for each in service.store.nodes()}
    assert sum(each["tokens"] for each in held if each["id"] not in gone) == freed["tokens"]
    assert service.store.stats()["segments"] < before["segments"]


async def test_the_model_and_the_requests_of_a_conversation(client: Client) -> None:
    id = await talk(client)
    (one,) = (await value(await client.get(f"{OWN}/sessions")))["sessions"]
    assert (one["model"], one["tokenizer"]) == ("story", "")
    (request,) = (await value(await client.get(f"{OWN}/requests?session={id}")))["finished"]
    assert request["session"] == id
    assert (await value(await client.get(f"{OWN}/requests?session=x")))["finished"] == []
