"""A finished turn, and the store's records of sessions and turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.sessions.media import SentMedium
from towerd.store.tree.node import Node
from towerd.tokens import Ids


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and its reply, to be recorded."""

    scope: str
    """Tenant scope of the caller."""
    session: str | None
    """The client's name for the session or a session id; None: recognised by its tokens."""
    prompt: Ids
    reply: Ids
    n_cached: int
    """Leading tokens of prompt + reply whose rows exist; the rest is kept as the turn's tail."""
    started_s: float
    """Unix time at which the request arrived."""
    finished: bool = True
    """False when the turn was cut off (cancelled, failed)."""
    stop: str = ""
    """Why the reply ended: `end_turn`, `stop_sequence`, `max_tokens`, `tool_use`, `cancelled`."""
    workflow: str | None = None
    """The client's name for the workflow that this is a step of."""
    agent: str | None = None
    """The agent, named by the client or told apart by system prompt and tools; None if unknown."""
    n_base: int = 0
    """Leading tokens that the agent's prompts begin with, whatever it is told: up to the text of the first
    message that is no system prompt; 0: not known."""
    n_rows: int | None = None
    """Leading tokens whose rows the store has or gets; None: the first `n_cached`."""
    since: DeletionWatch | None = None
    """What was deleted since its request began."""
    media: Sequence[SentMedium] = ()
    """The files of its pictures and sounds."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Where a turn was recorded. `node` ends at n_cached (the tree's root if that is 0)."""

    session_id: str
    node: Node
    new_session: bool
    turn_id: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session as listed. `n_tokens` counts its current branch, `n_turns` every turn."""

    id: str
    scope: str
    title: str
    named: bool
    """True when the client chose the id."""
    leaf: int | None
    """The id of the current leaf turn."""
    n_tokens: int
    n_turns: int
    created: float
    updated: float
    cold_bytes: int = 0
    """Bytes of its coded tokens while it is frozen; 0 if it is not."""
    tokenizer: str = ""
    """Hex digest of the tokenizer that its ids belong to; empty: the one of the served model."""


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """One recorded turn. Turns of abandoned branches stay listed."""

    id: int
    parent: int | None
    """The turn that this one continues; None for the first."""
    prompt_node: int
    """Node ids; 0 is the root."""
    reply_node: int
    n_prompt: int
    n_reply: int
    n_cached: int
    started: float
    created: float
    finished: bool
    current: bool
    """True when it lies on the session's current branch."""


PREFIX, ANYWHERE = "prefix", "anywhere"
"""Where a base may stand in a prompt."""


@dataclass(frozen=True, slots=True)
class Base:
    """A precached prompt: a pinned path that ends at `node`."""

    name: str
    scope: str
    level: int
    node: int
    n_tokens: int
    digest: bytes
    """BLAKE2b-256 of the ids; changes when the prompt does."""
    format: str | None = None
    """The format to store its rows in whatever its level says: `native` or a stored one."""
    reuse: str = PREFIX
    """`prefix`, or `anywhere` for a text that is no prompt but may stand in the middle of one."""
