from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.wire.endpoint import Endpoint

Ids: TypeAlias = npt.NDArray[np.int32]

class Medium:
    """A picture, a tile of one, or a stretch of sound in a prompt."""

    @property
    def ids(self) -> Ids:
        """What stands for it in the prompt; see `towerd.media_ids`."""

class Encoded:
    """What a projector made of a medium."""

class Projector:
    """libmtmd: encodes media for a text model. Any thread may use it."""

    def __init__(self, model: int, options: bytes) -> None:
        """model: the address of a `llama_model`, which must outlive this object; options:
        `ProjectorOptions.encode()`. Raises RuntimeError: the file is no projector of this model."""

    @property
    def has_vision(self) -> bool: ...
    @property
    def has_audio(self) -> bool: ...
    @property
    def uses_mrope(self) -> bool:
        """Whether positions of media have more than one component."""

    def is_whole(self, medium: Medium) -> bool:
        """Whether all of it must be in one micro-batch, for its tokens see each other."""

    def encode(self, medium: Medium) -> Encoded:
        """One call at a time computes. Raises WireError (500)."""

    def decode(self, ctx: int, medium: Medium, encoded: Encoded, pos: int, seq: int) -> None:
        """Evaluate it from position `pos` of a sequence of the `llama_context` at `ctx` on, on that
        context's thread. Raises WireError (500): part of it may be evaluated then."""

class Model:
    """A model as llama-server serves it: its vocabulary, chat templates and defaults. Never
    changes; any thread may use it."""

    def __init__(
        self,
        model: int,
        settings: bytes,
        tokenizer: Callable[[str], Ids] | None = None,
        projector: Projector | None = None,
    ) -> None:
        """model: the address of a `llama_model`, which must outlive this object and everything made
        from it; settings: `Settings.encode()`; tokenizer: gives the very ids that llama.cpp does for
        a text, with what the vocabulary adds and with special tokens in it, but may remember some;
        projector: what media are encoded with, if the model shall take any.

        Raises RuntimeError: a chat template that does not parse or cannot render an example, a
        setting that llama.cpp does not know."""

    def props(self) -> bytes:
        """What GET /props says of templates, defaults and special tokens: a JSON object."""

    def apply_template(self, body: bytes) -> bytes:
        """The reply to POST /apply-template. Raises WireError."""

    def detokenize(self, body: bytes) -> bytes:
        """The reply to POST /detokenize. Raises WireError."""

    def count_tokens(self, endpoint: Endpoint, body: bytes) -> bytes:
        """The reply to the token counter of `chat`, `responses` or `messages`. Raises WireError."""

class Request:
    """One completion request. Never changes; any thread may use it."""

    def __init__(self, model: Model, endpoint: Endpoint, body: bytes) -> None:
        """Parse and tokenize. Raises WireError, never with a status of 500 or more but for what
        this model does not support (501)."""

    @property
    def id(self) -> str:
        """`chatcmpl-...`, in every event of the reply."""

    @property
    def prompts(self) -> list[Ids]:
        """The prompts' tokens, copied; most requests have one. None may be empty of tokens that are
        not the vocabulary's but those of its media, and one may have no tokens at all."""

    def media(self, prompt: int) -> list[Medium]:
        """Of a prompt, in their order."""

    @property
    def n_choices(self) -> int:
        """Replies that are asked for: `n_per_prompt` for each prompt, in their order."""

    @property
    def n_per_prompt(self) -> int: ...
    @property
    def stream(self) -> bool: ...
    @property
    def n_predict(self) -> int:
        """Tokens to generate at most; -1: no limit."""

    @property
    def n_keep(self) -> int: ...
    @property
    def cache_prompt(self) -> bool: ...
    @property
    def return_progress(self) -> bool: ...
    @property
    def ping_s(self) -> int:
        """Seconds of silence before an SSE comment; -1: never."""

    @property
    def id_slot(self) -> int: ...
    @property
    def agent(self) -> bytes:
        """JSON of a chat's leading system messages and its tools; empty if it has neither."""

    def spans(self, prompt: int) -> npt.NDArray[np.int32]:
        """int32[n, 3]: role, first token and length of each message of a prompt, as the template's
        delimiters have them; `ROLES` names the roles. Empty for a template without delimiters."""

    def field(self, name: str) -> bytes | None:
        """JSON of a top-level field of the body, if it is one of `Settings.kept_fields`."""

    def settings(self, brief: bool) -> bytes:
        """JSON of the parameters in force: `generation_settings`; brief: as in GET /slots."""

    def next_prompt(self, message: bytes) -> Ids:
        """The tokens that every next request of this chat begins with, if its client sends the
        reply back as `Writer.message` has it. Empty if this is no chat, a very long one, or one whose
        client began the reply. Raises WireError."""

class Chunk:
    """What one token made of a reply."""

    @property
    def token(self) -> int: ...
    @property
    def text(self) -> bytes:
        """Text that is certain now: nothing while a stop string may be at its end."""

    @property
    def is_sent(self) -> bool:
        """False: the token's character is not complete, and no event is made of it."""

    @property
    def stop(self) -> Literal["", "eos", "word", "limit"]:
        """Why the reply ends here; empty: it does not."""

