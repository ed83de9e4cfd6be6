"""The same requests to towerd and to the real llama-server: the same statuses, keys, types, and
where nothing is random the same values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import requests
from llama_wire import TEMPLATES, events, plain
from response_fields import as_llama_server
from scripted_model import make_scripted_model

from towerd.cli.bench.harness.servers import ServerProcess, llama_server, towerd_server
from towerd.engine.llama_server.process.binary import find_binary
from towerd.errors import TowerdError

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = Path(str(files("towerd") / "data" / "stories260K.gguf"))
CHAT = [{"role": "user", "content": "Once upon a time"}]
GREEDY = {"temperature": 0, "max_tokens": 4}
INPUT = {"input": "Once upon a time", "temperature": 0, "max_output_tokens": 4}
DIALECTS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "Once upon", **GREEDY}),
    ("/v1/completions", {"prompt": "Once upon", **GREEDY}),
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY}),
    ("/v1/responses", INPUT),
    ("/v1/messages", {"messages": CHAT, **GREEDY}),
]
TOOL_TEMPLATE = TEMPLATES / "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja"
TOOL_CALL = (
    "<tool_call>",
    '\n{"name": ',
    '"paint"',
    ', "arguments": ',
    '{"color": ',
    '"blue"',
    "}}",
    "\n</tool_call>",
)
PAINT = {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]}
USER = {"role": "user", "content": "Paint my house."}
TOOLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"tool_choice": "required"},
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "paint", "parameters": PAINT}}],
        },
    ),
    (
        "/v1/responses",
        {"tool_choice": "required"},
        {
            "input": "Paint my house.",
            "tools": [{"type": "function", "name": "paint", "parameters": PAINT}],
        },
    ),
    (
        "/v1/messages",
        {"tool_choice": {"type": "any"}},
        {"messages": [USER], "tools": [{"name": "paint", "input_schema": PAINT}]},
    ),
]


@pytest.fixture(scope="module")
def theirs() -> Iterator[str]:
    """llama-server's URL."""
    try:
        find_binary()
    except TowerdError as error:
        pytest.skip(error.message)
    flags = ("-np", "2", "-c", "1024", "-t", "1", "--metrics", "--jinja")
    with llama_server(MODEL, *flags) as server:
        yield server.url


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """towerd's URL."""
    store = tmp_path_factory.mktemp("side") / "store"
    server: ServerProcess = towerd_server(MODEL, store, "-np", "2", "-c", "512", "-t", "1")
    with server:
        yield server.url


def shape(value: Any) -> Any:
    """A JSON value with its leaves replaced by their types; lists by their first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def assert_same_shape(mine: Any, theirs: Any, at: str = "") -> None:
    """Keys and types agree; an empty list agrees with any."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        assert set(mine) - {"towerd"} == set(theirs), at
        for key in theirs:
            assert_same_shape(mine[key], theirs[key], f"{at}.{key}")
    elif isinstance(theirs, list) and isinstance(mine, list):
        for a, b in zip(mine[:1], theirs[:1], strict=False):
            assert_same_shape(a, b, f"{at}[]")
    else:
        assert mine == theirs, at


