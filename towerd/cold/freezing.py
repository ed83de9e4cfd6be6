"""Freezing and thawing one session of a store, in an order that never loses data.

    tokens --encode, decode, compare--> blob --durable--> read back, decode, compare
           --one transaction--> turns without tokens, segments of nobody else's removed
    blob --decode, its hash holds--> tokens --one transaction--> turns and segments, no blob

Killed anywhere in between, the session is either as it was before or as it is after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from towerd.codec.errors import CodecError
from towerd.errors import NotFound, SessionFrozen, StoreError, ThawError
from towerd.store import History, Node, Store
from towerd.store.segments import durable
from towerd.store.sessions.cold import Frozen
from towerd.tokens import Ids

if TYPE_CHECKING:
    from towerd.codec import Codec

MayDrop = Callable[[str, str, Sequence[Node]], bool]
"""(id, scope, segments to be removed): whether the session is currently unused."""


@dataclass(frozen=True, slots=True)
class Froze:
    """What freezing a session did."""

    id: str
    scope: str
    n_tokens: int
    """Of all turns, each token once, what is shared with other sessions left out."""
    nbytes: int
    """The blob."""
    removed: tuple[Node, ...]


def freeze(
    store: Store,
    codec: Codec,
    id: str,
    scope: str | None = None,
    may_drop: MayDrop | None = None,
    form: str = "auto",
) -> Froze | None:
    """Freeze a session; None if it is frozen already. Takes a while: about a second for a few
    thousand tokens.

    Raises NotFound, InvalidRequest (no turns), SessionBusy (in use, or it went on meanwhile),
    StoreError (ambiguous, or it cannot be coded), DiskFull; the session stays as it was then."""
    warm = store.cold.take(id, scope)
    if warm is None:
        return None
    info = warm.taken.info
    history = warm.taken.history()
    base, own = history.stream[: warm.n_base], history.stream[warm.n_base :]
    try:
        blob = codec.encode(own, base=base, form=form)
        keep(codec, blob)
        copy = store.cold.put(warm, history, blob)
        if not np.array_equal(_stream(codec, copy), history.stream):
            raise RuntimeError("the blob that was stored has other tokens")
    except (CodecError, ThawError, ValueError, RuntimeError) as error:
        message = f"Session {id!r} cannot be frozen: {error}"
        raise StoreError(message, public=message) from error
    if copy.history(history.stream).turns != history.turns:
        raise StoreError(f"Session {id!r} cannot be frozen: its turns do not come back.")
    ask = may_drop or (lambda *_: True)
    removed = store.cold.drop(warm, lambda doomed: ask(info.id, info.scope, doomed))
    return Froze(info.id, info.scope, len(own), len(blob), tuple(removed))


def thaw(store: Store, codec: Codec, id: str, scope: str | None = None) -> bool:
    """Thaw a session; False if it is not frozen. Raises NotFound, StoreError (ambiguous),
    ThawError (it cannot be decoded here, and stays as it is), DiskFull."""
    while (frozen := store.cold.read(id, scope)) is not None:
        if store.cold.restore(frozen, frozen.history(decode(codec, frozen))):
            return True
    return False


def recode(store: Store, codec: Codec, id: str, scope: str) -> bool:
    """Code a frozen session again in the smallest form; whether it is frozen still. Raises ThawError
    (it cannot be decoded here), StoreError, DiskFull; the blob stays then."""
    try:
        frozen = store.cold.read(id, scope)
    except NotFound:
        return False
    if frozen is None:
        return False
    stream = decode(codec, frozen)
    try:
        blob = codec.encode(stream[len(frozen.base) :], base=frozen.base)
    except (ValueError, RuntimeError) as error:
        raise StoreError(f"Session {id!r} cannot be coded again: {error}") from error
    keep(codec, blob)
    store.cold.recode(frozen, blob)
    return True


def cold_history(store: Store, codec: Codec, id: str, scope: str | None = None) -> History | None:
    """What a frozen session consists of, without thawing it; None if it is not frozen. Raises as
    `thaw`, and SessionFrozen if it went on without its tokens."""
    frozen = store.cold.read(id, scope)
    if frozen is not None and frozen.went_on:
        raise SessionFrozen(
            f"Session {id!r} is frozen and went on since: thaw it with towerctl thaw first."
        )
    return None if frozen is None else frozen.history(decode(codec, frozen))


def keep(codec: Codec, blob: bytes) -> None:
    """Keep with the store what a blob needs besides this release. Raises DiskFull, StoreError."""
    with durable.store_errors("The table that frozen sessions are read with cannot be kept"):
        codec.keep(blob)


def decode(codec: Codec, frozen: Frozen) -> Ids:
    """int32[n]: the token ids that the turns of a frozen session add. Raises ThawError."""
    try:
        return _stream(codec, frozen)
    except CodecError as error:
        raise ThawError(f"Session {frozen.info.id!r} cannot be thawed: {error}") from error


def _stream(codec: Codec, frozen: Frozen) -> Ids:
    return np.concatenate([frozen.base, codec.decode(frozen.blob, base=frozen.base)])
