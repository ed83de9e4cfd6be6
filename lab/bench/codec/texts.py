"""Sessions to compress: chat records of one kind, in a chat template, joined and cut to 16 KB."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from lab.texts.chat_records import ChatRecord
from lab.texts.chat_template import in_template, records
from lab.train.data.manifest import read_manifest
from lab.train.data.records import TRAIN

SESSION_BYTES = 16384
KINDS = ("human", "assistant", "code", "mixed")


def sessions(data: Path, n_max: int) -> dict[str, list[bytes]]:
    """Kind -> up to `n_max` UTF-8 texts of SESSION_BYTES. ClickException for unusable data."""
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    kinds = {name: source.kind for name, source in read_manifest().items()}
    for record in records(data):
        kind = kinds.get(record.source, "mixed")
        if kind in texts:
            texts[kind].append(in_template(record, users=kind != "assistant"))
        texts["mixed"].append(in_template(record))
    found = {kind: cut(parts)[:n_max] for kind, parts in texts.items()}
    if not all(found.values()):
        lacking = ", ".join(kind for kind, each in found.items() if not each)
        raise click.ClickException(f"{data} has less than {SESSION_BYTES} bytes of {lacking} text.")
    return found


def training(data: Path, n_bytes: int) -> list[bytes]:
    """Texts of the training split beside `data`, in random order, about `n_bytes`."""
    return random_texts(records(data.with_name(TRAIN)), n_bytes)


def random_texts(found: Sequence[ChatRecord], n_bytes: int) -> list[bytes]:
    """Texts of records in random order, about `n_bytes`."""
    texts = [in_template(record).encode() for record in found]
    turn = np.random.default_rng(0).permutation(len(texts))
    chosen, left = [], n_bytes
    for i in turn:
        chosen.append(texts[i])
        left -= len(texts[i])
        if left <= 0:
            break
    return chosen


def cut(parts: Sequence[str]) -> list[bytes]:
    """Texts of SESSION_BYTES of all parts in random order, as UTF-8."""
    turn = np.random.default_rng(1).permutation(len(parts))
    text = "".join(parts[i] for i in turn).encode()
    cuts = [text[at : at + SESSION_BYTES] for at in range(0, len(text), SESSION_BYTES)]
    return [each.decode(errors="ignore").encode() for each in cuts if len(each) == SESSION_BYTES]
