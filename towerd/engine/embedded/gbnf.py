"""A check of GBNF grammars before llama.cpp sees them.

llama.cpp says what is wrong with a grammar only on stderr, and some grammars make it allocate
without end or overflow its stack: an inverted repetition, left recursion behind a nullable rule,
deep nesting, rules that reference each other in exponentially many ways. Syntax as in
llama.cpp's `grammars/README.md` and `src/llama-grammar.cpp`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from towerd.engine.embedded.grammar_cost import TEXT, character, check_cost
from towerd.engine.embedded.vocab import Vocab
from towerd.errors import InvalidRequest

BYTES_MAX = 512 * 1024
ELEMENTS_MAX = 500_000
"""Grammar elements after repetitions are written out."""
NESTING_MAX = 2_000
REPEAT_MAX = 2_000
"""llama.cpp's own limit: a larger minimum is refused, a larger maximum means no maximum."""

_UNIT = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\\"\[\]-])"
_LITERAL_UNIT = re.compile(rf'[^"\\]|{_UNIT}')
_CLASS_UNIT = re.compile(rf"[^\]\\]|{_UNIT}")
_LITERAL = re.compile(rf'"((?:[^"\\]|{_UNIT})*+)"')
_CLASS = re.compile(rf"\[\^?((?:[^\]\\]|{_UNIT})*+)\]")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_TOKEN = re.compile(r"!?(<\[(\d+)\]>|<[^>]*>)")
_BRACES = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_NL = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")


