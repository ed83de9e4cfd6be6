"""Pictures through towerd: the same words as from llama-server alone, between chats of text."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon
from fake_llama_server import Asked, answering

from lab.models.vision import make_projector, picture
from towerd.cli.bench.harness.servers import llama_server as llama_server_alone
from towerd.models.bundled import bundled_model

FLAGS = ("-c", "2048", "-np", "2", "-t", "1")
N_EMBD_TEXT = 64
"""Of the bundled model."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def both(llama_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of llama-server alone and of towerd in front of one; both see pictures."""
    root = tmp_path_factory.mktemp("images")
    projector = root / "projector.gguf"
    make_projector(projector, N_EMBD_TEXT)
    own = ("--mmproj", str(projector), "--no-warmup")
    with llama_server_alone(bundled_model(), *FLAGS, *own, "-kvu") as server:
        with Daemon(root / "d", "--engine", "llama-server", *FLAGS, "--", *own) as daemon:
            yield server.url, daemon.url


def post(url: str, path: str, body: Any) -> Any:
    reply = requests.post(url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def look_at(*seeds: int, text: str = "What is this?") -> dict[str, Any]:
    """A user's message with pictures."""
    urls = [f"data:image/png;base64,{picture(seed)}" for seed in seeds]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


def say(url: str, messages: list[Any]) -> tuple[str, int]:
    """The reply to a chat, and the tokens of its prompt."""
    done = post(url, "/v1/chat/completions", {"messages": messages, **GREEDY})
    return done["choices"][0]["message"]["content"], done["usage"]["prompt_tokens"]


def test_pictures_are_seen(both: tuple[str, str]) -> None:
    """Each gives its own words, the same as without towerd."""
    replies = []
    for seeds in ((1,), (2,), (3,), (1, 2)):
        alone, ours = (say(url, [look_at(*seeds)]) for url in both)
        assert ours == alone
        replies.append(ours[0])
    assert len(set(replies)) > 1


def test_chats_with_and_without_pictures(both: tuple[str, str]) -> None:
    """Two chats about pictures and one of text take turns in two slots."""
    texts = "Once upon a time there was a dog. " * 4
    starts = [look_at(4), {"role": "user", "content": texts}, look_at(5, 6)]
    chats: list[list[list[Any]]] = [[[start] for start in starts] for _ in both]
    for turn in range(3):
        for i in range(len(starts)):
            said = [say(url, chat[i]) for url, chat in zip(both, chats, strict=True)]
            assert said[0] == said[1], (turn, i)
            for chat in chats:
                chat[i] += [
                    {"role": "assistant", "content": said[0][0]},
                    {"role": "user", "content": "And then?"},
                ]
    stats = requests.get(both[1] + "/towerd/v1/stats", timeout=30).json()["engine"]
    assert stats["restores_missed"] == 0
    assert stats["saves_failed"] == 0


def test_other_ways_to_show_one(both: tuple[str, str]) -> None:
    """In a native completion, in Anthropic's words, and counted only."""
    source = {"type": "base64", "media_type": "image/png", "data": picture(7)}
    parts = [{"type": "text", "text": "What?"}, {"type": "image", "source": source}]
    messages = {"messages": [{"role": "user", "content": parts}], **GREEDY}
    found = []
    for url in both:
        marker = requests.get(url + "/props", timeout=30).json()["media_marker"]
        prompt = {"prompt_string": f"Look {marker} now", "multimodal_data": [picture(7)]}
        native = post(url, "/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0})
        theirs = post(url, "/v1/messages", messages)
        counted = post(url, "/v1/chat/completions/input_tokens", {"messages": [look_at(7)]})
        found.append((native["content"], theirs["content"], counted["input_tokens"]))
    assert found[0] == found[1]


def test_a_picture_that_is_none(both: tuple[str, str]) -> None:
    """llama-server's own refusal, and both continue."""
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [broken]}], **GREEDY}
    replies = [requests.post(u + "/v1/chat/completions", json=body, timeout=60) for u in both]
    assert replies[0].status_code == replies[1].status_code == 400
    assert replies[0].json() == replies[1].json()
    assert say(both[0], [look_at(1)]) == say(both[1], [look_at(1)])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion"])
