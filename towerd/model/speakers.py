"""Where messages begin in the tokens that a chat template rendered.

Templates mark speakers with control tokens, whose ids no user's text has. A name of a speaker stands
in the control token itself (`<|user|>`, `[INST]`) or in the text behind it (`<|im_start|>user`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from towerd.tokens import Ids

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "ipython": "tool",
    "function": "tool",
    "observation": "tool",
}
_NAMED = re.compile(rf"(?i)[<\[|｜_]({'|'.join(ROLES)})(?=[|｜>\]_])")
HEADER = re.compile(rf"\s*({'|'.join(ROLES)})[ \t]*(?:\n+|\Z)", re.IGNORECASE)
_INSTRUCTION = {"[INST]": "user", "[/INST]": "assistant", "[TOOL_RESULTS]": "tool"}
_SYSTEM_TOKENS = 4096
_HEADER_TOKENS = 16
"""The name of a speaker behind a control token has fewer."""


class Spelled(Protocol):
    """A vocabulary whose control tokens are known."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of each token."""

    @property
    def names(self) -> Sequence[bytes]:
        """How each control token is written; b"" for the others."""


@dataclass(frozen=True, slots=True)
class MessageStart:
    """`at`: the first token of a message of `role`, which is a control token."""

    role: str
    at: int


def message_starts(ids: Ids, vocabulary: Spelled) -> list[MessageStart]:
    """Where each message begins whose speaker is named, in a prompt: what follows the last one is to be
    generated, and is none."""
    pieces, names = vocabulary.pieces, vocabulary.names
    controls = [id for id in np.unique(ids).tolist() if 0 <= id < len(names) and names[id]]
    places = np.flatnonzero(np.isin(ids, controls)).tolist()
    roles = {id: role_in(names[id].decode("utf-8", "replace")) for id in controls}
    found = list[MessageStart]()
    for at, end in pairwise([*places, len(ids)]):
        role = roles[int(ids[at])]
        if not role:
            behind = ids[at + 1 : min(end, at + 1 + _HEADER_TOKENS)].tolist()
            text = b"".join(pieces[id] for id in behind if 0 <= id < len(pieces))
            header = HEADER.match(text.decode("utf-8", "replace"))
            role = ROLES[header[1].lower()] if header else ""
        if role:
            found.append(MessageStart(role, at))
    if found and found[-1].role == "assistant" and len(ids) - found[-1].at <= _HEADER_TOKENS:
        found.pop()
    return found


def system_tokens(ids: Ids, vocabulary: Spelled) -> int:
    """How many leading tokens of a prompt do not depend on what is said: its system prompt with tools, and
    the name of the first speaker. 0 if there is no system prompt, or speakers are not named."""
    n = _SYSTEM_TOKENS
    while True:  # most are short, and prompts can be very long
        starts = message_starts(ids[:n], vocabulary)
        first = next((start.at for start in starts if start.role != "system"), None)
        if first is not None:
            is_told = any(start.role == "system" for start in starts if start.at < first)
            return first + _header_tokens(ids[first:], vocabulary) if is_told else 0
        if n >= len(ids):
            return 0
        n *= 4


def _header_tokens(ids: Ids, vocabulary: Spelled) -> int:
    """How many tokens name the speaker of the message that begins with `ids`, a control token: that one if it
    names him itself, else also the name behind it, and the line feed or the control token that ends it."""
    pieces, names, text = vocabulary.pieces, vocabulary.names, b""
    if role_in(names[int(ids[0])].decode("utf-8", "replace")):
        return 1
    for n, id in enumerate(ids[1 : 1 + _HEADER_TOKENS].tolist(), 2):
        is_control = 0 <= id < len(names) and bool(names[id])
        text += pieces[id] if not is_control and 0 <= id < len(pieces) else b""
        header = HEADER.match(text.decode("utf-8", "replace"))
        if header and (is_control or header[0].endswith("\n")):
            return n
    return 1


def role_in(control: str) -> str:
    """The role that a control token's name says; "" if it says none."""
    if control in _INSTRUCTION:
        return _INSTRUCTION[control]
    named = _NAMED.search(control)
    return ROLES[named[1].lower()] if named and "/" not in control else ""
