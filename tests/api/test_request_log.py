"""What the log says of a request: a short title, and why tokens were evaluated."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from yarl import URL

from towerd.api.http.request_log import TITLE_CHARS_MAX, error_line, title_of, why_evaluated
from towerd.engine.base import Reuse, Timings


@pytest.mark.parametrize(
    ("body", "title"),
    [
        (
            {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]},
            "Hi",
        ),
        ({"messages": [{"content": [{"type": "text", "text": "A\n b"}], "role": "user"}]}, "A b"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}, {"text": "x"}]}]}, "x"),
        ({"input": "Hello"}, "Hello"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "Yes"}]}]}, "Yes"),
        ({"prompt": "Once \x1b[31m\u202eupon"}, "Once [31m upon"),
        ({"prompt": {"prompt_string": "pictured"}}, "pictured"),
        ({"prompt": ["Once", 5]}, "Once"),
        ({"prompt": [5, 6]}, ""),
        ({"messages": [{"role": "system", "content": "only"}]}, ""),
        ({"messages": "wrong"}, "wrong"),
        ({"messages": None}, ""),
        ({"prompt": "x" * 9999}, "x" * (TITLE_CHARS_MAX - 1) + "…"),
    ],
)
def test_titles(body: Any, title: str) -> None:
    """The first thing that the user says, on one line that no terminal obeys."""
    assert title_of(json.dumps(body).encode()) == title


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Field 'temperature': expected a number, got 'hot'", ...),
        ("no model 'gpt' is here; there is 'stories'", ...),
        ("the client's text can't be read", ...),
        (
            "bad value 'a' my diagnosis is HIV and my pin is 4711, tell nobody at all' here",
            "bad value '…' here",
        ),
        ('bad: {"content": "I read \\"x\\" and my diagnosis is HIV", "a": 1}', 'bad: {"…": 1}'),
        ("cut 'my diagnosis is HIV and my pin is 4711, tell nobody", "cut '…"),
        ("Failed to parse tools: x; tools = [secret]", "Failed to parse tools: x"),
    ],
)
def test_errors_are_logged_without_the_texts_that_they_quote(message: str, shown: Any) -> None:
    assert error_line(message) == (message if shown is ... else shown)


async def test_paths_are_logged_as_sent(
    make_client: Callable[..., Awaitable[TestClient[web.Request, web.Application]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A path without a key is a stranger's, and its decoded characters are too."""
    caplog.set_level(logging.INFO)
    client = await make_client(api_keys=(("sk-ann", "ann"),))
    path = "/foo%0A12:00:00%20info%1B[2J"
    async with client.post(URL(path + "?key=hidden", encoded=True)) as reply:
        assert reply.status == 401
    (record,) = [each for each in caplog.records if each.name == "towerd.request"]
    assert record.getMessage() == path


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"prompt": "cut', b"\xff", b"[" * 10_000, b'{"prompt": "\\ud800"}']
)
def test_bodies_without_a_title(body: bytes) -> None:
    """What is no request has none, and breaks nothing."""
    assert title_of(body) == ""


def test_deep_prompts_have_no_title() -> None:
    assert title_of(b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}") == ""


@pytest.mark.parametrize(
    ("reuse", "why"),
    [
        (Reuse(prefill=9), "nothing of it was stored"),
        (Reuse(live=4, hot=3, prefill=9), "new from token 7 on"),
        (Reuse(live=40, prefill=1), ""),
        (Reuse(warm=1, prefill=50, cold=50), "thawed: only its tokens were kept"),
    ],
)
def test_reasons(reuse: Reuse, why: str) -> None:
    assert why_evaluated(reuse) == why


async def test_refusals_are_logged_as_they_are_said(
    make_client: Callable[..., Awaitable[TestClient[web.Request, web.Application]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A short quotation, such as a field's name, stays; a long one may be of the user's text."""
    caplog.set_level(logging.INFO)
    client = await make_client()
    secret = "the user's own words, and a good many of them"
    for body in (
        {"prompt": "x", "temperature": "hot"},
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": secret}],
        },
    ):
        path = "/completion" if "prompt" in body else "/v1/chat/completions"
        async with client.post(path, json=body) as reply:
            assert reply.status == 400
    lines = [each.__dict__["error"] for each in caplog.records if each.name == "towerd.request"]
    assert lines[0].endswith("type must be number, but is string")
    assert "own words" not in lines[1]


@pytest.mark.parametrize(("tokens", "speed"), [(0, None), (1, None), (2, 10.0), (11, 100.0)])
def test_speed_is_of_the_tokens_after_the_first(tokens: int, speed: float | None) -> None:
    timings = Timings(0, 0, 0.0, predicted_n=tokens, predicted_ms=100.0)
    assert timings.tokens_per_second == speed
