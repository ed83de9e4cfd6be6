"""What people type, as a query of SQLite's full-text search.

Words are found as whole words, the last one by its beginning, too, and words in quotes as a phrase.
Nothing that is typed is a syntax error. Scripts that put no space between words are cut into their
characters, in texts and queries alike.
"""

from __future__ import annotations

import re

CUT = "\u200b"
"""Zero-width space: separates characters in what is indexed, and is removed from what is shown."""
MARKS = "\x02", "\x03"
"""Begin and end of what matched, in a text that SQLite returns."""
TERMS_MAX = 32
_NO_MARKS = dict.fromkeys(map(ord, ("\0", *MARKS)), " ")
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff])"
)
_TERM = re.compile(r'"([^"]*)"|([^\s"]+)')
_WORD = re.compile(r"[^\W_]")


def cut(text: str) -> str:
    """The text with its unspaced scripts cut into characters, and without MARKS."""
    return _UNSPACED.sub(rf"{CUT}\1{CUT}", text.translate(_NO_MARKS))


def uncut(text: str) -> str:
    """The text as it was."""
    return text.replace(CUT, "")


def expression(typed: str) -> str:
    """The FTS5 query for all terms of `typed`; "" if it has no word."""
    terms: list[str] = []
    begun = False
    for found in _TERM.finditer(typed):
        phrase, word = found[1], found[2]
        term = phrase if word is None else word
        if _WORD.search(term):
            terms.append(f'"{cut(term)}"')
            begun = word is not None and found.end() == len(typed)
    if not terms:
        return ""
    terms = terms[:TERMS_MAX]
    return " AND ".join(terms) + ("*" if begun else "")
