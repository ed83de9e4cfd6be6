"""Chat records as text in a chat template, and as tokens.

The template is ChatML, as bytes for text compressors. For our codec its two special tokens are the
corresponding ones of the vocabulary (or plain text if it has none), as for a served model."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import click
import numpy as np

from lab.texts.chat_records import SUFFIX, ChatRecord, read_records
from towerd.codec.text import KIND_NAMES
from towerd.codec.vocabulary import GgufVocabulary
from towerd.errors import ConfigError

START, END = "<|im_start|>", "<|im_end|>"
MARKS = (START.encode(), END.encode())


def held_out(data: Path) -> bytes:
    """UTF-8 text of the records whose source the codec's tables and models were not trained on, in
    random order. Raises ClickException if there are none."""
    manifest = files("towerd.codec") / "data" / "manifest.toml"
    known = tomllib.loads(manifest.read_text())
    texts = [in_template(each) for each in records(data) if each.source not in known]
    if not texts:
        raise click.ClickException(
            f"The codec was trained on every source of {data}: name records of another one."
        )
    turn = np.random.default_rng(1).permutation(len(texts))
    return "".join(texts[i] for i in turn).encode()


def records(path: Path) -> list[ChatRecord]:
    """The records of a file. Raises ClickException for any other file."""
    if not path.name.endswith(SUFFIX) or not path.exists():
        raise click.ClickException(f"{path} is needed: a *{SUFFIX} file of chat records.")
    try:
        return list(read_records(path))
    except ConfigError as error:
        raise click.ClickException(error.message) from error


def in_template(record: ChatRecord, *, users: bool = True) -> str:
    """The messages of a record in the template. users: including those of users."""
    said = [m for m in record.messages if users or m.role != "user"]
    return "".join(f"{START}{m.role}\n{m.content}{END}\n" for m in said)


def tokenized(text: bytes, vocabulary: GgufVocabulary) -> list[int]:
    """The token ids of a session's text."""
    marks = {}
    for mark, names in zip(MARKS, KIND_NAMES, strict=False):
        token = next((i for i, name in enumerate(vocabulary.names) if name in names), None)
        if token is not None:
            marks[mark] = token
    ids: list[int] = []
    for part in re.split(rb"(<\|im_start\|>|<\|im_end\|>)", text):
        ids += [marks[part]] if part in marks else vocabulary.tokenize(part).tolist()
    return ids
