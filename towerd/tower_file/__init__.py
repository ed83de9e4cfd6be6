"""The `.tower` file: one session's whole history, readable as text by anyone and as tokens wherever a
model with the same vocabulary is served.

    magic 4 | version 1 | bytes in all, u64
    text: model | text: hash of the model's file | vocabulary hash 8 | varint: its tokens
    of version 2, the tokenizer identity: text: hash of its tokens | text: hash of its rules
    text: session id | named 1 | text: title | created, updated: f64
    varint: bases, then per base its name, level, tokens and digest 32
    varint: turns, then per turn
        varints: turns back to its parent, turns back to its origin (0: none), tokens shared with
            the origin, tokens of the prompt, of the reply, and how many of both had rows
        started, created: f64 | finished 1
    varint: place of the current leaf
    varint: bytes of the blob | the blob (`towerd.codec`, of the form that every machine reads)
    of version 2
        the words (`words.py`): what each token id in the file stands for
        spelled 1 | if it is spelled, the text that follows the blob (`spelled.py`)
    BLAKE2b-128 of everything before

Numbers are little-endian or varints (`codec/varint.py`); a text is its length and UTF-8. The blob
holds the token ids that each turn adds to its origin, in order (`store/sessions/history.py`), in
the form that needs no table, so that later releases can read the file whatever tables they have.
The ids of a session that was frozen under another tokenizer cannot be had without it: its text goes
into the file instead, with what corrects it, and a reader that has the tokenizer has the ids again.

The reader trusts no byte: nothing is decoded before the checksum was verified, and no more memory is
allocated than the bytes justify. Files of version 1 have no words.
"""

from __future__ import annotations

from towerd.tower_file.fields import TURNS_MAX, TowerFileError
from towerd.tower_file.file import Source, TowerFile, read, write

__all__ = ["TURNS_MAX", "Source", "TowerFile", "TowerFileError", "read", "write"]
