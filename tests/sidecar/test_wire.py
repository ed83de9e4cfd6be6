"""One request on a connection of its own: what goes out, what comes back, and how it breaks."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.engine.llama_server.wire import BUFFER_BYTES_MAX, Lost, NotHttp, Reply, send

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Runs coroutines on either kind of loop."""
    with asyncio.Runner(loop_factory=request.param) as made:
        yield made


@asynccontextmanager
async def serving(talk: Talk, port: int = 0) -> AsyncIterator[str]:
    """URL of a server that does this with every connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def saying(*pieces: bytes) -> Talk:
    """A server that reads the request's head, then writes these pieces and ends."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return talk


async def ask(url: str, method: str = "GET", **fields: Any) -> tuple[Reply, bytes]:
    reply = await send(url, method, "/x", {}, **fields)
    try:
        return reply, await reply.read_all()
    finally:
        reply.close()


# --- replies ------------------------------------------------------------------------------

HEAD = (
    b"HTTP/1.1 200 Fine\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-A: 1\r\nX-A: 2\r\n"
)
CHUNKED = (
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nX-Late: 1\r\n\r\n"
)
REPLIES: list[tuple[str, bytes, bytes]] = [
    ("GET", HEAD + b"Content-Length: 8\r\n\r\nabcdefgh", b"abcdefgh"),
    ("GET", CHUNKED, b"abcdefgh"),
    ("GET", HEAD + b"Connection: close\r\n\r\nabcdefgh", b"abcdefgh"),
    ("POST", b"HTTP/1.1 100 Continue\r\nX-B: 1\r\n\r\n" + CHUNKED, b"abcdefgh"),
    ("HEAD", HEAD + b"Content-Length: 8\r\n\r\n", b""),
    ("GET", HEAD + b"Content-Length: 0\r\n\r\n", b""),
    ("GET", CHUNKED + b"HTTP/1.1 500 Not asked for\r\n\r\n", b"abcdefgh"),
]


@pytest.mark.parametrize(("method", "text", "body"), REPLIES)
def test_replies_wherever_they_are_cut(
    runner: asyncio.Runner, method: str, text: bytes, body: bytes
) -> None:
    """However its bytes arrive, a reply is the same."""

    @settings(max_examples=8, deadline=None)
    @given(st.lists(st.integers(0, len(text)), max_size=4))
    def check(cuts: list[int]) -> None:
        ends = sorted(cuts)
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]

        async def run() -> None:
            async with serving(saying(*pieces)) as url:
                reply, found = await ask(url, method)
            assert (reply.status, reply.reason, found) == (200, "Fine", body)
            assert reply.content_type == "text/event-stream"
            assert reply.headers.getall("x-a") == ["1", "2"]
            assert "X-Late" not in reply.headers
            assert "X-B" not in reply.headers
            assert reply.closed

        runner.run(run())

    check()


def test_no_content(runner: asyncio.Runner) -> None:
    """A 204 has no body, whatever its sender thinks."""

    async def run() -> None:
        text = b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nnull"
        async with serving(saying(text)) as url:
            reply, body = await ask(url)
        assert (reply.status, body) == (204, b"")

    runner.run(run())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", Lost), (b"HTTP/1.1 200 OK\r\nX:", Lost), (b"SSH-2.0-OpenSSH\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 100_000, NotHttp),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", NotHttp),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n", NotHttp),
    ],
)  # fmt: skip
def test_no_reply(runner: asyncio.Runner, text: bytes, error: type[Exception]) -> None:
    async def run() -> None:
        async with serving(saying(text)) as url:
            with pytest.raises(error):
                await send(url, "GET", "/", {})

    runner.run(run())


@pytest.mark.parametrize(
    "head", [b"Content-Length: 9\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n6\r\n"]
)
def test_a_reply_that_breaks_off(runner: asyncio.Runner, head: bytes) -> None:
    """What came is handed out first, then it is said that more was to come."""

    async def run() -> None:
        async with serving(saying(HEAD + head, b"abc", b"def")) as url:
            reply = await send(url, "GET", "/", {})
            found = b""
            while len(found) < 6:
                found += await reply.read(2)
            assert found == b"abcdef"
            with pytest.raises(Lost):
                await reply.read(2)
            reply.close()

    runner.run(run())


