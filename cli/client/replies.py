"""The replies that towerctl reads, as far as it reads them: a server that is no towerd, or another
version of it, is told by their shape."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

Number = float
Moment = Annotated[float, Meta(ge=0, lt=2.5e11)]
"""Unix time, of years that have four digits."""


class Session(TypedDict):
    """A session as it is listed."""

    id: str
    scope: str
    title: str
    named: bool
    n_tokens: int
    n_turns: int
    created: Moment
    updated: Moment
    cold_bytes: int
    tokenizer: str


class Sessions(TypedDict):
    sessions: list[Session]


class CodedSession(TypedDict):
    """A session that has a coded form; `pk` is its place in their order."""

    id: str
    scope: str
    pk: int


class CodedSessions(TypedDict):
    sessions: list[CodedSession]


class Turn(TypedDict):
    """One recorded turn of a session."""

    id: int
    parent: int | None
    reply_node: int
    n_prompt: int
    n_reply: int
    created: Moment
    finished: bool
    current: bool


class Rows(TypedDict):
    """What a model has of a session."""

    arch: str
    model_hash: str
    cache_types: str
    n_tokens: int
    is_served: bool


class Kept(TypedDict):
    """What is live of a chat with a budget."""

    policy: str
    budget: int
    n: int
    runs: list[tuple[int, int]]


class WholeSession(TypedDict):
    """One session with its turns."""

    session: Session
    turns: list[Turn]
    rows: list[Rows]
    text: NotRequired[str | None]
    kept: NotRequired[Kept | None]


class ChangedSession(TypedDict):
    """A session after it was frozen, thawed or coded again."""

    session: Session
    changed: bool


class ImportedBase(TypedDict):
    name: str
    here: bool


class Imported(TypedDict):
    """The session of an imported file."""

    session: Session
    added: int
    bases: list[ImportedBase]


class FoundSession(TypedDict):
    """A result of a search."""

    session: Session
    turn: int
    said: Moment
    snippet: list[str]


class Search(TypedDict):
    results: list[FoundSession]


class Deleted(TypedDict):
    deleted: str


class Segment(TypedDict):
    """A segment as it is listed."""

    id: int
    parent: int
    scope: str
    p0: int
    p1: int
    tokens: int
    hot: bool
    warm: bool
    format: str | None
    bytes: int
    boundary_bytes: int
    pinned: bool
    hits: int | None
    last_used: Moment | None


class Segments(TypedDict):
    segments: list[Segment]
    total: int


class PlacedSegment(Segment):
    """A segment with its neighbours."""

    path: list[int]
    children: list[int]
    cut: str
    text: NotRequired[str]
    ids: NotRequired[list[int]]


class OneSegment(TypedDict):
    segment: PlacedSegment


class Branch(Segment):
    """A segment with those below it."""

    children: list[Branch]


class Trie(TypedDict):
    root: int
    trie: list[Branch]
    truncated: bool


class Rank(TypedDict):
    """How a policy ranks a segment."""

    score: Number
    place: int | None
    used: Moment
    expected: NotRequired[bool]
    retired: NotRequired[bool]
    ended: NotRequired[bool]
    returns_per_s: NotRequired[Number | None]
    trusts: NotRequired[bool]


class Ranks(TypedDict):
    policy: str
    hot: Rank | None
    warm: Rank | None
    n_hot: int | None
    n_warm: int | None


class Why(TypedDict):
    segment: Segment
    why: Ranks


class Pins(TypedDict):
    pins: list[Segment]


class Pinned(TypedDict):
    pinned: Segment


class Unpinned(TypedDict):
    unpinned: int


class Module(TypedDict):
    """A base that may stand anywhere."""

    tokens: int
    recompute: Number
    recomputed: int
    kl: Number
    floor_kl: Number
    top1: Number
    fidelity: str
    spliced: bool
    digest: str


class Base(TypedDict):
    """A precached prompt."""

    name: str
    scope: str
    public: bool
    level: int
    format: str | None
    module: Module | None
    segment: int
    tokens: int
    digest: str


class Bases(TypedDict):
    bases: list[Base]


class EngineStats(TypedDict):
    """Of either engine, as far as people are shown it."""

    running: int
    waiting: int
    live_cells_used: int
    live_cells: int
    can_slice: NotRequired[bool]
    why_not_sliceable: NotRequired[str]
    state_cut: NotRequired[str]
    state_kind: NotRequired[str]


class TierStats(TypedDict):
    hot_bytes: int
    hot_bytes_max: int
    hot_evictions: int
    warm_bytes: int
    warm_bytes_max: int
    warm_evictions: int
    unwritten_segments: int
    damaged_segments: int
    write_errors: int


class StoreStats(TypedDict):
    sessions: int
    frozen_sessions: int
    copied_sessions: int
    cold_bytes: int
    bases: int
    segments: int
    tokens: int
    files: int
    disk_bytes: int
    catalog_bytes: int
    journal_bytes: int


class Space(TypedDict):
    tokens_resumable: int
    tokens_to_prefill: int
    bytes_wanted: int


class Stats(TypedDict):
    """Of a store; `engine` is None without a running daemon."""

    version: str
    engine: EngineStats | None
    store: StoreStats


class DaemonStats(Stats):
    """Of a running daemon."""

    model: str
    model_path: str
    n_ctx: int
    uptime_s: Number
    fidelity: str
    reuse: dict[str, int]
    tiers: TierStats
    space: Space


class LoadState(TypedDict):
    value: str


class Model(TypedDict):
    """A model of a router, which has a status, or of a daemon."""

    id: str
    status: NotRequired[LoadState]


class Models(TypedDict):
    data: list[Model]


class NextToken(TypedDict):
    n_decoded: NotRequired[int]


class Slot(TypedDict):
    """llama-server's, and what it does if it may be seen."""

    id: int
    is_processing: bool
    id_task: NotRequired[int]
    n_prompt_tokens: NotRequired[int]
    n_prompt_tokens_processed: NotRequired[int]
    n_prompt_tokens_cache: NotRequired[int]
    next_token: NotRequired[list[NextToken]]


