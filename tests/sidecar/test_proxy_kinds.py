"""Requests whose tokens or slots towerd cannot know, between conversations whose it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, reuse_of
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from towerd.cli.bench.harness.servers import llama_server as llama_server_alone
from towerd.models.bundled import bundled_model

FLAGS = ("-c", "1024", "-np", "2", "-t", "1")
EMBED = ("--embeddings", "--pooling", "mean")
GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 8, "ignore_eos": True}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def fim_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with three of its tokens declared as those of fill-in-the-middle."""
    path = tmp_path_factory.mktemp("fim") / "fim.gguf"
    reader, writer = GGUFReader(bundled_model()), GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kinds = field.types
            inner = kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=inner)
    for i, name in enumerate(("pre", "suf", "mid")):
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", 259 + i)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def mixed(fim_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A sidecar that can also fill in and embed."""
    flags = ("--engine", "llama-server", "-m", str(fim_model), *FLAGS)
    with Daemon(tmp_path_factory.mktemp("mixed"), *flags, "--", *EMBED) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def reference(fim_model: Path) -> Iterator[str]:
    """The same llama-server alone."""
    with llama_server_alone(fim_model, *FLAGS, *EMBED, "-kvu") as server:
        yield server.url


def ask(url: str, path: str, body: Any, status: int = 200) -> Any:
    reply = requests.post(url + path, json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"prompt": "def "}])
def test_infill(mixed: Daemon, reference: str, extra: dict[str, Any]) -> None:
    """Filled in as by llama-server alone, in a slot that the next such request finds again."""
    body = {"input_prefix": "Once upon", "input_suffix": "happily.", **GREEDY, **extra}
    said = [ask(url, "/infill", body) for url in (reference, mixed.url)]
    if "n" in extra:
        assert [each["content"] for each in said[1]] == [each["content"] for each in said[0]]
        return
    assert said[1]["content"] == said[0]["content"]
    again = ask(mixed.url, "/infill", body)
    assert again["content"] == said[0]["content"]
    assert again["timings"]["cache_n"] > 0
    with requests.post(mixed.url + "/infill", json={**body, "stream": True}, timeout=60) as reply:
        assert '"stop":true' in reply.text


def test_embeddings(mixed: Daemon, reference: str) -> None:
    body = {"input": ["A dog", "A cat and a hat"]}
    ours, theirs = (ask(url, "/v1/embeddings", body)["data"] for url in (mixed.url, reference))
    for a, b in zip(ours, theirs, strict=True):
        assert a["embedding"] == pytest.approx(b["embedding"], abs=1e-5)


OTHERS: list[tuple[str, Any, int]] = [
    ("/v1/embeddings", {"input": ["A dog", "Another dog", "And one more"]}, 200),
    ("/infill", {"input_prefix": "One", "input_suffix": "two", "n_predict": 4}, 200),
    ("/completion", {"prompt": ["First", "Second", "Third"], "n_predict": 4}, 200),
    ("/v1/completions", {"prompt": "Several", "n": 2, "max_tokens": 4}, 200),
    ("/completion", {"prompt": "With adapters", "lora": [{"id": 0, "scale": 1}], "n_predict": 4}, 200),
    ("/v1/chat/completions",
     {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
     400),
    ("/v1/messages",
     {"messages": [{"role": "user", "content": [
         {"type": "image", "source": {"type": "base64", "data": "AA=="}}]}], "max_tokens": 2}, 400),
    ("/no/such/endpoint", {"prompt": "x", "id_slot": 1}, 404),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status"), OTHERS)
def test_conversations_survive_what_is_between(
    mixed: Daemon, reference: str, path: str, body: Any, status: int
) -> None:
    """Two chats fill both slots; then comes something that takes any slot; both chats continue word
    for word as without it, from what the store or their slot has."""
    names = [f"{path} {status} {i}" for i in range(2)]
    asked = [f"Chat {name} begins with a long line of words." for name in names]
    replies: list[list[int]] = []
    for prompt in asked:
        done = mixed.complete(prompt, 8)
        replies.append(done["tokens"])
    ask(mixed.url, path, body, status)
    for prompt, reply in zip(asked, replies, strict=True):
        ids = ask(reference, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
        more = {"prompt": [*ids, *reply, 400, 410], **GREEDY, "return_tokens": True}
        got = requests.post(mixed.url + "/completion", json=more, timeout=60)
        assert got.json()["tokens"] == ask(reference, "/completion", more)["tokens"]
        assert sum(reuse_of(got.headers).values()) == len(more["prompt"])
    assert mixed.get("/towerd/v1/stats")["engine"]["restores_missed"] == 0


def test_nothing_cached_when_asked(mixed: Daemon) -> None:
    """cache_prompt=false evaluates everything, and is no failure of a restore."""
    mixed.complete("Say it again and again", 4)
    done = mixed.complete("Say it again and again", 4, cache_prompt=False)
    assert done["timings"]["cache_n"] == 0
    assert mixed.get("/towerd/v1/stats")["engine"]["restores_missed"] == 0


def test_adapters_stop_reuse(mixed: Daemon) -> None:
    """After POST /lora-adapters the engine looks again; with the same scales all continues."""
    mixed.complete("Adapters come and go", 4)
    assert ask(mixed.url, "/lora-adapters", []) == {"success": True}
    again = mixed.complete("Adapters come and go", 4)
    assert again["tokens_evaluated"] > 0
