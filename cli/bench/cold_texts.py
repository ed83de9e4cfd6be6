"""Chat records as text in a chat template, and as tokens.

The template is ChatML, as bytes for compressors of text; for ours its two special tokens are those of
the vocabulary that play their part (or plain text where it has none), as a served model has them."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import click
import numpy as np

from towerd.cli.bench.chat_records import SUFFIX, Record, read_records
from towerd.codec.text import KIND_NAMES
from towerd.codec.vocabulary import GgufVocabulary
from towerd.errors import ConfigError

START, END = "<|im_start|>", "<|im_end|>"
MARKS = (START.encode(), END.encode())


def held_out(data: Path) -> bytes:
    """UTF-8 text of the records whose source the codec's tables and models were not trained on, in
    random order. ClickException where there are none."""
    manifest = files("towerd.codec") / "data" / "manifest.toml"
    known = tomllib.loads(manifest.read_text())
    texts = [in_template(each) for each in records(data) if each.source not in known]
    if not texts:
        raise click.ClickException(
            f"The codec was trained on every source of {data}: name records of another one."
        )
    turn = np.random.default_rng(1).permutation(len(texts))
    return "".join(texts[i] for i in turn).encode()


def records(path: Path) -> list[Record]:
    """Those of a file. ClickException for anything else."""
    if not path.name.endswith(SUFFIX) or not path.exists():
        raise click.ClickException(f"{path} is needed: a *{SUFFIX} file of chat records.")
    try:
        return list(read_records(path))
    except ConfigError as error:
        raise click.ClickException(error.message) from error


def in_template(record: Record, *, users: bool = True) -> str:
    """What was said; users: what they said, too."""
    said = [m for m in record.messages if users or m.role != "user"]
    return "".join(f"{START}{m.role}\n{m.content}{END}\n" for m in said)


def tokenized(text: bytes, vocabulary: GgufVocabulary) -> list[int]:
    """The ids of a session."""
    marks = {}
    for mark, names in zip(MARKS, KIND_NAMES, strict=False):
        token = next((i for i, name in enumerate(vocabulary.names) if name in names), None)
        if token is not None:
            marks[mark] = token
    ids: list[int] = []
    for part in re.split(rb"(<\|im_start\|>|<\|im_end\|>)", text):
        ids += [marks[part]] if part in marks else vocabulary.tokenize(part).tolist()
    return ids
