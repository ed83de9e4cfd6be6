"""Who said what: messages out of the tokens that a chat template rendered.

Templates mark speakers with control tokens, whose ids no user's text has. A name of a speaker stands
in the control token itself (`<|user|>`, `[INST]`) or in the text behind it (`<|im_start|>user`).
Text without such marks is one message without a role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tokens import Ids

_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "ipython": "tool",
    "function": "tool",
    "observation": "tool",
}
_NAMED = re.compile(rf"(?i)[<\[|｜_]({'|'.join(_ROLES)})(?=[|｜>\]_])")
_HEADER = re.compile(rf"\s*({'|'.join(_ROLES)})[ \t]*(?:\n+|\Z)", re.IGNORECASE)
_INSTRUCTION = {"[INST]": "user", "[/INST]": "assistant", "[TOOL_RESULTS]": "tool"}
TITLE_CHARS_MAX = 100
_HEADER_TOKENS = 16
"""The name of a speaker behind a control token has fewer."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What one speaker said. `role`: user, assistant, system, tool, or "" if it is not known."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class MessageStart:
    """`at`: the first token of a message of `role`, which is a control token."""

    role: str
    at: int


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
            named = _role_in(part.text)
            role, is_named = (named, True) if named else (role, is_named)
            is_channel = "channel" in part.text
            after_control = True
            continue
        text = part.text
        if after_control and (header := _HEADER.match(text)):
            role, text = _ROLES[header[1].lower()], text[header.end() :]
            is_named = True
        if text.strip() and not is_channel:
            found.append(ChatMessage(role if is_named else "", text))
        after_control = is_channel = False
    return [
        ChatMessage(role, "".join(each.text for each in run).strip())
        for role, run in groupby(found, key=lambda each: each.role)
    ]


def message_starts(ids: Ids, vocabulary: KeptVocabulary) -> list[MessageStart]:
    """Where each message begins whose speaker is named, in a prompt: what follows the last one is to be
    generated, and is none."""
    pieces, names = vocabulary.pieces, vocabulary.names
    controls = [id for id in np.unique(ids).tolist() if 0 <= id < len(names) and names[id]]
    places = np.flatnonzero(np.isin(ids, controls)).tolist()
    roles = {id: _role_in(names[id].decode("utf-8", "replace")) for id in controls}
    found = list[MessageStart]()
    for at, end in pairwise([*places, len(ids)]):
        role = roles[int(ids[at])]
        if not role:
            behind = ids[at + 1 : min(end, at + 1 + _HEADER_TOKENS)].tolist()
            text = b"".join(pieces[id] for id in behind if 0 <= id < len(pieces))
            header = _HEADER.match(text.decode("utf-8", "replace"))
            role = _ROLES[header[1].lower()] if header else ""
        if role:
            found.append(MessageStart(role, at))
    if found and found[-1].role == "assistant" and len(ids) - found[-1].at <= _HEADER_TOKENS:
        found.pop()
    return found


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


def _role_in(control: str) -> str:
    """The role that a control token's name says; "" if it says none."""
    if control in _INSTRUCTION:
        return _INSTRUCTION[control]
    named = _NAMED.search(control)
    return _ROLES[named[1].lower()] if named and "/" not in control else ""


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
