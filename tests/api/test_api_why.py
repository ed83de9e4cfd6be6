"""Why a prompt was not found whole: for its owner, in the log, and told once to a client that does it always."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tenants_talk import KEYS, Client, key
from waiting import until_async

from lab.models.random_gguf import PRESETS, make_random_gguf

MakeClient = Callable[..., Awaitable[Client]]
OWN = "/towerd/v1"
RULES = "Be brief, and kind to whoever asks, and say so if you do not know. " * 3
QUESTION = "How many legs does a spider have, and how many has a beetle? "


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a vocabulary with ChatML's control tokens."""
    path = tmp_path_factory.mktemp("models") / "chatty.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=1))
    return path


@pytest.fixture
def make_chatty(make_client: MakeClient, chatty: Path) -> MakeClient:
    async def make(**changes: Any) -> Client:
        values = {"model": chatty, "ctx_size": 2048, "live_tokens": 8192, "retention": "none"}
        return await make_client(**(values | changes))

    return make


def chat(date: str, *said: str) -> list[dict[str, str]]:
    """A system prompt with a date and rules, and what user and model said in turn."""
    messages = [{"role": "system", "content": f"Today is Nov {date}. {RULES}"}]
    roles = ("user", "assistant")
    return messages + [{"role": roles[k % 2], "content": text} for k, text in enumerate(said)]


