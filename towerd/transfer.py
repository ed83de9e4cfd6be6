"""Export and import of sessions as `.tower` files.

Coding takes seconds for a long session, so it runs on a separate thread: neither the event loop nor
the threads that record turns wait for it, and the store is locked only while catalog rows are
copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from towerd.codec.errors import CodecError
from towerd.cold.coding import SessionModel
from towerd.cold.freezing import cold_history, thaw
from towerd.errors import InvalidRequest, NotFound, SessionFrozen, ThawError
from towerd.store import History, SessionInfo, Store
from towerd.store.catalog.vocabularies import KeptVocabulary, KnownWords
from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.sessions.frozen import FrozenSession
from towerd.store.sessions.history import MEDIA_MAX, media_keys
from towerd.store.sessions.media import KeptMedium, SentMedium
from towerd.store.tree.scope import is_public, public_of

if TYPE_CHECKING:
    from towerd.tower_file import CarriedMedium, Source, TowerFile

T = TypeVar("T")


class Transfer:
    """The thread that `.tower` files are read and written on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "transfer")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` on the thread; calls run one at a time, in order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def close(self) -> None:
        """Wait for the running work to end, and cancel what is queued."""
        self._thread.shutdown(cancel_futures=True)


# Below, `tower_file` is imported late: it loads the codec, which a daemon needs no part of at its
# start.


@dataclass(frozen=True, slots=True)
class Export:
    """A `.tower` file: its session, and the files of pictures and sounds that follow, in order."""

    session: bytes
    files: tuple[KeptMedium, ...] = ()
    n_media: int = 0
    """Pictures and sounds that are made of these files."""
    n_left_out: int = 0
    """Those that are damaged here, or more than a file carries."""

    @property
    def n_bytes(self) -> int:
        """Of the whole file."""
        return len(self.session) + sum(each.n_bytes for each in self.files)


def export_session(
    store: Store, model: SessionModel, id: str, scope: str | None, *, with_media: bool = False
) -> Export:
    """A session of the served model's tokenizer as a `.tower` file; a frozen session stays frozen.
    Raises NotFound, InvalidRequest (several tenants have a session with this id), ThawError or
    TowerFileError."""
    history = session_history(store, model, id, scope)
    media = kept_media(store, store.session(id, scope)) if with_media else []
    keys = media_keys(history) if media else set()
    write = partial(session_file, store, model, history)
    return _exported(store, media, keys, write)


def kept_media(store: Store, info: SessionInfo) -> list[KeptMedium]:
    """The media of a session whose files are kept."""
    row = store.media.session(info.id, info.scope, info.tokenizer)
    return [] if row is None else store.media.entries(row)


def _exported(
    store: Store,
    media: Sequence[KeptMedium],
    keys: set[bytes] | None,
    write: Callable[[tuple[CarriedMedium, ...]], bytes],
) -> Export:
    """keys: of the media that the session's turns have; None: not known. write: makes the file that says which media it
    carries"""
    from towerd.tower_file import CarriedMedium

    n_all = len(media)
    media = [each for each in media if keys is None or each.key in keys]
    media = [each for each in media if each.ordinal < MEDIA_MAX][:MEDIA_MAX]  # as can be read back
    files: dict[bytes, KeptMedium | None] = {}
    for each in media:
        if files.get(each.digest) is None:
            files[each.digest] = None if store.media.read(each) is None else each
    whole = [each for each in media if files[each.digest] is not None]
    carried = tuple(CarriedMedium(e.key, e.ordinal, e.digest, e.n_bytes) for e in whole)
    found = tuple(each for each in files.values() if each is not None)
    return Export(write(carried), found, len(whole), n_all - len(whole))


def session_history(store: Store, model: SessionModel, id: str, scope: str | None) -> History:
    """A session of the served model's tokenizer, frozen or not; it stays so. Raises as `export_session`."""
    return cold_history(store, model.codec, id, scope) or store.history(id, scope)


def session_file(
    store: Store, model: SessionModel, history: History, media: tuple[CarriedMedium, ...] = ()
) -> bytes:
    """The `.tower` file of a session of the served model's tokenizer, up to its media. Raises TowerFileError."""
    from towerd.tower_file import Source, TowerFile, write

    codec, vocabulary = model.codec, model.codec.vocabulary
    identity = store.state.catalog.tokenizer(store.state.identity.tokenizer)
    n_tokens = len(vocabulary.pieces)
    source = Source(model.name, model.hash, codec.vocabulary_hash, n_tokens, identity)
    words = KeptVocabulary(vocabulary.pieces, vocabulary.names)
    return write(TowerFile(source, history, words, media=media))


def history_in(model: SessionModel, data: bytes) -> History | None:
    """The session of a `.tower` file; None if it is of another vocabulary than the served model's. Raises
    TowerFileError."""
    from towerd.tower_file import read

    file = read(data)
    if file.source.vocabulary != model.codec.vocabulary_hash:
        return None
    return file.whole(model.codec.vocabulary)


def outline(data: bytes) -> dict[str, Any]:
    """Of the session of a `.tower` file: `id`, `title`, `model`, `turns`, `tokens` of its current branch. Raises
    TowerFileError."""
    from towerd.tower_file import read

    file = read(data)
    history = file.history
    return {
        "id": history.id,
        "title": history.title,
        "model": file.source.name,
        "turns": len(history.turns),
        "tokens": history.turns[history.leaf].n,
    }


def export_foreign(
    store: Store, id: str, scope: str | None, tokenizer: str = "", *, with_media: bool = False
) -> Export:
    """A session of another tokenizer as a `.tower` file, with the words that the store keeps. A frozen one has the text of its blob, if its ids take the tokenizer. Raises NotFound,
    StoreError (several tenants have it, or its words are not kept), ThawError or TowerFileError."""
    from towerd.tower_file import TowerFile, write

    keys: set[bytes] | None = None
    info = store.foreign.session(id, scope, tokenizer).info
    which = id, info.scope, info.tokenizer
    digest = bytes.fromhex(info.tokenizer)
    words = store.vocabularies.words(digest, info.scope)
    source = _source(store, digest, words)
    try:
        history, _ = store.foreign.history(*which)
        file = TowerFile(source, history, words.vocabulary)
    except SessionFrozen:
        frozen, _ = store.foreign.frozen(*which)
        file = _frozen_file(store, frozen, source, words.vocabulary)
    media = kept_media(store, info) if with_media else []
    if media and file.written is None:
        keys = media_keys(file.history)
    return _exported(store, media, keys, lambda carried: write(replace(file, media=carried)))


def _source(store: Store, digest: bytes, words: KnownWords) -> Source:
    from towerd.tower_file import Source

    n_tokens, identity = len(words.vocabulary.pieces), store.foreign.identity(digest)
    name = words.model or "a model that was served here"
    return Source(name, "", words.hash, n_tokens, identity)


def _frozen_file(
    store: Store, frozen: FrozenSession, source: Source, words: KeptVocabulary
) -> TowerFile:
    from towerd.codec.codec import Codec, WrittenText
    from towerd.tower_file import TowerFile

    if frozen.was_continued:
        raise SessionFrozen(
            f"Session {frozen.info.id!r} is frozen and went on since: serve its model to thaw it."
        )
    try:
        found = Codec(words, tables=store.tables).read(frozen.blob, base=frozen.base)
    except CodecError as error:
        raise ThawError(f"Session {frozen.info.id!r} cannot be read: {error}") from error
    if not isinstance(found, WrittenText):
        return TowerFile(source, frozen.history(frozen.stream(found)), words)
    history = frozen.outline(frozen.n_base + found.n_ids)
    return TowerFile(source, replace(history, stream=frozen.beginning), words, found)


def import_session(
    store: Store,
    model: SessionModel,
    data: bytes,
    scope: str,
    since: DeletionWatch | None = None,
    *,
    keeps_media: bool = True,
) -> dict[str, Any]:
    """Enter the session of a `.tower` file for a tenant; one of another vocabulary is listed and read
    as text. Turns that continue otherwise than here are branches. Returns `session`, `added` (the number of
    turns that were not here), `bases` (the precached prompts that it begins with, and whether each of them is here)
    and `media`: how many of its pictures and sounds are `kept`, were `damaged` in the file, or `not_kept`: there is no room, or
    keeps_media is False.

    Raises TowerFileError, InvalidRequest, ThawError or SessionFrozen
    (the session here is frozen and cannot be compared), SessionDeleted (it was deleted `since`) or
    DiskFull."""
    from towerd.tower_file import read

    if is_public(scope):
        raise InvalidRequest(
            "Sessions belong to a tenant, and 'public' is not one: name another scope."
        )
    store.disk.check()
    file = read(data)
    codec = model.codec
    if file.source.vocabulary != codec.vocabulary_hash:
        return _import_foreign(store, model, file, scope, since, keeps_media)
    history = file.whole(codec.vocabulary)
    with suppress(NotFound):
        thaw(store, codec, history.id, scope)
    sent, n_here = lacked_media(store, file, history, scope, keeps_media)
    with store.media.written(sent, scope, checks=True) as media:
        added = store.add_history(history, scope, since, media)
    here = {
        base.digest for base in store.bases.listing() if base.scope in (scope, public_of(scope))
    }
    found = _imported(store.session(history.id, scope), added, history, here)
    return found | {"media": _media_counts(file, len(media) + n_here, keeps_media)}


def lacked_media(
    store: Store,
    file: TowerFile,
    history: History,
    scope: str,
    keeps_media: bool,
    tokenizer: str = "",
) -> tuple[list[SentMedium], int]:
    """The undamaged media of a file that its turns have and the session here lacks; and how many it has undamaged. Those
    stay: nothing in the file proves that its own are what the conversation was held about. None and 0 unless keeps_media.
    tokenizer: see `MediaTable.session`"""
    if not keeps_media or not file.media:
        return [], 0
    keys = media_keys(history)
    sent = [each for each in file.sent() if each.key in keys]
    row = store.media.session(history.id, scope, tokenizer) if sent else None
    if row is None:
        return sent, 0
    wanted = {each.key for each in sent}
    here = [each for each in store.media.entries(row) if each.key in wanted]
    files = {each.name: each for each in here}  # of many media, maybe: each is read once
    sound = {name for name, each in files.items() if store.media.read(each) is not None}
    known = {each.key for each in here if each.name in sound}
    lacked = [each for each in sent if each.key not in known]
    return lacked, len(sent) - len(lacked)


def _media_counts(file: TowerFile, n_kept: int, keeps_media: bool) -> dict[str, int]:
    is_cut_off = not keeps_media and not file.files  # on purpose, which is no damage
    n_sound = len(file.media) if is_cut_off else len(file.sent())
    return {
        "kept": n_kept,
        "damaged": len(file.media) - n_sound,
        "not_kept": n_sound - n_kept,
    }


def _import_foreign(
    store: Store,
    model: SessionModel,
    file: TowerFile,
    scope: str,
    since: DeletionWatch | None,
    keeps_media: bool,
) -> dict[str, Any]:
    """Enter the session of a file whose vocabulary is not that of the served model."""
    source = file.source
    if file.words is None or source.tokenizer is None or file.written is not None:
        raise _needs_its_model(file, model)
    digest = store.foreign.enter(source.tokenizer)
    words = KnownWords(file.words, source.vocabulary, source.tokenizer, source.name)
    store.vocabularies.add_words(digest, scope, words)  # before the lock is held
    sent, n_here = lacked_media(store, file, file.history, scope, keeps_media, digest.hex())
    with store.media.written(sent, scope, checks=True) as media, store.locked():
        # Again: a gc in between would take the words for those of deleted chats.
        store.vocabularies.add_words(digest, scope, words)  # first: what is listed can be read
        added = store.foreign.add_history(file.history, scope, digest, since, media)
    store.vocabularies.add_words(digest, scope, words)  # unless another process's gc came between
    info = store.foreign.session(file.history.id, scope, digest.hex()).info
    found = _imported(info, added, replace(file.history, bases=()), set())
    return found | {"media": _media_counts(file, len(media) + n_here, keeps_media)}


def _needs_its_model(file: TowerFile, model: SessionModel) -> InvalidRequest:
    from towerd.tower_file import TowerFileError

    source, codec = file.source, model.codec
    why = "" if file.written is None else ", and only its tokenizer knows its tokens"
    instead = "" if file.words is None else ", or read it as text with towerctl read"
    return TowerFileError(
        f"The session is of {source.name!r}, whose vocabulary ({source.n_tokens} tokens, "
        f"{source.vocabulary.hex()}) is not that of {model.name!r} here "
        f"({len(codec.vocabulary.pieces)} tokens, {codec.vocabulary_hash.hex()}){why}: serve "
        f"{source.name!r} to import it{instead}."
    )


def _imported(info: SessionInfo, added: int, history: History, here: set[bytes]) -> dict[str, Any]:
    return {
        "session": asdict(info),
        "added": added,
        "bases": [
            {"name": base.name, "n_tokens": base.n_tokens, "here": base.digest in here}
            for base in history.bases
        ],
    }
