"""A chat that outgrows its context: an error by default, a shift where that was asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import requests
from daemon import Daemon

from towerd.engine.embedded.longchat.shift import shift_ids

N_CTX = 256
N_BASE = 60
SHIFTING = ("--ctx-size", str(N_CTX), "--retention", "shift")
MakeDaemon = Callable[..., Daemon]


def some_ids(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(260, 500) for _ in range(n)]


BASE = [1, *some_ids(N_BASE - 1, 0)]


def test_error_by_default(make_daemon: MakeDaemon) -> None:
    """llama-server's refusal at the turn that does not fit; the turns before stay usable, and a
    reply ends where the context does."""
    with make_daemon("--ctx-size", str(N_CTX)) as daemon:
        ids = list(BASE)
        while len(ids) + 40 < N_CTX:
            ids += some_ids(20, len(ids))
            ids += daemon.complete(ids, 20)["tokens"]
        error = daemon.post("/completion", {"prompt": ids + some_ids(80, 1)}, 400)["error"]
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (len(ids) + 80, N_CTX)
        last = daemon.complete(ids, 1000)
        assert len(ids) + last["tokens_predicted"] == N_CTX
        assert last["stop_type"] == "limit"
        assert last["truncated"]
        assert last["timings"]["cache_n"] == len(ids) - 1


def test_shift_goes_on(make_daemon: MakeDaemon) -> None:
    """Turn after turn far beyond the context: the base stays, the oldest turns are dropped,
    every token of the chat is stored, and what follows is what a prompt of the kept tokens
    gives. A restart does not change that."""
    with make_daemon(*SHIFTING) as daemon:
        daemon.post("/towerd/v1/precache", {"name": "base", "prompt": BASE})
        ids = list(BASE)
        for turn in range(16):
            ids += some_ids(25, turn)
            reply = turn_of(daemon, ids)
            assert reply["timings"]["cache_n"] >= N_BASE, "the base is never evaluated again"
            ids += reply["tokens"]
            if turn == 11:
                assert daemon.stop() == 0
                daemon.start()
        assert len(ids) > 3 * N_CTX
        assert daemon.session_ids("long") == ids
        assert daemon.stop() == 0
    with daemon.stored() as store:
        assert len(store.turns("long")) == 16


def turn_of(daemon: Daemon, ids: list[int]) -> dict[str, Any]:
    """One turn of the session "long", checked against the shortened prompt by itself."""
    headers = {"X-Towerd-Session": "long"}
    body = {
        "prompt": ids,
        "n_predict": 25,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    reply: dict[str, Any] = daemon.post("/completion", body, headers=headers)
    assert reply["tokens_predicted"] == 25
    short = shift_ids(np.array(ids, np.int32), N_CTX, N_BASE).tolist()
    assert short[:N_BASE] == BASE
    assert reply["truncated"] == (len(ids) + 25 > N_CTX)
    if len(short) < len(ids):
        # Only the beginning: at its own end the context shifts once more.
        n = min(3, N_CTX - len(short))
        alone = daemon.complete(short, n, cache_prompt=False)
        assert reply["tokens"][:n] == alone["tokens"][:n]
    return reply


def test_one_reply_beyond_the_context(make_daemon: MakeDaemon) -> None:
    """A single reply of several contexts' length, streamed; all of it is stored."""
    with make_daemon(*SHIFTING) as daemon:
        body: dict[str, Any] = {
            "prompt": BASE,
            "n_predict": 4 * N_CTX,
            "ignore_eos": True,
            "stream": True,
            "seed": 1,
        }
        headers = {"X-Towerd-Session": "novel"}
        with requests.post(
            daemon.url + "/completion", json=body, headers=headers, stream=True, timeout=60
        ) as reply:
            lines = [line[6:] for line in reply.iter_lines() if line]
        assert len(lines) > 3 * N_CTX
        stored = daemon.session_ids("novel")
        assert len(stored) == N_BASE + 4 * N_CTX
        assert stored[:N_BASE] == BASE
        assert daemon.n_processing() == 0


@pytest.mark.parametrize("n_keep", [-1, 30])
def test_keep_what_the_request_says(make_daemon: MakeDaemon, n_keep: int) -> None:
    """n_keep as llama-server has it; -1 keeps the prompt as far as half the context."""
    with make_daemon(*SHIFTING) as daemon:
        ids = [1, *some_ids(2 * N_CTX, 3)]
        reply = daemon.complete(ids, 2, n_keep=n_keep)
        kept = len(ids) if n_keep == -1 else n_keep
        short = shift_ids(np.array(ids, np.int32), N_CTX, kept).tolist()
        assert len(short) < N_CTX
        assert short[:30] == ids[:30]
        alone = daemon.complete(short, 2, cache_prompt=False)
        assert reply["tokens"] == alone["tokens"]


def test_chat_messages_beyond_the_context(make_daemon: MakeDaemon) -> None:
    """The same through /v1/chat/completions, whose messages only ever grow."""
    messages = [{"role": "system", "content": "You tell stories."}]
    with make_daemon(*SHIFTING) as daemon:
        n_prompt = 0
        for turn in range(12):
            messages.append({"role": "user", "content": f"Tell me story number {turn}, please."})
            body = {"messages": messages, "max_tokens": 30, "ignore_eos": True}
            reply = daemon.post("/v1/chat/completions", body)
            messages.append(reply["choices"][0]["message"])
            assert reply["usage"]["completion_tokens"] == 30
            assert reply["usage"]["prompt_tokens"] > n_prompt
            n_prompt = reply["usage"]["prompt_tokens"]
        assert n_prompt > 2 * N_CTX
        assert len(daemon.get("/towerd/v1/sessions")["sessions"]) == 1


def test_a_reply_without_an_end_ends(make_daemon: MakeDaemon) -> None:
    """A model that never stops, asked for no number of tokens, gets one context full of them."""
    with make_daemon(*SHIFTING) as daemon:
        reply = daemon.post("/completion", {"prompt": BASE, "ignore_eos": True, "n_predict": -1})
        assert (reply["tokens_predicted"], reply["stop_type"]) == (N_CTX, "limit")
