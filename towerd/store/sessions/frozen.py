"""A session on its way into the cold tier, and one that is there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from towerd.codec.errors import CodecError
from towerd.errors import StoreError, ThawError
from towerd.store.sessions.cold_row import decode_turns
from towerd.store.sessions.history import History, HistoryCopy, PastTurn, beginning
from towerd.store.sessions.sessions import SessionRow
from towerd.store.sessions.turn import Base, SessionInfo
from towerd.store.tree.node import Node
from towerd.tokens import Ids, ids_array


@dataclass(frozen=True, slots=True)
class WarmSession:
    """A session that can be frozen, in the state in which it was read."""

    session: SessionRow
    taken: HistoryCopy
    base: Node | None
    n_base: int

    @property
    def turn_ids(self) -> list[int]:
        """The ids of all turns, oldest first."""
        return [row[0] for row in self.taken.turns]


@dataclass(frozen=True, slots=True)
class FrozenSession:
    """A frozen session as stored. `base` and the decoded `blob` form the `stream` of its
    history."""

    session: SessionRow
    info: SessionInfo
    base: Ids
    """int32[n_base]: the tokens that the blob follows."""
    turns: bytes
    blob: bytes
    rows: list[tuple[Any, ...]]
    """The catalog row of each turn."""
    bases: list[Base]
    """The bases that its tenant's sessions may begin with."""
    digest: bytes
    """Changes whenever the session is frozen or recoded."""

    @property
    def was_continued(self) -> bool:
        """Whether it has turns that the blob lacks, because it could not be thawed for them."""
        return len(self.rows) > len(self.turn_ids())

    def history(self, stream: Ids) -> History:
        """The session, once its tokens are known. Raises ThawError if they are too few."""
        history = self.outline(len(stream))
        history = replace(history, stream=stream)
        return replace(history, bases=beginning(history.ids(history.leaf).tobytes(), self.bases))

    def outline(self, n_tokens: int) -> History:
        """The session without its tokens, of which there are so many, and without the names of its
        bases. Raises ThawError if there should be more or fewer."""
        turns = self._turns()
        wanted = sum(turn.n - turn.n_shared for _, turn in turns)
        if wanted != n_tokens:
            raise damaged_session(
                self.info.id, f"its turns have {wanted} tokens and its blob {n_tokens}"
            )
        places = {id: place for place, (id, _) in enumerate(turns)}
        leaf = places.get(self.info.leaf or 0, len(turns) - 1)
        info = self.info
        past = tuple(turn for _, turn in turns)
        return History(
            info.id,
            info.named,
            info.title,
            info.created,
            info.updated,
            leaf,
            past,
            (),
            ids_array(b""),
        )

    def turn_ids(self) -> list[int]:
        """The ids of the turns in the blob, oldest first."""
        return [id for id, _ in self._turns()]

    def _turns(self) -> list[tuple[int, PastTurn]]:
        known = {row[0]: row[1:] for row in self.rows}
        places: dict[int, int] = {}
        found: list[tuple[int, PastTurn]] = []
        try:
            decoded = decode_turns(self.turns)
        except CodecError as error:
            raise damaged_session(self.info.id, str(error)) from error
        for place, (id, origin, n_shared) in enumerate(decoded):
            if id not in known:
                raise damaged_session(self.info.id, f"its turn {id} is gone from the catalog")
            parent, n_prompt, n_reply, n_cached, started, created, finished = known[id]
            n = n_prompt + n_reply
            n_origin = found[origin][1].n if 0 <= origin < place else 0
            if not (0 <= n_prompt <= n and 0 <= n_cached <= n and n_shared <= min(n, n_origin)):
                raise damaged_session(self.info.id, f"its turn {id} does not fit those before it")
            places[id] = place
            before, is_done = places.get(parent), bool(finished)
            turn = PastTurn(
                before, origin, n_shared, n_prompt, n_reply, n_cached, started, created, is_done
            )
            found.append((id, turn))
        return found


def damaged_session(id: str, what: str) -> ThawError:
    """The error for a frozen session that cannot be read."""
    return ThawError(
        f"Session {id!r} cannot be thawed: {what.rstrip('.')}; put back a copy of the store's "
        "catalog, or remove the session and import it."
    )


class SessionBusy(StoreError):
    """A session cannot be frozen now; nothing was changed."""

    status = 409
    kind = "invalid_request_error"
    stands_for = ""