def both(ours: str, theirs: str, path: str, body: Any) -> tuple[Any, Any]:
    """The two replies, whose statuses and content types must agree."""
    replies = []
    for base in (theirs, ours):
        if body is None:
            replies.append(requests.get(base + path, timeout=60))
        else:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            replies.append(requests.post(base + path, data=data, timeout=60))
    expected, got = replies
    assert got.status_code == expected.status_code, (got.text, expected.text)
    assert got.headers["Content-Type"] == expected.headers["Content-Type"]
    return got, expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/health", None),
        ("/props", None),
        ("/v1/models", None),
        ("/slots", None),
        ("/completion", {"prompt": "Once upon", **GREEDY, "n_probs": 2, "return_tokens": True}),
        ("/completion", {"prompt": "Once", **GREEDY, "n_probs": 2, "post_sampling_probs": True}),
        ("/completion", {"prompt": ["a", [1, 300], ["b", 301]], **GREEDY}),
        (
            "/completion",
            {"prompt": "a", **GREEDY, "response_fields": ["content", "timings/cache_n"]},
        ),
        ("/v1/completions", {"prompt": "Once upon", **GREEDY, "logprobs": 2, "n": 2}),
        ("/chat/completions", {"messages": CHAT, **GREEDY, "logprobs": True, "top_logprobs": 1}),
        ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "n": 2}),
        ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "verbose": True}),
        *DIALECTS,
        ("/tokenize", {"content": "hello", "with_pieces": True, "add_special": True}),
        ("/apply-template", {"messages": CHAT}),
    ],
)
def test_same_shape(ours: str, theirs: str, path: str, body: Any) -> None:
    """Whole replies have the same keys and types."""
    got, expected = both(ours, theirs, path, body)
    assert_same_shape(shape(as_llama_server(got.json())), shape(expected.json()))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "Once upon a time"}),
        ("/tokenize", {"content": ["Once", 300, " upon"], "add_special": True}),
        ("/tokenize", {"content": "<s>x", "parse_special": False}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [1, 300, 301, 485]}),
        ("/detokenize", {}),
        ("/apply-template", {"messages": CHAT}),
        ("/apply-template", {"messages": [{"role": "system", "content": "Be kind."}, *CHAT]}),
        (
            "/apply-template",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}
                ]
            },
        ),
        ("/v1/chat/completions/input_tokens", {"messages": CHAT}),
        ("/v1/responses/input_tokens", {"input": "Once upon a time"}),
        ("/v1/messages/count_tokens", {"messages": CHAT, "system": "Be kind."}),
        ("/completion", {"prompt": 3}),
        ("/completion", {"prompt": []}),
        ("/completion", {"prompt": [99999]}),
        ("/completion", {"prompt": "a", "n_predict": -5}),
        ("/completion", {"prompt": "a", "n": 9}),
        ("/completion", {"prompt": "hello world " * 800}),
        ("/completion", {"prompt": [300] * 512}),
        ("/completion", {"prompt": ["a", [300] * 600]}),
        ("/v1/completions", {"prompt": [300] * 600, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 800}]}),
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"messages": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "bad"}}),
        ("/v1/responses", {}),
        ("/v1/responses", {"input": 3, "stream": True}),
        ("/v1/responses", {"input": "hello " * 800}),
        ("/v1/responses/input_tokens", {}),
        ("/v1/messages", {"messages": [{"role": "user"}]}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hello " * 800}], "stream": True},
        ),
        ("/v1/messages/count_tokens", {"messages": 3}),
        ("/completion", {}),
        ("/completion", {"prompt": "a", "temperature": "x"}),
        ("/completion", {"prompt": "a", "stream": "x"}),
        ("/completion", {"prompt": "a", "json_schema": {"type": "nope"}}),
        ("/completion", {"prompt": {"x": 1}}),
        ("/completion", []),
        ("/nope", {}),
    ],
)
def test_same_values(ours: str, theirs: str, path: str, body: Any) -> None:
    """Where nothing is random or timed the replies are equal; errors have the shape of the API."""
    got, expected = both(ours, theirs, path, body)
    assert got.json() == in_shape(path, expected.json())


def in_shape(path: str, reply: Any) -> Any:
    """llama-server's reply, but for errors of other APIs, in the shape that their clients read."""
    if not isinstance(reply, dict) or "error" not in reply or not path.startswith("/v1/"):
        return reply
    error = reply["error"]
    is_too_long = error["type"] == "exceed_context_size_error"
    if path.startswith("/v1/messages"):
        words = error["message"]
        if is_too_long:
            words = (
                f"prompt is too long: {error['n_prompt_tokens']} tokens > {error['n_ctx']} maximum"
            )
        return {"type": "error", "error": {"type": "invalid_request_error", "message": words}}
    if not is_too_long:
        return reply
    words = (
        f"This model's maximum context length is {error['n_ctx']} tokens. However, you requested "
        f"{error['n_prompt_tokens']} tokens: {error['message']}"
    )
    return {"error": error | {"code": "context_length_exceeded", "message": words}}


@pytest.mark.parametrize("body", [{}, {"input_prefix": "a", "input_suffix": "b"}])
def test_what_a_model_will_never_do_is_not_retried(ours: str, theirs: str, body: Any) -> None:
    """Its words, and 400 instead of 501."""
    got, expected = (
        requests.post(base + "/infill", json=body, timeout=60) for base in (ours, theirs)
    )
    assert (got.status_code, expected.status_code) == (400, 501)
    assert got.json()["error"] == expected.json()["error"] | {"code": 400}


@pytest.mark.parametrize("path", ["/completion", "/v1/messages", "/v1/messages/count_tokens"])
def test_mistakes_are_the_clients(ours: str, theirs: str, path: str) -> None:
    """Where llama-server takes a client's mistake for its own (500), its words and 400."""
    data = b"{" if path == "/completion" else b"{}"
    got, expected = (requests.post(base + path, data=data, timeout=60) for base in (ours, theirs))
    assert (got.status_code, expected.status_code) == (400, 500)
    changed = {"code": 400, "type": "invalid_request_error"}
    assert got.json() == in_shape(path, {"error": expected.json()["error"] | changed})


def test_same_text(ours: str, theirs: str) -> None:
    """Greedy text, tokens, counts and the prompt's own text are equal. Of a reply that a stop string
    cut off towerd keeps the rows of what was sent, llama-server the stop string's as well."""
    keys = (
        "content",
        "tokens_predicted",
        "tokens_evaluated",
        "prompt",
        "stop_type",
        "stopping_word",
        "has_new_line",
        "truncated",
        "index",
        "tokens",
    )
    for extra in ({"n_predict": 20}, {"n_predict": 60, "stop": ["girl"]}, {"n_predict": 1}):
        body = {"prompt": "Once upon a time", "temperature": 0, "return_tokens": True, **extra}
        got, expected = both(ours, theirs, "/completion", body)
        compared = keys if "stop" in extra else (*keys, "tokens_cached")
        assert {k: got.json()[k] for k in compared} == {k: expected.json()[k] for k in compared}