async def ask(client: Client, messages: list[dict[str, str]], **headers: str) -> str:
    """The id of a chat's completion."""
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    async with client.post("/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return str((await reply.json())["id"])


async def complete(client: Client, prompt: str, **headers: str) -> None:
    body = {"prompt": prompt, "n_predict": 2}
    async with client.post("/completion", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()


async def why(client: Client, id: str, status: int = 200, name: str = "") -> Any:
    headers = key(name) if name else {}
    async with client.get(f"{OWN}/requests/{id}/why", headers=headers) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines on requests."""
    return [vars(each) for each in caplog.records if each.name == "towerd.request"]


async def logged(caplog: pytest.LogCaptureFixture, n: int) -> list[dict[str, Any]]:
    """The log's lines on requests, once there are `n`."""
    await until_async(lambda: len(lines(caplog)) >= n)
    return lines(caplog)


async def test_a_date_that_changed(
    make_chatty: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The log, the list of requests and the request's own page say it, the last two with less and more."""
    caplog.set_level(logging.INFO)
    client = await make_chatty()
    await ask(client, chat("25", QUESTION))
    await logged(caplog, 1)  # what it says is looked up after its reply
    id = await ask(client, chat("26", QUESTION, "Eight.", "Why?"))
    first, second = await logged(caplog, 2)
    assert first["why"] == "nothing of it was stored"
    assert second["request"] == id.removeprefix("chatcmpl-")[:8]
    said = f"system prompt changed at token {second['live']}"
    assert second["why"] == f"{said}: 'Nov 25' -> 'Nov 26'"
    found = await why(client, second["request"])
    assert found == await why(client, id)
    assert found["why"] == second["why"]
    divergence = found["divergence"]
    assert divergence["before"].endswith("Today is Nov 2")
    assert divergence["stored"].startswith("5. Be brief")
    assert divergence["sent"].startswith("6. Be brief")
    assert (divergence["role"], divergence["message"], divergence["messages"]) == ("system", 1, 4)
    assert divergence["session"] == first["session"] != second["session"]
    assert divergence["title"] == QUESTION.strip()
    assert 64 <= divergence["known"] < found["request"]["reuse"]["prefill"]
    async with client.get(f"{OWN}/requests") as reply:
        listed = (await reply.json())["finished"]
    assert [each["why"] for each in listed] == [said, first["why"]]
    assert listed[0] == found["request"]
    await why(client, "chatcmpl-nosuch", 404)
    await why(client, "chat", 404)


async def test_what_is_no_change(make_chatty: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """A chat that goes on, an answer generated again, a new chat."""
    caplog.set_level(logging.INFO)
    client = await make_chatty()
    await ask(client, chat("25", QUESTION))
    await ask(client, chat("25", QUESTION))
    await ask(
        client, chat("25", QUESTION, "Eight.", "And how long do they live, if all goes well? " * 2)
    )
    await ask(
        client, chat("25", "Another thing, which has to do with whales and with the sea. " * 2)
    )
    said = [line.get("why", "") for line in await logged(caplog, 4)]
    assert said[1] == ""
    assert said[2:] == [f"new from token {line['live']} on" for line in lines(caplog)[2:]]
    found = await why(client, lines(caplog)[3]["request"])
    assert (found["why"], found["divergence"]) == (said[3], None)


async def test_turns_dropped_and_edited(
    make_chatty: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Another chat of the same system prompt, used later, is not taken for the one that changed."""
    caplog.set_level(logging.INFO)
    client = await make_chatty()
    turns = [
        f"{QUESTION} I ask for the {nth} time." for nth in ("first", "second", "third", "fourth")
    ]
    await ask(client, chat("25", *turns))
    await ask(client, chat("25", "Quite another thing."))
    await ask(client, chat("25", *turns[2:], "Again"))
    await logged(caplog, 3)
    await ask(client, chat("25", turns[0], turns[1].replace("beetle", "bee"), *turns[2:], "So?"))
    lines = await logged(caplog, 4)
    assert lines[2]["why"] == ("the oldest turns are gone: messages 2 to 3 are no longer there")
    where, _, words = lines[3]["why"].partition(" changed at token ")
    assert where == "message 3 of 6 (assistant)"
    assert words.endswith("'a beetle' -> 'a bee'")
    assert (await why(client, lines[2]["request"]))["divergence"]["session"] == lines[0]["session"]


async def test_a_prompt_without_messages(
    make_chatty: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = await make_chatty()
    for year in ("2025", "2026"):
        await complete(client, f"It is {year}. {RULES}")
    line = (await logged(caplog, 2))[1]
    assert line["why"] == f"prompt changed at token {line['live']}: 'is 2025' -> 'is 2026'"
    assert (await why(client, line["request"]))["divergence"]["message"] == 0


async def test_the_conversation_that_the_client_names(
    make_chatty: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the one that was used last, which has as much of the prompt."""
    caplog.set_level(logging.INFO)
    client = await make_chatty()
    for n, (day, name) in enumerate((("25", "mine"), ("25", "other"), ("26", "mine")), 1):
        said = "Tell me all." if name == "mine" else "Tell me nothing."
        await ask(client, chat(day, QUESTION, "Well.", said), **{"X-Towerd-Session": name})
        await logged(caplog, n)
    found = await why(client, lines(caplog)[2]["request"])
    assert found["why"].endswith("'Nov 25' -> 'Nov 26'")
    assert found["divergence"]["session"] == "mine"


async def test_no_text_of_others(make_chatty: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """Where keys are set the log has no words; no tenant sees a request of another, or diverges from its
    conversations."""
    caplog.set_level(logging.INFO)
    client = await make_chatty(api_keys=KEYS)
    await ask(client, chat("25", QUESTION), **key("ka"))
    bobs = await ask(client, chat("26", QUESTION), **key("kb"))
    anns = await ask(client, chat("27", QUESTION), **key("ka"))
    lines = await logged(caplog, 3)
    assert lines[1]["why"] == "nothing of it was stored"
    assert lines[2]["why"].startswith("system prompt changed at token ")
    assert "Nov" not in lines[2]["why"]
    assert (await why(client, bobs, name="kb"))["divergence"] is None
    await why(client, anns, 404, "kb")
    found = await why(client, anns, name="ka")
    assert found["why"].endswith("'Nov 25' -> 'Nov 27'")


async def test_deleted_text_is_not_shown(
    make_chatty: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what was found before the deletion nor, until the next gc, what would be after it."""
    caplog.set_level(logging.INFO)
    client = await make_chatty()
    await ask(client, chat("25", QUESTION))
    id = await ask(client, chat("26", QUESTION))
    first, second = await logged(caplog, 2)
    for session in (first["session"], second["session"]):
        async with client.delete(f"{OWN}/sessions/{session}") as reply:
            assert reply.status == 200
        found = await why(client, id)
        assert found["divergence"]["stored"] is found["divergence"]["sent"] is None
        assert "Nov" not in found["why"]
    await ask(client, chat("27", QUESTION))
    line = (await logged(caplog, 3))[2]
    assert line["why"] == f"new from token {line['live']} on"


async def test_a_base_that_changed(
    make_chatty: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = await make_chatty()
    body = {"name": "rules", "messages": chat("25")}
    async with client.post(f"{OWN}/precache", json=body) as reply:
        assert reply.status == 200, await reply.text()
    id = await ask(client, chat("26", QUESTION))
    await logged(caplog, 1)
    found = await why(client, id)
    assert found["why"].endswith("'Nov 25' -> 'Nov 26'")
    assert (found["divergence"]["base"], found["divergence"]["session"]) == ("rules", "")


async def test_a_client_is_told_once(
    make_chatty: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = await make_chatty()
    for day in range(10, 20):
        await ask(client, chat(str(day), QUESTION), **{"User-Agent": "clock/1.0"})
        await logged(caplog, day - 9)
    told = [line for line in lines(caplog) if "client" in line]
    assert len(told) == 1
    assert told[0]["client"] == "clock/1.0"
    assert "put what changes at the end" in told[0]["message"]
    assert told[0]["why"].startswith("system prompt changed at token ")
