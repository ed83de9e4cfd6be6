"""The replies that towerctl reads, as far as it reads them: a server that is no towerd, or another
version of it, is told by their shape."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

Moment = Annotated[float, Meta(ge=0, lt=2.5e11)]
"""Unix time, of years that have four digits."""


class StoredFormatShape(TypedDict):
    format: str
    tokens: int
    bytes: int


class FootprintShape(TypedDict):
    """What conversations take after each layer."""

    tokens: int
    slot_bytes: int
    shared_bytes: int
    levels_bytes: int
    transform_bytes: int
    kept_bytes: int
    text_bytes: int
    formats: list[StoredFormatShape]


class SessionShape(TypedDict):
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
    footprint: NotRequired[FootprintShape | None]


class CodedSessionShape(TypedDict):
    """A session that has a coded form; `pk` is its place in their order."""

    id: str
    scope: str
    pk: int


class TurnShape(TypedDict):
    """One recorded turn of a session."""

    id: int
    parent: int | None
    reply_node: int
    n_prompt: int
    n_reply: int
    created: Moment
    finished: bool
    current: bool


class RowsShape(TypedDict):
    """What a model has of a session."""

    arch: str
    model_hash: str
    cache_types: str
    n_tokens: int
    is_served: bool


class KeptShape(TypedDict):
    """What is live of a chat with a budget."""

    policy: str
    budget: int
    n: int
    runs: list[tuple[int, int]]


class WholeSessionShape(TypedDict):
    """One session with its turns."""

    session: SessionShape
    turns: list[TurnShape]
    rows: list[RowsShape]
    text: NotRequired[str | None]
    kept: NotRequired[KeptShape | None]


class ChangedSessionShape(TypedDict):
    """A session after it was frozen, thawed or coded again."""

    session: SessionShape
    changed: bool


class ImportedBaseShape(TypedDict):
    name: str
    here: bool


class ImportedMediaShape(TypedDict):
    """How many pictures and sounds of an imported file are kept, and how many are not."""

    kept: int
    damaged: int
    not_kept: int


class ImportedShape(TypedDict):
    """The session of an imported file."""

    session: SessionShape
    added: int
    bases: list[ImportedBaseShape]
    media: ImportedMediaShape


class PushedShape(TypedDict):
    """What was put into the shared tier, or taken from it."""

    tokens: int
    rows: int


class SharedCollectedShape(TypedDict):
    """What was deleted from the shared tier, and what is garbage there."""

    objects: int
    bytes: int
    records: int
    waiting_objects: int
    waiting_bytes: int
    marks: int
    passed_over: list[str]


class SharedRemovedShape(TypedDict):
    """What was deleted from the shared tier, beside its name."""

    records: int
    puts_again: bool


class SharedSessionShape(TypedDict):
    """A session in the shared tier."""

    id: str
    title: str
    turns: int
    tokens: int
    rows: int
    put: float


class SharedBaseShape(TypedDict):
    """A base in the shared tier."""

    name: str
    public: bool
    tokens: int
    rows: int
    put: float


class SharedShape(TypedDict):
    """What is in the shared tier."""

    sessions: list[SharedSessionShape]
    bases: list[SharedBaseShape]


class FoundSessionShape(TypedDict):
    """A result of a search."""

    session: SessionShape
    turn: int
    said: Moment
    snippet: list[str]


class SegmentShape(TypedDict):
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
    checkpoint_bytes: int
    pinned: bool
    hits: int | None
    last_used: Moment | None


class SegmentsShape(TypedDict):
    segments: list[SegmentShape]
    total: int


class PlacedSegmentShape(SegmentShape):
    """A segment with its neighbours."""

    path: list[int]
    children: list[int]
    cut: str
    text: NotRequired[str]
    ids: NotRequired[list[int]]


class BranchShape(SegmentShape):
    """A segment with those below it."""

    children: list[BranchShape]


class TreeShape(TypedDict):
    root: int
    trie: list[BranchShape]
    truncated: bool


class RankShape(TypedDict):
    """How a policy ranks a segment."""

    score: float
    place: int | None
    used: Moment
    expected: NotRequired[bool]
    retired: NotRequired[bool]
    ended: NotRequired[bool]
    returns_per_s: NotRequired[float | None]
    trusts: NotRequired[bool]


class RanksShape(TypedDict):
    policy: str
    hot: RankShape | None
    warm: RankShape | None
    n_hot: int | None
    n_warm: int | None


class WhyShape(TypedDict):
    segment: SegmentShape
    why: RanksShape


class ReuseShape(TypedDict):
    live: int
    hot: int
    warm: int
    prefill: int


class RequestShape(TypedDict):
    """A request that was answered."""

    id: str
    reuse: ReuseShape


class DivergenceShape(TypedDict):
    """Where a prompt left a stored conversation, or a base."""

    known: int
    session: str
    title: str
    base: str
    before: str | None
    stored: str | None
    sent: str | None
    advice: str


class WhyRequestShape(TypedDict):
    request: RequestShape
    why: str
    divergence: DivergenceShape | None


class BaseShape(TypedDict):
    """A precached prompt."""

    name: str
    scope: str
    public: bool
    level: int
    format: str | None
    reuse: str
    segment: int
    tokens: int
    digest: str


class EngineStatsShape(TypedDict):
    """Of either engine, as far as people are shown it."""

    running: int
    waiting: int
    live_cells_used: int
    live_cells: int
    can_slice: NotRequired[bool]
    why_not_sliceable: NotRequired[str]
    state_cut: NotRequired[str]
    state_kind: NotRequired[str]


class TierStatsShape(TypedDict):
    hot_bytes: int
    hot_bytes_max: int
    hot_evictions: int
    warm_bytes: int
    warm_bytes_max: int
    warm_evictions: int
    unwritten_segments: int
    damaged_segments: int
    write_errors: int


class StoreStatsShape(TypedDict):
    sessions: int
    frozen_sessions: int
    copied_sessions: int
    alike_coded: NotRequired[int]
    alike_bytes_saved: NotRequired[int]
    cold_bytes: int
    bases: int
    segments: int
    tokens: int
    files: int
    disk_bytes: int
    catalog_bytes: int
    journal_bytes: int


class SpaceShape(TypedDict):
    tokens_resumable: int
    tokens_to_prefill: int
    bytes_wanted: int


class WrittenShape(TypedDict):
    """What was written to the store today."""

    today_bytes: int
    budget_bytes: int | None
    refused: int
    kinds: dict[str, int]


class StatsShape(TypedDict):
    """Of a store; `engine` is None without a running daemon."""

    version: str
    engine: EngineStatsShape | None
    store: StoreStatsShape
    footprint: FootprintShape
    written: WrittenShape


class DaemonStatsShape(StatsShape):
    """Of a running daemon."""

    model: str
    model_path: str
    n_ctx: int
    uptime_s: float
    fidelity: str
    reuse: dict[str, int]
    tiers: TierStatsShape
    space: SpaceShape


class LoadStateShape(TypedDict):
    value: str


class ModelMetaShape(TypedDict):
    n_ctx: int
    n_ctx_train: int


class ModelShape(TypedDict):
    id: str
    aliases: NotRequired[list[str]]
    status: NotRequired[LoadStateShape]
    meta: NotRequired[ModelMetaShape]


class AddressShape(TypedDict):
    urls: list[str]
    needs_key: bool


class NextTokenShape(TypedDict):
    n_decoded: NotRequired[int]


class SlotShape(TypedDict):
    """llama-server's, and what it does if it may be seen."""

    id: int
    is_processing: bool
    id_task: NotRequired[int]
    n_prompt_tokens: NotRequired[int]
    n_prompt_tokens_processed: NotRequired[int]
    n_prompt_tokens_cache: NotRequired[int]
    next_token: NotRequired[list[NextTokenShape]]