def test_same_end_of_the_context(ours: str, theirs: str) -> None:
    """A prompt that fits, and a reply that runs into the end of the context."""
    body = {"prompt": [300] * 500, "n_predict": 100, "temperature": 0, "ignore_eos": True}
    got, expected = both(ours, theirs, "/completion", body)
    keys = ("content", "tokens_predicted", "tokens_evaluated", "stop_type", "truncated")
    assert {k: got.json()[k] for k in keys} == {k: expected.json()[k] for k in keys}
    assert got.json()["truncated"]
    got, expected = both(ours, theirs, "/v1/completions", body)
    mine, other = got.json()["choices"][0], expected.json()["choices"][0]
    assert mine["finish_reason"] == other["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *DIALECTS,
        ("/completion", {"prompt": "Once upon", **GREEDY, "n_probs": 1, "timings_per_token": True}),
        ("/v1/completions", {"prompt": "Once upon", **GREEDY, "logprobs": 1}),
        (
            "/v1/chat/completions",
            {"messages": CHAT, **GREEDY, "stream_options": {"include_usage": True}},
        ),
        ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "logprobs": True, "top_logprobs": 1}),
    ],
)
def test_same_stream(ours: str, theirs: str, path: str, body: Any) -> None:
    """Streams have the same events one by one."""
    got, expected = both(ours, theirs, path, {**body, "stream": True})
    mine, other = events(got.content), events(expected.content)
    assert [name for name, _ in mine] == [name for name, _ in other]
    for (_, a), (_, b) in zip(mine, other, strict=True):
        assert_same_shape(shape(as_llama_server(a)), shape(b))
    assert [_text(data) for _, data in mine] == [_text(data) for _, data in other]
    assert "".join(_text(data) for _, data in mine)


def _text(data: Any) -> str:
    """All text of an event."""
    if isinstance(data, dict):
        return "".join(
            value
            if key in ("content", "text", "delta") and isinstance(value, str)
            else _text(value)
            for key, value in data.items()
            if key != "towerd"
        )
    return "".join(map(_text, data)) if isinstance(data, list) else ""


@pytest.fixture(scope="module")
def painters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Both servers on a model that calls a tool."""
    folder = tmp_path_factory.mktemp("painters")
    path = folder / "painter.gguf"
    make_scripted_model(path, TOOL_CALL)
    flags = (
        "-np",
        "1",
        "-c",
        "2048",
        "-t",
        "1",
        "-a",
        "painter",
        "--chat-template-file",
        str(TOOL_TEMPLATE),
    )
    with (
        llama_server(path, *flags, "--jinja") as other,
        towerd_server(path, folder / "store", *flags) as mine,
    ):
        yield mine.url, other.url


@pytest.mark.parametrize(("path", "choice", "body"), TOOLS, ids=[path for path, *_ in TOOLS])
@pytest.mark.parametrize("stream", [False, True])
def test_same_tool_call(
    painters: tuple[str, str], path: str, choice: dict[str, Any], body: Any, stream: bool
) -> None:
    """Tools that may and that must be called, in each dialect: the same replies, event by event, and
    the same prompt behind them."""
    for asked in (body, body | choice):
        asked |= {"stream": stream, "temperature": 0, "max_tokens": 50}
        got, expected = both(*painters, path, asked)
        if stream:
            mine = as_llama_server(events(got.content))
            assert _steady(mine) == _steady(events(expected.content))
        else:
            assert _steady(as_llama_server(got.json())) == _steady(expected.json())
        assert "paint" in got.text
        assert "blue" in got.text


def _steady(value: Any) -> Any:
    """Without ids, times, and what was reused."""
    if isinstance(value, dict):
        left_out = ("usage", "timings", "towerd")
        return plain({k: _steady(v) for k, v in value.items() if k not in left_out})
    if isinstance(value, list | tuple):
        return [_steady(item) for item in value]
    return plain(value)


def test_same_progress(ours: str, theirs: str) -> None:
    """return_progress reports the same figures."""
    body = {"prompt": "A new story about a fox", **GREEDY, "stream": True, "return_progress": True}
    for path in ("/completion", "/v1/completions"):
        got, expected = both(ours, theirs, path, body)
        mine, other = (json.loads(r.text.split("\n\n")[0][6:]) for r in (got, expected))
        assert_same_shape(shape(mine), shape(other))


def test_same_metric_names(ours: str, theirs: str) -> None:
    """Every llama-server metric that concerns this engine exists here."""
    got, expected = both(ours, theirs, "/metrics", None)
    names = [
        {line.split()[2] for line in reply.text.splitlines() if line.startswith("# TYPE llamacpp:")}
        for reply in (got, expected)
    ]
    missing = names[1] - names[0]
    assert all("spec_decode" in name for name in missing), missing
    assert "Process-Start-Time-Unix" in got.headers
