"""Embeddings beside chats: llama-server's numbers, and none once their client has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import requests
from daemon import Daemon

from towerd.cli.bench.harness.servers import llama_server
from towerd.models.bundled import bundled_model

FLAGS = ("-c", "512", "-t", "1", "--embeddings", "--pooling", "mean")
TEXTS = ["Once upon a time", "The cat sat on the mat and looked at the moon."]
N_TEXTS = 1000


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("embedding"), *FLAGS) as daemon:
        yield daemon


def embed(url: str, **fields: Any) -> npt.NDArray[np.float32]:
    """float32[n, n_embd] of OpenAI's endpoint."""
    reply = requests.post(url + "/v1/embeddings", json=fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return np.array([each["embedding"] for each in reply.json()["data"]], np.float32)


def test_numbers(embedding: Daemon) -> None:
    with llama_server(bundled_model(), *FLAGS) as server:
        wanted = embed(server.url, input=TEXTS)
    assert np.allclose(embed(embedding.url, input=TEXTS), wanted, atol=1e-5)


def test_each_token(make_daemon: Callable[..., Daemon]) -> None:
    """Without pooling each token has its row."""
    with make_daemon("-c", "512", "-t", "1", "--embeddings", "--pooling", "none") as daemon:
        (reply,) = daemon.post("/embeddings", {"content": TEXTS[0]})
        tokens = daemon.post("/tokenize", {"content": TEXTS[0], "add_special": True})["tokens"]
    assert np.shape(reply["embedding"]) == (len(tokens), 64)


def test_a_client_that_leaves(embedding: Daemon) -> None:
    """The rest of its texts is not evaluated."""
    before = n_evaluated(embedding)
    texts = [f"{i} " + "once upon a time " * 60 for i in range(N_TEXTS)]
    with pytest.raises(requests.ReadTimeout):
        requests.post(embedding.url + "/embeddings", json={"content": texts}, timeout=(5, 0.5))
    assert len(embed(embedding.url, input="a")) == 1
    assert n_evaluated(embedding) - before < N_TEXTS


def n_evaluated(daemon: Daemon) -> int:
    return int(daemon.get("/towerd/v1/stats")["engine"]["decode_steps"])
