"""Ids to a blob and back: chooses the form, verifies each blob, reports what is missing.

codec = Codec(vocabulary)
blob = codec.encode(ids, base=prefix_ids)
ids = codec.decode(blob, base=prefix_ids)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from towerd.codec import container, kept, media
from towerd.codec.base import IDS_MAX, TokenVocabulary, as_ids, ids_hash, vocabulary_hash
from towerd.codec.container import BY_NAME, Blob
from towerd.codec.errors import (
    CodecError,
    Damaged,
    UnknownModel,
    WrongBase,
    WrongVocabulary,
    other_ids,
)
from towerd.codec.forms import mini
from towerd.codec.forms.fallback import Packed, Ranked, ZstdText
from towerd.codec.forms.form import Coded, FormCoder, TextCoder
from towerd.codec.forms.mini import Student
from towerd.codec.forms.mix import MiniCoder, MiniText, Mix
from towerd.codec.forms.network import Network
from towerd.codec.prior import file
from towerd.codec.text import Text, spell, to_ids
from towerd.tokens import Ids

STUDENT = "student"
"""The form `network` with the student that was given."""
AUTO = ("packed", "ranked", "text", "mix")
"""The forms that `auto` chooses from, besides `network` if there is a mini model."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenText:
    """Ids as their text and what corrects them; whoever has their tokenizer has the ids again."""

    text: Text
    n_ids: int
    hash: bytes
    """Of the ids, 16 bytes (`base.ids_hash`)."""
    media: bytes = b""
    """See `media.take_out`."""

    def ids(self, vocabulary: TokenVocabulary) -> Ids:
        """int32[n_ids]. Damaged if this vocabulary cuts the text into other ids."""
        tokens = np.array(to_ids(self.text, vocabulary), np.int32)
        return _checked(self.n_ids, self.hash, self.media, tokens)

    def spell(self, vocabulary: TokenVocabulary) -> bytes:
        """The text, control tokens as they are written and without media."""
        return spell(self.text, vocabulary)


