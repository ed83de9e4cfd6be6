"""What the tokenizer of a store's conversations gave for fixed texts at the last start, and what is
left to do since it gave something else."""

from __future__ import annotations

from towerd.store.state.state import StoreState

_PROBE = "tokenizer_probe:"
CHANGED = "tokenizer_changed:"
"""Begins the key of the catalog's meta, with the tokenizer's digest, whose value is RENEWING, the
number of conversations that can only be read as text, or 0."""
RENEWING = "renewing"


def note_probe(
    state: StoreState, digest: bytes, now: str, mini: str = "", written: str | None = None
) -> bool:
    """Remember what a tokenizer gives now; whether it gave something else at the last start. Raises
    DiskFull. `mini`: the hash of the vocabulary that conversations of this tokenizer are coded in, if
    the probe is of that; `written`: what it gave before any start that is remembered."""
    key = _PROBE + digest.hex() + (f":{mini}" if mini else "")
    with state.locked():
        meta = state.catalog
        before = meta.get_meta(key) or written
        if before == now:
            return False
        if before is not None:
            meta.set_meta(CHANGED + digest.hex(), RENEWING)  # first: a kill in between asks again
        meta.set_meta(key, now)
        return before is not None


def is_renewing(state: StoreState, digest: bytes) -> bool:
    """Whether conversations were coded before the tokenizer changed and were not yet renewed."""
    with state.locked():
        return state.catalog.get_meta(CHANGED + digest.hex()) == RENEWING


def note_renewed(state: StoreState, digest: bytes, n_text: int) -> None:
    """All were renewed but `n_text`, which can be read as text alone."""
    with state.locked():
        state.catalog.set_meta(CHANGED + digest.hex(), str(n_text))