def test_a_picture_that_ends_the_decoder(both: tuple[str, str], path: str) -> None:
    """It is refused before llama-server gets it, which would end."""
    data = base64.b64encode(
        b"\x53\x80\xf6\x34" + bytes(84) + b"PICT" + struct.pack(">HH8x", 4000, 4000) + bytes(9)
    ).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}], **GREEDY}
    if path == "/completion":
        marker = requests.get(both[1] + "/props", timeout=30).json()["media_marker"]
        body = {"prompt": {"prompt_string": marker, "multimodal_data": [data]}, **GREEDY}
    reply = requests.post(both[1] + path, json=body, timeout=60)
    assert reply.status_code == 400
    assert "this format" in reply.json()["error"]["message"]
    stats = requests.get(both[1] + "/towerd/v1/stats", timeout=30).json()["engine"]
    assert stats["restarts"] == 0


ADDRESSES = ("http://127.0.0.1:{port}/p.png", "https://127.0.0.1:{port}/p.png")
CHATS = {
    "/v1/chat/completions": "image_url",
    "/chat/completions": "image_url",
    "/v1/responses": "input_image",
    "/v1/messages": "image",
    "/apply-template": "image_url",
    "/v1/chat/completions/input_tokens": "image_url",
    "/v1/responses/input_tokens": "input_image",
    "/v1/messages/count_tokens": "image",
}


def chat_about(kind: str, address: str) -> dict[str, Any]:
    """A request in the shape of an endpoint that names a picture by its address."""
    if kind == "input_image":
        parts = [{"type": kind, "image_url": address}]
        return {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    if kind == "image_url":
        picture_part: dict[str, Any] = {"type": kind, "image_url": {"url": address}}
    else:
        inner = {"type": kind, "source": {"type": "url", "url": address}}
        picture_part = {"type": "tool_result", "tool_use_id": "a", "content": [inner]}
    return {"messages": [{"role": "user", "content": [picture_part]}], "max_tokens": 4}


@pytest.mark.parametrize("path", CHATS)
def test_nothing_is_fetched(both: tuple[str, str], path: str) -> None:
    """An address in a chat is refused, whatever the endpoint, and nobody is asked for it; without
    towerd llama-server asks."""
    asked: list[str] = []

    def note(request: Asked) -> None:
        asked.append(request.path)
        request.connection.close()

    with answering({}, talks={"/": note}) as elsewhere:
        port = elsewhere.rpartition(":")[2]
        for address in ADDRESSES:
            body = chat_about(CHATS[path], address.format(port=port))
            reply = requests.post(both[1] + path, json=body, timeout=60)
            assert reply.status_code == 400
            assert "send the bytes" in reply.json()["error"]["message"]
        assert asked == []
        body = chat_about(CHATS[path], ADDRESSES[0].format(port=port))
        requests.post(both[0] + path, json=body, timeout=60)
        assert asked == ["/p.png"]


@pytest.mark.parametrize("where", ["request", "conversation"])
def test_pictures_continue_nothing_that_is_kept(both: tuple[str, str], where: str) -> None:
    """llama-server would answer without what was said before: refused, and no address is asked."""
    asked: list[str] = []
    with answering({}, talks={"/": lambda request: asked.append(request.path)}) as elsewhere:
        for address in (f"{elsewhere}/p.png", f"data:image/png;base64,{picture(1)}"):
            item = chat_about("input_image", address)["input"][0]
            if where == "request":
                first = post(both[1], "/v1/responses", {"input": "One day", "max_output_tokens": 4})
                body: dict[str, Any] = {"input": [item], "previous_response_id": first["id"]}
            else:
                made = post(both[1], "/v1/conversations", {"items": [item]})
                body = {"input": "What is it?", "conversation": made["id"]}
            for path in ("/v1/responses", "/responses", "/v1/responses/input_tokens"):
                reply = requests.post(both[1] + path, json=body, timeout=60)
                assert reply.status_code == 400, reply.text
                said = reply.json()["error"]["message"]
                assert "send the whole" in said or "send the bytes" in said
    assert asked == []


@pytest.mark.parametrize("name", ["input", "content"])
@pytest.mark.parametrize("many", [False, True])
def test_nothing_is_fetched_to_embed(both: tuple[str, str], name: str, many: bool) -> None:
    """llama-server embeds pictures too, and would fetch them."""
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/p.png"}}]
    asked: Any = {"content": parts}
    for path in ("/embedding", "/embeddings", "/v1/embeddings"):
        body = {name: [asked] if many else asked}
        reply = requests.post(both[1] + path, json=body, timeout=60)
        assert reply.status_code == 400
        assert "send the bytes" in reply.json()["error"]["message"]
