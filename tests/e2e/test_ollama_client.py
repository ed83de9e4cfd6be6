"""The ollama Python package, unmodified, against real daemons on either engine."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests
from daemon import Daemon
from gguf import GGUFReader
from hub_server import hub_server
from llama_wire import TEMPLATES
from ollama import AsyncClient, ChatResponse, Client, ResponseError
from scripted_model import make_scripted_model
from tool_callers import FAMILIES, TOOL
from waiting import until

from lab.models.vision import make_projector, picture
from towerd.models.bundled import bundled_model

MODEL = "stories260K.gguf"
HELLO = [{"role": "user", "content": "Tell me about Lily and her red ball."}]
GREEDY = {"temperature": 0, "num_predict": 12}
ENGINES = ("embedded", "llama-server")
FLAGS = ("-c", "1024", "-t", "1")
N_EMBD_TEXT = 64
"""Of the bundled model."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "blue"]},
    },
    "required": ["age", "colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """A daemon that sees pictures and embeds."""
    root = tmp_path_factory.mktemp("ollama")
    make_projector(root / "mmproj.gguf", N_EMBD_TEXT)
    flags = ("--engine", request.param, "--mmproj", str(root / "mmproj.gguf"), *FLAGS)
    with Daemon(root / "d", *flags) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.log


@pytest.fixture
def client(served: Daemon) -> Iterator[Client]:
    with Client(host=served.url) as client:
        yield client


def openai_text(daemon: Daemon, messages: Any, **fields: Any) -> str:
    """What the route of OpenAI's says, which others test."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    reply = daemon.post("/v1/chat/completions", body)
    return str(reply["choices"][0]["message"]["content"])


def test_chat_says_what_openai_says(client: Client, served: Daemon) -> None:
    """Whole and streamed: the text, why it ended, how long it took; the model has the name it was asked by."""
    wanted = openai_text(served, HELLO)
    whole = client.chat("story:latest", HELLO, options=GREEDY)
    assert whole.message.content == wanted
    parts = list(client.chat("story:latest", HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == wanted
    assert len(parts) > 5, "it came in pieces"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (whole, parts[-1]):
        assert (last.model, last.message.role) == ("story:latest", "assistant")
        assert (last.done, last.done_reason, last.eval_count) == (True, "length", 12)
        assert last.created_at
        n_prompt, durations = last.prompt_eval_count, durations_of(last)
        assert n_prompt == whole.prompt_eval_count
        assert n_prompt is not None
        assert n_prompt > 10, "what is reused counts"
        assert 0 < sum(durations[1:]) <= durations[0] < 60e9


def durations_of(reply: ChatResponse) -> list[int]:
    found = (
        reply.total_duration,
        reply.load_duration,
        reply.prompt_eval_duration,
        reply.eval_duration,
    )
    return [each or 0 for each in found]


def test_bytes_of_a_stream(served: Daemon) -> None:
    """A body without `stream` gets one; each line is an object, and nothing else is sent: no event, no comment."""
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "options": GREEDY}
    reply = requests.post(served.url + "/api/chat", json=body, timeout=60)
    assert reply.headers["Content-Type"] == "application/x-ndjson"
    assert reply.content.endswith(b"\n")
    objects = [json.loads(line) for line in reply.content.removesuffix(b"\n").split(b"\n")]
    assert [each["done"] for each in objects][-2:] == [False, True]
    assert all(each["message"]["role"] == "assistant" for each in objects)
    assert objects[-1]["towerd"]["session"]


def evaluated(daemon: Daemon) -> tuple[str, int]:
    """The session of the request that ended last, and how many tokens of its prompt were evaluated."""
    newest = daemon.get("/towerd/v1/requests?limit=1")["finished"][0]
    return newest["session"], newest["reuse"]["prefill"]


def test_a_second_turn_finds_the_first(client: Client, served: Daemon) -> None:
    """A chat is one session, streamed or not, also where it continues through another API."""
    messages: list[Any] = [{"role": "user", "content": "Tell me about a conversation with Tim."}]
    sessions = set()
    n_before = 0
    for turn in range(3):
        if turn % 2:
            reply = client.chat(MODEL, messages, options=GREEDY)
            text = reply.message.content
        else:
            parts = list(client.chat(MODEL, messages, options=GREEDY, stream=True))
            text, reply = "".join(part.message.content or "" for part in parts), parts[-1]
        session, n_new = evaluated(served)
        sessions.add(session)
        n_prompt = reply.prompt_eval_count or 0
        if turn:
            assert n_new <= n_prompt - n_before - 11, "the reply's tokens have their rows"
        n_before = n_prompt
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"And then, {turn}?"},
        ]
    openai_text(served, messages)
    session, n_new = evaluated(served)
    assert sessions == {session}
    assert n_new < n_before / 2
    turns = served.get(f"/towerd/v1/sessions/{session}")["turns"]
    assert [turn["finished"] for turn in turns] == [True] * 4