def check_gbnf(text: str, vocab: Vocab | None = None) -> None:
    """Raises InvalidRequest naming the line and the problem; otherwise llama.cpp can take it.

    `vocab` resolves token references (`<think>`); without it they are not looked up."""
    if len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise InvalidRequest(f"grammar: longer than {BYTES_MAX} bytes.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"grammar: not valid Unicode: {error}.") from error
    reader = _Reader(text, vocab)
    reader.read()
    check_cost([rule or [] for rule in reader.alternates], reader.names, reader.n_vocab)


@dataclass(slots=True)
class _Frame:
    """A rule or group being read."""

    rule: int
    alternates: list[list[int]] = field(default_factory=lambda: [[]])
    last: int = 0
    """Index in the current alternate where the last symbol begins."""
    weight: int = 0
    """Elements of the last symbol."""


class _Reader:
    """One pass over the text; groups and repetitions become rules of their own."""

    def __init__(self, text: str, vocab: Vocab | None) -> None:
        self.alternates: list[list[list[int]] | None] = []
        """By rule id: alternates of items, each a rule id, `TEXT` or a `character`."""
        self.names: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self.n_vocab = 1 if vocab is None else vocab.n_vocab
        self._text, self._pos, self._vocab = text, 0, vocab
        self._elements = 0
        self._referenced: dict[int, int] = {}

    def read(self) -> None:
        if "\0" in self._text:
            self._pos = self._text.index("\0")
            raise self._error("a NUL character")
        self._space(newline=True)
        while self._pos < len(self._text):
            self._read_rule()
        if "root" not in self._ids:
            raise InvalidRequest("grammar: there is no rule named root.")
        for rule, pos in self._referenced.items():
            if self.alternates[rule] is None:
                self._pos = pos
                raise self._error(f"rule '{self.names[rule]}' is not defined")

    def _read_rule(self) -> None:
        name = self._match(_NAME)
        if name is None:
            raise self._error("expected the name of a rule")
        self._space(newline=False)
        if not self._text.startswith("::=", self._pos):
            raise self._error("expected ::= after the name of a rule")
        self._pos += 3
        self._space(newline=True)
        stack = [_Frame(self._rule_id(name[0]))]
        while self._read_symbol(stack):
            self._space(newline=len(stack) > 1)
        if len(stack) > 1:
            raise self._error("expected ')'")
        self.alternates[stack[0].rule] = stack[0].alternates
        if self._pos < len(self._text) and self._text[self._pos] not in "\r\n":
            raise self._error(f"unexpected {self._text[self._pos]!r}")
        self._space(newline=True)

    def _read_symbol(self, stack: list[_Frame]) -> bool:
        """Read one symbol or operator; False where the rule ends."""
        if self._pos >= len(self._text):
            return False
        char, frame = self._text[self._pos], stack[-1]
        if char == '"':
            unit = self._need(_LITERAL, "a string is not closed, or has an unknown escape")
            n = len(_LITERAL_UNIT.findall(unit[1]))
            self._terminal(frame, n, TEXT if n > 1 else character(n))
        elif char == "[":
            unit = self._need(_CLASS, "a character class is not closed, or has an unknown escape")
            n = len(_CLASS_UNIT.findall(unit[1]))
            self._terminal(frame, n, character(n))
        elif char in "<!":
            self._check_token(self._need(_TOKEN, "expected a token like <[12]> or <name>"))
            self._terminal(frame, 1, character(1))
        elif char == ".":
            self._pos += 1
            self._terminal(frame, 1, character(1))
        elif char in "*+?{":
            self._repeat(frame, *self._read_repetition(char))
        elif char == "|":
            self._pos += 1
            self._space(newline=True)
            frame.alternates.append([])
            frame.last = frame.weight = 0
        elif char == "(":
            self._open(stack)
        elif char == ")" and len(stack) > 1:
            self._pos += 1
            self.alternates[frame.rule] = frame.alternates
            self._symbol(stack, frame.rule)
        elif name := self._match(_NAME):
            rule = self._rule_id(name[0])
            self._referenced.setdefault(rule, self._pos)
            self._symbol(stack, rule)
        else:
            return False
        return True

    def _open(self, stack: list[_Frame]) -> None:
        if len(stack) > NESTING_MAX:
            raise self._error(f"parentheses nest more than {NESTING_MAX} deep")
        self._pos += 1
        stack.append(_Frame(self._new_rule(stack[0].rule)))

    def _symbol(self, stack: list[_Frame], rule: int) -> None:
        """A reference; after a group's end it belongs to the frame around it."""
        if stack[-1].rule == rule and len(stack) > 1:
            stack.pop()
        frame = stack[-1]
        frame.last, frame.weight = len(frame.alternates[-1]), 1
        frame.alternates[-1].append(rule)
        self._count(1)

    def _terminal(self, frame: _Frame, n: int, item: int) -> None:
        frame.last, frame.weight = len(frame.alternates[-1]), n
        if n:
            frame.alternates[-1].append(item)
        self._count(n)

    def _read_repetition(self, char: str) -> tuple[int, int | None]:
        if char != "{":
            self._pos += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        found = self._need(_BRACES, "a repetition must look like {2}, {2,} or {2,5}")
        least, most = int(found[1]), int(found[3] or found[1])
        if least > REPEAT_MAX:
            raise self._error(f"at most {REPEAT_MAX} repetitions are possible")
        if (found[2] and not found[3]) or most > REPEAT_MAX:
            return least, None
        if most < least:
            raise self._error("a repetition's maximum is below its minimum")
        return least, most

    def _repeat(self, frame: _Frame, least: int, most: int | None) -> None:
        items = frame.alternates[-1]
        last = items[frame.last :]
        if not last:
            raise self._error("there is nothing before *, +, ? or {} to repeat")
        optional = 1 if most is None else most - least
        self._count(frame.weight * max(least - 1, 0) + optional * (frame.weight + 3))
        if not least:
            del items[frame.last :]
        if optional:
            rule = self._new_rule(frame.rule)
            # All optional repetitions at once: what matters here is what can stand first.
            self.alternates[rule] = [last + ([rule] if most is None else []), []]
            items.append(rule)
        frame.weight = frame.weight * least + 1

    def _check_token(self, found: re.Match[str]) -> None:
        if self._vocab is None:
            return
        if found[2]:
            if int(found[2]) >= self._vocab.n_vocab:
                raise self._error(f"token {found[1]} is not in the vocabulary")
        elif len(self._vocab.tokenize(found[1], False, True)) != 1:
            raise self._error(f"{found[1]} is not one token of this model")

    # ---- helpers ----------------------------------------------------------------------------

    def _rule_id(self, name: str) -> int:
        if name not in self._ids:
            self._ids[name] = len(self.alternates)
            self.names[len(self.alternates)] = name
            self.alternates.append(None)
        return self._ids[name]

    def _new_rule(self, parent: int) -> int:
        self.alternates.append(None)
        self.names[len(self.alternates) - 1] = self.names[parent]
        return len(self.alternates) - 1

    def _count(self, n: int) -> None:
        self._elements += n
        if self._elements > ELEMENTS_MAX:
            raise self._error(f"more than {ELEMENTS_MAX} elements with its repetitions")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._pos)
        if found:
            self._pos = found.end()
        return found

    def _need(self, pattern: re.Pattern[str], problem: str) -> re.Match[str]:
        found = self._match(pattern)
        if found is None:
            raise self._error(problem)
        return found

    def _space(self, *, newline: bool) -> None:
        self._match(_SPACE_NL if newline else _SPACE)

    def _error(self, problem: str) -> InvalidRequest:
        line = self._text.count("\n", 0, self._pos) + 1
        return InvalidRequest(f"grammar, line {line}: {problem}.")
