"""The engine protocol: requests, their events, and what an engine can do.

What is above an engine (sessions, API) uses these types; only the relay, LoRA adapters and calibration,
which one engine alone has, name its own. Token ids travel as
one-dimensional int32 arrays (`Ids`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from towerd.drift import Drift
from towerd.engine.served import ServedAnswer
from towerd.errors import TooLarge, TowerdError
from towerd.slots.row_identity import RowIdentity
from towerd.store import Node, Store
from towerd.tiers.checkpoint_tier import CheckpointTier
from towerd.tiers.manager import Tiers
from towerd.tiers.prefetch import Prefetch
from towerd.tokens import Ids

if TYPE_CHECKING:  # only the embedded engine needs llama.cpp in this process
    from towerd.slots.image import ImageSpec
    from towerd.wire import Chunk, Medium, Reply, Request, WireThreads


CLOSING = "towerd is shutting down; try again when it is back."
"""The answer to requests that come too late."""


@dataclass(frozen=True, slots=True)
class LiveBudget:
    """How a growing chat is kept within the context: `none` ends it with an error at the end of its
    context, `shift` drops its oldest turns there, any other policy keeps `tokens` tokens live."""

    policy: str = "none"
    tokens: int = 0
    scope: str = "all"
    """Whether the tokens are the same in `all` layers, each `layer` has its own, or each `head`."""

    @property
    def is_bounded(self) -> bool:
        """Whether there is a number of tokens to stay within."""
        return self.policy not in ("none", "shift")

    def n_cells(self, n: int) -> int:
        """How many cells a chat of `n` tokens needs."""
        return min(n, self.tokens) if self.is_bounded else n


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion of one prompt."""

    ids: Ids
    """The whole prompt, at least one token, special tokens already in place."""
    media: Sequence[Medium] = ()
    """Pictures and sounds in `ids`, to be evaluated where their rows are missing."""
    kept_media: Callable[[Ids], Medium | None] | None = None
    """Makes one that is not among `media` from what the store has of it. Raises TowerdError; blocks."""
    keeps_media: bool = True
    """Whether the store keeps the files of `media`."""
    reply: Reply | None = None
    """Samples and keeps the text; None: the engine makes one from `fields` if it generates."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a POST /completion, such as `temperature` and `stop`, where there is no `reply`."""
    n_predict: int = -1
    """Tokens to generate; -1: until EOG or the context is full (where the chat may
    outgrow that: as many tokens as it holds); 0: only evaluate the prompt."""
    scope: str = "local"
    """The tenant, from the authenticated key and never from the body, and its LoRA adapters."""
    session: str | None = None
    """The client's X-Towerd-Session, or None: recognised by token prefix."""
    cache_prompt: bool = True
    return_progress: bool = False
    n_keep: int = 0
    """Prompt tokens to keep at a context shift; -1: all of them (llama-server's meaning)."""
    live: LiveBudget = LiveBudget()
    """What stays in the live context as the chat grows."""
    background: bool = False
    """No client waits for it: it runs only while the engine is idle, and ends when a request
    comes."""
    next_prompt: Callable[[], Awaitable[Ids | None]] | None = None
    """Waits until the reply is complete and returns the tokens that every next request of this chat
    begins with; empty or None if they are not known. Raises TowerdError. None: `ids` are no chat."""
    workflow: str | None = None
    """The client's X-Towerd-Workflow."""
    agent: str | None = None
    """The client's X-Towerd-Agent, else a digest of system prompt and tools; None: neither."""
    may_move: bool = True
    """Whether rows that were computed behind other text may be used for it, and kept for it."""
    reuse_tokens_min: int | None = None
    """The shortest run of tokens whose rows are kept behind other text; 0: none is; None: as the
    engine is set."""
    compare: ServedAnswer | None = None
    """An answer to its last tokens that was served from moved rows, which this evaluates exactly."""
    prefetch: Prefetch | None = None
    """The prefetch that this is, in the background: its tokens are in the store, and it is no use of
    them."""
    precache: str | None = None
    """Name of a base when this evaluates a precached prompt: stored, pinned, no session."""

    @property
    def takes_moved(self) -> bool:
        """Whether it may continue from moved rows: what is precached never does."""
        return self.may_move and self.precache is None and self.reuse_tokens_min != 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt evaluation so far, as llama-server's `prompt_progress`."""

    total: int
    cache: int
    processed: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Generated tokens, and the text that is certain with them (it may be empty)."""

    text: str
    ids: tuple[int, ...]
    chunk: Chunk | None = None
    """Source of the events on the wire."""


@dataclass(frozen=True, slots=True)
class Timings:
    """llama-server's `timings`, before its derived per-token and per-second figures."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the reply."""
        return tokens_per_second(self.predicted_n, self.predicted_ms / 1e3)


