"""Whether a codec's runtime still gives the numbers that blobs were written with.

A form with a runtime (`codec/README.md`) is only as lasting as the runtime: so the store keeps a
short blob of it, the probe, which is decoded at every start. Where that fails, sessions are thawed
from the fallbacks that such blobs carry, and coded again in idle time in a form that lasts.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from towerd.codec.errors import CodecError
from towerd.cold.freezing import decode, keep
from towerd.errors import NotFound, StoreError, ThawError
from towerd.store import Store

if TYPE_CHECKING:
    from towerd.codec import Codec

_PROBE = "codec_probe"


def has_changed(store: Store, codec: Codec, forms: Sequence[str]) -> bool:
    """Check the probe of every form that was ever used; whether blobs have to be coded again.
    `forms`: those whose runtime is here; they get a probe if they have none. Raises StoreError."""
    changed = False
    for form in sorted({*forms, *_known(store)}):
        probe = store.get_meta(_key(store, form))
        if probe:
            changed |= not codec.check_probe(base64.b64decode(probe))
        elif form in forms:
            made = base64.b64encode(codec.make_probe(form)).decode()
            store.set_meta(_key(store, form), made)
            store.set_meta(_list_key(store), ",".join(sorted({form, *_known(store)})))
    return changed


def forget_probes(store: Store) -> None:
    """No blob of a form with a runtime is left: the next start makes new probes."""
    for form in _known(store):
        store.set_meta(_key(store, form), "")
    store.set_meta(_list_key(store), "")


def stale(store: Store, codec: Codec) -> Iterator[tuple[str, str]]:
    """(id, scope) of the frozen sessions whose blob only its fallback can be read of."""
    for id, scope in store.cold.frozen():
        try:
            frozen = store.cold.read(id, scope)
            if frozen is not None and not codec.can_decode(frozen.blob):
                yield id, scope
        except (NotFound, ThawError, CodecError):
            continue  # gone meanwhile, or damaged: verify tells


def recode(store: Store, codec: Codec, id: str, scope: str) -> bool:
    """Put a blob that every machine can read in the place of a session's; whether it is frozen
    still. Raises ThawError (no part of it can be decoded here), StoreError, DiskFull; the blob
    stays then."""
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


def _known(store: Store) -> list[str]:
    """The forms that a probe was ever made for, of this model."""
    return [form for form in (store.get_meta(_list_key(store)) or "").split(",") if form]


def _list_key(store: Store) -> str:
    return f"{_PROBE}s:{store.state.digest.hex()}"


def _key(store: Store, form: str) -> str:
    return f"{_PROBE}:{store.state.digest.hex()}:{form}"
