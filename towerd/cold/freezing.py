"""Freezing and thawing one session of a store, in an order that never loses data.

    tokens --encode--> blob --durable--> read back, decode, compare: a copy beside the tokens
    copy --decode, compare--> turns without tokens, segments that nothing else needs removed, in
           one transaction
    blob --decode, check its hash--> tokens --one transaction--> turns and segments, and a copy

If the process is killed at any point, the session is either as before or fully converted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from towerd.codec.errors import CodecError
from towerd.errors import SessionFrozen, StoreError, ThawError
from towerd.store import History, Node, Store
from towerd.store.files import durable
from towerd.store.sessions.frozen import FrozenSession, WarmSession
from towerd.tokens import Ids

if TYPE_CHECKING:
    from towerd.codec import Codec

MayDrop = Callable[[str, str, Sequence[Node]], bool]
"""(id, scope, segments to be removed): whether the session is currently unused."""
ALIKE_SHARE_MAX = 0.9
"""A blob follows a base that its session does not begin with where that saves a tenth of its bytes."""


@dataclass(frozen=True, slots=True)
class FreezeResult:
    """The result of freezing a session."""

    id: str
    scope: str
    n_tokens: int
    """Tokens in the blob: those of all turns, each once, without those shared with other
    sessions."""
    nbytes: int
    """Size of the blob in bytes."""
    removed: tuple[Node, ...]


def freeze(
    store: Store,
    codec: Codec,
    id: str,
    scope: str | None = None,
    may_drop: MayDrop | None = None,
    form: str = "auto",
) -> FreezeResult | None:
    """Freeze a session, from its copy if that is current; None if it is already frozen. Takes about
    a second for a few thousand tokens. A `form` other than auto makes a new blob of that form.

    Raises NotFound, InvalidRequest (no turns), SessionBusy (in use, or continued meanwhile),
    StoreError (ambiguous id, or it cannot be coded) or DiskFull; the session is then unchanged."""
    warm = store.cold.take(id, scope)
    if warm is None:
        return None
    info, history = warm.taken.info, warm.taken.history()
    copy = store.cold.copy_of(warm) if form == "auto" else None
    if copy is None or not _holds(codec, copy, history):
        copy = _put_copy(store, codec, warm, history, form)
    ask = may_drop or (lambda *_: True)
    removed = store.cold.drop(warm, copy, lambda doomed: ask(info.id, info.scope, doomed))
    n_own = len(history.stream) - copy.n_base
    return FreezeResult(info.id, info.scope, n_own, len(copy.blob), tuple(removed))


def write_copy(
    store: Store, codec: Codec, id: str, scope: str | None = None, form: str = "auto"
) -> bool:
    """Write the blob of a session, verified, beside its tokens and rows, which stay. False if it is
    frozen or has a current copy. Raises as `freeze`; the session is never changed."""
    warm = store.cold.take(id, scope)
    if warm is None or store.cold.copy_of(warm) is not None:
        return False
    _put_copy(store, codec, warm, warm.taken.history(), form)
    return True


def thaw(store: Store, codec: Codec, id: str, scope: str | None = None) -> bool:
    """Thaw a session; False if it is not frozen. Raises NotFound, StoreError (ambiguous id),
    ThawError (it cannot be decoded here and stays frozen) or DiskFull."""
    while (frozen := store.cold.read(id, scope)) is not None:
        if store.cold.restore(frozen, frozen.history(decode(codec, frozen))):
            return True
    return False


def recode(store: Store, codec: Codec, id: str, scope: str | None = None) -> bool:
    """Code a session that is frozen or has a copy in coded form again, in the smallest form, verified
    before it replaces the old blob; False if it has none. Raises NotFound, ThawError (it cannot be
    decoded here), SessionBusy, StoreError or DiskFull; the old blob then stays."""
    frozen = store.cold.read(id, scope)
    if frozen is None:
        return _recode_copy(store, codec, id, scope)
    stream, context = decode(codec, frozen), store.cold.alike.context_of(frozen)
    try:
        blob = codec.encode(stream[context.n :], base=context.ids)
    except (ValueError, RuntimeError) as error:
        raise StoreError(f"Session {id!r} cannot be coded again: {error}") from error
    keep(codec, blob)
    store.cold.recode(frozen, blob, context)
    return True


def _recode_copy(store: Store, codec: Codec, id: str, scope: str | None) -> bool:
    warm = store.cold.take(id, scope)
    if warm is None or store.cold.copy_of(warm) is None:
        return False
    _put_copy(store, codec, warm, warm.taken.history(), "auto")
    return True


def cold_history(store: Store, codec: Codec, id: str, scope: str | None = None) -> History | None:
    """The history of a frozen session, without thawing it; None if it is not frozen. Raises as
    `thaw`, and SessionFrozen if turns were added while it was frozen."""
    frozen = store.cold.read(id, scope)
    if frozen is not None and frozen.was_continued:
        raise SessionFrozen(
            f"Session {id!r} is frozen and went on since: thaw it with towerctl thaw first."
        )
    return None if frozen is None else frozen.history(decode(codec, frozen))


def keep(codec: Codec, blob: bytes) -> None:
    """Store the tables that later releases need to read a blob. Raises DiskFull or StoreError."""
    with durable.store_errors("The table that frozen sessions are read with cannot be kept"):
        codec.keep(blob)


def decode(codec: Codec, frozen: FrozenSession) -> Ids:
    """The token ids that the turns of a frozen session add, int32[n]. Raises ThawError."""
    try:
        return _stream(codec, frozen)
    except CodecError as error:
        raise ThawError(f"Session {frozen.info.id!r} cannot be thawed: {error}") from error


def _put_copy(
    store: Store, codec: Codec, warm: WarmSession, history: History, form: str
) -> FrozenSession:
    """Store a session's blob, and read it back, decode and compare it. Raises as `freeze`."""
    id = warm.session.id
    try:
        warm, blob = _smallest(store, codec, warm, history.stream, form)
        keep(codec, blob)
        copy = store.cold.put(warm, history, blob)
        if not np.array_equal(_stream(codec, copy), history.stream):
            raise RuntimeError("the blob that was stored has other tokens")
    except (CodecError, ThawError, ValueError, RuntimeError) as error:
        message = f"Session {id!r} cannot be frozen: {error}"
        raise StoreError(message, public=message) from error
    if copy.history(history.stream).turns != history.turns:
        raise StoreError(f"Session {id!r} cannot be frozen: its turns do not come back.")
    return copy


def _smallest(
    store: Store, codec: Codec, warm: WarmSession, stream: Ids, form: str
) -> tuple[WarmSession, bytes]:
    """The blob after what other sessions share, or after a base like the session's prompt."""
    blob = codec.encode(stream[warm.n_base :], base=stream[: warm.n_base], form=form)
    context = store.cold.alike.context(warm, stream) if form == "auto" else None
    if context is not None:
        other = codec.encode(stream[context.n :], base=context.ids)
        if len(other) <= ALIKE_SHARE_MAX * len(blob):
            store.cold.alike.note(len(blob) - len(other))
            return replace(warm, base=context.node, n_base=context.n), other
    return warm, blob


def _holds(codec: Codec, copy: FrozenSession, history: History) -> bool:
    """Whether a copy, which may be old, still decodes to exactly this history."""
    try:
        stream = _stream(codec, copy)
        return (
            np.array_equal(stream, history.stream) and copy.history(stream).turns == history.turns
        )
    except (CodecError, ThawError, ValueError, RuntimeError):
        return False


def _stream(codec: Codec, frozen: FrozenSession) -> Ids:
    return frozen.stream(codec.decode(frozen.blob, base=frozen.base))
