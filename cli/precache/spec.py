"""Reads the file of `towerctl precache`: a tree of prompts, checked with line numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import yaml

from towerd.errors import ConfigError
from towerd.slots.layout import NATIVE
from towerd.store.sessions.turn import ANYWHERE, PREFIX
from towerd.tiers.formats.fidelity import check_format

Message: TypeAlias = dict[str, str]

LEVELS = ("platform", "communities", "bots")
"""The key that holds the prompts of each level."""
SOURCES = ("text", "file", "messages")
MESSAGE_KEYS = ("role", "content")
NAME_CHARS_MAX = 200
_TEXT = "tag:yaml.org,2002:str"
_BOOL = "tag:yaml.org,2002:bool"


class SpecError(ConfigError):
    """The file is invalid; the message has one `FILE:LINE: problem` per line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One base. Its prompt is its parent's, continued by `text` or by `messages`."""

    name: str
    """The name, preceded by those of its ancestors: platform/community/bot."""
    level: int
    public: bool
    line: int
    text: str
    messages: tuple[Message, ...]
    children: tuple[Prompt, ...]
    format: str | None = None
    """The format to store its rows in, overriding that of its level; `native`: exact."""
    anywhere: bool = False
    """Whether it is a text that may stand anywhere in prompts (`reuse: anywhere`), by itself."""

    def walk(self) -> Iterator[Prompt]:
        """This prompt and its descendants, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def load_spec(path: Path) -> Prompt:
    """The root of the tree. Raises SpecError, which names every problem with its line."""
    reader = _Reader(path)
    root = reader.root(_compose(path))
    if reader.problems or root is None:
        raise SpecError("\n".join(text for _, text in sorted(reader.problems)))
    return root


def _compose(path: Path) -> yaml.Node:
    """The file as YAML nodes, which know their lines."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"Cannot read {path}: {error.strerror}.") from error
    try:
        node = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path}:{line}: not UTF-8 text") from error
    except yaml.reader.ReaderError as error:
        line = data.decode().count("\n", 0, error.position) + 1
        raise SpecError(f"{path}:{line}: a character that YAML does not allow") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise SpecError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    except RecursionError as error:
        raise SpecError(f"{path}:1: nested too deeply") from error
    if node is None:
        raise SpecError(f"{path}:1: empty; it needs the key 'platform'")
    return node


