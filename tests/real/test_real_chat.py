"""SmolLM2 behind the API, with the chat template of its own file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from click.testing import CliRunner
from daemon import Daemon, reuse_of
from oracle import Oracle
from real_checks import check_bits, said
from real_text import CLOCK, QUESTIONS, RIVER
from waiting import until

from towerd.cli.main import towerctl

Messages = list[dict[str, str]]
FLAGS = ("-c", "2048", "-t", "1", "-fa", "on", "--fidelity", "exact")
THINKS = 'root ::= "<think>" [a-z ]{80} "</think>\\n\\n" [A-Z] [a-z ]{80} "."'
TEMPLATE_TOKENS_MAX = 12
"""What the template puts around a question and before its answer."""
UNEVALUATED = 1
"""The last token of a reply was sampled and never evaluated."""


@pytest.fixture(scope="module")
def daemon(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("chat"), "-m", str(smollm2), *FLAGS) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.log


def say(
    daemon: Daemon, messages: Messages, n: int = 48, **fields: Any
) -> tuple[str, dict[str, int]]:
    """The reply's text, and where its prompt's tokens came from."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": n, "temperature": 0, **fields}
    reply = requests.post(daemon.url + "/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"], reuse_of(reply.headers)


def n_tokens(daemon: Daemon, text: str) -> int:
    return len(daemon.post("/tokenize", {"content": text})["tokens"])


def anticipated(daemon: Daemon) -> int:
    """Tokens evaluated ahead, when nothing more is about to be."""

    def stats() -> dict[str, int]:
        found = daemon.get("/towerd/v1/stats")["traffic"]
        assert isinstance(found, dict)
        return found

    until(lambda: stats()["anticipations_running"] == 0)
    return stats()["anticipated_tokens"]


def told(text: str) -> Messages:
    return [{"role": "system", "content": text}]


def n_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def test_a_turn_pays_for_its_words(daemon: Daemon) -> None:
    """A turn evaluates what its prompt adds to the ids of its session. That is the new question
    alone, and nothing is evaluated ahead, unless a reply was generated in other tokens than its
    text is split into. Whether one is depends on the CPU's rounding."""
    messages = told(f"You answer questions about this text.\n{CLOCK}")
    before, is_respelled, known = anticipated(daemon), False, list[int]()
    for turn, question in enumerate(("Where is the clock?", "Who built it?", "And who came then?")):
        messages.append({"role": "user", "content": question})
        prompt = daemon.post("/apply-template", {"messages": messages})["prompt"]
        ids = daemon.post("/tokenize", {"content": prompt, "add_special": True})["tokens"]
        n_known = n_common(known, ids)
        is_respelled |= n_known < len(known)
        if not is_respelled:
            assert anticipated(daemon) == before
        text, reuse = say(daemon, messages)
        messages.append({"role": "assistant", "content": text})
        if turn:
            assert reuse["prefill"] <= len(ids) - n_known + UNEVALUATED
            if not is_respelled:
                assert reuse["prefill"] <= n_tokens(daemon, question) + TEMPLATE_TOKENS_MAX
        session = daemon.get("/towerd/v1/sessions")["sessions"][0]["id"]
        known = daemon.session_ids(session)


def test_thoughts_are_left_out_ahead(daemon: Daemon) -> None:
    """A client that sends no thoughts back finds the answer without them evaluated already."""
    messages = told(f"You answer questions about this text.\n{RIVER}")
    messages += [
        {"role": "user", "content": "What is it about?"},
        {"role": "assistant", "content": "It is about rivers."},
        {"role": "user", "content": QUESTIONS[2]},
    ]
    before = anticipated(daemon)
    text, _ = say(daemon, messages, 400, grammar=THINKS)
    assert "</think>" in text
    n_ahead = anticipated(daemon) - before
    assert n_ahead > 16
    answer = text.rpartition("</think>")[2].lstrip("\n")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
    _, reuse = say(daemon, messages, 8)
    assert n_tokens(daemon, answer) > 12
    assert reuse["prefill"] <= n_tokens(daemon, "Why?") + TEMPLATE_TOKENS_MAX


def test_a_reply_in_a_schema(daemon: Daemon) -> None:
    """Valid, and right."""
    properties = {
        "country": {"type": "string"},
        "capital": {"type": "string"},
        "is_in_europe": {"type": "boolean"},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    form = {"type": "json_schema", "json_schema": {"name": "fact", "schema": schema}}
    question = "What is the capital of France? Answer in JSON with country, capital, is_in_europe."
    text, _ = say(daemon, [{"role": "user", "content": question}], 96, response_format=form)
    found = json.loads(text)
    assert list(found) == list(properties)
    assert found["capital"] == "Paris"
    assert isinstance(found["is_in_europe"], bool)


def test_a_chat_moves(
    daemon: Daemon, smollm2: Path, smollm2_oracle: Oracle, tmp_path: Path
) -> None:
    """Exported and imported it has the same tokens, and continues as a prefill does, to the bit."""
    ids = daemon.post("/tokenize", {"content": CLOCK})["tokens"]
    ids += daemon.complete(ids, 16)["tokens"]
    session = daemon.get("/towerd/v1/sessions")["sessions"][0]["id"]
    path = tmp_path / "chat.tower"
    ctl("export", session, "-o", path, "--socket", daemon.socket)
    assert path.stat().st_size < 2 * len(CLOCK)  # half of it the words of its tokens
    with Daemon(tmp_path / "two", "-m", str(smollm2), *FLAGS) as other:
        ctl("import", path, "--socket", other.socket)
        assert other.session_ids(session) == ids
        reply = said(other.complete(ids, 16, n_probs=4))
        assert other.get("/towerd/v1/sessions")["sessions"][0]["id"] == session
        assert other.stop() == 0, other.log
    check_bits(smollm2_oracle, np.array(ids, np.int32), [len(ids)], reply)


def ctl(*args: object) -> None:
    result = CliRunner().invoke(towerctl, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