class Codec:
    """Codes the ids of one vocabulary. Thread-safe; the first use of a form builds its tables."""

    def __init__(
        self,
        vocabulary: TokenVocabulary,
        networks: Sequence[FormCoder] = (),
        tables: Path | None = None,
        student: Path | None = None,
    ) -> None:
        """`networks`: forms that need a model (`models/`), instead of those of the package.
        `tables`: a folder for copies of the tables and models that blobs need, because a later
        release may have others. `student`: a GGUF for one more `network`, which `auto` tries, too
        (`forms/mini.py`)."""
        self.vocabulary = vocabulary
        self._tables, self._student_path = tables, student
        self.vocabulary_hash = vocabulary_hash(vocabulary)
        self._makers: dict[str, Callable[[], FormCoder]] = {
            "packed": lambda: Packed(len(vocabulary.pieces)),
            "ranked": lambda: Ranked(vocabulary),
            "text": lambda: ZstdText(vocabulary),
            "mix": lambda: Mix(vocabulary, file.bundled()),
        }
        if mini.PATH.exists():
            self._makers["network"] = lambda: mini.mini_network(vocabulary, mini.PATH)
        self._networks = {network.name: network for network in networks}
        self._made: dict[str, FormCoder] = {}
        self._student: Student | None = None
        self._lock, self._opening = threading.Lock(), threading.Lock()

    def encode(
        self, ids: Sequence[int] | Ids, base: Sequence[int] | Ids = (), form: str = "auto"
    ) -> bytes:
        """The blob of `ids`, which follow `base` (context that `decode` needs, too).

        `form` is "auto" (the smallest), a name in `container.FORMS`, or STUDENT. The blob is
        decoded and compared before it is returned. Raises ValueError if there are too many ids or
        one is not in the vocabulary, RuntimeError if a form does not give back the ids it was
        given.
        """
        wanted, before = as_ids(ids), as_ids(base)
        self._check_ids(wanted)
        self._check_ids(before)
        if len(wanted) > IDS_MAX:
            raise ValueError(f"{len(wanted)} ids are more than the {IDS_MAX} that a blob holds.")
        coders = self._auto() if form == "auto" else [self._coder(form)]
        return min((self._encode(wanted, before, coder) for coder in coders), key=len)

    def decode(self, blob: bytes, base: Sequence[int] | Ids = ()) -> Ids:
        """int32[n] ids of a blob, checked against their hash. Raises a CodecError that says what
        is wrong or missing."""
        parsed = container.read(blob)
        before = as_ids(base)
        self._check_needs(parsed, before)
        return self._decode(parsed, before)

    def read(self, blob: bytes, base: Sequence[int] | Ids = ()) -> Ids | WrittenText:
        """The ids of a blob; or its text where this vocabulary cannot cut that into those ids: another
        llama.cpp, or a vocabulary that is kept without its tokenizer. Raises as `decode`."""
        parsed = container.read(blob)
        before = as_ids(base)
        self._check_needs(parsed, before)
        coder, n_tokens = self._ready(parsed)
        if not isinstance(coder, TextCoder) or not n_tokens:
            return self._decode(parsed, before)
        text = coder.text(_coded(parsed), n_tokens, media.tokens_of(before))
        written = WrittenText(text, parsed.n_ids, parsed.hash, parsed.media)
        try:
            return written.ids(self.vocabulary)
        except CodecError:
            if parsed.base_ids and isinstance(coder, MiniCoder):
                if not coder.mini.cuts_as_written():
                    raise  # after another base the text would be another one
            return written

    def keep(self, blob: bytes) -> None:
        """Copy the tables and models that a blob needs into `tables`; call it before the blob is
        relied on. Raises OSError."""
        parsed = container.read(blob)
        if self._tables is None:
            return
        if self._is_students(parsed):
            kept.keep(self._tables, self._coder(STUDENT))
        elif parsed.form.name not in self._networks:
            kept.keep(self._tables, self._coder(parsed.form.name))

    def is_current(self, blob: bytes) -> bool:
        """Whether a blob is of a form that is still written, with the table and model that new ones
        have, or with a model of the user's of which there is a copy."""
        parsed = container.read(blob)
        if parsed.form != BY_NAME[parsed.form.name]:
            return False
        names = [parsed.form.name]
        if self._student_path is not None and parsed.form.name == Network.name:
            names.append(STUDENT)
        for name in names:
            with suppress(UnknownModel):
                if self._coder(name).model == parsed.model:
                    return True
        return self._tables is not None and kept.is_students(self._tables, parsed.model)

    def minis(self) -> list[MiniText]:
        """The vocabularies that texts are coded in now."""
        found = [self.text_coder().mini]
        if self._student_path is not None:
            with suppress(UnknownModel):
                found.append(self._open_student().mini)
        return found

    def text_coder(self) -> Mix | Network:
        """The form that takes the fewest bits for a text: `network`, or `mix` if there is no mini
        model. UnknownModel if the package has no table."""
        coder = self._coder(self._names()[-1])
        assert isinstance(coder, Mix | Network)
        return coder

    def _auto(self) -> list[FormCoder]:
        coders = [self._coder(name) for name in self._names()]
        if self._student_path is not None:
            try:
                coders.append(self._coder(STUDENT))
            except UnknownModel as error:
                log.warning("Conversations are coded without the student: %s", error)
                self._student_path = None
        return coders

    def _names(self) -> tuple[str, ...]:
        if "network" not in self._networks and "network" not in self._makers:
            return AUTO
        try:
            self._coder("network")
        except UnknownModel as error:
            log.warning("Conversations are coded without the mini model: %s", error)
            self._makers.pop("network", None)
            return AUTO
        return (*AUTO, "network")

    def _coder(self, name: str) -> FormCoder:
        if name in self._networks:
            return self._networks[name]
        if name == STUDENT:
            return self._open_student()
        if name not in self._makers:
            if name in BY_NAME:
                raise UnknownModel(f"The form {name} needs a model that is not loaded here.")
            raise ValueError(f"There is no form called {name}; there are {', '.join(BY_NAME)}.")
        with self._lock:
            if name not in self._made:
                self._made[name] = self._makers[name]()
            return self._made[name]

    def _open_student(self) -> Student:
        with self._opening:  # another lock: deriving a start must not keep others from thawing
            if self._student is None:
                if self._student_path is None:
                    raise UnknownModel("No student was given to code with.")
                find = None if self._tables is None else kept.starts(self._tables)
                self._student = Student(self.vocabulary, self._student_path, find)
            return self._student

    def _is_students(self, blob: Blob) -> bool:
        return self._student is not None and self._student.model == blob.model

    def _coder_of(self, blob: Blob) -> FormCoder:
        """The coder that reads a blob, with the kept table of an earlier release if it needs one.
        Raises UnknownModel."""
        here = blob.form.name in self._makers or blob.form.name in self._networks
        coder = self._coder(blob.form.name) if here else None
        if coder is not None and blob.model == coder.model:
            return coder
        if self._is_students(blob):
            return self._coder(STUDENT)
        name = f"{blob.form.name}-{blob.model.hex()}"
        with self._lock:
            if self._tables is not None and name not in self._made:
                found = kept.find(self._tables, self.vocabulary, blob)
                if found is not None:
                    self._made[name] = found
            if name in self._made:
                return self._made[name]
        if self._student_path is not None and blob.form.name == Network.name:
            return self._coder(STUDENT)
        return coder or self._coder(blob.form.name)

    def _encode(self, ids: Ids, base: Ids, coder: FormCoder) -> bytes:
        tokens = media.tokens_of(ids)
        coded = coder.encode(tokens, media.tokens_of(base)) if len(tokens) else Coded(b"", ())
        needed = base if coder.uses_base else base[:0]
        blob = Blob(
            BY_NAME[coder.name],
            self.vocabulary_hash,
            ids_hash(ids),
            len(ids),
            coded.chunks,
            coded.side,
            len(needed),
            ids_hash(needed) if len(needed) else b"",
            coder.model,
            media.take_out(ids),
        )
        if self._decode(blob, base).tolist() != ids.tolist():
            raise RuntimeError(f"The form {coder.name} does not give back the ids it was given.")
        return container.write(blob)

    def _decode(self, blob: Blob, base: Ids) -> Ids:
        coder, n_tokens = self._ready(blob)
        ids = np.zeros(0, np.int32)
        if n_tokens:
            ids = coder.decode(_coded(blob), n_tokens, media.tokens_of(base))
        return _checked(blob.n_ids, blob.hash, blob.media, ids)

    def _ready(self, blob: Blob) -> tuple[FormCoder, int]:
        """What reads a blob, and the number of its tokens without media."""
        coder = self._coder_of(blob)
        self._check_model(blob, coder)
        n_tokens = blob.n_ids - media.count(blob.media)
        if n_tokens < 0:
            raise Damaged("The blob is damaged: it has fewer ids than its media.")
        return coder, n_tokens

    def _check_ids(self, ids: Ids) -> None:
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
        if len(base):
            self._check_ids(base)

    def _check_model(self, blob: Blob, coder: FormCoder) -> None:
        if blob.model != coder.model:
            raise UnknownModel(
                f"The blob needs the model or table {blob.model.hex()}, and here is "
                f"{coder.model.hex()}: use the version of towerd that wrote it, with the student "
                "that it was given, if any."
            )


