"""Ids to a blob and back: chooses the form, checks what it wrote, says what is missing.

codec = Codec(vocabulary)
blob = codec.encode(ids, base=prefix_ids)
ids = codec.decode(blob, base=prefix_ids)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from towerd.codec import container
from towerd.codec.base import IDS_MAX, Ids, Vocabulary, as_ids, ids_hash, vocabulary_hash
from towerd.codec.container import Blob, Chunk
from towerd.codec.errors import Damaged, UnknownModel, WrongBase, WrongVocabulary
from towerd.codec.fallback import Fallback, Packed, Ranked, ZstdText

_FALLBACKS: dict[str, type[Packed] | type[Ranked] | type[ZstdText]] = {
    "packed": Packed,
    "ranked": Ranked,
    "text": ZstdText,
}


class Codec:
    """Codes the ids of one vocabulary. Thread-safe once made; making it costs little, the first
    use of a form builds that form's tables."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.vocabulary_hash = vocabulary_hash(vocabulary)

    def encode(self, ids: Sequence[int] | Ids, base: Sequence[int] | Ids = (),
               form: str = "auto") -> bytes:  # fmt: skip
        """The blob of `ids`, which follow `base` (context: it must be given again to decode).

        `form` is "auto" (the smallest that is safe) or a name in `container.FORMS`. The blob was
        decoded again and compared before it is returned. Raises ValueError for ids that are not
        in the vocabulary or too many, RuntimeError if a form does not give back what it was given."""
        wanted, before = as_ids(ids), as_ids(base)
        self._check(wanted)
        if len(wanted) > IDS_MAX:
            raise ValueError(f"{len(wanted)} ids are more than the {IDS_MAX} that a blob holds.")
        names = _FALLBACKS if form == "auto" else (form,)
        return min((self._encode(wanted, before, name) for name in names), key=len)

    def decode(self, blob: bytes, base: Sequence[int] | Ids = ()) -> Ids:
        """int32[n] ids of a blob, whose hash is checked.

        Raises a CodecError that says what is wrong or missing."""
        parsed = container.read(blob)
        before = as_ids(base)
        self._check_needs(parsed, before)
        return self._decode(parsed, before)

    def can_decode(self, blob: bytes) -> bool:
        """Whether the vocabulary, model and runtime that the blob needs are here."""
        parsed = container.read(blob)
        return parsed.vocabulary == self.vocabulary_hash and parsed.form.name in _FALLBACKS

    @functools.cached_property
    def _fallbacks(self) -> dict[str, Fallback]:
        return {name: kind(self.vocabulary) for name, kind in _FALLBACKS.items()}

    def _encode(self, ids: Ids, base: Ids, name: str) -> bytes:
        form = container.BY_NAME.get(name)
        coder = self._fallbacks.get(name)
        if form is None or coder is None:
            raise ValueError(f"There is no form called {name}; there are {', '.join(_FALLBACKS)}.")
        side, bits = coder.encode(ids)
        chunks = (Chunk(len(ids), bits),) if len(ids) else ()
        blob = Blob(form, self.vocabulary_hash, ids_hash(ids), len(ids), chunks, side,
                    model=coder.model)  # fmt: skip
        data = container.write(blob)
        if self.decode(data, base).tolist() != ids.tolist():
            raise RuntimeError(f"The form {name} does not give back the ids it was given.")
        return data

    def _decode(self, blob: Blob, base: Ids) -> Ids:
        coder = self._fallbacks[blob.form.name]
        if blob.model != coder.model:
            raise UnknownModel(
                f"The blob needs the tables {blob.model.hex()}, and this towerd has "
                f"{coder.model.hex()}: use the version of towerd that wrote it."
            )
        bits = b"".join(chunk.bits for chunk in blob.chunks)
        ids = np.asarray(coder.decode(blob.side, bits, blob.n_ids) if blob.n_ids else (), np.int32)
        return _checked(ids, blob)

    def _check(self, ids: Ids) -> None:
        n_tokens = len(self.vocabulary.pieces)
        if len(ids) and int(ids.max()) >= n_tokens:
            raise ValueError(f"Id {int(ids.max())} is not in the vocabulary of {n_tokens} tokens.")

    def _check_needs(self, blob: Blob, base: Ids) -> None:
        if blob.vocabulary != self.vocabulary_hash:
            raise WrongVocabulary(
                f"The blob was written for another model's tokenizer ({blob.vocabulary.hex()}, "
                f"here {self.vocabulary_hash.hex()}): serve that model to read it."
            )
        if blob.base_ids and (len(base) != blob.base_ids or ids_hash(base) != blob.base_hash):
            raise WrongBase(
                f"The blob continues a prefix of {blob.base_ids} ids with hash "
                f"{blob.base_hash.hex()}: give that prefix as the base."
            )


def without_fallback(data: bytes) -> bytes:
    """The same blob without its fallback, for measuring."""
    return container.write(dataclasses.replace(container.read(data), fallback=b""))


def _checked(ids: Ids, blob: Blob) -> Ids:
    if len(ids) != blob.n_ids or ids_hash(ids) != blob.hash:
        raise Damaged(
            "The blob decodes to other ids than it was made of; use its fallback or a copy."
        )
    return ids