def test_generate(client: Client, served: Daemon) -> None:
    """A prompt is a user's message after a system's; a raw one is a completion."""
    system = {"role": "system", "content": "You tell stories."}
    wanted = openai_text(served, [system, *HELLO])
    asked: dict[str, Any] = {"prompt": HELLO[0]["content"], "options": GREEDY}
    assert client.generate(MODEL, system=system["content"], **asked).response == wanted
    parts = list(client.generate(MODEL, system=system["content"], **asked, stream=True))
    assert "".join(part.response or "" for part in parts) == wanted
    assert (parts[-1].done, parts[-1].done_reason) == (True, "length")
    raw = served.complete("Once upon a time", 12)["content"]
    options = GREEDY | {"seed": 3}
    said = client.generate(MODEL, "Once upon a time", raw=True, options=options)
    assert said.response == raw
    streamed = client.generate(MODEL, "Once upon a time", raw=True, options=options, stream=True)
    assert "".join(part.response or "" for part in streamed) == raw
    assert said.prompt_eval_count == len("Once upon a time".split()) + 1


def test_options(client: Client) -> None:
    """They reach the sampler: a seed gives one text, a stop string ends it; what sets up a model is passed over."""
    hot = {"temperature": 1.5, "num_predict": 24, "num_ctx": 4096, "num_gpu": 0}

    def say(**options: Any) -> str:
        return client.chat(MODEL, HELLO, options=hot | options).message.content or ""

    first = say(seed=7)
    assert first == say(seed=7)
    assert len({first, say(seed=8), say(seed=9)}) == 3
    far = {"repeat_penalty": 1.5, "seed": 7}
    assert say(**far, repeat_last_n=-1) == say(**far, repeat_last_n=1024)
    assert say(num_predict=2**32 + 3, stop=["."], seed=7).startswith(first[:20])
    stop = first[9:14]
    reply = client.chat(MODEL, HELLO, options=hot | {"seed": 7, "stop": ["none", stop]})
    assert reply.message.content == first[: first.index(stop)]
    assert reply.done_reason == "stop"


@pytest.mark.parametrize("route", ["chat", "generate", "raw"])
def test_format(client: Client, route: str) -> None:
    """A tiny model that knows no JSON answers with what the schema allows, or with some object."""
    options = {"seed": 2, "num_predict": 300}
    for format in (SCHEMA, "json"):
        if route == "chat":
            text = client.chat(MODEL, HELLO, format=format, options=options).message.content
        else:
            is_raw = route == "raw"
            asked = client.generate(MODEL, "A child.", raw=is_raw, format=format, options=options)
            text = asked.response
        if format == SCHEMA:
            jsonschema.validate(json.loads(text or ""), SCHEMA)
        else:
            assert (text or "").lstrip().startswith("{")


def test_logprobs(client: Client) -> None:
    """A greedy token leads its alternatives, in every part."""
    asked: dict[str, Any] = {"options": GREEDY, "logprobs": True, "top_logprobs": 3}
    whole = client.chat(MODEL, HELLO, **asked)
    tokens = list(whole.logprobs or ())
    assert len(tokens) == 12
    for token in tokens:
        best = list(token.top_logprobs or ())
        assert len(best) == 3
        assert best[0].logprob == token.logprob <= 0
        assert sum(math.exp(each.logprob) for each in best) <= 1 + 1e-6
    parts = client.chat(MODEL, HELLO, **asked, stream=True)
    assert [each.token for part in parts for each in part.logprobs or ()] == [
        each.token for each in tokens
    ]
    raw = client.generate(MODEL, "Once", raw=True, **asked)
    assert len(raw.logprobs or ()) == 12
    alone = client.chat(MODEL, HELLO, options=GREEDY, logprobs=True)
    raw = client.generate(MODEL, "Once", raw=True, options=GREEDY, logprobs=True)
    assert [each.token for each in alone.logprobs or ()] == [each.token for each in tokens]
    for reply in (alone, raw):
        assert len(reply.logprobs or ()) == 12
        assert not any(each.top_logprobs for each in reply.logprobs or ())


