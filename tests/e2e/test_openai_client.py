"""The openai Python package, unmodified, against a real daemon."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import openai as openai_errors
import pytest
from daemon import Daemon
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from waiting import until

MODEL = "stories260K.gguf"
HELLO: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me about Lily and her red ball."},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "colour": {"enum": ["red", "blue"]},
    },
    "required": ["name", "age", "tags", "colour"],
    "additionalProperties": False,
}


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def test_models(openai: OpenAI) -> None:
    """The one model is listed and found by name."""
    assert [model.id for model in openai.models.list()] == [MODEL]


def test_chat(openai: OpenAI) -> None:
    """A whole reply: its text, why it ended, what it used."""
    reply = openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12
    again = openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


def test_chat_stream_says_the_same(openai: OpenAI) -> None:
    """Streamed and not, greedy text is one text; the stream names the role first and the reason
    last, and has no usage unless asked."""
    whole = openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=20, temperature=0
    )
    with openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=20, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 10, "it came in pieces"
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_usage(openai: OpenAI) -> None:
    """include_usage adds one last chunk with the figures and no choices."""
    with openai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_json_schema(openai: OpenAI, seed: int) -> None:
    """A tiny model that knows no JSON still answers with what the schema allows."""
    reply = openai.chat.completions.create(
        model=MODEL,
        messages=user("Describe a child."),
        seed=seed,
        max_tokens=200,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "child", "schema": SCHEMA, "strict": True},
        },
    )
    assert reply.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(reply.choices[0].message.content or ""), SCHEMA)


def test_logprobs(openai: OpenAI) -> None:
    """Greedy tokens lead their alternatives; probabilities are probabilities; the tokens are
    the text. Streamed they are the same."""
    arguments: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    reply = openai.chat.completions.create(**arguments)
    choice = reply.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == 6
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob
        assert token.logprob <= 0
        assert sum(math.exp(each.logprob) for each in token.top_logprobs) <= 1 + 1e-6
    raw = b"".join(bytes(token.bytes or []) for token in content).decode("utf-8", "replace")
    assert raw.strip() == (choice.message.content or "").strip()
    with openai.chat.completions.create(**arguments, stream=True) as stream:
        streamed = [
            token.token
            for chunk in stream
            if chunk.choices[0].logprobs
            for token in chunk.choices[0].logprobs.content or []
        ]
    assert streamed == [token.token for token in content]


def test_two_choices(openai: OpenAI) -> None:
    """n=2: two replies of one prompt, told apart by their index, streamed or not."""
    arguments: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 16,
        "n": 2,
        "seed": 5,
        "temperature": 1.5,
    }
    reply = openai.chat.completions.create(**arguments)
    texts = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 32
    with openai.chat.completions.create(**arguments, stream=True) as stream:
        chunks = list(stream)
    assert [text_of(chunks, 0), text_of(chunks, 1)] == texts


def test_stop(openai: OpenAI) -> None:
    """The text ends before the stop string, even when that is split over tokens."""
    plain = openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=40, temperature=0
    )
    text = plain.choices[0].message.content or ""
    stop = text[14:20]
    reply = openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=40, temperature=0, stop=[stop, "no such text"]
    )
    assert reply.choices[0].message.content == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_seed(openai: OpenAI) -> None:
    """One seed gives one text, however warm the cache is; another seed gives another."""

    def ask(seed: int) -> str:
        reply = openai.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=30, temperature=1.3, seed=seed
        )
        return reply.choices[0].message.content or ""

    first = ask(7)
    assert first == ask(7)
    assert len({first, ask(8), ask(9)}) == 3


def test_completions(openai: OpenAI) -> None:
    """The older endpoint, streamed and not, one prompt and several."""
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    reply = openai.completions.create(prompt="Once upon a time", **arguments)
    assert reply.object == "text_completion"
    assert reply.choices[0].finish_reason == "length"
    with openai.completions.create(prompt="Once upon a time", stream=True, **arguments) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == reply.choices[0].text
    two = openai.completions.create(prompt=["Once upon a time", "The cat"], **arguments)
    assert two.choices[0].text == reply.choices[0].text
    assert two.choices[1].text != reply.choices[0].text


def test_closing_a_stream_stops_it(make_daemon: Any, slow_model: Path) -> None:
    """A client that leaves frees its slot at once, and what it got so far is stored."""
    flags = ("-m", str(slow_model), "--ctx-size", "8192")
    name = "left-early"
    with (
        make_daemon(*flags) as daemon,
        OpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        with client.chat.completions.create(
            model="slow",
            messages=user("A very long story, please."),
            stream=True,
            max_tokens=8000,
            extra_headers={"X-Towerd-Session": name},
            extra_body={"ignore_eos": True},
        ) as stream:
            seen = "".join(next(stream).choices[0].delta.content or "" for _ in range(8))
            assert daemon.n_processing() == 1
        until(lambda: daemon.n_processing() == 0)
        until(lambda: len(turns_of(daemon, name)) == 1)
        (turn,) = turns_of(daemon, name)
        assert not turn["finished"]
        assert 6 <= turn["n_reply"] < 8000
        text = daemon.get(f"/towerd/v1/sessions/{name}?text=1")["text"]
        assert seen.split("\ufffd")[0].strip() in text


def turns_of(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    """The turns of a session, empty while there is none."""
    sessions = {each["id"] for each in daemon.get("/towerd/v1/sessions")["sessions"]}
    if name not in sessions:
        return []
    turns: list[dict[str, Any]] = daemon.get(f"/towerd/v1/sessions/{name}")["turns"]
    return turns


def test_errors_become_exceptions(openai: OpenAI) -> None:
    """Each refusal has the class that openai's users catch."""
    wrong_messages: list[Any] = [{"role": "user"}]
    with pytest.raises(openai_errors.BadRequestError) as wrong:
        openai.chat.completions.create(model=MODEL, messages=wrong_messages)
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai_errors.BadRequestError) as too_long:
        openai.chat.completions.create(
            model=MODEL, messages=user("word " * 2000), extra_body={"retention": "none"}
        )
    assert too_long.value.type == "exceed_context_size_error"
    assert too_long.value.code == "context_length_exceeded"


