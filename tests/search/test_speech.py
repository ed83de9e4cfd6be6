"""Messages out of the tokens that templates render; the tables here are the templates' own."""

from __future__ import annotations

import pytest
from rendered_chats import RENDERED, tokenized

from towerd.search.speech import ChatMessage, first_question, messages, spoken


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
