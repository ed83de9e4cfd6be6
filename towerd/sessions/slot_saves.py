"""Chats by the number of their slot, saved to files of llama.cpp's own format and restored from them.

A file has the tokens of a chat and their rows, so that a llama-server of the same model restores it. Of a file
that is restored here only the tokens are taken: rows come from the store, or are evaluated, so that no file can
put rows there that the model did not compute.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path

import numpy as np

from towerd.engine.base import Engine, GenerateRequest
from towerd.errors import InvalidRequest, NotSupported, SessionDeleted, TowerdError, Unavailable
from towerd.sessions.sessions import Sessions
from towerd.settings.setting import LOCAL_TENANT
from towerd.slots.errors import StateError
from towerd.slots.image import ImageSpec, image_size, usable, window_rows, write_image
from towerd.slots.layout import STATE_VERSION
from towerd.slots.rows import KVRows
from towerd.slots.slotfile import FILE_MAGIC, HEADER_BYTES, parse_tokens
from towerd.store import Store
from towerd.store.files.durable import NO_SPACE, new_file, reserve
from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.tree.scope import tenant_of
from towerd.tiers.manager import Tiers
from towerd.tiers.plan import RestorePlan
from towerd.tokens import Ids, Provenance

SETTLE_S_MAX = 20.0
"""How long a save waits for the rows of a reply that has just ended."""
SETTLE_S = 0.25
SECTION_WORDS_MORE = 16
"""Words of a token section besides the tokens."""
_DELETED = "The chat of this slot was deleted"
_numbers = count()


@dataclass(frozen=True, slots=True)
class SlotChat:
    """What a slot had last, as a tenant sees it."""

    prompt: Ids
    reply: tuple[int, ...]
    n: int
    """How many tokens of prompt and reply were evaluated."""
    scope: str
    store: Store
    since: DeletionWatch
    """What was deleted since it began."""

    def tokens(self) -> Ids:
        """The evaluated tokens. Not on the event loop: a reply may be long."""
        return np.concatenate([self.prompt, np.array(self.reply, np.int32)])[: self.n]


class SlotBook:
    """The last chat of every slot, for each tenant: no tenant sees that of another."""

    def __init__(self) -> None:
        self._chats: dict[tuple[str, int], SlotChat] = {}

    def note(self, slot: int, chat: SlotChat) -> None:
        """A slot has a new chat."""
        self._chats[tenant_of(chat.scope), slot] = chat

    def of(self, tenant: str, slot: int, store: Store) -> SlotChat | None:
        """The chat of a slot; None if it has none since `store` was opened."""
        found = self._chats.get((tenant, slot))
        return found if found is not None and found.store is store else None

    def clear(self) -> None:
        """Leave all slots empty: the store that their chats are in is closed."""
        self._chats.clear()

    def forget(self, tenant: str, slot: int) -> None:
        """Leave a slot empty."""
        self._chats.pop((tenant, slot), None)


@dataclass(frozen=True, slots=True)
class SlotFileResult:
    """What a save or a restore did."""

    n_tokens: int
    n_bytes: int
    ms: float


def file_of(folder: Path, tenant: str, name: str) -> Path:
    """The file of a tenant. No valid name of a file has two points, so those of others are out of reach."""
    if tenant != LOCAL_TENANT:
        folder = folder / f"tenant..{blake2b(tenant.encode(), digest_size=16).hexdigest()}"
    return folder / name


async def save(
    engine: Engine, tiers: Tiers, sessions: Sessions, chat: SlotChat, path: Path
) -> SlotFileResult:
    """Write a chat to a file, which replaces one of this name once it is whole. Raises NotSupported,
    InvalidRequest if the chat was deleted, Unavailable while its rows are not stored, TowerdError."""
    began = time.monotonic()
    spec = engine.slot_image
    if spec is None:
        raise NotSupported("This model's state is more than rows, and is not written to slot files")
    if not chat.store.rows.is_trusted:
        raise NotSupported("The rows of this model are not stored: the daemon's log says why")
    ids = await asyncio.to_thread(chat.tokens)
    if (ids < 0).any():
        raise NotSupported("A chat with pictures or sounds is not written to slot files")
    try:
        await asyncio.to_thread(chat.store.insert, ids, chat.scope, [len(ids)], chat.since)
    except SessionDeleted as error:
        raise InvalidRequest(_DELETED) from error
    deadline, is_evaluated = time.monotonic() + SETTLE_S_MAX, False
    with chat.store.hold(ids, chat.scope) as handle:
        while True:
            plan = tiers.plan(handle, 0, worst=Provenance.APPROXIMATE)
            if plan.parts and plan.parts[-1].p1 >= len(ids):
                n_bytes = await asyncio.to_thread(_write, spec, ids, tiers, plan, path)
                if n_bytes:
                    return SlotFileResult(len(ids), n_bytes, (time.monotonic() - began) * 1e3)
            if time.monotonic() > deadline:
                raise Unavailable("The rows of this slot are not stored yet; try again")
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.settle(), SETTLE_S)
                if is_evaluated:
                    await asyncio.sleep(SETTLE_S)
                else:  # they left for want of space
                    await _evaluate(sessions, ids, chat.scope, cache_prompt=False)
                    is_evaluated = True


async def restore(
    engine: Engine, sessions: Sessions, store: Store, scope: str, path: Path
) -> tuple[SlotFileResult, SlotChat]:
    """Have the chat of a file ready for this tenant: rows that its store lacks are evaluated. Raises
    InvalidRequest."""
    began = time.monotonic()
    since = store.deletions.watch()
    ids, n_bytes = await asyncio.to_thread(_read, path, engine.n_ctx)
    try:
        await _evaluate(sessions, ids, scope, cache_prompt=True)
    except TowerdError as error:
        if error.status >= 500:
            raise
        raise _unrestored(error.public) from error
    moved = SlotFileResult(len(ids), n_bytes, (time.monotonic() - began) * 1e3)
    return moved, SlotChat(ids, (), len(ids), scope, store, since)


async def _evaluate(sessions: Sessions, ids: Ids, scope: str, *, cache_prompt: bool) -> None:
    """Evaluate tokens whose rows are not there, outside any session."""
    request = GenerateRequest(
        ids=ids, n_predict=0, scope=scope, cache_prompt=cache_prompt, precache="slot file"
    )
    if await sessions.run_quietly(request) is None:
        raise Unavailable("The slot could not be evaluated; try again")


def _unrestored(why: str) -> InvalidRequest:
    return InvalidRequest(f"Unable to restore slot: {why}")


# ---- files -------------------------------------------------------------------------------------

_writing = threading.Lock()
"""One save at a time: each takes as much memory as its chat has rows."""


def _write(spec: ImageSpec, ids: Ids, tiers: Tiers, plan: RestorePlan, path: Path) -> int:
    """Write the rows of a plan; returns the file's bytes, 0 if some rows cannot be read after all."""
    with _writing:
        parts: list[KVRows] = [rows for _, rows in tiers.rows(plan)]
        n = len(ids)
        if not parts or parts[-1].p1 < n or usable(spec, parts, n) < n:
            return 0
        parts = [part.slice(part.p0, min(part.p1, n)) for part in parts if part.p0 < n]
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _write_file(spec, ids, parts, path)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise TowerdError(f"Unable to save slot: {error.strerror}") from error
            raise TowerdError(
                f"The slot cannot be saved as {path}: {error.strerror}",
                public="Unable to save slot",
            ) from error


