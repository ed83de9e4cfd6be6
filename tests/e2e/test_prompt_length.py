"""Prompts longer than the context: refused unless a retention was asked for, and then bounded."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from daemon import Daemon

N_CTX = 256
PROMPT_TOKENS_MAX = 5000
SHIFT = {"retention": "shift"}
LONG = [5] * N_CTX
TEXT = "once upon a time " * 100


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the default retention, a small context and a small limit."""
    flags = ("--ctx-size", str(N_CTX), "--live-tokens", "16384", "-t", "1")
    limit = ("--prompt-tokens-max", str(PROMPT_TOKENS_MAX))
    with Daemon(tmp_path_factory.mktemp("length"), *flags, *limit) as made:
        yield made


def n_recorded(daemon: Daemon) -> int:
    """Tokens in the store."""
    n: int = daemon.get("/towerd/v1/stats")["store"]["tokens"]
    return n


def some_ids(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(260, 500) for _ in range(n)]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}], ids=str)
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/completion", {"prompt": LONG}),
        ("/completion", {"prompt": TEXT}),
        ("/completion", {"prompt": ["a", 300, TEXT]}),
        ("/completion", {"prompt": [[7, 8, 9], LONG]}),
        ("/completion", {"prompt": [5] * 3_000_000}),
        ("/v1/completions", {"prompt": ["Once", "upon", TEXT]}),
        ("/v1/completions", {"prompt": LONG, "retention": "none"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    ],
)
def test_refused_by_default(
    daemon: Daemon, path: str, prompt: dict[str, Any], more: dict[str, Any]
) -> None:
    """llama-server's error, with the right number, for OpenAI's programs in their words as well; no other
    prompt of the request is evaluated, and nothing is recorded."""
    before = n_recorded(daemon)
    error = daemon.post(path, prompt | more, 400)["error"]
    n = error["n_prompt_tokens"]
    words = (
        f"request ({n} tokens) exceeds the available context size ({N_CTX} tokens), "
        "try increasing it"
    )
    is_openai = path.startswith("/v1/")
    most = (
        f"This model's maximum context length is {N_CTX} tokens. However, you requested {n} tokens"
    )
    assert error == {
        "code": "context_length_exceeded" if is_openai else 400,
        "message": f"{most}: {words}" if is_openai else words,
        "type": "exceed_context_size_error",
        "n_prompt_tokens": n,
        "n_ctx": N_CTX,
    }
    assert n >= N_CTX
    if prompt.get("prompt", [])[:1] == [5]:
        assert n == len(prompt["prompt"])
    assert n_recorded(daemon) == before


def test_a_shift_that_was_asked_for_is_told(daemon: Daemon) -> None:
    """`truncated` where llama-server has it, and in `towerd` where it has no word for it."""
    ids: dict[str, Any] = {
        "prompt": some_ids(4 * N_CTX, 1),
        "n_predict": 2,
        "ignore_eos": True,
        **SHIFT,
    }
    messages = [{"role": "user", "content": TEXT}]
    chat: dict[str, Any] = {"messages": messages, "max_tokens": 2, **SHIFT}
    assert daemon.post("/completion", ids)["truncated"] is True
    assert daemon.post("/v1/completions", ids)["towerd"] == {"truncated": True}
    assert daemon.post("/v1/chat/completions", chat)["towerd"] == {"truncated": True}
    verbose = daemon.post("/v1/chat/completions", chat | {"verbose": True})
    assert verbose["__verbose"]["truncated"] is True
    for path, body in (("/v1/completions", ids), ("/v1/chat/completions", chat)):
        reply = requests.post(daemon.url + path, json=body | {"stream": True}, timeout=60)
        last = [line for line in reply.text.split("\n\n") if '"towerd"' in line]
        assert json.loads(last[0].removeprefix("data: "))["towerd"]["truncated"] is True
    short = daemon.post("/v1/completions", ids | {"prompt": "Once"})
    assert "towerd" not in short


def test_tokens_dropped_by_a_policy_are_told(daemon: Daemon) -> None:
    """A chat whose live set is partial says so as well."""
    body = {"n_predict": 2, "retention": "streaming", "live_budget": 64, "ignore_eos": True}
    assert daemon.post("/completion", body | {"prompt": some_ids(200, 2)})["truncated"] is True
    assert daemon.post("/completion", body | {"prompt": some_ids(20, 3)})["truncated"] is False


