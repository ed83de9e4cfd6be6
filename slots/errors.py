"""The one error for state bytes and rows that cannot be used."""

from __future__ import annotations


class StateError(ValueError):
    """Bytes are damaged, hostile or of an unsupported form, or rows do not fit together.

    The message is one sentence that says what was found and what was expected."""
