"""Sessions to compress: chat records of one kind, in a chat template, joined and cut to 16 KB.

The template is ChatML, as bytes for compressors of text; for ours its two special tokens are those of
the vocabulary that play their part (or plain text where it has none), as a served model has them."""

from __future__ import annotations

import re
from pathlib import Path

import click
import numpy as np

from towerd.codec.text import KIND_NAMES
from towerd.codec.train.errors import TrainError
from towerd.codec.train.manifest import read_manifest
from towerd.codec.train.records import SUFFIX, TRAIN, Record, read_records
from towerd.codec.vocabulary import GgufVocabulary

SESSION_BYTES = 16384
START, END = "<|im_start|>", "<|im_end|>"
MARKS = (START.encode(), END.encode())
KINDS = ("human", "assistant", "code", "mixed")


def sessions(data: Path, n_max: int) -> dict[str, list[bytes]]:
    """Kind -> up to `n_max` UTF-8 texts of SESSION_BYTES. ClickException for unusable data."""
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    kinds = {name: source.kind for name, source in read_manifest().items()}
    for record in _records(data):
        kind = kinds.get(record.source, "mixed")
        if kind in texts:
            texts[kind].append(_text(record, kind))
        texts["mixed"].append(_text(record, "mixed"))
    found = {kind: _cut(parts)[:n_max] for kind, parts in texts.items()}
    if not all(found.values()):
        lacking = ", ".join(kind for kind, each in found.items() if not each)
        raise click.ClickException(f"{data} has less than {SESSION_BYTES} bytes of {lacking} text.")
    return found


def held_out(data: Path) -> bytes:
    """UTF-8 text of the records whose source the codec's tables and models were not trained on, in
    random order. ClickException where there are none."""
    known = read_manifest()
    texts = [_text(each, "mixed") for each in _records(data) if each.source not in known]
    if not texts:
        raise click.ClickException(
            f"The codec was trained on every source of {data}: name records of another one."
        )
    turn = np.random.default_rng(1).permutation(len(texts))
    return "".join(texts[i] for i in turn).encode()


def training(data: Path, n_bytes: int) -> list[bytes]:
    """Texts of the training split beside `data`, in random order, about `n_bytes`."""
    records = [_text(record, "mixed").encode() for record in _records(data.with_name(TRAIN))]
    turn = np.random.default_rng(0).permutation(len(records))
    chosen, left = [], n_bytes
    for i in turn:
        chosen.append(records[i])
        left -= len(records[i])
        if left <= 0:
            break
    return chosen


def _records(path: Path) -> list[Record]:
    if not path.name.endswith(SUFFIX) or not path.exists():
        raise click.ClickException(f"{path} is needed: a *{SUFFIX} file of chat records.")
    try:
        return list(read_records(path))
    except TrainError as error:
        raise click.ClickException(str(error)) from error


def _text(record: Record, kind: str) -> str:
    said = [m for m in record.messages if kind != "assistant" or m.role != "user"]
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


def _cut(parts: list[str]) -> list[bytes]:
    turn = np.random.default_rng(1).permutation(len(parts))
    text = "".join(parts[i] for i in turn).encode()
    cuts = [text[at : at + SESSION_BYTES] for at in range(0, len(text), SESSION_BYTES)]
    return [cut.decode(errors="ignore").encode() for cut in cuts if len(cut) == SESSION_BYTES]
