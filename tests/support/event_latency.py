"""How much later a stream's events arrive through towerd than without it, an event at a time.

    python tests/support/event_latency.py [EVENTS PAUSE_MS ROUNDS]

A stand-in for llama-server writes the time into each event; the client subtracts it from its own.
The two ways take turns. Unlike `towerctl bench proxy`, which has a model decode beside it, this
tells tenths of a millisecond on a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
from daemon import Daemon
from fake_llama_server import Asked, answering, props

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"index":0,"content":"%d","tokens":[5],"stop":false,"tokens_predicted":%d}\n\n'
TIMINGS = {"cache_n": 0, "prompt_n": 2, "prompt_ms": 1.0, "predicted_n": 1, "predicted_ms": 1.0}


def serve(slot_dir: Path, n_events: int, pause_s: float, pipe: Connection) -> None:
    """Be the llama-server, until the pipe says something."""

    def talk(asked: Asked) -> None:
        body = json.loads(asked.body.read(int(asked.headers["Content-Length"])))
        end = {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "timings": TIMINGS}
        if not body.get("stream"):
            data = json.dumps(end).encode()
            asked.connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
            )
            return
        asked.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked.connection.sendall(HEAD)
        for i in range(n_events):
            time.sleep(pause_s)
            asked.connection.sendall(chunk(EVENT % (time.monotonic_ns(), i)))
        asked.connection.sendall(chunk(b"data: %s\n\n" % json.dumps(end).encode()) + chunk(b""))

    told = props("b99999-0123abc")
    with answering(told, save_to=slot_dir, talks={"/completion": talk}) as url:
        pipe.send(url)
        pipe.recv()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def latencies_ms(session: aiohttp.ClientSession, url: str) -> list[float]:
    """Of each event of one stream."""
    found = []
    body = {"prompt": [5, 6], "stream": True}
    async with session.post(f"{url}/completion", json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {") and (text := json.loads(line[6:])["content"]):
                found.append((time.monotonic_ns() - int(text)) / 1e6)
    return found


async def measure(urls: list[str], n_rounds: int) -> list[list[float]]:
    """For each way all latencies; the first round warms up."""
    found: list[list[float]] = [[] for _ in urls]
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        for k in range(n_rounds + 1):
            for i in (0, 1) if k % 2 else (1, 0):
                now = await latencies_ms(session, urls[i])
                found[i] += now if k else []
    return found


def main(n_events: int, pause_ms: float, n_rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        slot_dir = Path(folder) / "slots"
        slot_dir.mkdir(mode=0o700)
        ours, theirs = multiprocessing.Pipe()
        asked = (slot_dir, n_events, pause_ms / 1e3, theirs)
        server = multiprocessing.Process(target=serve, args=asked)
        server.start()
        url = ours.recv()
        with Daemon(Path(folder) / "d", "--upstream", url, "--slot-dir", str(slot_dir)) as daemon:
            alone, through = asyncio.run(measure([url, daemon.url], n_rounds))
        ours.send(None)
        server.join()
    p50 = [statistics.median(each) for each in (alone, through)]
    print(f"p50 of {len(alone)} events: {p50[0]:.3f} ms alone, {p50[1] - p50[0]:.3f} ms added")


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    main(int(given.get(0, 100)), float(given.get(1, 10)), int(given.get(2, 18)))