def tokens_per_second(n: int, seconds: float) -> float | None:
    """Speed of a reply of `n` tokens; None for a single one, since the time runs from the first
    one on."""
    return (n - 1) / seconds if n > 1 and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the prompt's tokens came from; the first four add up to the prompt's length."""

    live: int = 0
    hot: int = 0
    warm: int = 0
    prefill: int = 0
    approximate: int = 0
    """Reused tokens whose rows were kept in a stored format in between."""
    cold: int = 0
    """Evaluated tokens that were known from a frozen session."""
    kept: int | None = None
    """Tokens in the live context when the reply began, if the chat has a budget."""
    drift: Drift | None = None
    """The measured drift of the approximate rows; None if there are none or it was not measured."""
    moved: int = 0
    """Reused tokens whose rows are kept behind other text than they were computed after."""
    checked: int = 0
    """Evaluated tokens by which that was checked."""
    refused: int = 0
    """Evaluated tokens whose rows were known, but deviated too much behind the new text."""

    def with_moved(self, hot: int, warm: int) -> Reuse:
        """With so many more tokens kept behind other text that would have been evaluated; fewer if
        negative."""
        n = hot + warm
        return replace(
            self,
            hot=self.hot + hot,
            warm=self.warm + warm,
            prefill=self.prefill - n,
            approximate=self.approximate + n,
            moved=self.moved + n,
        )

    def header(self) -> str:
        """The value of X-Towerd-Reuse."""
        parts = f"live={self.live},hot={self.hot},warm={self.warm},prefill={self.prefill}"
        more = {"approx": self.approximate, "cold": self.cold}
        more |= {"moved": self.moved, "checked": self.checked, "refused": self.refused}
        parts += "".join(f",{name}={n}" for name, n in more.items() if n)
        if self.kept is not None:
            n = self.live + self.hot + self.warm + self.prefill
            parts += f",kept={self.kept}/{n}"
        return parts


@dataclass(frozen=True, slots=True)
class Started:
    """Yielded once, before the first Piece: the prompt is evaluated, the first token is next."""

    reuse: Reuse
    n_prompt: int
    prompt_ms: float = 0.0
    """Time spent evaluating the prompt, as the final `Timings.prompt_ms`."""


StopType: TypeAlias = Literal["eos", "word", "limit", "cancelled"]


TURN_STOPS: dict[str, str] = {
    "eos": "end_turn",
    "word": "stop_sequence",
    "limit": "max_tokens",
    "cancelled": "cancelled",
}
"""The stop reason of a turn, by that of its reply."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event. When it reaches the API the tokens are durable."""

    stop: StopType
    stopping_word: str
    ids: tuple[int, ...]
    """Every generated token whose text was sent (EOG included, a stop string's tokens not)."""
    n_cached: int
    """Of prompt + `ids`, how many leading tokens have their rows in the live context."""
    timings: Timings
    reuse: Reuse
    truncated: bool = False
    """Tokens were dropped from the live context, or the reply ended because it was full."""
    session: str = ""
    """The session it was recorded under; filled in by `towerd.sessions.sessions`."""
    n_rows: int | None = None
    """How many leading tokens have or will have rows in the store; None: `n_cached`. Less for a
    chat with a partial live set, or one that was shortened."""
    slot: int = -1
    """Where GET /slots showed it."""
    served: ServedAnswer | None = None
    """What the reply was sampled from, if that was computed over moved rows."""