def _coded(blob: Blob) -> Coded:
    return Coded(blob.side, blob.chunks, blob.form.n_ctx)


def _checked(n_ids: int, hash: bytes, taken_out: bytes, tokens: Ids) -> Ids:
    """The ids of a blob, with its media, if they have the hash that they should."""
    ids = media.put_back(tokens, taken_out)
    if len(ids) != n_ids or ids_hash(ids) != hash:
        raise other_ids()
    return ids


def pack_ids(ids: Ids, vocabulary: bytes, n_tokens: int) -> bytes:
    """A blob of the form `packed`, which needs no more of the vocabulary than its hash and its number
    of tokens. ValueError if there are too many ids or one is not in the vocabulary."""
    if len(ids) > IDS_MAX:
        raise ValueError(f"{len(ids)} ids are more than the {IDS_MAX} that a blob holds.")
    if len(ids) and int(ids.max()) >= n_tokens:
        raise ValueError(f"Id {int(ids.max())} is not in the vocabulary of {n_tokens} tokens.")
    tokens = media.tokens_of(ids)
    form = Packed(n_tokens)
    chunks = form.encode(tokens, tokens[:0]).chunks if len(tokens) else ()
    head = BY_NAME[form.name], vocabulary, ids_hash(ids), len(ids)
    return container.write(Blob(*head, chunks, media=media.take_out(ids)))


def packed_ids(data: bytes, vocabulary: bytes, n_tokens: int) -> Ids:
    """int32[n]: the inverse of `pack_ids`. Raises a CodecError."""
    blob = container.read(data)
    n = blob.n_ids - media.count(blob.media)
    if blob.form.name != Packed.name or blob.vocabulary != vocabulary or n < 0:
        raise Damaged(
            "The blob is damaged: it is not of the form and vocabulary that it should be."
        )
    empty = np.zeros(0, np.int32)
    tokens = Packed(n_tokens).decode(_coded(blob), n, empty) if n else empty
    if n and int(tokens.max()) >= n_tokens:
        raise Damaged(f"The blob is damaged: it has an id that is not among {n_tokens} tokens.")
    return _checked(blob.n_ids, blob.hash, blob.media, tokens)
