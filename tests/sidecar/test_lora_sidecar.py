"""LoRA adapters in front of a llama-server: rows under other scales are other rows, and come back.

The oracle is llama-server with the same adapters, which evaluates every prompt anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, reuse_of
from lora_adapter import write_adapter

from towerd.cli.bench.harness.servers import llama_server as llama_server_alone
from towerd.models.bundled import bundled_model

START = "Once upon a time there was a little girl who had a dog."
SMALL = ("-c", "512", "-np", "1", "-t", "1")
LORAS: tuple[list[dict[str, float]], ...] = (
    [{"id": 0, "scale": 1.0}],
    [{"id": 1, "scale": 0.3}],
    [{"id": 0, "scale": 0}],
)


@pytest.fixture(scope="module")
def both(llama_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of towerd in front of a llama-server with two adapters, and of one alone."""
    root = tmp_path_factory.mktemp("lora")
    model = bundled_model()
    first = write_adapter(root / "a.gguf", model, seed=1)
    second = write_adapter(root / "b.gguf", model, seed=2)
    flags = ("--lora", f"{first},{second}")
    with (
        Daemon(root / "d", "--engine", "llama-server", *SMALL, "--", *flags) as daemon,
        llama_server_alone(model, *SMALL, *flags) as server,
    ):
        yield daemon.url, server.url
        assert daemon.stop() == 0, daemon.log


def ask(url: str, prompt: Any, **fields: Any) -> requests.Response:
    """A greedy completion."""
    body = {"temperature": 0, "n_predict": 12, "ignore_eos": True, "return_tokens": True}
    reply = requests.post(
        url + "/completion", json={**body, "prompt": prompt, **fields}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    return reply


def test_chats_under_other_adapters(both: tuple[str, str]) -> None:
    """They take turns in one slot; each says what it says alone, and none is evaluated anew."""
    towerd, alone = both
    chats: list[Any] = [START] * len(LORAS)
    texts = set()
    for turn in range(3):
        for i, lora in enumerate(LORAS):
            ours = ask(towerd, chats[i], lora=lora)
            theirs = ask(alone, chats[i], lora=lora, cache_prompt=False).json()
            assert ours.json()["tokens"] == theirs["tokens"], (turn, lora)
            reuse = reuse_of(ours.headers)
            assert reuse["live"] == 0
            assert (reuse["hot"] > 0) == (turn > 0)
            assert ours.json()["timings"]["cache_n"] == reuse["hot"]
            if turn == 0:
                ids = requests.post(
                    alone + "/tokenize", json={"content": START, "add_special": True}, timeout=30
                ).json()["tokens"]
                texts.add(tuple(theirs["tokens"]))
                chats[i] = ids
            chats[i] = [*chats[i], *theirs["tokens"], 300 + turn]
    assert len(texts) == len(LORAS)


def test_scales_of_all_requests(both: tuple[str, str]) -> None:
    """Set for all at once, rows of other scales are not used; set back, they are."""
    towerd, alone = both
    prompt = "The dog went to the park and " * 4
    before = ask(towerd, prompt).json()["tokens"]
    scales = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.5}]
    for url in both:
        assert requests.post(url + "/lora-adapters", json=scales, timeout=30).status_code == 200
    changed = ask(towerd, prompt)
    assert reuse_of(changed.headers)["prefill"] > 1
    theirs = ask(alone, prompt, cache_prompt=False).json()["tokens"]
    assert changed.json()["tokens"] == theirs != before
    first = [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 1.0}]
    for url in both:
        assert requests.post(url + "/lora-adapters", json=first, timeout=30).status_code == 200
    back = ask(towerd, prompt)
    assert back.json()["tokens"] == before
    assert reuse_of(back.headers)["prefill"] == 1