class Reply:
    """One choice while it is generated: its sampler and its text. Any thread may use it, one at a
    time gets to."""

    def __init__(self, request: Request, choice: int) -> None:
        """Raises WireError: samplers that cannot be made, a grammar that does not parse."""

    def accept_prompt(self, ids: Ids) -> None:
        """Let the penalties see the tokens that are evaluated before the reply."""

    def started(self, n_cached: int, n_processed: int, prompt_ms: float) -> None:
        """The prompt is evaluated: how many of its tokens were reused and how many evaluated. Only
        the first call counts."""

    def step(self, ctx: int, index: int, is_full: bool) -> Chunk:
        """Sample a token and account for it. ctx: the address of the `llama_context`; index: the
        batch position of the logits; is_full: there is no room for another token.

        Raises WireError (500): no token continues the grammar, logits that are no numbers. The
        reply cannot go on then."""

    def steps(self, ctx: int, index: int, draft: Ids, n_room: int) -> list[Chunk]:
        """The same after a batch in which `draft` followed the newest token, which was at `index`:
        as many tokens as the draft has right, and the one after them, which are those that steps
        without a draft give; fewer where the reply ends. n_room: how many tokens there is room
        for; the one after them ends the reply."""

    def limit(self, truncated: bool) -> None:
        """End it at a limit that the request does not have; truncated: for want of context."""

    def truncate(self) -> None:
        """Say in the reply that tokens before it were dropped for want of context."""

    def end_reasoning(self) -> bool:
        """End its reasoning with the next tokens; False: there is none to end."""

    @property
    def request(self) -> Request: ...
    @property
    def choice(self) -> int: ...
    @property
    def seed(self) -> int:
        """The seed in force."""

    @property
    def text(self) -> bytes:
        """Everything generated, without the stop string."""

    @property
    def stop(self) -> Literal["", "eos", "word", "limit"]: ...
    @property
    def stopping_word(self) -> bytes: ...
    @property
    def has_new_line(self) -> bool: ...
    @property
    def n_kept(self) -> int:
        """How many of its tokens have their text in the reply: all but those that a stop string
        cut off, in whole or in part."""

    @property
    def timings(self) -> tuple[int, int, float, int, float]:
        """(cache_n, prompt_n, prompt_ms, predicted_n, predicted_ms)."""

    @property
    def drafted(self) -> tuple[int, int]:
        """(draft_n, draft_n_accepted): drafted tokens that were evaluated, and that were right."""

class Interruption:
    """Ends what a context evaluates before its time. Any thread may ask; the others are calls of the
    thread that evaluates."""

    def __init__(self, ctx: int) -> None:
        """ctx: the address of a `llama_context`, which evaluates only as long as this object
        lives."""

    def arm(self) -> None:
        """From here to `disarm` an evaluation may be ended."""

    def disarm(self) -> None: ...
    def ask(self) -> None:
        """End the evaluation that runs or comes next, if it may be ended: llama.cpp stops after the
        node of the graph that it computes, and `llama_decode` returns 2."""

class Speculation:
    """Guesses at the next tokens of running replies, by the flags that a model was made with: from a
    draft model, from n-grams, or both. One thread uses it."""

    def __init__(
        self, model: Model, ctx: int, n_slots: int, n_threads: int, n_threads_batch: int
    ) -> None:
        """ctx: the address of the `llama_context` that evaluates the drafts, which outlives this
        object; the numbers of threads are a draft model's, unless flags say otherwise.

        Raises RuntimeError: types that nothing here can serve, no draft model where one is needed,
        one that cannot be loaded, has another vocabulary, or cannot forget a draft."""

    @staticmethod
    def is_asked_for(model: Model) -> bool:
        """Whether the model's flags ask for speculation."""

    def draft(self, asked: Sequence[tuple[int, Ids, int]]) -> list[Ids]:
        """For each (slot, tokens so far, how many more at most) tokens that may follow, maybe none.
        A slot is less than `n_slots` and stands for one text that grows; with another text it
        begins anew. A draft model that has to read much first does so over several calls, and has
        nothing to say meanwhile. Raises WireError (500)."""

    def accept(self, slot: int, n_accepted: int) -> None:
        """How many tokens of the slot's last draft were right."""

class Writer:
    """The bytes of one response. Any thread may use it, one at a time gets to. Every call may raise
    WireError (500) when what was generated is no reply of the model's format."""

    def __init__(self, request: Request) -> None: ...
    def partial(self, chunk: Chunk) -> bytes:
        """The events of one token; empty where there are none, or nothing is streamed."""

    def progress(self, choice: int, total: int, cached: int, processed: int, time_ms: int) -> bytes:
        """The events of `prompt_progress`."""

    def final(self, reply: Reply, id_slot: int, n_cached: int, extra: bytes) -> bytes:
        """The events that close one choice of a stream. Else all of the response, at the call for
        the last of its choices, and nothing before. n_cached: `tokens_cached`; extra: empty, or a
        JSON object whose fields join the reply, or the last of the events."""

    def end(self) -> bytes:
        """What follows the last choice of a stream; may be empty."""

    def error(self, error: bytes) -> bytes:
        """The event of an error in the middle of a stream; error: JSON of llama-server's error
        object."""

    def message(self, choice: int) -> bytes:
        """JSON of the message that a choice has become, in OpenAI's form."""

class EmbeddingRequest:
    """POST /embeddings, or /v1/embeddings."""

    def __init__(self, model: Model, openai: bool, body: bytes) -> None:
        """Raises WireError."""

    @property
    def prompts(self) -> list[Ids]: ...
    @property
    def normalize(self) -> int:
        """`embd_normalize`: how the engine shall normalize."""

    def reply(self, rows: Sequence[npt.NDArray[np.float32]]) -> bytes:
        """The JSON reply. rows: of each prompt float32[n, n_embd], one with pooling, else one a
        token."""

class RerankRequest:
    """POST /rerank."""

    def __init__(self, model: Model, body: bytes) -> None:
        """Raises WireError."""

    @property
    def prompts(self) -> list[Ids]:
        """One for each document."""

    def reply(self, scores: Sequence[float]) -> bytes:
        """The JSON reply; scores: of each document."""
