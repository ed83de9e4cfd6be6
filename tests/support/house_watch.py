"""What must hold at every moment of a simulated store, and what of its deleted sessions may be left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from house_foreign import foreign_in
from simulation import Tokens, found_in, path_ids
from store_tools import ids_of

from towerd.store import Node, SegmentFile, Store
from towerd.store.rows.rows import RowStore
from towerd.store.state.state import StoreState

if TYPE_CHECKING:
    from house import House

MARK_TOKENS_MIN = 20
"""So many drawn tokens are found nowhere else."""


@contextmanager
def pins_watched(house: House) -> Iterator[None]:
    """Pinned rows leave for a full disk alone, inside the block. Raises AssertionError where they leave."""
    drop_file: Callable[..., int] = RowStore.drop_file
    drop_hot: Callable[..., int] = RowStore.drop_hot
    forget_file: Callable[..., None] = StoreState.forget_file
    leaving: set[Path] = set()

    def file_left(rows: RowStore, file: SegmentFile, *, set_aside: bool = False, **how: Any) -> int:
        if set_aside:  # it is damaged
            house.lost.note(house.store.viewers(file))
            return drop_file(rows, file, set_aside=True)
        leaving.add(file.path)
        house.lost.note(house.store.viewers(file))
        try:
            return drop_file(rows, file, **how)
        finally:
            leaving.discard(file.path)

    def forgotten(state: StoreState, file: SegmentFile) -> None:
        if file.path in leaving and not state.directory.limit.bytes_max:
            pinned = [node.id for node in state.tree.viewers(file) if node.pinned]
            assert not pinned, f"the file of the pinned segments {pinned} is deleted"
        forget_file(state, file)

    def hot_left(rows: RowStore, node: Node) -> int:
        with house.store.state.lock:
            pinned = [each for each in house.store.nodes() if each.pinned and each.hot is not None]
            n_bytes = sum(each.hot.nbytes for each in pinned if each.hot is not None)
            has_room = house.has_room and not house.disk.n_refused and "give" not in house.kinds
            is_lost = node in pinned and node.file is None and n_bytes <= house.hot_bytes
            assert not (has_room and is_lost), (
                f"the rows of pinned {node.id} have no file, and leave"
            )
        return drop_hot(rows, node)

    with (
        patch.object(RowStore, "drop_file", file_left),
        patch.object(RowStore, "drop_hot", hot_left),
    ):
        yield


class LostRows:
    """Segments whose rows have left for want of space, or were damaged."""

    def __init__(self) -> None:
        self._lost: list[tuple[int, Tokens]] = []

    def note(self, nodes: Sequence[Node]) -> None:
        """They have no file any more."""
        self._lost += [(node.p0, path_ids(node)) for node in nodes]

    def has(self, node: Node) -> bool:
        """Whether a segment, or one that it was split from, is one of them."""
        ids = path_ids(node)
        return any(p0 <= node.p0 and lost[: len(ids)] == ids for p0, lost in self._lost)

    def check_written(self, store: Store) -> None:
        """After a flush for which there is room, all rows in RAM are in files as well. Nothing else runs."""
        left = [
            node.id
            for node in store.nodes()
            if node.hot is not None and node.file is None and not self.has(node)
        ]
        assert not left, f"{left} have rows in RAM alone, after a flush"


class Marks:
    """Tokens by which what was said in each session can be told, and those of sessions that are deleted."""

    def __init__(self) -> None:
        self._said: dict[str, list[bytes]] = {}
        self._deleted: list[bytes] = []

    def say(self, name: str, tokens: Tokens) -> None:
        """Said in a session, and nowhere else."""
        if len(tokens) >= MARK_TOKENS_MIN:
            self._said.setdefault(name, []).append(ids_of(*tokens).tobytes())

    def delete(self, name: str) -> None:
        """The session is deleted."""
        self._deleted += self._said.pop(name, [])

    def check_gone(self, house: House) -> None:
        """After a gc no file has what was said in deleted sessions, unless it is pinned, no medium is left of them, and no
        word of deleted chats of another tokenizer. Nothing else runs."""
        house.store.gc()
        house.words.check(house.store)
        kept = found_in(house.store).each() | foreign_in(house.store)
        n_kept = sum(isinstance(key, tuple) and key[0] == "medium" for key in kept)
        n_media = len(list(house.disk.root.glob("media/*")))
        assert n_media <= n_kept, f"{n_media} files of media, but {n_kept} are kept"
        pinned = [node.prefix_ids().tobytes() for node in house.store.pins.listing()]
        marks = [mark for mark in self._deleted if not any(mark in ids for ids in pinned)]
        for path in sorted(house.disk.root.rglob("*")) if marks else ():
            data = path.read_bytes() if path.is_file() else b""
            found = [mark for mark in marks if mark in data]
            assert not found, f"{path.name} has tokens of {len(found)} turns of deleted sessions"