class VerifiedShape(TypedDict):
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


class DoneShape(TypedDict):
    done: int
    total: int


class VerifyEventShape(TypedDict):
    """Bytes that are checked, or the result."""

    progress: NotRequired[DoneShape]
    verify: NotRequired[VerifiedShape]


class CollectedShape(TypedDict):
    segments: int
    files: int
    bytes_freed: int


class ForgettableShape(TypedDict):
    """What would be forgotten."""

    sessions: int
    tokens: int
    responses: int
    conversations: int
    is_encrypted: bool


class ForgottenShape(TypedDict):
    """What was forgotten."""

    sessions: int
    tokens: int
    held: int
    is_encrypted: bool
    keys_destroyed: bool
    segments: int
    files: int
    bytes_freed: int


class FloorShape(TypedDict):
    kl: float
    ci: float
    top1: float
    n_tokens: int
    shape: str


class CostShape(TypedDict):
    kl: float
    excess: float
    ci: float
    top1: float
    n_tokens: int


class ChoiceShape(TypedDict):
    levels: list[str]
    bits: float
    cost: CostShape
    bound: float


class GridShape(TypedDict):
    uniform: dict[str, CostShape]


class CalibrationShape(TypedDict):
    made_unix: Moment
    floor: FloorShape
    bits: dict[str, float]
    choices: dict[str, ChoiceShape]
    grid: GridShape


class MovedShape(TypedDict):
    """What rows behind changed text cost."""

    floor_kl: float
    noise: float
    slope: float
    tightened: float


class CalibrationStateShape(TypedDict):
    state: str
    why: str
    fidelity: str | None
    level_formats: str | None
    progress: DoneShape
    learning: NotRequired[DoneShape | None]
    calibration: CalibrationShape | None
    row_identity: NotRequired[dict[str, object]]
    moved: NotRequired[MovedShape | None]


class ProcessedShape(TypedDict):
    processed: int
    total: int


class PrecacheEventShape(TypedDict):
    """Tokens that are evaluated, or the base."""

    progress: NotRequired[ProcessedShape]
    base: NotRequired[BaseShape]
    reuse: NotRequired[ReuseShape]