class _Reader:
    """Converts nodes to prompts; continues after a problem, so that all are reported at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[tuple[int, str]] = []

    def root(self, node: yaml.Node) -> Prompt | None:
        top = self._mapping(node, ("platform",), "the file")
        if top is None:
            return None
        if "platform" not in top:
            self._problem(node, "'platform' is missing")
            return None
        return self._prompt(top["platform"], 0, None)

    def _prompt(self, node: yaml.Node, level: int, parent: Prompt | None) -> Prompt | None:
        below = LEVELS[level + 1 : level + 2]
        what = ("the platform", "a community", "a bot")[level]
        known = ("name", "public", "format", "fidelity", "reuse", "recompute", *SOURCES, *below)
        keys = self._mapping(node, known, what)
        if keys is None:
            return None
        name = self._name(node, keys.get("name"), what, parent)
        public = self._public(keys.get("public"), parent)
        text, messages = self._source(node, keys, what, parent)
        line = node.start_mark.line + 1
        format = self._format(keys)
        anywhere = self._anywhere(keys, below)
        prompt = Prompt(name, level, public, line, text, messages, (), format, anywhere)
        if not below or below[0] not in keys:
            return prompt
        return replace(prompt, children=self._children(keys[below[0]], below[0], prompt))

    def _children(self, node: yaml.Node, key: str, parent: Prompt) -> tuple[Prompt, ...]:
        if not isinstance(node, yaml.SequenceNode):
            self._problem(node, f"'{key}' must be a list")
            return ()
        children: list[Prompt] = []
        lines: dict[str, int] = {}
        for item in node.value:
            child = self._prompt(item, parent.level + 1, parent)
            if child is None:
                continue
            short = child.name.removeprefix(f"{parent.name}/")
            if short and child.name in lines:
                first = lines[child.name]
                self._problem(item, f"the name {short!r} is taken already, in line {first}")
            lines.setdefault(child.name, child.line)
            children.append(child)
        return tuple(children)

    def _name(self, at: yaml.Node, node: yaml.Node | None, what: str, parent: Prompt | None) -> str:
        above = f"{parent.name}/" if parent is not None else ""
        if node is None:
            self._problem(at, f"{what} has no 'name'")
            return above
        name = self._text(node, "name")
        if name is None:
            return above
        if not name.strip() or not name.isprintable() or "/" in name:
            self._problem(node, "'name' must be printable text without '/'")
        elif len(above + name) > NAME_CHARS_MAX:
            self._problem(
                node, f"'name' is too long: with those above it {NAME_CHARS_MAX} characters"
            )
        return above + name

    def _public(self, node: yaml.Node | None, parent: Prompt | None) -> bool:
        inherited = parent is not None and parent.public
        if node is None:
            return inherited
        if node.tag != _BOOL:
            self._problem(node, "'public' must be true or false")
            return inherited
        public = str(node.value).lower() in ("true", "yes", "on")
        if public and parent is not None and not parent.public:
            self._problem(node, f"public below {parent.name!r}, which is not")
        return public

    def _format(self, keys: dict[str, yaml.Node]) -> str | None:
        """The format set by `format` or `fidelity: exact`; None: the level's."""
        if "format" in keys and "fidelity" in keys:
            self._problem(keys["fidelity"], "'fidelity' beside 'format': give one of them")
            return None
        if "fidelity" in keys:
            if self._text(keys["fidelity"], "fidelity") not in (None, "exact"):
                self._problem(
                    keys["fidelity"],
                    "'fidelity' must be exact; the others are for the daemon as a whole",
                )
            return NATIVE
        if "format" not in keys:
            return None
        name = self._text(keys["format"], "format")
        if name is not None:
            try:
                check_format(name, "'format'")
            except ConfigError as error:
                self._problem(keys["format"], error.message)
        return name

    def _anywhere(self, keys: dict[str, yaml.Node], below: tuple[str, ...]) -> bool:
        """Whether `reuse: anywhere` is set. `recompute` had to do with it once and has no effect."""
        reuse = self._text(keys["reuse"], "reuse") if "reuse" in keys else PREFIX
        if reuse != ANYWHERE:
            if reuse not in (None, PREFIX):
                self._problem(keys["reuse"], f"'reuse' must be {PREFIX} or {ANYWHERE}")
            return False
        for key in ("messages", *below):
            if key in keys:
                self._problem(
                    keys[key],
                    f"'{key}' beside reuse: {ANYWHERE}: it is a text of its own, and what stands "
                    "before or after it is not known",
                )
        return True

    def _source(
        self, at: yaml.Node, keys: dict[str, yaml.Node], what: str, parent: Prompt | None
    ) -> tuple[str, tuple[Message, ...]]:
        given = [key for key in SOURCES if key in keys]
        if len(given) != 1:
            named = " and ".join(f"'{key}'" for key in given) or "none"
            node = keys[given[1]] if given else at
            self._problem(node, f"{what} needs one of 'text', 'file', 'messages', has {named}")
            return "", ()
        node = keys[given[0]]
        if given[0] == "messages":
            if parent is not None and not parent.messages and "reuse" not in keys:
                self._problem(node, f"'messages' cannot continue the text of {parent.name!r}")
            return "", self._messages(node)
        text = self._text(node, given[0])
        if text is not None and given[0] == "file":
            text = self._file(node, text)
        if text == "":
            self._problem(node, f"'{given[0]}' is empty")
        return text or "", ()

    def _file(self, node: yaml.Node, name: str) -> str | None:
        path = self.path.parent / Path(name).expanduser()
        try:
            return path.read_bytes().decode()
        except OSError as error:
            self._problem(node, f"cannot read {path}: {error.strerror}")
        except ValueError as error:
            reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            self._problem(node, f"cannot read {path}: {reason}")
        return None

    def _messages(self, node: yaml.Node) -> tuple[Message, ...]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            self._problem(node, "'messages' must be a list of messages")
            return ()
        messages = []
        for item in node.value:
            keys = self._mapping(item, MESSAGE_KEYS, "a message")
            if keys is None:
                continue
            message: Message = {}
            for key in MESSAGE_KEYS:
                if key not in keys:
                    self._problem(item, f"a message needs '{key}'")
                elif (text := self._text(keys[key], key)) is not None:
                    message[key] = text
            messages.append(message)
        return tuple(messages)

    def _text(self, node: yaml.Node, key: str) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == _TEXT:
            return str(node.value)
        hint = "; put it in quotes" if isinstance(node, yaml.ScalarNode) and node.value else ""
        self._problem(node, f"'{key}' must be text{hint}")
        return None

    def _mapping(
        self, node: yaml.Node, known: tuple[str, ...], what: str
    ) -> dict[str, yaml.Node] | None:
        """The node's keys, without unknown and repeated ones, which are reported."""
        if not isinstance(node, yaml.MappingNode):
            self._problem(node, f"{what} must be a mapping with the keys {_listed(known)}")
            return None
        found: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean '{near[0]}'?" if near else f"{what} has {_listed(known)}"
                self._problem(key_node, f"unknown key {key!r}, {hint}")
            elif key in found:
                self._problem(key_node, f"'{key}' stands here twice")
            else:
                found[key] = value
        return found

    def _problem(self, node: yaml.Node, text: str) -> None:
        line = node.start_mark.line + 1
        entry = (line, f"{self.path}:{line}: {text}")
        if entry not in self.problems:
            self.problems.append(entry)


def _listed(keys: tuple[str, ...]) -> str:
    return ", ".join(f"'{key}'" for key in keys)
