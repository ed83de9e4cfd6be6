"""Who said what: messages out of the tokens that a chat template rendered.

Templates mark speakers with control tokens, whose ids no user's text has. A name of a speaker stands
in the control token itself (`<|user|>`, `[INST]`) or in the text behind it (`<|im_start|>user`).
Text without such marks is one message without a role.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from towerd.model.speakers import HEADER, ROLES, role_in
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tokens import Ids

TITLE_CHARS_MAX = 100


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What one speaker said. `role`: user, assistant, system, tool, or "" if it is not known."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class _TextRun:
    is_control: bool
    text: str


def messages(ids: Ids, vocabulary: KeptVocabulary) -> list[ChatMessage]:
    """The messages in a run of tokens, which may begin and end inside of one. Raises NotSupported if
    their text is too long."""
    vocabulary.check_size(ids)
    role, found = "", list[ChatMessage]()
    is_named = after_control = is_channel = False
    for part in _parts(ids, vocabulary):
        if part.is_control:
            named = role_in(part.text)
            role, is_named = (named, True) if named else (role, is_named)
            is_channel = "channel" in part.text
            after_control = True
            continue
        text = part.text
        if after_control and (header := HEADER.match(text)):
            role, text = ROLES[header[1].lower()], text[header.end() :]
            is_named = True
        if text.strip() and not is_channel:
            found.append(ChatMessage(role if is_named else "", text))
        after_control = is_channel = False
    return [
        ChatMessage(role, "".join(each.text for each in run).strip())
        for role, run in groupby(found, key=lambda each: each.role)
    ]


def spoken(found: Iterable[ChatMessage]) -> str:
    """What users, models and tools said, without the instructions of systems."""
    return "\n\n".join(each.text for each in found if each.role != "system")


def first_question(found: Sequence[ChatMessage]) -> str:
    """The first words of a user, on one line, to be a conversation's title; those of anybody where
    the speakers are not known."""
    asked = [each.text for each in found if each.role == "user"]
    words = " ".join((asked or [spoken(found)])[0].split())
    if len(words) <= TITLE_CHARS_MAX:
        return words
    return words[:TITLE_CHARS_MAX].rsplit(" ", 1)[0] + "…"


def _parts(ids: Ids, vocabulary: KeptVocabulary) -> list[_TextRun]:
    """The control tokens, each by itself, and the texts between them."""
    parts: list[_TextRun] = []
    names = vocabulary.names
    n = len(names)
    start = 0
    values = ids.tolist()
    for place, id in enumerate(values):
        if 0 <= id < n and names[id]:
            if place > start:
                parts.append(_TextRun(False, vocabulary.text(ids[start:place])))
            parts.append(_TextRun(True, names[id].decode("utf-8", "replace")))
            start = place + 1
    if start < len(values):
        parts.append(_TextRun(False, vocabulary.text(ids[start:])))
    return parts