def test_pictures(client: Client, served: Daemon) -> None:
    """Bare base64 is what a data: URI is to OpenAI's route."""
    url = f"data:image/png;base64,{picture(1)}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    wanted = openai_text(served, [{"role": "user", "content": parts}])
    seen = {"role": "user", "content": "What is this?", "images": [picture(1)]}
    assert client.chat(MODEL, [seen], options=GREEDY).message.content == wanted
    streamed = client.chat(MODEL, [seen], options=GREEDY, stream=True)
    assert "".join(part.message.content or "" for part in streamed) == wanted
    said = client.generate(MODEL, "What is this?", images=[picture(1)], options=GREEDY)
    assert said.response == wanted
    assert openai_text(served, [{"role": "user", "content": "What is this?"}]) != wanted


def test_models(client: Client, served: Daemon, request: pytest.FixtureRequest) -> None:
    """What is listed, runs and is shown is the one model, as its file says."""
    (listed,) = client.list().models
    assert listed.model == MODEL
    assert listed.modified_at is not None
    assert abs(listed.modified_at.timestamp() - bundled_model().stat().st_mtime) < 1
    assert listed.details is not None
    assert listed.details.family == "llama"
    (said,) = served.get("/api/tags")["models"]
    assert said["capabilities"] == client.show(MODEL).capabilities
    trained = GGUFReader(bundled_model()).fields["llama.context_length"].contents()
    lengths = {"context_length": trained, "embedding_length": N_EMBD_TEXT}
    assert said["details"].items() >= lengths.items()
    (running,) = client.ps().models
    assert running.model == MODEL
    is_known = "embedded" in request.node.name
    assert running.size_vram == (0 if is_known else None), "there is no GPU here"
    assert running.digest == listed.digest
    n_ctx = served.get("/props")["default_generation_settings"]["n_ctx"]
    assert running.context_length == n_ctx
    shown = client.show(MODEL)
    assert shown.template == served.get("/props")["chat_template"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == n_ctx
    assert shown.modelinfo["llama.embedding_length"] == N_EMBD_TEXT
    assert shown.capabilities == ["completion", "vision"]
    version = served.get("/api/version")["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_loading_and_unloading(client: Client, served: Daemon) -> None:
    """A request without text says why it says nothing; the model leaves behind it, or behind an answer, and
    comes for the next one, which finds the rows of the last."""
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, keep_alive="5m").done_reason == "load"
    messages: list[Any] = [{"role": "user", "content": "Tell me about a fox that sleeps."}]
    said = client.chat(MODEL, messages, options=GREEDY, keep_alive=0)
    until(lambda: client.ps().models == [])
    assert served.get("/props")["is_sleeping"]
    messages += [said.message.model_dump(exclude_none=True), HELLO[0]]
    began_s = time.monotonic()
    again = client.chat(MODEL, messages, options=GREEDY)
    took_s = time.monotonic() - began_s
    assert 0.5 * took_s < (again.total_duration or 0) / 1e9 < took_s, "loading counts"
    with pytest.raises(ResponseError, match="top_k"):
        client.chat(MODEL, HELLO, options={"top_k": "a"}, keep_alive=0)
    n_known = (said.prompt_eval_count or 0) + 11
    assert evaluated(served)[1] <= (again.prompt_eval_count or 0) - n_known
    assert len(client.ps().models) == 1
    assert client.generate(MODEL, keep_alive="0s").done_reason == "unload"
    until(lambda: client.ps().models == [])
    assert len(client.list().models) == 1
    parts = client.chat(MODEL, HELLO, options={"num_predict": 400, "seed": 1}, stream=True)
    next(iter(parts))
    assert client.chat(MODEL, keep_alive=0).done_reason == "unload"
    assert list(parts)[-1].done, "who runs beside it is answered"
    until(lambda: client.ps().models == [])
    assert client.chat(MODEL, HELLO, options=GREEDY, keep_alive="2h").done
    (running,) = client.ps().models
    assert running.expires_at is not None
    rest = running.expires_at - datetime.now(UTC)
    assert timedelta(hours=1) < rest <= timedelta(hours=2)
    assert client.chat(MODEL, HELLO, options=GREEDY, keep_alive="300ms").done
    until(lambda: client.ps().models == [])
    assert client.chat(MODEL, keep_alive=-1).done_reason == "load"


def test_what_is_no_generation_says_nothing_of_loading(client: Client, served: Daemon) -> None:
    """What is refused, and what only reads tokens, neither sets how long the model stays nor takes it back."""
    two_hours, long = timedelta(hours=2), "word " * 3000

    def refused(path: str, **body: Any) -> bool:
        return requests.post(served.url + path, json=body, timeout=60).status_code == 400

    assert client.generate(MODEL, "Once", options=GREEDY, keep_alive=-1).done
    for text in (long, ["Once"]):
        assert refused("/api/generate", model=MODEL, prompt=text, keep_alive=0)
        assert rest_of(client) > two_hours
    assert client.generate(MODEL, "Once", options=GREEDY, keep_alive="2h").done
    assert refused("/api/generate", model=MODEL, prompt=long)
    assert refused("/v1/chat/completions", messages=5)
    assert served.post("/tokenize", {"content": "Once"})["tokens"]
    assert rest_of(client) <= two_hours
    assert openai_text(served, HELLO)
    assert rest_of(client) > two_hours


def test_who_leaves_has_said_how_long_the_model_stays(client: Client, served: Daemon) -> None:
    """As has one that ends beside an older one, which says nothing; what wakes the model then keeps it."""
    long = {"num_predict": 900, "seed": 1}
    parts = client.chat(MODEL, HELLO, options=long, stream=True, keep_alive=0)
    next(iter(parts))
    parts.close()  # type: ignore[attr-defined]
    until(lambda: client.ps().models == [])
    assert served.post("/tokenize", {"content": "Once"})["tokens"]
    assert rest_of(client) > timedelta(hours=2)
    older = client.chat(MODEL, HELLO, options=long, stream=True)
    next(iter(older))
    assert client.chat(MODEL, HELLO, options=GREEDY, keep_alive="2h").done
    assert list(older)[-1].done
    assert rest_of(client) <= timedelta(hours=2)


def rest_of(client: Client) -> timedelta:
    """How long the model that is loaded stays so."""
    (running,) = client.ps().models
    assert running.expires_at is not None
    return running.expires_at - datetime.now(UTC)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"messages": HELLO}, 400, "model is required"),
        ("chat", {"model": MODEL, "messages": "Hi"}, 400, "messages"),
        ("chat", {"model": MODEL, "messages": HELLO, "stream": "no"}, 400, "stream"),
        ("chat", {"model": MODEL, "messages": HELLO, "think": "much"}, 400, "think"),
        ("chat", {"model": MODEL, "messages": HELLO, "format": "xml"}, 400, "format"),
        ("chat", {"model": MODEL, "messages": HELLO, "keep_alive": "soon"}, 400, "keep_alive"),
        ("chat", {"model": MODEL, "messages": HELLO, "keep_alive": 10**400}, 400, "keep_alive"),
        ("chat", {"model": MODEL, "messages": HELLO, "keep_alive": [0] * 10**5}, 400, "keep_alive"),
        ("chat", {"model": "m" * 1025, "messages": HELLO}, 400, "model"),
        ("chat", {"model": MODEL, "messages": HELLO, "prompt": [0] * 2_000_002}, 400, "values"),
        ("chat", {"model": MODEL, "messages": HELLO, "options": {"top_k": "a"}}, 400, "top_k"),
        ("chat", {"model": MODEL, "messages": [{"role": "user", "images": ["?"]}]}, 400, "base64"),
        ("generate", {"model": MODEL, "prompt": "a", "context": [1, 2]}, 400, "/api/chat"),
        ("generate", {"model": MODEL, "prompt": "a", "suffix": "b"}, 400, "nfill"),
        ("embed", {"model": MODEL, "input": "a"}, 400, "--embeddings"),
        ("embed", {"model": MODEL, "input": 3}, 400, "input"),
        ("pull", {"model": "no-such-model"}, 404, "no-such-model"),
        ("push", {"model": MODEL}, 400, "not supported"),
        ("nonsense", {}, 404, "File Not Found"),
    ],
)
def test_errors(served: Daemon, path: str, body: dict[str, Any], status: int, words: str) -> None:
    """The message is all there is of them."""
    reply = requests.post(f"{served.url}/api/{path}", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    assert words in reply.json()["error"]


def test_errors_become_exceptions(client: Client) -> None:
    """Streamed or not, with the status."""
    long = [{"role": "user", "content": "word " * 3000}]
    for stream in (False, True):
        with pytest.raises(ResponseError, match="context size") as refused:
            for _ in client.chat(MODEL, long, stream=stream):
                pass
        assert refused.value.status_code == 400
    with pytest.raises(ResponseError) as unknown:
        client.pull("no-such-model")
    assert unknown.value.status_code == 404


async def test_async_client(served: Daemon) -> None:
    """Several streams at once, each of which says what it says alone."""
    asked: list[Any] = [[{"role": "user", "content": f"Story {i}."}] for i in range(3)]
    wanted = [openai_text(served, messages) for messages in asked]
    async with AsyncClient(host=served.url) as client:

        async def say(messages: Any) -> str:
            stream = await client.chat(MODEL, messages, options=GREEDY, stream=True)
            return "".join([part.message.content or "" async for part in stream])

        assert await asyncio.gather(*map(say, asked)) == wanted


# --- what is not every daemon's ------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_embeddings(tmp_path: Path, engine: str) -> None:
    """The numbers of OpenAI's route, several at once, and fewer dimensions of length one."""
    flags = ("--engine", engine, "--embeddings", "--pooling", "mean", *FLAGS)
    with Daemon(tmp_path, *flags) as daemon, Client(host=daemon.url) as client:
        texts = ["Once upon a time", "The cat"]
        data = daemon.post("/v1/embeddings", {"input": texts})["data"]
        wanted = [each["embedding"] for each in data]
        reply = client.embed(MODEL, texts)
        for found, numbers in zip(reply.embeddings, wanted, strict=True):  # in batches of their own
            assert found == pytest.approx(numbers, abs=1e-5)
        assert reply.prompt_eval_count
        alone = client.embeddings(MODEL, texts[0]).embedding
        assert alone == pytest.approx(wanted[0], abs=1e-5)
        (short,) = client.embed(MODEL, texts[0], dimensions=8).embeddings
        assert math.isclose(math.hypot(*short), 1, rel_tol=1e-6)
        assert math.isclose(short[0] / short[1], wanted[0][0] / wanted[0][1], rel_tol=1e-3)
        assert list(client.embed(MODEL, []).embeddings) == []
        assert len(client.embed(MODEL, ["a"] * 1001).embeddings) == 1001


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": TOOL, "description": "It tells.", "parameters": PARAMETERS},
    }
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["meta-llama-Llama-3.1-8B-Instruct", "Qwen-Qwen3-0.6B"])
def test_a_tool_loop(tmp_path: Path, engine: str, family: str) -> None:
    """Calls have objects for arguments, streamed or not; they come back with results that have no ids, and each
    turn evaluates what is new."""
    make_scripted_model(tmp_path / "scripted.gguf", FAMILIES[family].script)
    template = str(TEMPLATES / f"{family}.jinja")
    flags: tuple[str, ...] = ("-m", str(tmp_path / "scripted.gguf"))
    flags += ("--chat-template-file", template)
    flags = ("--engine", engine, "-c", "8192", "-t", "1", *flags)
    with Daemon(tmp_path / "d", *flags) as daemon, Client(host=daemon.url) as client:
        assert "tools" in (client.show("m").capabilities or ())
        messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        counts: list[int] = []
        sessions = set()
        for turn in range(4):
            if turn % 2:
                parts = list(client.chat("m", messages, tools=TOOLS, stream=True))
                calls = [call for part in parts for call in part.message.tool_calls or ()]
                thinking = "".join(part.message.thinking or "" for part in parts)
                last = parts[-1]
            else:
                last = client.chat("m", messages, tools=TOOLS)
                calls = list(last.message.tool_calls or ())
                thinking = last.message.thinking or ""
            assert last.done_reason == "stop"
            (call,) = calls
            assert call.function.name == TOOL
            assert dict(call.function.arguments) == {"city": "Paris"}
            assert bool(thinking) == FAMILIES[family].thinking
            counts.append(last.prompt_eval_count or 0)
            session, n_new = evaluated(daemon)
            sessions.add(session)
            if turn:
                assert n_new < counts[-1] - counts[-2], "the call's tokens have their rows"
            answer = {"role": "tool", "tool_name": TOOL, "content": f"Sun {turn}."}
            said = {"role": "assistant", "tool_calls": [call.model_dump()], "thinking": thinking}
            messages += [said, answer]
        assert len(sessions) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_thinking_and_a_gap(tmp_path: Path, engine: str) -> None:
    """`think` is what `enable_thinking` is to the template; a suffix is what follows a gap."""
    model = tmp_path / "scripted.gguf"
    make_scripted_model(model, ("Hel", "lo", "!"), fill_in=True)
    template = str(TEMPLATES / "Qwen-Qwen3-0.6B.jinja")
    flags = ("-m", str(model), "--engine", engine, *FLAGS, "--chat-template-file", template)
    with Daemon(tmp_path / "d", *flags) as daemon, Client(host=daemon.url) as client:
        capabilities = client.show("m").capabilities or ()
        assert set(capabilities) == {"completion", "tools", "thinking"}
        counts = set()
        for think in (True, False):
            kwargs = {"enable_thinking": think}
            body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": kwargs}
            wanted = daemon.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
            for reply in (
                client.chat("m", HELLO, think=think, options=GREEDY),
                client.generate("m", HELLO[0]["content"], think=think, options=GREEDY),
            ):
                assert reply.prompt_eval_count == wanted
            counts.add(wanted)
        assert len(counts) == 2
        gap = {"input_prefix": "def f():", "input_suffix": "return", "n_predict": 12}
        filled = daemon.post("/infill", gap | {"temperature": 0})
        said = client.generate("m", "def f():", suffix="return", options=GREEDY)
        assert said.response == filled["content"] != ""
        assert said.prompt_eval_count == filled["tokens_evaluated"]