def _write_file(spec: ImageSpec, ids: Ids, parts: Sequence[KVRows], path: Path) -> int:
    window = window_rows(spec, parts, len(ids))
    size = image_size(spec, len(ids), sum(map(len, window)))
    half = path.with_name(f"half..{os.getpid()}-{next(_numbers)}")
    with new_file(half, path) as fd:
        reserve(fd, size)
        with mmap.mmap(fd, size) as view:
            out = np.frombuffer(view, np.uint8)
            try:
                write_image(spec, ids, parts, window, 0, out)
            finally:
                del out
    return size


def _read(path: Path, n_ctx: int) -> tuple[Ids, int]:
    """The tokens of a slot file, and how long it is. Raises InvalidRequest."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unrestored("there is no such file") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise _unrestored("there is no such file")
        head = os.pread(fd, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0")
        magic, version, n_words = struct.unpack("<III", head)
        if (magic, version) != (FILE_MAGIC, STATE_VERSION):
            raise _unrestored("it is no slot file of this llama.cpp")
        if n_words > n_ctx + SECTION_WORDS_MORE:
            raise _unrestored("Restored prompt does not fit in the slot context")
        section = os.pread(fd, 4 * n_words, HEADER_BYTES)
    finally:
        os.close(fd)
    try:
        if len(section) != 4 * n_words:
            raise StateError("it is cut off")
        words = np.frombuffer(section, "<i4")
        ids, _ = parse_tokens(words)
    except StateError as error:
        raise _unrestored(str(error)) from error
    if not 0 < len(ids) < n_ctx:
        raise _unrestored(
            "Restored prompt does not fit in the slot context" if len(ids) else "it has no tokens"
        )
    return ids, info.st_size
