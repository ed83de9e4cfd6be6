"""A conversation as messages to be read and answered: who said what, where in its tokens each message
begins, and of what parts it consists.

Speakers are told as in `towerd.search.speech`. Where the template names none by control tokens, what was sent
and what was answered is told by the turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from towerd.media_ids import is_first
from towerd.model.speakers import HEADER, ROLES, role_in
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tokens import Ids

PartKind: TypeAlias = Literal["text", "reasoning", "call", "result", "medium"]
_MARKS: dict[str, PartKind] = {
    "think": "reasoning",
    "tool_call": "call",
    "tool_response": "result",
}
"""Of what kind is what follows a control token with such a name, or stands in a tag of that name."""
_RESULT = re.compile(r"<(tool_response)>(.*?)</\1>", re.DOTALL)
_TAGGED = {
    "assistant": re.compile(rf"<({'|'.join(_MARKS)})>(.*?)(?:</\1>|\Z)", re.DOTALL),
    "user": _RESULT,
    "tool": _RESULT,
}
"""The tags that a model or a template writes in the messages of each speaker: other tags are what was said. A
reply may be cut off."""
_WRITTEN = re.compile(r"<\|im_(?:start\|>(?:\w+\n)?|end\|>)")
"""Marks of ChatML that are text to a vocabulary without such tokens."""
_CHANNEL = re.compile(r"\s*(\w+)\s*")
_SAID_IN = ("final", "")
"""The channels in which a model speaks; in others it thinks, or calls a tool."""


@dataclass(frozen=True, slots=True)
class ChatPart:
    """A part of a message. A medium, whose bytes are not kept, has no text."""

    kind: PartKind
    text: str


@dataclass(slots=True)
class PlacedMessage:
    """What one speaker said. `role` as in `ChatMessage`; `at`: the first of its tokens in the conversation."""

    role: str
    at: int
    parts: list[ChatPart] = field(default_factory=list)

    def add(self, kind: PartKind, text: str) -> None:
        """Add a text behind its parts; blanks alone are none."""
        if self.parts and self.parts[-1].kind == kind:
            text = self.parts.pop().text + text
        if text.strip():
            self.parts.append(ChatPart(kind, text))


def placed_messages(
    ids: Ids, vocabulary: KeptVocabulary, ends: Sequence[int] = ()
) -> list[PlacedMessage]:
    """The messages in the tokens of a whole conversation. ends: where a prompt and its reply end by turns, for
    a conversation whose speakers are not named. Raises NotSupported if their text is too long."""
    return named_messages(ids, vocabulary) or messages_by_turns(ids, vocabulary, ends)


def named_messages(ids: Ids, vocabulary: KeptVocabulary) -> list[PlacedMessage]:
    """The messages of a conversation whose speakers are named by control tokens; empty: none is. Raises as
    `placed_messages`."""
    vocabulary.check_size(ids)
    found = _Finder()
    for run in _runs(ids, vocabulary):
        found.take(run)
    if not any(each.role for each in found.messages):
        return []
    if not found.messages[0].role:  # some begin with instructions whose speaker they do not name
        found.messages[0].role = "system"
    return [_trimmed(each) for each in found.messages if each.parts]


def messages_by_turns(
    ids: Ids, vocabulary: KeptVocabulary, ends: Sequence[int]
) -> list[PlacedMessage]:
    """What was sent and answered in turn. Raises as `placed_messages`."""
    vocabulary.check_size(ids)
    return list(_by_turns(ids, vocabulary, ends))


@dataclass(frozen=True, slots=True)
class _Run:
    """`kind`: a control token, a medium, or text between these."""

    kind: Literal["control", "medium", "text"]
    at: int
    text: str = ""


def _runs(ids: Ids, vocabulary: KeptVocabulary) -> Iterator[_Run]:
    names, values = vocabulary.names, ids.tolist()
    controls = [id for id in np.unique(ids).tolist() if 0 <= id < len(names) and names[id]]
    is_text = (ids >= 0) & ~np.isin(ids, controls)
    places = np.flatnonzero(~is_text).tolist()
    start = 0
    for place in [*places, len(values)]:
        if place > start:
            yield _Run("text", start, vocabulary.text(ids[start:place]))
        start = place + 1
        if place == len(values):
            break
        if values[place] >= 0:
            yield _Run("control", place, names[values[place]].decode("utf-8", "replace"))
        elif is_first(values[place]) or place == 0 or values[place - 1] >= 0:
            yield _Run("medium", place)


class _Finder:
    """Finds messages in the runs of a conversation."""

    def __init__(self) -> None:
        self.messages: list[PlacedMessage] = []
        self._kind: PartKind = "text"
        self._control: _Run | None = None
        """The control token right before the run."""

    def take(self, run: _Run) -> None:
        """Take the next run."""
        control, self._control = self._control, None
        if run.kind == "control":
            self._control = run
            self._mark(run)
        elif run.kind == "medium":
            self._current(run.at).parts.append(ChatPart("medium", ""))
        else:
            self._read(run, control)

    def _mark(self, run: _Run) -> None:
        name = run.text.lower()
        kind = next((_MARKS[mark] for mark in _MARKS if mark in name), None)
        if kind is not None:  # before its role: that of a call is no tool's
            self._kind = "text" if "/" in name or "end" in name else kind
        elif role := role_in(run.text):
            self._begin(role, run.at)
        elif name.startswith("<channel"):  # the end of one
            self._kind = "text"

    def _read(self, run: _Run, control: _Run | None) -> None:
        text = run.text
        if control is not None and "channel" in control.text:
            named = _CHANNEL.match(text) if not control.text.startswith("<channel") else None
            if named is not None:
                self._kind = "text" if named[1] in _SAID_IN else "reasoning"
                text = text[named.end() :]
        elif control is not None and (header := HEADER.match(text)):
            self._begin(ROLES[header[1].lower()], control.at)
            text = text[header.end() :]
        if text:
            message = self._current(run.at)
            is_text = self._kind == "text"
            for kind, part in _tagged(text, message.role) if is_text else [(self._kind, text)]:
                message.add(kind, part)

    def _begin(self, role: str, at: int) -> None:
        self._kind = "text"
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != role or role == "user":
            self.messages.append(PlacedMessage(role, at))

    def _current(self, at: int) -> PlacedMessage:
        if not self.messages:
            self.messages.append(PlacedMessage("", at))
        return self.messages[-1]


def _tagged(text: str, role: str) -> Iterator[tuple[PartKind, str]]:
    """What a speaker said in parts, by the tags that many models write as text."""
    at = 0
    for tag in _TAGGED[role].finditer(text) if role in _TAGGED else ():
        yield "text", text[at : tag.start()]
        yield _MARKS[tag[1]], tag[2]
        at = tag.end()
    yield "text", text[at:]


def _trimmed(message: PlacedMessage) -> PlacedMessage:
    parts = [ChatPart(each.kind, each.text.strip()) for each in message.parts]
    return PlacedMessage(message.role, message.at, parts)


def _by_turns(ids: Ids, vocabulary: KeptVocabulary, ends: Sequence[int]) -> Iterator[PlacedMessage]:
    start = 0
    for place, end in enumerate([*ends] or [len(ids)]):
        role = ("user", "assistant")[place % 2] if ends else ""
        message = PlacedMessage(role, start)
        for run in _runs(ids[start:end], vocabulary):
            if run.kind == "medium":
                message.parts.append(ChatPart("medium", ""))
            elif run.kind == "text":
                message.add("text", _WRITTEN.sub("", run.text))
        if message.parts:
            yield _trimmed(message)
        start = end
