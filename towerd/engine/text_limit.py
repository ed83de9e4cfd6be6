"""How long a text may be that is tokenized."""

from __future__ import annotations

from towerd.errors import TooLarge


def check_text(text: str, bytes_max: int) -> None:
    """Raises TooLarge: tokenizing takes many times the bytes of a text."""
    # Encoding it to know its bytes would block the event loop.
    if len(text) > bytes_max:
        raise TooLarge(
            f"The text has {len(text)} characters; at most {bytes_max} bytes are tokenized at once"
        )