def test_pull(tmp_path: Path) -> None:
    """What was fetched is said as it comes, and whether it is served; what is served already needs nothing."""
    repo = "owner/stories-GGUF"
    with hub_server() as hub:
        hub.repos[repo] = {"stories-Q8_0.gguf": bundled_model().read_bytes()}
        told = {"HF_ENDPOINT": hub.url}
        with (
            Daemon(tmp_path, *FLAGS, env=told) as daemon,
            Client(host=daemon.url) as client,
        ):
            lines = list(client.pull(f"hf.co/{repo}:Q8_0", stream=True))
            assert hub.downloads
            assert lines[0].status == "pulling manifest"
            size = bundled_model().stat().st_size
            assert any((line.completed, line.total) == (size, size) for line in lines)
            assert "-m" in (lines[-2].status or "")
            assert lines[-1].status == "success"
            assert client.pull(MODEL).status == "success"
            with pytest.raises(ResponseError, match="accept") as terms:
                client.pull("gemma3-270m")
            assert terms.value.status_code == 403
            missing = list(
                requests.post(
                    daemon.url + "/api/pull", json={"model": "hf.co/owner/none"}, timeout=60
                ).iter_lines()
            )
            assert "owner/none" in json.loads(missing[-1])["error"]


def test_what_changes_the_machine(tmp_path: Path) -> None:
    """To fetch a model, or to unload what others use, a key of one tenant is not enough."""
    with Daemon(tmp_path, *FLAGS, "--api-key", "ann:ka", "--api-key", "bob:kb") as daemon:
        for headers, status in (({"Authorization": "Bearer ka"}, 403), ({}, 401)):
            with Client(host=daemon.url, headers=headers) as client:
                with pytest.raises(ResponseError) as refused:
                    client.pull("smollm2")
                assert refused.value.status_code == status
                with pytest.raises(ResponseError) as kept:
                    client.generate(MODEL, keep_alive=0)
                assert kept.value.status_code == status
