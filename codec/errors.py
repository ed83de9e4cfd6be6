"""Everything that can be wrong with a blob: one exception type and its kinds."""

from __future__ import annotations


class CodecError(Exception):
    """A blob that cannot be decoded here. The message is one sentence that says what is missing."""


class Truncated(CodecError):
    """The blob is shorter than its header says."""


class Damaged(CodecError):
    """A checksum, a count or a hash of the blob does not hold."""


class NewerVersion(CodecError):
    """The blob was written by a later version of the format."""


class UnknownModel(CodecError):
    """The blob needs a model or table that is not loaded here."""


class WrongVocabulary(CodecError):
    """The blob holds token ids of another model's tokenizer."""


class WrongBase(CodecError):
    """The blob is conditioned on a prefix that was not given, or on another one."""


def other_ids() -> Damaged:
    """The error for a blob whose ids are not those that it was made of."""
    return Damaged(
        "The blob decodes to other ids than it was made of: it was changed, or this "
        "llama.cpp cuts text into tokens otherwise than the one that wrote it."
    )
