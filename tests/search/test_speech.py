"""Messages out of the tokens that templates render; the tables here are the templates' own."""

from __future__ import annotations

import re

import numpy as np
import pytest

from towerd.search.speech import ChatMessage, first_question, messages, spoken
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tokens import Ids

RENDERED = {
    "chatml": "‹<|im_start|>›system\nBe brief.‹<|im_end|>›\n‹<|im_start|>›user\nWho?‹<|im_end|>›\n"
    "‹<|im_start|>›assistant\nMe.‹<|im_end|>›\n",
    "llama3": "‹<|begin_of_text|>›‹<|start_header_id|>›system‹<|end_header_id|>›\n\nBe brief.‹<|eot_id|>›"
    "‹<|start_header_id|>›user‹<|end_header_id|>›\n\nWho?‹<|eot_id|>›"
    "‹<|start_header_id|>›assistant‹<|end_header_id|>›\n\nMe.‹<|eot_id|>›",
    "phi": "‹<|system|>›Be brief.‹<|end|>›‹<|user|>›Who?‹<|end|>›‹<|assistant|>›Me.‹<|end|>›",
    "deepseek": "‹<｜begin▁of▁sentence｜>›‹<｜User｜>›Who?‹<｜Assistant｜>›Me.‹<｜end▁of▁sentence｜>›",
    "gemma": "‹<bos>›‹<start_of_turn>›user\nWho?‹<end_of_turn>›\n‹<start_of_turn>›model\nMe.‹<end_of_turn>›\n",
    "mistral": "‹<s>›‹[SYSTEM_PROMPT]›Be brief.‹[/SYSTEM_PROMPT]›‹[INST]›Who?‹[/INST]›Me.‹</s>›",
    "harmony": "‹<|start|>›system‹<|message|>›Be brief.‹<|end|>›‹<|start|>›user‹<|message|>›Who?‹<|end|>›"
    "‹<|start|>›assistant‹<|channel|>›final‹<|message|>›Me.‹<|return|>›",
    "granite": "‹<|start_of_role|>›system‹<|end_of_role|>›Be brief.‹<|end_of_text|>›\n"
    "‹<|start_of_role|>›user‹<|end_of_role|>›Who?‹<|end_of_text|>›\n"
    "‹<|start_of_role|>›assistant‹<|end_of_role|>›Me.‹<|end_of_text|>›\n",
}
"""Control tokens stand in ‹›."""


def tokenized(rendered: str) -> tuple[Ids, KeptVocabulary]:
    """Ids in a vocabulary of the control tokens there are, and all bytes."""
    pieces, names = [bytes([i]) for i in range(256)], [b""] * 256
    ids: list[int] = []
    for part in re.split("(‹.*?›)", rendered):
        if part.startswith("‹"):
            ids.append(len(pieces))
            pieces.append(b"")
            names.append(part[1:-1].encode())
        else:
            ids += part.encode()
    return np.array(ids, np.int32), KeptVocabulary(pieces, names)


@pytest.mark.parametrize("family", RENDERED)
def test_speakers_of_each_template(family: str) -> None:
    found = messages(*tokenized(RENDERED[family]))
    said = [each for each in found if each.role != "system"]
    assert said == [ChatMessage("user", "Who?"), ChatMessage("assistant", "Me.")]
    systems = [each.text for each in found if each.role == "system"]
    assert systems == (["Be brief."] if "Be brief" in RENDERED[family] else [])
    assert first_question(found) == "Who?"
    assert "Be brief" not in spoken(found)


def test_a_user_who_writes_of_templates_is_not_cut() -> None:
    """What looks like a control token and is none, is text."""
    text = "what is <|im_start|>system\nfor?"
    found = messages(*tokenized(f"‹<|im_start|>›user\n{text}‹<|im_end|>›"))
    assert found == [ChatMessage("user", text)]


def test_a_run_from_the_middle_of_a_message_and_text_without_speakers() -> None:
    assert messages(*tokenized("half an answer.‹</s>›")) == [ChatMessage("", "half an answer.")]
    assert messages(*tokenized(" \n")) == []
    assert first_question(messages(*tokenized("Once upon\na time"))) == "Once upon a time"
    assert first_question([]) == ""
    assert len(first_question([ChatMessage("user", "word " * 99)])) <= 101