Event: TypeAlias = Progress | Started | Piece | Finish


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients can learn about the model, from /props and /v1/models."""

    path: str
    alias: str
    description: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size_bytes: int
    vocab_type: int
    bos_token: str
    eos_token: str
    chat_template: str
    row_identity: RowIdentity
    kv_bytes_per_token: int
    metadata: Mapping[str, str]
    aliases: tuple[str, ...] = ()
    """All names that clients may use for it; if empty, the alias alone."""
    tags: tuple[str, ...] = ()
    """Tags in GET /v1/models."""
    has_media: bool = False
    """Whether prompts may have pictures or sounds in them."""
    gpu_bytes: int | None = None
    """Bytes of the weights that lie in the memory of GPUs; None: not known."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """One live sequence, as GET /slots shows it."""

    id: int
    n_ctx: int
    is_processing: bool
    session: str | None
    n_tokens: int
    n_decoded: int
    request: Request | None
    """The current or last request; None: there was none, or it was not a client's."""
    scope: str = ""
    """The tenant of the current or last request; empty if there is none or it is not known."""
    id_task: int = -1
    """Number of the request that it last ran, counted from 0; -1: none yet."""
    n_prompt_processed: int = 0
    n_prompt_cached: int = 0
    n_remain: int = -1
    has_next_token: bool = False
    has_new_line: bool = False
    speculative: bool = False
    """Replies may be drafted."""
    ttft_s: float | None = None
    """How long its request waited for the first token; None: there is none yet, or it is not known."""
    tokens_per_second: float | None = None
    """Speed of the reply from the first token until now; None before there are two."""

    def hidden(self, *, shows_busy: bool) -> SlotView:
        """The view for other tenants, to whom it looks idle, or busy if they may see as much."""
        is_busy = shows_busy and self.is_processing
        return SlotView(
            self.id, self.n_ctx, is_busy, None, 0, 0, None, speculative=self.speculative
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept positions of a chat with a budget, which is live or parked in RAM."""

    policy: str
    budget: int
    n: int
    """Evaluated tokens of the chat."""
    runs: tuple[tuple[int, int], ...]
    """[p0, p1) of its tokens that are kept, ascending."""


class Generation(ABC):
    """A running request. Iterate it to its Finish, or `cancel` it; then always `release` it."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event | TowerdError] = asyncio.Queue()
        """What the engine emits; the last one is a Finish or an error."""
        self.cut_off: Finish | None = None
        """What was generated before the request failed. Set before its error is emitted."""
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Its events, ending with Finish. Raises TowerdError when it failed."""
        while not self._ended:
            event = await self.events.get()
            if isinstance(event, TowerdError):
                self._ended = True
                raise event
            self._ended = isinstance(event, Finish)
            yield event

    async def cancel(self) -> Finish | None:
        """End it now: the Finish of what was generated; of a request that failed, of what was
        generated before. None if it had ended, or nothing was generated."""
        if not self._ended:
            self.stop()
            try:
                async for event in self:
                    if isinstance(event, Finish):
                        return event
            except TowerdError:
                pass
        return self.cut_off

    @abstractmethod
    def stop(self) -> None:
        """Have it end soon, with a Finish of what was generated."""

    @abstractmethod
    def release(self) -> None:
        """Call when its tokens are recorded: the engine may then export, share or evict its live
        rows."""


class Embeds(Protocol):
    """A model that turns texts into embeddings."""

    pooling: str
    """none, mean, cls, last or rank: how the rows of a text's tokens are combined."""

    def embed(self, ids: Ids, normalize: int) -> Future[npt.NDArray[np.float32]]:
        """float32[n, n_embd], the embeddings of a text: one with pooling, else one per token, not
        normalized. Texts are evaluated one at a time; those that wait may be cancelled.

        normalize: as llama-server's `embd_normalize`. Raises ContextExceeded, TowerdError."""
        ...

    def score(self, ids: Ids) -> Future[float]:
        """The relevance of a prompt, which is a query with a document; as `embed`."""
        ...


class AdapterSet(Protocol):
    """The LoRA adapters of a model, and how strong each is. Any thread may use it."""

    def scope(self, tenant: str, asked: object = None) -> str:
        """The scope of a request of `tenant`; asked: its field `lora`. Raises InvalidRequest."""
        ...

    def has(self, scope: str) -> bool:
        """Whether the adapters of a scope are loaded."""
        ...


class Engine(Protocol):
    """A model that serves requests. All methods are called on the event loop and never block it."""

    name: str
    """`embedded` or `llama-server`."""
    info: ModelInfo
    wire: WireThreads
    """How requests to this model are parsed, and replies shaped."""
    embedder: Embeds | None
    """None: this engine gives no embeddings, or was not told to."""
    n_ctx: int
    """Tokens one sequence may hold."""
    n_slots: int
    """Sequences that may run at once."""
    token_bytes_max: int
    """Bytes of text that one token stands for, at most; 0: any number."""
    outgrowing: Collection[str]
    """The policies of a `LiveBudget` under which a prompt may be longer than the context."""

    @property
    def adapters(self) -> AdapterSet: ...

    @property
    def slot_image(self) -> ImageSpec | None:
        """How the state of a chat is written to a slot file; None: it is more than rows."""
        ...

    async def settle(self) -> None:
        """Wait until the rows of every chat without a running request are stored."""
        ...

    @property
    def why_not_movable(self) -> str:
        """Why rows cannot be kept behind other text than they were computed after; "" if they can."""
        ...

    def generate(self, request: GenerateRequest) -> Generation:
        """Queue one request.

        Raises ContextExceeded, InvalidRequest (bad grammar), Unavailable (queue full, shutting
        down), TowerdError (decode failed)."""
        ...

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Ids:
        """Text to ids, off the loop. Raises TooLarge."""
        ...

    async def detokenize(self, ids: Sequence[int] | Ids) -> bytes:
        """Ids to bytes (special tokens as text), off the loop."""
        ...

    async def end_reasoning(self, replies: Sequence[Reply]) -> bool:
        """End the reasoning of running replies with their next tokens; False: none is reasoning."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; a table look-up."""
        ...

    def slots(self) -> list[SlotView]:
        """A snapshot of the live sequences."""
        ...

    async def running(self) -> list[SlotView]:
        """Those of `slots` that work on a client's request, and how far it is."""
        ...

    async def kept(self, ids: Ids, scope: str) -> Kept | None:
        """The kept positions of the chat whose tokens are `ids`; None: it has no budget, or is not
        live."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters and gauges for /metrics and /towerd/v1/stats."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Wait until nothing runs. After `grace_s` running requests are cancelled, each ending with
        its Finish, and no new ones are taken."""
        ...

    async def close(self) -> None:
        """Finish or cancel running requests, write rows that are not stored yet, free the model."""
        ...


EngineT = TypeVar("EngineT")


@dataclass(frozen=True, slots=True)
class OpenedEngine(Generic[EngineT]):
    """The result of opening an engine. The context manager that opened it closes it."""

    engine: EngineT
    store: Store
    tiers: Tiers
    forget: Callable[[Sequence[Node]], None]
    """Called with the segments of a session that was frozen, on another thread than the loop's."""
    checkpoints: CheckpointTier | None = None
    """The state checkpoints that the model needs to resume; None: it does from any row."""
    is_quiet: Callable[[], bool] | None = None
    """Whether the engine is idle or only decodes; None: it has no background requests, so nothing
    is evaluated or fetched ahead."""
    anticipate_tokens_max: int = 0
    """Tokens that may be evaluated ahead of a chat's next turn."""


def check_text(text: str, bytes_max: int) -> None:
    """Raises TooLarge: tokenizing takes many times the bytes of a text."""
    # Encoding it to know its bytes would block the event loop.
    if len(text) > bytes_max:
        raise TooLarge(
            f"The text has {len(text)} characters; at most {bytes_max} bytes are tokenized at once"
        )


KEPT_FIELDS = (
    "retention", "live_budget", "retention_scope", "lora", "n_cache_reuse", "id_slot", "store",
)  # fmt: skip
"""Fields of a body that towerd reads itself."""


def encode(body: Mapping[str, Any]) -> bytes:
    """A request body as JSON; arrays of token ids become lists."""
    return msgspec.json.encode(body, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