def test_names(runner: asyncio.Runner) -> None:
    """A name leads where it led before, and is looked up again when nobody answers there."""

    async def run() -> None:
        async with serving(saying(HEAD + b"\r\nabc")) as url:
            port = int(url.rpartition(":")[2])
            for _ in range(2):
                assert (await ask(f"http://localhost:{port}"))[1] == b"abc"
        with pytest.raises(OSError, match=r"(?i)refused|connect"):
            await send(f"http://localhost:{port}", "GET", "/", {})
        async with serving(saying(HEAD + b"\r\nabc"), port):
            assert (await ask(f"http://localhost:{port}"))[1] == b"abc"

    runner.run(run())


def test_nobody_there(runner: asyncio.Runner) -> None:
    async def run() -> None:
        async with serving(saying()) as url:
            pass
        with pytest.raises(OSError, match=r"(?i)refused|connect"):
            await send(url, "GET", "/", {})

    runner.run(run())


def test_a_reply_waits_for_its_reader(runner: asyncio.Runner) -> None:
    """Megabytes that nobody reads stay with their sender."""
    data = bytes(range(256)) * 40_000

    async def run() -> None:
        text = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data)
        async with serving(saying(text + data)) as url:
            reply = await send(url, "GET", "/", {})
            await asyncio.sleep(0.05)
            assert len(reply._buffer) < 4 * BUFFER_BYTES_MAX
            found = bytearray()
            while piece := await reply.read(100_000):
                assert len(piece) <= 100_000
                found += piece
            assert bytes(found) == data

    runner.run(run())


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    n_taken=st.lists(st.integers(0, 30), min_size=1, max_size=12),
)
def test_a_borrower_and_a_reader_have_it_all_in_order(
    pieces: list[bytes], cuts: list[int], n_taken: list[int]
) -> None:
    """However it arrives, and whatever whole chunks someone reads who borrows the connection."""
    found: list[bytes] = []
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    left = chunks + b"0\r\n\r\n"
    parts = []
    for cut in cuts:
        parts.append(left[:cut])
        left = left[cut:]

    async def run() -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with serving(saying(head, *parts, left)) as url:
            reply = await send(url, "GET", "/", {})
            wanted = iter(n_taken * 50)
            while data := await reply.read(1 << 20):
                found.append(data)
                if reply.lend():
                    await asyncio.sleep(0.001)
                    borrowed = reply.own_descriptor()
                    assert borrowed is not None
                    reply.take_back(whole_chunks(borrowed, next(wanted), found))
            reply.close()

    asyncio.run(run())
    assert b"".join(found) == b"".join(pieces)


def whole_chunks(borrowed: int, n_bytes: int, found: list[bytes]) -> bytes:
    """Read some of what has arrived, keep its whole chunks, and say what is left."""
    try:
        raw = os.read(borrowed, n_bytes) if n_bytes else b""
    except BlockingIOError:
        raw = b""
    finally:
        os.close(borrowed)
    while (line := re.match(rb"([0-9a-f]+)\r\n", raw)) and int(line[1], 16):
        end = line.end() + int(line[1], 16)
        if len(raw) < end + 2:
            break
        found.append(raw[line.end() : end])
        raw = raw[end + 2 :]
    return raw


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (b"Content-Length: 9\r\n\r\nabc", b"abc"),
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3\r\nd", b"abcd"),
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3\r\n", b"abc"),
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3", b"abc"),
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc", b"abc"),
        (b"Transfer-Encoding: chunked\r\n\r\n6\r\nabcdef\r\n", b"abc"),
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
    ],
    ids=["length", "inside", "size", "size in part", "no end", "unread", "over"],
)
def test_what_is_not_lent(runner: asyncio.Runner, text: bytes, read: bytes) -> None:
    """A connection that is not between two chunks, or of which something is still to be read."""

    async def run() -> None:
        async with serving(saying(b"HTTP/1.1 200 OK\r\n" + text)) as url:
            reply = await send(url, "GET", "/", {})
            assert await reply.read(len(read)) == read
            assert not reply.lend()
            reply.close()

    runner.run(run())


