"""llama.cpp's own request parsing, chat templates, samplers and response shapes.

One `Model` for each loaded model. For each HTTP request:

    request = Request(model, "chat", body)        in a worker thread
    replies = [Reply(request, k) for k in range(request.n_choices)]
    writer = Writer(request)
    reply.accept_prompt(ids)                      on the inference thread from here
    reply.started(n_cached, n_processed, prompt_ms)
    chunks = reply.steps(context, index, draft, n_room)   after each decode, until chunks[-1].stop
    writer.partial(chunk)                         bytes for the client, on any other thread
    writer.final(reply, ...); writer.end()

No call holds the GIL for longer than it takes to copy its arguments. Failures raise `WireError`
with llama-server's status and message; so does a failed assertion in llama.cpp.
"""

from towerd.errors import WireError
from towerd.llama_library import lib as _lib  # first: the extension uses the libllama that it loads
from towerd.wire._wire import (
    Chunk,
    EmbeddingRequest,
    Encoded,
    Head,
    Interruption,
    LoadFlags,
    Medium,
    Model,
    Projector,
    Received,
    Reply,
    Request,
    RerankRequest,
    Speculation,
    Writer,
    check_medium,
    device_bytes,
    is_file_name,
    mended_json,
    number_of,
    server_flags,
    token_bytes_max,
)
from towerd.wire.settings import Endpoint, ProjectorOptions, Settings, recommended
from towerd.wire.threads import WireThreads

__all__ = [
    "Chunk",
    "EmbeddingRequest",
    "Encoded",
    "Endpoint",
    "Head",
    "Interruption",
    "LoadFlags",
    "Medium",
    "Model",
    "Projector",
    "ProjectorOptions",
    "Received",
    "Reply",
    "Request",
    "RerankRequest",
    "Settings",
    "Speculation",
    "WireError",
    "WireThreads",
    "Writer",
    "check_medium",
    "device_bytes",
    "is_file_name",
    "mended_json",
    "number_of",
    "recommended",
    "server_flags",
    "token_bytes_max",
]
del _lib
