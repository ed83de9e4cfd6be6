"""A tokenizer as written into a GGUF: its metadata keys, and the tokens not to generate."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType

from lab.models import templates
from towerd.errors import ModelError

SPACE = "\u2581"
"""SentencePiece's visible blank: how pieces spell a leading space."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
N_SYNTHETIC_MIN = 448
"""3 specials, 2 ChatML tokens, 256 bytes, 96 single characters, and room for some words."""


@dataclass(frozen=True, slots=True)
class Field:
    """One metadata key. `item_type` is the element type of an array, else None."""

    key: str
    value: Any
    type: GGUFValueType
    item_type: GGUFValueType | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything a GGUF says about its tokenizer."""

    fields: tuple[Field, ...]
    silent: npt.NDArray[np.bool_]
    """[n_vocab]: tokens that random weights should not generate (control, unknown, bytes, and
    pieces that would not be tokenized to themselves)."""
    template: str | None
    """The chat template that came with it."""

    def __len__(self) -> int:
        return len(self.silent)

    def write(self, writer: GGUFWriter, template: str | None) -> None:
        """Add the keys to `writer`, with `template` as the chat template unless it is None."""
        for field in self.fields:
            writer.add_key_value(field.key, field.value, field.type, field.item_type)
        if template is not None:
            writer.add_chat_template(template)


def sentencepiece(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[TokenType],
    *,
    special: dict[str, int],
    add_space_prefix: bool = True,
    silent: npt.NDArray[np.bool_] | None = None,
    template: str | None = None,
) -> Vocabulary:
    """A SentencePiece tokenizer from its pieces. `special` maps bos, eos, eot, unknown to ids."""
    array, text, integer = GGUFValueType.ARRAY, GGUFValueType.STRING, GGUFValueType.INT32
    flag, number = GGUFValueType.BOOL, GGUFValueType.FLOAT32
    fields = [
        Field("tokenizer.ggml.model", "llama", text),
        Field("tokenizer.ggml.tokens", list(pieces), array, text),
        Field("tokenizer.ggml.scores", [float(s) for s in scores], array, number),
        Field("tokenizer.ggml.token_type", [int(t) for t in types], array, integer),
        Field("tokenizer.ggml.add_bos_token", True, flag),
        Field("tokenizer.ggml.add_eos_token", False, flag),
        Field("tokenizer.ggml.add_space_prefix", add_space_prefix, flag),
    ]
    for name, token in special.items():
        fields.append(Field(f"tokenizer.ggml.{name}_token_id", token, GGUFValueType.UINT32))
    if silent is None:
        silent = _silent(types)
    return Vocabulary(tuple(fields), silent, template)


def synthetic(n_vocab: int) -> Vocabulary:
    """A synthetic vocabulary of `n_vocab` tokens.

    Any text can be tokenized (characters, then bytes). The pieces beyond characters are words
    that start with a blank, every prefix of a word being a word too, and only they are generated:
    the output of a random model is tokenized back to exactly the tokens that it generated, so its
    chats can be continued over HTTP like those of a real model. Raises ModelError if too small.
    """
    if n_vocab < N_SYNTHETIC_MIN:
        raise ModelError(f"A synthetic vocabulary needs at least {N_SYNTHETIC_MIN} tokens.")
    pieces = ["<unk>", "<s>", "</s>", *CHATML_TOKENS]
    types = [TokenType.UNKNOWN] + [TokenType.CONTROL] * 4
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [TokenType.BYTE] * 256
    letters = [chr(c) for c in range(0x21, 0x7F)] + [SPACE]
    n_quiet = len(pieces) + len(letters)
    words = list(itertools.islice(_words(), n_vocab - n_quiet))
    pieces += letters + words
    types += [TokenType.NORMAL] * (len(letters) + len(words))
    silent = np.zeros(n_vocab, dtype=np.bool_)
    silent[:n_quiet] = True
    return sentencepiece(
        pieces,
        [0.0] * (len(pieces) - len(words)) + [-float(i) for i in range(len(words))],
        types,
        special={"bos": 1, "eos": 4, "unknown": 0},
        add_space_prefix=False,
        silent=silent,
        template=templates.CHATML,
    )


def from_gguf(path: Path) -> Vocabulary:
    """The tokenizer of an existing GGUF (a vocab-only one is enough). Raises ModelError."""
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable GGUF: {error}.") from error
    fields: list[Field] = []
    template: str | None = None
    for key, field in reader.fields.items():
        if key == "tokenizer.chat_template":
            template = field.contents()
        elif key.startswith("tokenizer."):
            item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            fields.append(Field(key, field.contents(), field.types[0], item))
    by_key = {field.key: field.value for field in fields}
    tokens = by_key.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path} has no tokenizer.")
    types = by_key.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    return Vocabulary(tuple(fields), _silent(types), template)


def _silent(types: Sequence[int]) -> npt.NDArray[np.bool_]:
    text_types = (TokenType.NORMAL, TokenType.USER_DEFINED)
    return ~np.isin(np.asarray(types, dtype=np.int32), [int(t) for t in text_types])


def _words() -> Iterator[str]:
    """Blank + a, b, ..., z, aa, ab, ...: shortest first, so that prefixes come before words."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield SPACE + "".join(letters)
