"""Chat templates: roles differ, and a later prompt extends an earlier one and its reply."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from lab.models import templates
from towerd.models.known import CHATML_LINES

EACH = pytest.mark.parametrize(
    "source",
    [templates.CHATML, CHATML_LINES, templates.STORY],
    ids=["chatml", "lines", "story"],
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Once there was\na cat."},
    {"role": "assistant", "content": " The cat  was happy.\n "},
    {
        "role": "user",
        "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}],
    },
    {"role": "assistant", "content": "It slept."},
    {"role": "user", "content": ""},
]


def render(source: str, messages: list[dict[str, Any]], generate: bool = True) -> str:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(messages=messages, bos_token="<s>", add_generation_prompt=generate)


@EACH
@pytest.mark.parametrize("turn", [2, 4])
def test_prompt_extends_prompt_and_reply(source: str, turn: int) -> None:
    """Reuse of a conversation depends on this: nothing is trimmed, nothing is inserted."""
    end = "<s>" if source == templates.STORY else "<|im_end|>"
    earlier = render(source, CHAT[:turn]) + str(CHAT[turn]["content"]) + end
    assert render(source, CHAT[: turn + 2]).startswith(earlier)


@EACH
def test_roles_are_told_apart(source: str) -> None:
    said = {
        role: render(source, [*CHAT[:2], {"role": role, "content": "x"}], generate=False)
        for role in ("system", "user", "assistant")
    }
    assert len(set(said.values())) == 3


@EACH
def test_blank_handling_does_not_matter(source: str) -> None:
    """Some engines trim blocks, some do not."""
    plain = jinja2.Environment().from_string(source)
    text = plain.render(messages=CHAT, bos_token="<s>", add_generation_prompt=True)
    assert text == render(source, CHAT)


def test_chatml_text() -> None:
    assert render(templates.CHATML, CHAT[:2]) == (
        "<|im_start|>system\nBe kind.<|im_end|>"
        "<|im_start|>user\nOnce there was\na cat.<|im_end|><|im_start|>assistant\n"
    )


def test_lines_text() -> None:
    """Without a system message none is added."""
    assert render(CHATML_LINES, CHAT[1:2]) == (
        "<|im_start|>user\nOnce there was\na cat.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_story_text() -> None:
    assert render(templates.STORY, CHAT[:4]) == (
        "Be kind.\n\n<s>Once there was\na cat.\n The cat  was happy.\n <s>And then?\n"
    )
