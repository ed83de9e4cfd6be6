"""Conversations read as messages, and continued from their own tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from llama_wire import TEMPLATES
from scripted_model import make_scripted_model
from tenants_talk import KEYS, Client, key, talk

MakeClient = Callable[..., Awaitable[Client]]
OWN = "/towerd/v1/sessions"
GREEDY = {"max_tokens": 24, "temperature": 0}
SCRIPT = ("<think>", "Hm", ".", "</think>", "Hel", "lo")
QUESTION = "Who?"


async def value(reply: Any, status: int = 200) -> Any:
    assert reply.status == status, await reply.text()
    return await reply.json()


async def ids_of(client: Client, session: str = "s") -> list[int]:
    found: list[int] = (await value(await client.get(f"{OWN}/{session}?ids=1")))["ids"]
    return found


async def text_of(client: Client) -> str:
    text: str = (await value(await client.get(f"{OWN}/s?text=1")))["text"]
    return text


async def continued(client: Client, **body: Any) -> Any:
    return await value(await client.post(f"{OWN}/s/chat", json={**GREEDY, **body}))


async def chat_of(client: Client, query: str = "") -> Any:
    return await value(await client.get(f"{OWN}/s/chat{query}"))


@pytest.fixture
def thinking(tmp_path: Path) -> dict[str, Any]:
    """A model that thinks before it answers, under a template that drops what was thought from earlier replies."""
    path = tmp_path / "thinking.gguf"
    make_scripted_model(path, SCRIPT, controls=("<|im_start|>", "<|im_end|>"))
    template = TEMPLATES / "Qwen-Qwen3-0.6B.jinja"
    return {"model": path, "chat_template_file": template, "anticipate": False}


async def begin(client: Client, *messages: tuple[str, str]) -> str:
    body = {"messages": [{"role": role, "content": text} for role, text in messages], **GREEDY}
    reply = await client.post("/v1/chat/completions", json=body, headers={"X-Towerd-Session": "s"})
    said: str = (await value(reply))["choices"][0]["message"]["content"]
    return said


async def test_read_as_messages(make_client: MakeClient, thinking: dict[str, Any]) -> None:
    client = await make_client(**thinking)
    assert await begin(client, ("system", "Brief!"), ("user", QUESTION)) == "Hello"
    for _ in range(2):
        found = await chat_of(client)
        assert [(each["role"], each["parts"]) for each in found["messages"]] == [
            ("system", [{"kind": "text", "text": "Brief!"}]),
            ("user", [{"kind": "text", "text": QUESTION}]),
            (
                "assistant",
                [{"kind": "reasoning", "text": "Hm."}, {"kind": "text", "text": "Hello"}],
            ),
        ]
        assert found["continues"]
        await value(await client.post(f"{OWN}/s/freeze", json={}))


async def test_its_own_tokens_are_continued(
    make_client: MakeClient, thinking: dict[str, Any]
) -> None:
    """Also what was thought, which the template would drop: all but the new message is there. As tokens it is
    what the template makes of it."""
    client = await make_client(**thinking)
    await begin(client, ("system", "Brief!"), ("user", QUESTION))
    before, text = await ids_of(client), await text_of(client)
    reply = await continued(client, message={"content": "And?"})
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello", "Hm.")
    after = await ids_of(client)
    assert after[: len(before) - 1] == before[:-1]
    ended = text.removesuffix("</s>") + "<|im_end|>\n"
    asked = ended + "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert await text_of(client) == asked + "<think>Hm.</think>Hello</s>"
    assert reply["timings"]["cache_n"] >= len(before) - 2
    assert reply["usage"]["prompt_tokens"] == len(after) - len(SCRIPT) - 1


async def test_a_changed_message_branches(
    make_client: MakeClient, thinking: dict[str, Any]
) -> None:
    client = await make_client(**thinking)
    await begin(client, ("system", "Brief!"), ("user", QUESTION))
    first = await text_of(client)
    await continued(client, message={"content": "And?"})
    second = await text_of(client)
    whole = await chat_of(client)
    places = [each["at"] for each in whole["messages"] if each["role"] == "user"]
    for at, old, text in ((places[1], second, "And?"), (places[0], first, QUESTION)):
        await continued(client, turn=whole["turn"], at=at, message={"content": "Why?"})
        assert await text_of(client) == old.replace(text, "Why?")
    old_one = await chat_of(client, f"?turn={whole['turn']}")
    assert old_one["messages"] == whole["messages"]
    await value(await client.post(f"{OWN}/s/chat", json={"at": places[1] + 1, "message": {}}), 400)


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
async def test_a_reply_is_made_anew(
    make_client: MakeClient, thinking: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    """To the same prompt, however the template began that reply; nothing is evaluated but its last token."""
    client = await make_client(**thinking)
    body = {"messages": [{"role": "user", "content": QUESTION}], "chat_template_kwargs": kwargs}
    reply = await client.post(
        "/v1/chat/completions", json={**GREEDY, **body}, headers={"X-Towerd-Session": "s"}
    )
    wanted = (await value(reply))["choices"][0]["message"]
    first = await ids_of(client)
    turn = (await chat_of(client))["turn"]
    again = await continued(client, turn=turn)
    assert again["choices"][0]["message"] == wanted
    assert again["timings"]["prompt_n"] == 1
    assert await ids_of(client) == first
    assert len((await value(await client.get(f"{OWN}/s")))["turns"]) == 2


async def test_a_chat_without_marks_is_told_by_turns(client: Client) -> None:
    """The bundled model has no tokens that name speakers."""
    said = await begin(client, ("user", QUESTION))
    before = await ids_of(client)
    await continued(client, message={"content": "And?"})
    roles = [
        (each["role"], each["parts"][0]["text"]) for each in (await chat_of(client))["messages"]
    ]
    assert roles[:2] == [("user", QUESTION), ("assistant", said.strip())]
    assert [role for role, _ in roles] == ["user", "assistant"] * 2
    assert (await ids_of(client))[: len(before)] == before


async def test_a_frozen_chat_continues(client: Client) -> None:
    await begin(client, ("user", QUESTION))
    before = await ids_of(client)
    await value(await client.post(f"{OWN}/s/freeze", json={}))
    await continued(client, message={"content": "And?"})
    found = await value(await client.get(f"{OWN}/s?ids=1"))
    assert found["ids"][: len(before)] == before
    assert (found["session"]["cold_bytes"], len(found["turns"])) == (0, 2)


async def test_streamed(client: Client, sse: Callable[[str], list[str]]) -> None:
    """The last event says what was reused, and under which session it is."""
    await begin(client, ("user", QUESTION))
    body = {**GREEDY, "message": {"content": "And?"}, "stream": True}
    reply = await client.post(f"{OWN}/s/chat", json=body)
    events = sse(await reply.text())
    assert '"session":"s"' in events[-2].replace(" ", "")
    assert '"cache_n"' in events[-2]


async def test_tenants_continue_their_own(make_client: MakeClient) -> None:
    client = await make_client(api_keys=KEYS)
    ann = await talk(client, **key("ka"))
    for method, body in (("GET", None), ("POST", {"message": {"content": "x"}})):
        path = f"{OWN}/{ann}/chat"
        await value(await client.request(method, path, json=body, headers=key("kb")), 404)
        await value(await client.request(method, path, json=body), 401)
    path = f"{OWN}/{ann}/chat"
    own = await value(await client.get(path, headers=key("ka")))
    assert own["continues"]
    asked = {**GREEDY, "turn": own["turn"], "message": {"content": "x"}}
    await value(await client.post(path, json=asked, headers=key("ka")))


async def test_the_event_loop_is_never_blocked(make_client: MakeClient, loop_time: Any) -> None:
    """Nor by a long conversation, nor by a message with a large picture, which this model does not take."""
    client = await make_client(ctx_size=32768, live_tokens=65536)
    many = [("user" if n % 2 == 0 else "assistant", "word " * 4) for n in range(201)]
    await begin(client, *many)
    picture = "data:image/png;base64," + "A" * (4 << 20)
    content = [{"type": "image_url", "image_url": {"url": picture}}]
    small, large = (
        json.dumps({**GREEDY, "message": {"content": each}}) for each in ("And?", content)
    )

    url = str(client.make_url(f"{OWN}/s/chat"))

    async def work() -> None:
        # The client runs in a thread: only the server's steps are on the watched loop.
        assert len((await asyncio.to_thread(requests.get, url, timeout=60)).json()["messages"]) > 1
        for body, status in ((small, 200), (large, 400)):
            reply = await asyncio.to_thread(requests.post, url, data=body, timeout=60)
            assert reply.status_code == status, reply.text

    await loop_time.watch(work)


async def test_what_cannot_be_continued(client: Client) -> None:
    await begin(client, ("user", QUESTION))
    wrong: list[Any] = [
        {"message": "Hi"},
        {"message": {"role": "assistant", "content": "Hi"}},
        {"at": 0},
        {"at": 10**6, "message": {"content": "Hi"}},
        {"turn": 999, "message": {"content": "Hi"}},
    ]
    statuses = [(await client.post(f"{OWN}/s/chat", json=body)).status for body in wrong]
    assert statuses == [400, 400, 400, 400, 404]
    await value(await client.get(f"{OWN}/nothing/chat"), 404)
    assert len((await value(await client.get(f"{OWN}/s")))["turns"]) == 1
