"""What is rendered behind the tokens of a conversation, with the templates of many models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_wire import TEMPLATES, Talker
from scripted_model import make_scripted_model

from towerd.api.admin.continuing import ContinuedChat
from towerd.search.chat import placed_messages
from towerd.search.reading import ReadBranch
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tokens import Ids
from towerd.wire import Model, Request

CONTROL = re.compile(r"<[|｜]?[A-Za-z_▁0-9]{1,40}[|｜]?>|\[/?[A-Z_]{3,}\]")
TEXT = {"<s>", "</s>", "<think>", "<tool_call>", "<tool_response>", "<tools>"}
"""Tokens that the vocabulary has anyway, and tags that are none."""
NAMES = (
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "google-gemma-2-2b-it",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
    "GLM-4.6",
    "LFM2-8B-A1B",
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "Cohere2MoE",
)
ASKED, SAID, MORE = (
    {"role": role, "content": text}
    for role, text in (("user", "Who?"), ("assistant", "Me."), ("user", "And?"))
)


def rendered(model: Model, messages: list[dict[str, str]]) -> Ids:
    return Request(model, "chat", json.dumps({"messages": messages}).encode()).prompts[0]


@pytest.mark.parametrize("name", NAMES)
def test_only_the_new_message_is_rendered(name: str, tmp_path: Path) -> None:
    """Behind the tokens that there are, as the template renders it last in the whole chat; in place of a message,
    as a chat that never had it; and another reply is to the same tokens."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    controls = sorted({*CONTROL.findall(template)} - TEXT)
    path = tmp_path / "model.gguf"
    make_scripted_model(path, ["Hey"], controls=controls)
    talker = Talker(path)
    model = talker.model(chat_template=template)
    plain: list[bytes] = [b""] * 3 + [bytes([i]) for i in range(256)]
    names = [b"<unk>", b"<s>", b"</s>"] + [b""] * 256
    vocabulary = KeptVocabulary(
        [*plain, *[b""] * len(controls), b"Hey"], [*names, *(c.encode() for c in controls), b""]
    )
    prompt = rendered(model, [ASKED])
    known = np.concatenate([prompt, np.frombuffer(b"Me.", np.uint8).astype(np.int32) + 3])
    messages = placed_messages(known, vocabulary, [len(prompt), len(known)])
    branch = ReadBranch(1, known, len(prompt), messages, True)

    def continued(at: int, message: dict[str, Any] | None) -> Ids:
        body, replaced = ContinuedChat(branch, vocabulary, at, message, {}).made(model)
        return Request(model, "chat", json.dumps(body).encode(), continued=replaced).prompts[0]

    found, whole = continued(len(known), MORE), rendered(model, [ASKED, SAID, MORE])
    assert found[: len(known)].tolist() == known.tolist()
    added = found[len(known) :].tolist()
    assert added == whole[-len(added) :].tolist()
    assert vocabulary.text(found[len(known) :]).count("And?") == 1
    assert "Who?" not in vocabulary.text(found[len(known) :])
    (at,) = (each.at for each in messages if each.role == "user")
    assert continued(at, MORE).tolist() == rendered(model, [MORE]).tolist()
    assert continued(len(known), None).tolist() == prompt.tolist()
    talker.close()
