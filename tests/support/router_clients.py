"""Clients of a simulated router: what they ask, when they leave, and what happens to processes meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Awaitable, Callable

import aiohttp
from router_oracle import HEARD_S, LIFE_S, Asked, RouterOracle
from router_plan import ADDRESS
from simulated_loop import SimulatedLoop
from simulated_model import SimulatedModel

URL = f"http://{ADDRESS[0]}:{ADDRESS[1]}"


class RouterClient:
    """One client, which does one thing after the other."""

    def __init__(self, loop: SimulatedLoop, oracle: RouterOracle, chance: random.Random) -> None:
        self._loop, self._oracle, self._chance = loop, oracle, chance
        self._plan = oracle.plan
        connector = aiohttp.TCPConnector(socket_factory=loop.simulated_socket)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(URL, connector=connector, timeout=timeout)

    async def __aenter__(self) -> RouterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def live(self) -> None:
        """Do what was drawn. Raises AssertionError for what must not be."""
        plan, chance = self._plan, self._chance
        does: list[Callable[[str], Awaitable[None]]] = [self.chat] * 5 + [self._plain_chat] * 2
        does += [self._load, self._list, self._props, self._listen, self._stop_stream]
        does += [self._unload] * 2 * plan.has_unloads
        does += [self._new_file] * plan.has_new_files
        does += [self._kill, self._suspend] * plan.has_faults
        for _ in range(plan.n_operations):
            await asyncio.sleep(chance.random() * plan.pause_s)
            await chance.choice(does)(chance.choice(plan.names))
            self._oracle.check()

    async def expect(self, model: str, within_s: float) -> None:
        """Ask a model, which must answer in time. Raises AssertionError."""
        asking = asyncio.create_task(self.chat(model, is_calm=True))
        is_done = (await asyncio.wait((asking,), timeout=within_s))[0]
        assert is_done, f"{model} does not answer within {within_s:.0f} s"
        await asking
        self._oracle.check()

    # ---- chats ----------------------------------------------------------------------------------

    def _ask(self, model: str) -> Asked:
        """A new request."""
        chance, asked = self._chance, self._oracle.asked
        id = f"r{len(asked)}"
        body = {
            "id": id,
            "model": model,
            "stream": chance.random() < 0.6,
            "n": chance.choice((1, 3, 20)),
            "pace_s": chance.choice((0.0, 0.01, 0.2, 0.9)),
            "padding": chance.choice((0, 0, 100, 50_000)),
        }
        asked[id] = Asked(id, model, body, self._loop.time())
        self._oracle.note(f"{id} asks {model}")
        return asked[id]

    async def chat(self, model: str, *, is_calm: bool = False) -> None:
        """Ask a model, and leave before the reply's end now and then. is_calm: do not."""
        chance, oracle = self._chance, self._oracle
        asked = self._ask(model)
        asked.is_kept = asked.body["stream"] and chance.random() < 0.3
        headers = {"X-Conversation-Id": asked.id} if asked.is_kept else {}
        leaves = not is_calm and chance.random() < 0.3
        leave_s = chance.choice((0.01, 0.3, 3.0)) if leaves else None
        is_slow = not is_calm and chance.random() < 0.1
        said = bytearray()
        try:
            async with asyncio.timeout(leave_s):
                async with self._session.post(
                    "/v1/chat/completions", json=asked.body, headers=headers
                ) as reply:
                    async for chunk in reply.content.iter_any():
                        said += chunk
                        await asyncio.sleep(0.3 if is_slow else 0)
        except TimeoutError:
            oracle.leaves(asked)
        except aiohttp.ClientError as error:
            oracle.judge(asked, f"its connection ended: {error!r}")
        else:
            oracle.judge(asked, oracle.mistake(asked, reply.status, bytes(said)))

    async def _plain_chat(self, model: str) -> None:
        """The same over a bare connection, which may be shut down after the request, or reset."""
        chance, oracle = self._chance, self._oracle
        asked = self._ask(model)
        body = json.dumps(asked.body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {ADDRESS[0]}\r\nConnection: close\r\n"
        length = f"Content-Length: {len(body)}\r\n\r\n"
        leave_s = chance.choice((0.01, 0.3, 3.0)) if chance.random() < 0.3 else None
        try:
            reader, writer = await asyncio.open_connection(*ADDRESS)
        except ConnectionRefusedError as error:
            oracle.judge(asked, repr(error))
            return
        try:
            async with asyncio.timeout(leave_s):
                writer.write((head + length).encode() + body)
                if chance.random() < 0.5:
                    writer.write_eof()
                said = await reader.read()
        except TimeoutError:
            oracle.leaves(asked)
            writer.transport.abort()
        except ConnectionError as error:
            oracle.judge(asked, repr(error))
        else:
            status, content = _parsed(said)
            oracle.judge(asked, oracle.mistake(asked, status, content) if status else "no reply")
        finally:
            writer.close()

    async def _stop_stream(self, model: str) -> None:
        """End a stream that would outlive its client."""
        kept = [each for each in self._oracle.asked.values() if each.is_kept]
        if not kept:
            return
        asked = self._chance.choice(kept[-3:])
        self._oracle.note(f"stop {asked.id}")
        asked.is_stopped = True
        began_s = self._loop.time()
        try:
            async with self._session.delete("/v1/stream", params={"conv_id": asked.id}) as reply:
                said = await reply.read()
        except aiohttp.ClientError:
            self._oracle.must_excuse(asked.model, began_s, "/v1/stream: no reply")
        else:
            if reply.status != 204:
                self._oracle.must_excuse(asked.model, began_s, f"/v1/stream says {said!r}")

    # ---- what clients do to models -----------------------------------------------------------------

    async def _order(self, path: str, model: str) -> bool:
        try:
            async with self._session.post(path, json={"model": model}) as reply:
                said = await reply.json()
                self._oracle.must(reply.status in (200, 400), f"{path} says {reply.status} {said}")
        except aiohttp.ClientError:
            self._oracle.must(self._oracle.is_ending, f"{path}: no reply")
            return False
        return reply.status == 200

    async def _load(self, model: str) -> None:
        self._oracle.note(f"load {model}")
        await self._order("/models/load", model)

    async def _unload(self, model: str) -> None:
        self._oracle.note(f"unload {model}")
        began_s = self._loop.time()
        self._oracle.told.append((model, began_s, float("inf")))
        is_done = await self._order("/models/unload", model)
        self._oracle.told.remove((model, began_s, float("inf")))
        if is_done:
            self._oracle.told.append((model, began_s, self._loop.time()))

    async def _list(self, model: str) -> None:
        try:
            async with self._session.get("/models") as reply:
                listed = (await reply.json())["data"]
        except aiohttp.ClientError:
            self._oracle.must(self._oracle.is_ending, "/models: no reply")
        else:
            names = [each["id"] for each in listed]
            self._oracle.must(names == sorted(self._plan.names), f"/models lists {names}")

    async def _props(self, model: str) -> None:
        began_s = self._loop.time()
        try:
            async with self._session.get("/props", params={"model": model}) as reply:
                said = await reply.json()
        except aiohttp.ClientError:
            self._oracle.must_excuse(model, began_s, "/props: no reply")
            return
        if reply.status == 200:
            self._oracle.must(said == {"model": model}, f"/props of {model} says {said}")
        else:
            self._oracle.must("message" in said["error"], f"/props says {said}")

    async def _new_file(self, model: str) -> None:
        file = self._plan.twin if model == "twin" else model
        self._oracle.note(f"a new file for {file}")
        assert file is not None
        self._plan.write(file)
        concerned = [file, "twin"] if file == self._plan.twin else [file]
        began_s = self._loop.time()
        told = [(name, began_s, float("inf")) for name in concerned]
        self._oracle.told += told
        try:
            async with self._session.get("/models", params={"reload": "1"}) as reply:
                self._oracle.must(reply.status == 200, f"a reload says {reply.status}")
        except aiohttp.ClientError:
            self._oracle.must(self._oracle.is_ending, "reload: no reply")
        for each in told:
            self._oracle.told.remove(each)
            self._oracle.told.append((each[0], began_s, self._loop.time()))

    async def _listen(self, model: str) -> None:
        """Hear what happens to models, for a while."""
        said = bytearray()
        try:
            async with asyncio.timeout(self._chance.choice((0.5, 5.0, 30.0))):
                async with self._session.get("/models/sse") as reply:
                    async for chunk in reply.content.iter_any():
                        said += chunk
        except TimeoutError:
            pass
        except aiohttp.ClientError:
            self._oracle.must(self._oracle.is_ending, "/models/sse ended")
        for event in bytes(said).split(b"\n\n")[:-1]:
            if event.startswith(b"data: "):
                told = json.loads(event[6:])
                names = (*self._plan.names, "*")
                self._oracle.must(told["model"] in names and told["event"], f"told {told}")

    async def states(self) -> dict[str, str]:
        """The status of every model, by its name."""
        async with self._session.get("/models") as reply:
            return {each["id"]: each["status"]["value"] for each in (await reply.json())["data"]}

    async def metrics(self) -> str:
        """What the router counts."""
        async with self._session.get("/metrics") as reply:
            return await reply.text()

    # ---- what happens to processes ---------------------------------------------------------------

    def _victim(self) -> SimulatedModel | None:
        alive = [each for each in self._oracle.children.values() if each.process.returncode is None]
        return self._chance.choice(alive) if alive else None

    async def _kill(self, model: str) -> None:
        if (child := self._victim()) is not None:
            self._oracle.note(f"process {child.number} of {child.name} is killed")
            for name in [child.name] if child.name else self._plan.names:
                for_s = LIFE_S if child.name else HEARD_S
                self._oracle.excuse(name, "its process was killed", for_s)
            child.process.kill()

    async def _suspend(self, model: str) -> None:
        child = self._victim()
        if child is None or not child.has_room:
            return
        self._oracle.note(f"process {child.number} of {child.name} is stopped")
        self._oracle.excuse(child.name, "its process was stopped")
        excuse = self._oracle.excuses[child.name][-1]
        child.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._chance.choice((0.5, 3.0, 20.0, 60.0)))
        if child.process.returncode is None:
            self._oracle.note(f"process {child.number} of {child.name} continues")
            child.process.send_signal(signal.SIGCONT)
        excuse.ended_s = min(excuse.ended_s, self._loop.time() + HEARD_S)


def _parsed(said: bytes) -> tuple[int, bytes]:
    """Status and body of a reply; 0 if it is not whole."""
    head, _, rest = said.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1]) if rest else 0
    if b"transfer-encoding: chunked" not in head.lower():
        return status, rest
    body = bytearray()
    while True:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16) if size else -1
        if n < 0 or len(rest) < n + 2:
            return 0, bytes(body)
        if n == 0:
            return status, bytes(body)
        body += rest[:n]
        rest = rest[n + 2 :]
