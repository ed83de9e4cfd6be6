"""Malformed HTTP: an error in llama-server's shape, one line in the log, no effect on others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from served import served
from waiting import until_async

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /completion HTTP/1.1\r\nHost: localhost\r\n"
HEADS = {
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01",
    "no HTTP": b"hello there\r\n\r\n",
    "half a line": b"GET\r\n\r\n",
    "a version": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "a header's name": GET + b"Bad Header : x\r\n\r\n",
    "a header without a colon": GET + b"no colon\r\n\r\n",
    "a long header": GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
    "a long line": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "many headers": GET + b"".join(b"X%d: y\r\n" % i for i in range(500)) + b"\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length in words": POST + b"Content-Length: two\r\n\r\n{}",
    "a URL": b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a chunk's size": POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
}
BODIES = {
    "a chunk's size": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"ZZ\r\n{}\r\n0\r\n\r\n"),
    "the next chunk's": (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", b"QQ\r\n\r\n"),
    "a compressed body": (POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\n", b"abcde"),
}


@pytest.fixture
def begun() -> list[web.Request]:
    """The requests whose head has arrived."""
    return []


@pytest.fixture
async def url(
    make_app: Callable[..., Awaitable[web.Application]], begun: list[web.Request]
) -> AsyncIterator[str]:
    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        begun.append(request)
        return await handler(request)

    app = await make_app()
    app.middlewares.insert(0, note)
    async with served(app) as url:
        yield url


async def send(
    url: str, first: bytes, begun: list[web.Request], rest: bytes = b""
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON body of the first reply to these bytes; the rest of them are sent
    when the first have begun a request."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(first)
        if rest:
            await until_async(lambda: bool(begun))
            writer.write(rest)
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            status, *lines = head.decode().split("\r\n")
            headers = {
                name.lower(): value for name, _, value in (li.partition(": ") for li in lines)
            }
            body = await reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, json.loads(body)
    finally:
        writer.close()


def is_one_line(record: logging.LogRecord) -> bool:
    return record.exc_info is None and "\n" not in record.getMessage()


@pytest.mark.parametrize("data", HEADS.values(), ids=HEADS)
async def test_a_head_that_is_malformed(
    url: str, data: bytes, begun: list[web.Request], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    status, headers, body = await send(url, data, begun)
    assert (status, body["error"]["code"]) == (400, 400)
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("Malformed HTTP request: ")
    assert len(body["error"]["message"]) < 120
    assert headers["content-type"] == "application/json; charset=utf-8"
    assert headers["server"] == "towerd"
    (record,) = [each for each in caplog.records if "malformed" in each.getMessage()]
    assert record.levelno == logging.INFO
    assert all(is_one_line(each) for each in caplog.records)


@pytest.mark.parametrize("parts", BODIES.values(), ids=BODIES)
async def test_a_body_that_is_malformed(
    url: str,
    parts: tuple[bytes, bytes],
    begun: list[web.Request],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Arriving after its head, while a handler waits for it: it is refused at once."""
    status, headers, body = await send(url, parts[0], begun, parts[1])
    assert (status, body["error"]["code"]) == (400, 400)
    assert "\n" not in body["error"]["message"]
    assert headers["server"] == "towerd"
    assert all(is_one_line(each) for each in caplog.records)


async def test_an_unknown_expectation(url: str, begun: list[web.Request]) -> None:
    head = POST + b"Expect: the unexpected\r\nContent-Length: 2\r\n\r\n{}"
    status, _, body = await send(url, head, begun)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


async def test_what_follows_a_request(url: str, begun: list[web.Request]) -> None:
    """The request is answered first."""
    body = b'{"prompt": "a", "n_predict": 3}'
    request = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    status, _, reply = await send(url, request, begun, b"garbage\r\n\r\n")
    assert (status, reply["stop"]) == (200, True)
