"""Answering requests with towerd.wire and a llama.cpp context, as llama-server does; and asking
llama-server itself."""

from __future__ import annotations

import ctypes
import http.client
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np

from towerd.cli.bench.harness.servers import ServerProcess, llama_server
from towerd.model.llama_model import init_backend
from towerd.models.bundled import bundled_model
from towerd.wire import Chunk, Model, Reply, Request, Settings, WireError, Writer

N_CTX = 2048
"""More than the bundled model was made for: prompts of some templates are long in its few tokens."""
NAME = "story"
NO_DRAFT = np.zeros(0, np.int32)
PATHS = {
    "completion": "/completion",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "infill": "/infill",
}
"""Where llama-server serves each endpoint."""
TEMPLATES = Path(sys.prefix) / "src" / "llama.cpp" / "models" / "templates"
_IDS = re.compile(r"\b(chatcmpl-|resp_|rs_|msg_|fc_|call_)?[0-9A-Za-z]{32}\b")


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    body: bytes


class Talker:
    """A loaded model in a context of its own."""

    def __init__(self, path: Path | None = None) -> None:
        """path: the bundled one unless given."""
        init_backend()
        self.path = path or bundled_model()
        self.ptr: Any = lib.llama_model_load_from_file(
            str(self.path).encode(), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx = N_CTX
        params.n_threads = params.n_threads_batch = 1
        self._ctx: Any = lib.llama_init_from_model(self.ptr, params)
        self.address = address(self.ptr)
        self.context = address(self._ctx)
        self.n_vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.ptr)))

    def close(self) -> None:
        lib.llama_free(self._ctx)
        lib.llama_model_free(self.ptr)

    def model(self, **settings: Any) -> Model:
        values: dict[str, Any] = {"name": NAME, "n_ctx": N_CTX, "n_parallel": 1} | settings
        return Model(self.address, Settings(**values).encode())

    def clear(self) -> None:
        """Forget what was evaluated."""
        lib.llama_memory_clear(lib.llama_get_memory(self._ctx), True)

    def evaluate(self, ids: Any) -> None:
        """Append tokens; the last one's logits are at index -1."""
        array = np.ascontiguousarray(ids, np.int32)
        pointer = array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        assert lib.llama_decode(self._ctx, lib.llama_batch_get_one(pointer, len(array))) == 0

    def evaluate_all(self, ids: Any, start: int) -> None:
        """Append tokens behind the first `start`; the first one's logits are at index 0, and so
        on."""
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = int(token), start + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert lib.llama_decode(self._ctx, batch) == 0
        lib.llama_batch_free(batch)

    def cut(self, n: int) -> None:
        """Keep the first `n` tokens."""
        assert lib.llama_memory_seq_rm(lib.llama_get_memory(self._ctx), 0, n, -1)

    def chunks(self, request: Request, reply: Reply) -> Iterator[Chunk]:
        """Generate one choice to its end."""
        prompt = request.prompts[reply_index(request, reply)]
        self.clear()
        self.evaluate(prompt)
        reply.accept_prompt(prompt)
        reply.started(0, len(prompt), 1.0)
        n = len(prompt)
        while True:
            n += 1
            (chunk,) = reply.steps(self.context, -1, NO_DRAFT, 0 if n >= N_CTX else 1)
            yield chunk
            if chunk.stop:
                return
            self.evaluate([chunk.token])


def reply_index(request: Request, reply: Reply) -> int:
    """The prompt that a reply answers."""
    return reply.choice // request.n_per_prompt


def address(pointer: Any) -> int:
    """Of what a ctypes pointer points at."""
    value = ctypes.cast(pointer, ctypes.c_void_p).value
    assert value
    return value


def answer(talker: Talker, model: Model, endpoint: Any, body: bytes) -> Answer:
    """What a server made of towerd.wire answers."""
    try:
        return Answer(200, _answer(talker, Request(model, endpoint, body)))
    except WireError as error:
        return Answer(error.status, json.dumps(error.body()).encode())


def _answer(talker: Talker, request: Request) -> bytes:
    replies = [Reply(request, choice) for choice in range(request.n_choices)]
    writer = Writer(request)
    out = b""
    for reply in replies:
        n_prompt = len(request.prompts[reply_index(request, reply)])
        if request.stream and request.return_progress:
            out += writer.progress(reply.choice, n_prompt, 0, 0, 0)
            out += writer.progress(reply.choice, n_prompt, 0, n_prompt, 0)
        n = n_prompt - 1
        for chunk in talker.chunks(request, reply) if n_prompt else ():
            out += writer.partial(chunk)
            n += 1
        out += writer.final(reply, 0, n, b"")
    return out + (writer.end() if request.stream else b"")


class LlamaServer:
    """A running llama-server."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    def post(self, path: str, body: bytes) -> Answer:
        return self._ask("POST", path, body)

    def get(self, path: str) -> Answer:
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: bytes | None) -> Answer:
        link = http.client.HTTPConnection("127.0.0.1", self._process.port, timeout=60)
        try:
            link.request(method, path, body, {"Content-Type": "application/json"})
            reply = link.getresponse()
            return Answer(reply.status, reply.read())
        finally:
            link.close()


@contextmanager
def running_server(*flags: str, path: Path | None = None) -> Iterator[LlamaServer]:
    """llama-server on a model, the bundled one unless given, with one slot and little else."""
    fixed = [
        "-c", str(N_CTX), "-t", "1", "-a", NAME, "--no-warmup", "--no-cache-prompt", "--cache-ram", "0",
        "--no-webui", "--override-kv", f"llama.context_length=int:{N_CTX}",
    ]  # fmt: skip
    slots = () if "-np" in flags else ("-np", "1")
    with llama_server(path or bundled_model(), *fixed, *slots, *flags) as process:
        yield LlamaServer(process)


def events(stream: bytes) -> list[tuple[str, Any]]:
    """(event name, data) of a stream's events; data that is no JSON as text."""
    out: list[tuple[str, Any]] = []
    for block in stream.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            data = fields["data"]
            out.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return out


def plain(value: Any) -> Any:
    """JSON without what differs from run to run: ids, stamps and durations."""
    if isinstance(value, dict):
        return {key: plain(_steady(key, item)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return _IDS.sub(r"\1ID", value) if isinstance(value, str) else value


def _steady(key: str, value: Any) -> Any:
    changes = key in ("created", "created_at", "completed_at")
    changes = changes or key.endswith(("_ms", "_per_second"))
    return 0 if changes else value
