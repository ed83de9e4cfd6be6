"""What a student gains where it counts: in the bytes of conversations that it has not seen, coded as
the daemon codes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from lab.texts.chat_records import ChatRecord
from lab.train.data.corpus import shuffled
from lab.train.data.form import TextForm
from towerd.codec import Codec
from towerd.codec.codec import STUDENT
from towerd.codec.errors import UnknownModel
from towerd.codec.vocabulary import GgufVocabulary
from towerd.tokens import Ids

GAIN_TOKENS = 32768
"""Conversations are measured until they have this many tokens in all."""


def held_out(
    dev: Mapping[str, Sequence[ChatRecord]], form: TextForm, n_tokens: int = GAIN_TOKENS
) -> list[Ids]:
    """The ids of whole conversations that were kept from training (`data/records.py` says which),
    sources in turn, until there are `n_tokens`."""
    found: list[Ids] = []
    for turn in zip_longest(*(shuffled(records) for _, records in sorted(dev.items()))):
        for record in turn:
            if n_tokens > 0 and record is not None:
                (encoded,) = form.encode([record])
                found.append(encoded.ids.astype(np.int32))
                n_tokens -= len(found[-1])
    return found


def gain(served: Path, student: Path, conversations: Sequence[Ids]) -> dict[str, Any]:
    """Bytes and bits per token of conversations with `served`, a GGUF, as blobs: with the bundled
    model, with the student, and with whichever is smaller each time, as the daemon stores them.
    `gain` is the share of bytes that the student saves, negative if it takes more.

    Where the student cannot be used as a codec model there is only `refused`, which says why."""
    with GgufVocabulary(served) as vocabulary:
        bundled, taught = Codec(vocabulary), Codec(vocabulary, student=student)
        sizes = np.zeros((len(conversations), 2), np.int64)
        try:
            for i, ids in enumerate(conversations):
                sizes[i] = len(bundled.encode(ids)), len(taught.encode(ids, form=STUDENT))
        except UnknownModel as error:
            return {"refused": str(error)}
    n_tokens = sum(map(len, conversations))
    totals = (*sizes.sum(axis=0).tolist(), int(sizes.min(axis=1).sum()))
    return {
        "sessions": len(conversations),
        "tokens": n_tokens,
        **{
            name: {"bytes": total, "bits_per_token": round(8 * total / n_tokens, 3)}
            for name, total in zip(("bundled", "student", "smaller"), totals, strict=True)
        },
        "gain": round(1 - totals[1] / totals[0], 4),
    }


def advice(found: Mapping[str, Any], student: Path) -> str:
    """What to do about a gain, in a sentence."""
    if "refused" in found:
        return f"It cannot be used as --codec-model: {found['refused']}"
    where = f"on {found['sessions']} conversations that it did not see"
    if found["gain"] <= 0:
        more = f"{-found['gain']:.1%} more bytes" if found["gain"] else "as many bytes"
        return f"It takes {more} than the bundled model {where}: do not use it as --codec-model."
    return (
        f"It saves {found['gain']:.1%} of the bundled model's bytes {where}: use it with "
        f"towerd serve --codec-model {student}"
    )