def test_wrong_key(make_daemon: Any) -> None:
    """With --api-key a client needs it."""
    with make_daemon("--api-key", "sk-right") as guarded:
        base = guarded.url + "/v1"
        with OpenAI(base_url=base, api_key="sk-wrong", max_retries=0) as client:
            with pytest.raises(openai_errors.AuthenticationError):
                client.models.list()
            with pytest.raises(openai_errors.AuthenticationError):
                client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        with OpenAI(base_url=base, api_key="sk-right", max_retries=0) as client:
            reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
            assert reply.choices


async def test_eight_streams_at_once(daemon: Daemon, openai: OpenAI) -> None:
    """Eight concurrent streams each get what they would get alone."""
    prompts = [f"Story number {i} about {animal}." for i, animal in enumerate(ANIMALS)]
    # What greedy decoding says alone; batches of other shapes may flip a near tie, so the first
    # tokens only.
    alone = [
        openai.chat.completions.create(
            model=MODEL, messages=user(prompt), max_tokens=8, temperature=0
        )
        .choices[0]
        .message.content
        for prompt in prompts
    ]
    async with AsyncOpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0) as client:

        async def one(prompt: str) -> tuple[str, int]:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=user(prompt),
                max_tokens=60,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async with stream:
                chunks = [chunk async for chunk in stream]
            usage = chunks[-1].usage
            assert usage is not None
            return text_of(chunks), usage.completion_tokens

        together = await asyncio.gather(*(one(prompt) for prompt in prompts))
    for text, (streamed, n) in zip(alone, together, strict=True):
        assert n == 60
        assert streamed.startswith(text or "?")


ANIMALS = ("a cat", "a dog", "a bird", "a fish", "a frog", "a bear", "a mouse", "a horse")
