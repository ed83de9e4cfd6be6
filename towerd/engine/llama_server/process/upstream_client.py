"""UpstreamClient: the HTTP calls that towerd itself makes to one llama-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from aiohttp import ClientResponse

from towerd.engine.base import encode
from towerd.engine.llama_server.process.client import (
    Client,
    Lost,
    NotHttp,
    Unreachable,
    read_all,
)
from towerd.errors import (
    ContextExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    NotSupported,
    TowerdError,
    Unauthorized,
    Unavailable,
)
from towerd.tokens import Ids

_BIG_BYTES = 256 * 1024
"""Documents over this are decoded off the loop."""
_BY_STATUS: dict[int, type[TowerdError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    501: NotSupported,
    503: Unavailable,
}


class UpstreamGone(Unavailable):
    """llama-server does not answer: it died, restarts, or is not there."""


class UpstreamError(TowerdError):
    """llama-server answered with 500, or another status that has no error of its own."""


@dataclass(frozen=True, slots=True)
class SlotAction:
    """What a save or restore did."""

    n_tokens: int
    n_bytes: int
    ms: float


class UpstreamClient(Client):
    """A llama-server at `url`; `url` and `key` may change while it is restarted. Every call but `send`
    raises UpstreamGone, or the TowerdError of the status it got."""

    def __init__(self, url: str, key: str | None = None) -> None:
        super().__init__(url)
        self.key = key

    def auth(self) -> dict[str, str]:
        """The authorization header, if there is a key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    async def get(self, path: str) -> Any:
        """JSON of a GET."""
        return await _json(path, await self._ask("GET", path))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON of a POST; arrays of ids may be numpy arrays."""
        return await _json(path, await self._ask("POST", path, encode(body)))

    async def answer(self) -> None:
        """Return when it answers for its health, whatever it says: a server behind another one may
        have no such path. Raises as `send`."""
        (await self.send("GET", "/health", self.auth())).close()

    async def is_healthy(self) -> bool:
        """Whether it answers and its model is loaded."""
        try:
            await self.get("/health")
        except TowerdError:
            return False
        return True

    async def save(self, slot: int, name: str) -> SlotAction:
        """Write the slot's state to `name` in its slot directory; waits while the slot runs."""
        reply = await self.post(f"/slots/{slot}?action=save", {"filename": name})
        return SlotAction(reply["n_saved"], reply["n_written"], reply["timings"]["save_ms"])

    async def restore(self, slot: int, name: str) -> SlotAction:
        """Replace the slot's state by the file's; on an error the slot is empty."""
        reply = await self.post(f"/slots/{slot}?action=restore", {"filename": name})
        return SlotAction(reply["n_restored"], reply["n_read"], reply["timings"]["restore_ms"])

    async def erase(self, slot: int) -> None:
        """Empty the slot."""
        await self.post(f"/slots/{slot}?action=erase", {})

    async def slots(self) -> list[dict[str, Any]]:
        """GET /slots."""
        reply = await self.get("/slots")
        return list(reply)

    async def metrics(self) -> bytes:
        """GET /metrics; empty if it has none."""
        try:
            return await self._ask("GET", "/metrics")
        except UpstreamGone:
            raise
        except TowerdError:
            return b""

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Ids:
        """Text to ids by the upstream's own tokenizer."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        reply = await self.post("/tokenize", body)
        return np.asarray(reply["tokens"], np.int32)

    async def evaluate(
        self, ids: Ids, slot: int, lora: Sequence[Mapping[str, Any]] = (), *, n_predict: int = 0
    ) -> int:
        """Bring the slot to hold exactly `ids` under these LoRA adapters, and generate `n_predict` tokens;
        returns how many of `ids` came from the cache."""
        body: dict[str, Any] = {"prompt": ids, "n_predict": n_predict, "id_slot": slot}
        body |= {"cache_prompt": True, "n_cache_reuse": 0} | ({"lora": lora} if lora else {})
        reply = await self.post("/completion", body)
        return int(reply["timings"]["cache_n"])

    async def adapt(self, slot: int, token: int, lora: Sequence[Mapping[str, Any]]) -> None:
        """Have the slot apply these LoRA adapters, by evaluating a token under them."""
        body = {"prompt": [token], "n_predict": 0, "id_slot": slot, "lora": lora}
        await self.post("/completion", body)

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[ClientResponse]:
        """A reply that is read as it comes."""
        with self._translated():
            reply = await self._send("POST", path, body)
            try:
                if reply.status != 200:
                    raise _error(reply.status, await read_all(reply))
                yield reply
            finally:
                reply.close()

    async def _ask(self, method: str, path: str, data: bytes | bytearray | None = None) -> bytes:
        """The body of a reply."""
        with self._translated():
            reply = await self._send(method, path, data)
            try:
                body = await read_all(reply)
            finally:
                reply.close()
        if reply.status != 200:
            raise _error(reply.status, body)
        return body

    async def _send(self, method: str, path: str, data: bytes | bytearray | None) -> ClientResponse:
        headers = {**self.auth(), "Content-Type": "application/json"}
        return await self.send(method, path, headers, data)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (Lost, NotHttp, Unreachable) as error:
            raise UpstreamGone(f"llama-server at {self.url} does not answer: {error}") from error


async def _json(path: str, data: bytes) -> Any:
    try:
        if len(data) > _BIG_BYTES:
            return await asyncio.to_thread(msgspec.json.decode, data)
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TowerdError(f"{path} of the upstream did not answer JSON.") from error


def _error(status: int, body: bytes) -> TowerdError:
    """The upstream's error as ours, with its own words."""
    message = f"llama-server answered {status}"
    extra: dict[str, Any] = {}
    try:
        error = msgspec.json.decode(body)["error"]
        message = str(error["message"])
        if error.get("type") == ContextExceeded.kind:
            extra = {key: error[key] for key in ("n_prompt_tokens", "n_ctx") if key in error}
            return ContextExceeded(message, **extra)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    made = _BY_STATUS.get(status, UpstreamError)(message)
    made.status = status
    return made