def test_closing_tells_the_other_end(runner: asyncio.Runner) -> None:
    """Whoever generates a stream learns that nobody listens; whoever reads it, too."""

    async def run() -> None:
        ended = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + b"\r\nfirst")
            try:
                assert await reader.read() == b""
            finally:
                ended.set()

        async with serving(talk) as url:
            reply = await send(url, "GET", "/", {})
            assert await reply.read(100) == b"first"
            reading = asyncio.create_task(reply.read(100))
            await asyncio.sleep(0)
            reply.close()
            with pytest.raises(Lost):
                await reading
            await ended.wait()
            assert reply.closed

    runner.run(run())


# --- requests -----------------------------------------------------------------------------


async def pieces_of(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
        yield b""


@pytest.mark.parametrize("size", [0, 1, 5000, 3_000_000])
@pytest.mark.parametrize("kind", ["bytes", "length", "chunked"])
def test_requests_arrive(runner: asyncio.Runner, size: int, kind: str) -> None:
    """A real server reads what was sent, however big and however given."""
    data = (b"0123456789abcde\n" * (size // 16 + 1))[:size]

    async def run() -> None:
        seen: dict[str, Any] = {}

        async def handle(request: web.Request) -> web.Response:
            seen.update(path=request.raw_path, headers=request.headers.copy())
            seen["body"] = await request.read()
            return web.Response(text="done", status=201)

        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/base/{rest:.*}", handle)
        site_runner = web.AppRunner(app)
        await site_runner.setup()
        await web.TCPSite(site_runner, "127.0.0.1", 0).start()
        host, port = site_runner.addresses[0][:2]
        headers = {"X-Name": "vä\u00efl", "Authorization": "Bearer k"}
        body: Any = data
        if kind != "bytes":
            body = pieces_of(data, max(1, size // 7))
            headers |= {"Content-Length": str(size)} if kind == "length" else {}
        reply = await send(f"http://{host}:{port}/base/", "POST", "/a%20b?c=d", headers, body)
        assert (reply.status, await reply.read_all()) == (201, b"done")
        reply.close()
        await site_runner.cleanup()
        assert (seen["path"], seen["body"]) == ("/base/a%20b?c=d", data)
        assert seen["headers"]["X-Name"] == "vä\u00efl"
        assert seen["headers"]["Host"] == f"{host}:{port}"
        assert ("Transfer-Encoding" in seen["headers"]) == (kind == "chunked")

    runner.run(run())


def test_a_small_request_is_one_packet(runner: asyncio.Runner) -> None:
    async def run() -> None:
        first: list[bytes] = []

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            first.append(await reader.read(1 << 16))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        async with serving(talk) as url:
            await ask(url, "POST", body=b"{}")
        assert first[0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:")
        assert first[0].endswith(b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")

    runner.run(run())


def test_a_body_that_breaks_off(runner: asyncio.Runner) -> None:
    """Its reason is what the sender hears, and no whole request arrives."""

    async def run() -> None:
        arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                arrived.set_result(await reader.read(1 << 20) + await reader.read())
            except ConnectionError:
                arrived.set_result(b"")

        async def broken() -> AsyncIterator[bytes]:
            yield b"abc"
            await asyncio.sleep(0.01)
            raise RuntimeError("no more")

        async with serving(talk) as url:
            with pytest.raises(RuntimeError, match="no more"):
                await send(url, "POST", "/", {}, broken())
            assert not (await arrived).endswith(b"0\r\n\r\n")

    runner.run(run())


def test_an_answer_before_the_body_ends(runner: asyncio.Runner) -> None:
    """A server that refuses a body is heard although more of it is waited for."""

    async def run() -> None:
        is_left = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            try:
                yield b"abc"
                await asyncio.Event().wait()
            finally:
                is_left.set()

        text = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
        async with serving(saying(text)) as url:
            reply = await send(url, "POST", "/", {}, endless())
            assert (reply.status, await reply.read_all()) == (413, b"no")
            reply.close()
            await is_left.wait()

    runner.run(run())


def test_headers_hold_no_line_breaks(runner: asyncio.Runner) -> None:
    async def run() -> None:
        for name, value in (("X-A", "1\r\nX-B: 2"), ("X-A", "1\n"), ("X-\r", "1"), ("X-A", "\0")):
            with pytest.raises(ValueError, match="line break"):
                await send("http://127.0.0.1:1", "GET", "/", {name: value})

    runner.run(run())
