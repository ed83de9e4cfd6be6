"""Bad requests: llama-server's words, and its status but where it answers 500 for what a client
sent. What only towerd refuses is in test_wire_bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llama_wire import PATHS, TEMPLATES, LlamaServer, Talker, answer, running_server
from scripted_model import make_scripted_model

from towerd.wire import EmbeddingRequest, Model, RerankRequest, WireError

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]
USER = [{"role": "user", "content": "x"}]
EMBEDDING = np.array([[0.5, -1.0]], np.float32)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
NO_JSON = [
    b"",
    b"{bad",
    b"[1]",
    b"3",
    b'"x"',
    b"null",
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "n_predict": 1e999}',
]
PROMPTS: list[Any] = [
    3,
    None,
    [],
    [300_000],
    [-1],
    [-7, 1],
    [[]],
    ["a", 1.5],
    {"x": 1},
    [True],
    [2**70],
    [1, None],
    {},
    {"prompt_string": "a", "multimodal_data": ["aGk="]},
    {"prompt_string": 3},
]
FIELDS: list[tuple[str, Any]] = [
    ("temperature", "hot"), ("temperature", [1]), ("top_k", "40"), ("top_p", {}), ("seed", "x"),
    ("n_predict", -2), ("n_predict", "x"), ("max_tokens", -5), ("n_keep", -2),
    ("repeat_last_n", -1), ("repeat_penalty", 0), ("mirostat", "2"), ("stream", 1), ("stream", "yes"),
    ("cache_prompt", 0), ("ignore_eos", "x"), ("stop", [1]), ("samplers", [3]), ("grammar", "root ::= x"),
    ("grammar", 'root ::= "a" root2'), ("grammar", "x"), ("json_schema", 3), ("json_schema", {"type": "no"}),
    ("json_schema", {"$ref": "#/x"}), ("json_schema", {"$ref": "https://x/y"}), ("json_schema", {"minItems": -1, "type": "array"}),
    ("json_schema", {"enum": []}), ("dry_sequence_breakers", []), ("dry_sequence_breakers", "x"),
    ("n", 0), ("n", 99), ("lora", 3), ("lora", [{"id": 0}]), ("sse_ping_interval", -2), ("min_keep", -1), ("n_discard", -1),
    ("reasoning_format", "x"), ("grammar_lazy", True), ("grammar_triggers", [{}]), ("preserved_tokens", [1]),
    ("adaptive_decay", 2), ("reasoning_budget_tokens", -2), ("response_fields", "x"),
]  # fmt: skip
CHATS: list[Any] = [
    {},
    {"messages": None},
    {"messages": 3},
    {"messages": [3]},
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": 3, "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "what"}]}]},
    {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [{"type": "x", "id": "c"}]}
        ]
    },
    {"messages": IMAGE},
    {"messages": USER, "top_logprobs": 2},
    {"messages": USER, "response_format": {"type": "bad"}},
    {
        "messages": USER,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}},
    },
    {"messages": USER, "json_schema": {"type": "object"}, "grammar": 'root ::= "a"'},
    {"messages": USER, "tools": [{"type": "x"}]},
    {"messages": USER, "tools": {"a": 1}},
    {
        "messages": USER,
        "tools": [{"type": "function", "function": FUNCTION}],
        "grammar": 'root ::= "a"',
    },
    {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "f"},
    {"messages": USER, "tool_choice": {"type": "function"}},
    {"messages": USER, "chat_template_kwargs": 3},
    {"messages": USER, "chat_template_kwargs": {"enable_thinking": "x"}},
    {"messages": USER, "reasoning_format": "x"},
    {"messages": USER, "continue_final_message": True},
    {"messages": USER, "n": 5},
    {"messages": USER, "temperature": "x"},
    {
        "messages": USER,
        "logprobs": True,
        "stream": True,
        "tools": [{"type": "function", "function": FUNCTION}],
    },
]
OTHERS: list[tuple[str, Any]] = [
    ("responses", {}), ("responses", {"input": 3}), ("responses", {"input": [{}]}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
    ("responses", {"input": "x", "previous_response_id": "y"}), ("responses", {"input": "x", "tools": 3}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]}),
    ("messages", {}), ("messages", {"messages": 3}), ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": PIXEL[22:]}}]}]}),
    ("messages", {"messages": USER, "tools": 3}), ("messages", {"messages": USER, "max_tokens": -3}),
]  # fmt: skip
BODIES: list[tuple[str, bytes]] = [
    *(
        (endpoint, body)
        for body in NO_JSON
        for endpoint in ("completion", "chat", "responses", "messages")
    ),
    *(("completion", json.dumps({"prompt": prompt}).encode()) for prompt in PROMPTS),
    ("completions", b"{}"),
    *(("completion", json.dumps({"prompt": "a", name: value}).encode()) for name, value in FIELDS),
    *(("chat", json.dumps(body).encode()) for body in CHATS),
    *((endpoint, json.dumps(body).encode()) for endpoint, body in OTHERS),
    ("infill", b'{"input_prefix": "a"}'),
]


@pytest.mark.parametrize(("endpoint", "body"), BODIES, ids=lambda value: value[:60])
def test_same_refusal(
    server: LlamaServer, story: Talker, model: Model, endpoint: Any, body: bytes
) -> None:
    """A request that llama-server refuses, towerd.wire refuses in its words; what it answers, is
    answered."""
    theirs, ours = server.post(PATHS[endpoint], body), answer(story, model, endpoint, body)
    if theirs.status == 200:
        assert ours.status == 200
        return
    wanted, found = json.loads(theirs.body)["error"], json.loads(ours.body)["error"]
    if theirs.status == 500:
        wanted |= {"code": 400, "type": "invalid_request_error"}
    if theirs.status == 501:
        wanted |= {"code": 400}
    assert found == wanted
    assert ours.status == wanted["code"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_prefix": "a"}',
        b'{"input_suffix": "a"}',
        b'{"input_prefix": 3, "input_suffix": "a"}',
        b'{"input_prefix": "a", "input_suffix": "b", "input_extra": 3}',
        b'{"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}',
        b'{"input_prefix": "a", "input_suffix": "b", "prompt": 3, "n_predict": 2}',
        b'{"input_prefix": "a", "input_suffix": "b", "n_predict": 2}',
        b'{"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c", "filename": "d"}], "n_predict": 2, "stream": true}',
    ],
)
def test_infill(coder: tuple[LlamaServer, Talker, Model], body: bytes) -> None:
    """A model that can fill in, asked rightly and wrongly."""
    server, talker, model = coder
    test_same_refusal(server, talker, model, "infill", body)
    theirs, ours = server.post("/infill", body), answer(talker, model, "infill", body)
    if theirs.status == 200:
        assert text_of(theirs.body) == text_of(ours.body)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaServer, Talker, Model]]:
    path = tmp_path_factory.mktemp("coder") / "model.gguf"
    make_scripted_model(path, ["x", "yz"], fill_in=True)
    talker = Talker(path)
    with running_server(path=path) as server:
        yield server, talker, talker.model(defaults={"cache_prompt": False})
    talker.close()


def test_template_that_raises(story: Talker) -> None:
    """The client gets the template's message."""
    path = TEMPLATES / "google-gemma-2-2b-it.jinja"
    model = story.model(chat_template=path.read_text())
    body = json.dumps({"messages": [*USER, *USER]}).encode()
    with running_server("--chat-template-file", str(path)) as server:
        theirs = server.post(PATHS["chat"], body)
    with pytest.raises(WireError, match="Conversation roles must alternate") as raised:
        model.apply_template(body)
    assert raised.value.status == 400
    assert raised.value.message == json.loads(theirs.body)["error"]["message"]


