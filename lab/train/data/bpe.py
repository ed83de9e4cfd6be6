"""The mini model's tokenizer: byte-level BPE of a few thousand pieces.

Its pieces are byte strings whose concatenation is the text, so any bytes can be spelled, and the
256 single bytes are pieces: no text is unknown. Words are cut as llama.cpp's pre-tokenizer
`qwen2` does (llama.cpp, src/llama-vocab.cpp), which keeps digits apart, and merges follow their
rank, so llama.cpp gives the same ids for the exported vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFValueType, TokenType
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.trainers import BpeTrainer

from lab.models.vocabulary import Field, Vocabulary, from_gguf
from lab.train.errors import TrainError
from towerd.errors import ModelError

CONTROLS = ("<|begin|>", "<|im_start|>", "<|im_end|>", *(f"<|special_{i}|>" for i in range(13)))
"""Ids 0 to 15: before a session, before a role's name, after a message, and 13 for special tokens
of other vocabularies. They have ChatML's names, because llama.cpp finds the name <|start|> in any
text, even if control tokens are not to be parsed (src/llama-vocab.cpp)."""
BEGIN, START, END, SPECIAL = range(4)
N_VOCAB_MIN = len(CONTROLS) + 256
PRE_TOKENIZER = "qwen2"
PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


class Bpe:
    """A trained tokenizer. It treats text that spells a control token as ordinary text."""

    def __init__(self, pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        self.pieces = list(pieces)
        self.merges = list(merges)
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._tokenizer = Tokenizer(BPE(vocab=ids, merges=self.merges))
        self._tokenizer.pre_tokenizer = _pre_tokenizer()
        self._tokenizer.decoder = ByteLevelDecoder()

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def fingerprint(self) -> str:
        """Changes with any piece or merge."""
        text = json.dumps([self.pieces, self.merges])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The canonical ids of each text; no controls are added or recognised."""
        batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def save(self, path: Path) -> None:
        """Write `path` whole or not at all."""
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps({"pieces": self.pieces, "merges": self.merges}))
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Bpe:
        """Read what `save` wrote. Raises TrainError."""
        try:
            table = json.loads(path.read_text())
            return cls(table["pieces"], [(left, right) for left, right in table["merges"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainError(f"{path} is not a tokenizer of this program: {error}.") from error

    @classmethod
    def from_gguf(cls, path: Path) -> Bpe:
        """The tokenizer of a GGUF that this program made; its control tokens get their current
        names. Raises TrainError."""
        try:
            fields = {field.key: field.value for field in from_gguf(path).fields}
        except ModelError as error:
            raise TrainError(error.message) from error
        pieces, merges = (fields.get(f"tokenizer.ggml.{key}") for key in ("tokens", "merges"))
        types = fields.get("tokenizer.ggml.token_type") or []
        n_controls = len(CONTROLS)
        is_ours = fields.get("tokenizer.ggml.pre") == PRE_TOKENIZER and [
            i for i, kind in enumerate(types) if kind == TokenType.CONTROL
        ] == list(range(n_controls))
        if not pieces or not merges or not is_ours:
            raise TrainError(f"{path} does not have a tokenizer of this program.")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        return cls([*CONTROLS, *pieces[n_controls:]], [(left, right) for left, right in pairs])

    def vocabulary(self) -> Vocabulary:
        """The description of this tokenizer in a GGUF."""
        n_controls = len(CONTROLS)
        types = [TokenType.CONTROL] * n_controls
        types += [TokenType.NORMAL] * (len(self.pieces) - n_controls)
        text, array, number = GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.UINT32
        flag = GGUFValueType.BOOL
        merges = [f"{left} {right}" for left, right in self.merges]
        fields = (
            Field("tokenizer.ggml.model", "gpt2", text),
            Field("tokenizer.ggml.pre", PRE_TOKENIZER, text),
            Field("tokenizer.ggml.tokens", self.pieces, array, text),
            Field("tokenizer.ggml.token_type", [int(t) for t in types], array, GGUFValueType.INT32),
            Field("tokenizer.ggml.merges", merges, array, text),
            Field("tokenizer.ggml.bos_token_id", BEGIN, number),
            Field("tokenizer.ggml.eos_token_id", END, number),
            Field("tokenizer.ggml.eot_token_id", END, number),
            Field("tokenizer.ggml.add_bos_token", True, flag),
            Field("tokenizer.ggml.add_eos_token", False, flag),
        )
        silent = np.arange(len(self.pieces)) < n_controls
        return Vocabulary(fields, silent, CHAT_TEMPLATE)


def train_bpe(texts: Iterable[str], n_vocab: int) -> Bpe:
    """Learn `n_vocab` pieces (controls and bytes included). Raises TrainError if too few."""
    if n_vocab < N_VOCAB_MIN:
        raise TrainError(f"A vocabulary needs at least {N_VOCAB_MIN} tokens, not {n_vocab}.")
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    trainer = BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(CONTROLS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return Bpe(pieces, [(left, right) for left, right in model["merges"]])


def _pre_tokenizer() -> PreTokenizer:
    words = Split(Regex(PATTERN), behavior="isolated")
    return Steps([words, ByteLevel(add_prefix_space=False, use_regex=False)])