class Verified(TypedDict):
    ok: bool
    files: int
    bytes_read: int
    segments: int
    sessions: int
    frozen_sessions: int
    quarantined: int
    orphans: int
    recovered: list[str]
    problems: list[str]


class Done(TypedDict):
    done: int
    total: int


class VerifyEvent(TypedDict):
    """Bytes that are checked, or the result."""

    progress: NotRequired[Done]
    verify: NotRequired[Verified]


class Collected(TypedDict):
    segments: int
    files: int
    bytes_freed: int


class Gc(TypedDict):
    gc: Collected


class Floor(TypedDict):
    kl: Number
    ci: Number
    top1: Number
    n_tokens: int
    shape: str


class Cost(TypedDict):
    kl: Number
    excess: Number
    ci: Number
    top1: Number
    n_tokens: int


class Choice(TypedDict):
    levels: list[str]
    bits: Number
    cost: Cost
    bound: Number


class Grid(TypedDict):
    uniform: dict[str, Cost]


class Calibration(TypedDict):
    """What stored formats cost."""

    made_unix: Moment
    floor: Floor
    bits: dict[str, Number]
    choices: dict[str, Choice]
    grid: Grid


class CalibrationState(TypedDict):
    state: str
    why: str
    fidelity: str | None
    level_formats: str | None
    progress: Done
    calibration: Calibration | None


class Calibrating(TypedDict):
    calibration: CalibrationState


class Tokens(TypedDict):
    tokens: list[int]


class Prompt(TypedDict):
    prompt: str


class Processed(TypedDict):
    processed: int
    total: int


class Reuse(TypedDict):
    live: int
    hot: int
    warm: int


class PrecacheEvent(TypedDict):
    """Tokens that are evaluated, or the base."""

    progress: NotRequired[Processed]
    base: NotRequired[Base]
    reuse: NotRequired[Reuse]