@pytest.mark.parametrize(
    "prompt",
    [
        some_ids(PROMPT_TOKENS_MAX + 1, 4),
        [some_ids(PROMPT_TOKENS_MAX // 2 + 1, seed) for seed in (5, 6)],
        TEXT * 20,
    ],
    ids=["ids", "together", "text"],
)
@pytest.mark.parametrize("retention", ["shift", "streaming"])
def test_longer_than_any_retention_allows(daemon: Daemon, prompt: Any, retention: str) -> None:
    """Prompts beyond the context are bounded together, and nothing of them is recorded."""
    before = n_recorded(daemon)
    body = {"prompt": prompt, "n_predict": 2, "retention": retention}
    error = daemon.post("/completion", body, 400)["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > PROMPT_TOKENS_MAX
    assert f"({PROMPT_TOKENS_MAX} tokens), see --prompt-tokens-max" in error["message"]
    assert n_recorded(daemon) == before


def test_prompts_within_the_context_are_not_counted(daemon: Daemon) -> None:
    """Many short prompts may have more tokens together than one that is shortened."""
    prompts = [[300 + i, *[7] * (N_CTX - 20)] for i in range(PROMPT_TOKENS_MAX // N_CTX + 3)]
    replies = daemon.post("/completion", {"prompt": prompts, "n_predict": 0, **SHIFT})
    assert sum(reply["tokens_evaluated"] for reply in replies) > PROMPT_TOKENS_MAX


def test_a_long_history_can_be_freed(daemon: Daemon) -> None:
    """A shifted prompt is recorded whole; with its session deleted, gc frees its tokens."""
    before = n_recorded(daemon)
    headers = {"X-Towerd-Session": "long"}
    ids = some_ids(PROMPT_TOKENS_MAX, 7)
    daemon.post("/completion", {"prompt": ids, "n_predict": 2, **SHIFT}, headers=headers)
    assert n_recorded(daemon) >= before + len(ids)
    assert daemon.session_ids("long")[: len(ids)] == ids
    requests.delete(daemon.url + "/towerd/v1/sessions/long", timeout=30).raise_for_status()
    daemon.post("/towerd/v1/gc", {})
    assert n_recorded(daemon) <= before


def test_an_unanswered_prompt_leaves_what_can_be_reused(daemon: Daemon) -> None:
    """Of a shortened prompt without a reply only the tokens that have rows are kept."""
    before = n_recorded(daemon)
    daemon.post("/completion", {"prompt": some_ids(4000, 8), "n_predict": 0, **SHIFT})
    assert n_recorded(daemon) < before + N_CTX


@pytest.mark.skipif(not psutil.LINUX, reason="the peak of memory is read from /proc")
@pytest.mark.parametrize(
    ("path", "status", "n_mib"),
    [("/completion", 400, 12), ("/v1/chat/completions", 400, 12), ("/tokenize", 413, 17),
     ("/v1/chat/completions", 413, 20), ("/v1/messages/count_tokens", 413, 20)],
)  # fmt: skip
def test_texts_that_cannot_fit_are_not_tokenized(
    daemon: Daemon, path: str, status: int, n_mib: int
) -> None:
    """They are refused by their length: tokenizing takes forty times their memory."""
    text = "once upon a time " * (n_mib * 2**20 // 17)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    if path in ("/completion", "/tokenize"):
        body = {"prompt": text, "content": text}
    before = peak_bytes(daemon)
    for more in ({}, SHIFT) if status == 400 else ({},):
        error = daemon.post(path, body | more, status)["error"]
        if status == 400:
            assert error["type"] == "exceed_context_size_error"
            assert len(text) / 20 < error["n_prompt_tokens"] <= len(text)
            assert "request (at least " in error["message"]
    assert peak_bytes(daemon) - before < 24 * len(text)


def peak_bytes(daemon: Daemon) -> int:
    """The most memory that the process had so far."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_too_many_ids_are_not_decoded(daemon: Daemon) -> None:
    """A body of ids that cannot be a prompt takes little memory but its own."""
    body = b'{"retention": "shift", "prompt": [' + b"7," * 15_000_000 + b"7]}"
    process = psutil.Process(daemon.pid)
    seen = [process.memory_info().rss]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    reply = requests.post(daemon.url + "/completion", data=body, timeout=60)
    done.set()
    watcher.join()
    assert reply.status_code == 400
    assert "values" in reply.json()["error"]["message"]
    assert max(seen) - seen[0] < 4 * len(body)