def test_template_that_does_not_parse(story: Talker) -> None:
    """Refused at the start, with the reason."""
    with pytest.raises(RuntimeError, match="Unexpected token"):
        story.model(chat_template="{% for x in %}")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"input": []}',
        b'{"input": ""}',
        b'{"input": "a", "encoding_format": "x"}',
        b'{"input": [[-1]]}',
        b'{"content": {"content": 3}}',
        b'{"input": "a", "embd_normalize": "x"}',
        b"[1",
    ],
)
def test_embeddings_refused(embedder: LlamaServer, story: Talker, body: bytes) -> None:
    theirs = embedder.post("/v1/embeddings", body)
    if theirs.status == 200:
        EmbeddingRequest(story.model(), True, body)
        return
    with pytest.raises(WireError) as raised:
        EmbeddingRequest(story.model(), True, body)
    assert raised.value.status == 400
    assert raised.value.message == json.loads(theirs.body)["error"]["message"]


def test_embeddings(embedder: LlamaServer, story: Talker) -> None:
    """The reply's form, for each form of the request; the numbers are the engine's."""
    for path, fields in [
        ("/v1/embeddings", {"input": ["a", "b"], "model": "mine"}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/embeddings", {"content": "a"}),
        ("/embeddings", {"input": ["a", [1, 403]]}),
    ]:
        body = json.dumps(fields).encode()
        request = EmbeddingRequest(story.model(), path.startswith("/v1"), body)
        theirs = json.loads(embedder.post(path, body).body)
        ours = json.loads(request.reply([EMBEDDING for _ in request.prompts]))
        assert shape(ours) == shape(theirs)


def test_rerank(story: Talker) -> None:
    """Documents in order of their scores, in either server's form."""
    request = RerankRequest(story.model(), b'{"query": "q", "documents": ["a", "b"], "top_n": 1}')
    assert len(request.prompts) == 2
    reply = json.loads(request.reply([0.25, 0.75]))
    assert reply["results"] == [{"index": 1, "relevance_score": 0.75}]
    request = RerankRequest(
        story.model(), b'{"query": "q", "texts": ["a", "b"], "return_text": true}'
    )
    assert json.loads(request.reply([0.25, 0.75]))[0] == {"index": 1, "score": 0.75, "text": "b"}
    for body in (b"{}", b'{"query": 3}', b'{"query": "q"}', b'{"query": "q", "documents": [3]}'):
        with pytest.raises(WireError):
            RerankRequest(story.model(), body)


@pytest.fixture(scope="module")
def embedder() -> Iterator[LlamaServer]:
    with running_server("--embeddings", "--pooling", "mean") as running:
        yield running


def shape(value: Any) -> Any:
    """JSON with numbers and encoded numbers left out."""
    if isinstance(value, dict):
        return {key: "..." if key == "embedding" else shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else value


def text_of(body: bytes) -> str:
    """What was filled in."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return "".join(json.loads(line)["content"] for line in lines)
