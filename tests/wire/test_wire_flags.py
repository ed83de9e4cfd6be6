"""Flags of llama-server's command line: the same replies from towerd.wire and llama-server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_wire import PATHS, TEMPLATES, Talker, answer, plain, running_server

from towerd.settings.llama_flags import check_flags, words_of

TOOL = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}
CALL = ["<tool_call>", '\n{"name": ', '"paint"', ', "arguments": ', "{}}", "\n</tool_call>"]
LINES = ["One", " line", ".", "\n", "And", " one."]
COMPLETION = {"prompt": "x", "n_predict": 12, "temperature": 0}
CASES: dict[str, tuple[list[str], list[str], str, dict[str, Any], bytes]] = {
    "past the end": (["--ignore-eos"], ["The", " end."], "completion", COMPLETION, b'"limit"'),
    "escapes": (
        ["-r", r"\n", "--dry-sequence-breaker", r"\t"], LINES, "completion", COMPLETION, b'"One line."',
    ),
    "no escapes": (
        ["-r", r"\n", "--no-escape", "--dry-sequence-breaker", r"\t"], LINES, "completion", COMPLETION, rb"line.\nAnd one.",
    ),
    "text of a call": (
        ["--skip-chat-parsing"],
        CALL,
        "chat",
        {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 20, "temperature": 0},
        b'"content":"<tool_call>',
    ),
}  # fmt: skip
"""The command line, what the model says, the endpoint, the body, and what the reply contains."""


@pytest.mark.parametrize("name", CASES)
def test_same_reply(scripted: Callable[[Sequence[str]], Talker], name: str) -> None:
    flags, script, endpoint, fields, said = CASES[name]
    template = TEMPLATES / "Qwen-Qwen3-0.6B.jinja"
    check_flags(flags, {})
    talker = scripted(script)
    model = talker.model(
        chat_template=template.read_text(),
        defaults={"cache_prompt": False},
        flags=tuple(words_of(flags, "wire")),
    )
    body = json.dumps(fields).encode()
    with running_server("--chat-template-file", str(template), *flags, path=talker.path) as server:
        theirs = server.post(PATHS[endpoint], body)
    ours = answer(talker, model, endpoint, body)
    assert said in theirs.body, theirs.body
    assert plain(json.loads(ours.body)) == plain(json.loads(theirs.body))
