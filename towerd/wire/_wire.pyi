from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.wire.settings import Endpoint

Ids: TypeAlias = npt.NDArray[np.int32]

class Medium:
    """A picture, a tile of one, or a stretch of sound in a prompt."""

    @property
    def ids(self) -> Ids:
        """The ids that stand for it in the prompt; see `towerd.media_ids`."""
    @property
    def file(self) -> bytes | None:
        """What it is made of, as the client sent it; None where that is not known."""
    @property
    def file_bytes(self) -> int:
        """The size of that; 0 where it is not known."""
    @property
    def file_id(self) -> int:
        """Tells media of the same file in one prompt."""
    @property
    def ordinal(self) -> int:
        """Which of the media of its file it is in its prompt."""

class Encoded:
    """A medium encoded by a projector."""

def check_medium(data: bytes) -> None:
    """Raises WireError for a picture or sound that must not be decoded: a bomb, or of a format whose
    decoder is not to be trusted. What is neither passes."""

def is_file_name(name: str) -> bool:
    """Whether llama-server takes this as the name of a file in a folder of its own."""

def server_flags() -> list[tuple[list[str], int]]:
    """Every flag of llama-server: its spellings, and how many values follow it. One that switches off
    what another one switches on is a flag of its own."""

def number_of(name: str) -> Literal["int", "float", ""]:
    """What llama.cpp reads a flag's value as; empty where it is no number. Raises RuntimeError for a
    name that it does not know."""

class LoadFlags:
    """What flags of llama-server say about how a model and its contexts are made. It must live as long
    as they do."""

    def __init__(self, words: list[str]) -> None:
        """words: flags and their values. Raises RuntimeError that names a flag that llama.cpp does not
        know, or whose value it does not take."""

    @property
    def numa(self) -> int:
        """A `ggml_numa_strategy`."""

    def apply_to_model(self, params: int) -> None:
        """Set the fields of the `llama_model_params` at this address that belong to the flags."""

    def apply_to_context(self, params: int) -> None:
        """The same for `llama_context_params`."""

class Projector:
    """libmtmd: encodes media for a text model. Any thread may use it."""

    def __init__(self, model: int, options: bytes) -> None:
        """model: the address of a `llama_model`, which must outlive this object; options:
        `ProjectorOptions.encode()`. Raises RuntimeError: not a projector of this model."""

    @property
    def uses_mrope(self) -> bool:
        """Whether positions have several components (M-RoPE)."""

    def is_whole(self, medium: Medium) -> bool:
        """Whether all of it must be in one micro-batch, as its tokens attend to each other."""

    def encode(self, medium: Medium) -> Encoded:
        """Encode a medium; concurrent calls wait for each other. Raises WireError (500)."""

    def decode(
        self, ctx: int, medium: Medium, encoded: Encoded, pos: int, seq: int, head: Head | None
    ) -> None:
        """Evaluate a medium from position `pos` on, in sequence `seq` of the `llama_context` at
        `ctx`, and have a head read it; call it on that context's thread. Raises WireError (500),
        possibly after a part was evaluated."""

def device_bytes(model: int) -> list[tuple[int, int]]:
    """Bytes that are free and all bytes of each device beside the CPU that llama.cpp put a model on; both 0
    where a device does not tell. model: the address of a `llama_model`."""

def token_bytes_max(model: int) -> int:
    """Bytes of text that one token stands for, at most; 0: any number, where the tokenizer may drop
    text or change it, or a special token takes the space beside it. model: the address of a
    `llama_model`."""

class Model:
    """A model as llama-server serves it: its vocabulary, chat templates and defaults. Never
    changes; any thread may use it."""

    def __init__(
        self,
        model: int,
        settings: bytes,
        tokenizer: Callable[[str], Ids] | None = None,
        projector: Projector | None = None,
        deep_stack: Callable[[bytes, Callable[[], None]], None] | None = None,
    ) -> None:
        """model: the address of a `llama_model`, which must outlive this object and everything made
        from it; settings: `Settings.encode()`; tokenizer: returns the same ids as llama.cpp for a
        text, with the tokens that the vocabulary adds and with special tokens parsed, and may cache
        them; projector: encodes media, if the model accepts any; deep_stack: calls its second
        argument, which tokenizes the first, on a stack that is deep enough for it, if the vocabulary
        needs one. What both functions raise becomes WireError.

        Raises RuntimeError: a chat template that does not parse or cannot render an example, a
        setting that llama.cpp does not know."""

    @property
    def token_bytes_max(self) -> int:
        """See the function of this name."""

    def props(self) -> bytes:
        """Templates, defaults and special tokens, as in GET /props: a JSON object."""

    def apply_template(self, body: bytes) -> bytes:
        """The reply to POST /apply-template. Raises WireError."""

    def detokenize(self, body: bytes) -> bytes:
        """The reply to POST /detokenize. Raises WireError."""

    def count_tokens(self, endpoint: Endpoint, body: bytes) -> bytes:
        """The reply to the token counter of `chat`, `responses` or `messages`. Raises WireError."""

    def medium_at(self, file: bytes, ordinal: int) -> Medium:
        """The `ordinal`th medium of a file in a prompt that has the file often enough. Raises WireError."""

class Request:
    """One completion request. Never changes; any thread may use it."""

    def __init__(
        self,
        model: Model,
        endpoint: Endpoint,
        body: bytes,
        check_fit: Callable[[dict[str, bytes], list[int]], None] | None = None,
        upload: tuple[bytes, int, int] | None = None,
        continued: tuple[Ids, int] | None = None,
    ) -> None:
        """Parse and tokenize. upload: a body, and where the sound of a transcription begins and ends in
        it. continued: tokens of a conversation, which stand in place of so many tokens that the only prompt
        begins with; none of those may be a medium's, and `spans`, `agent` and `next_prompt` are empty. check_fit: called before prompts are tokenized of which one is longer
        than the context for certain, with the kept fields of the body and the least number of
        tokens of each prompt; what it raises becomes WireError.

        Raises WireError with a status below 500, except for features that this model does not
        support (501)."""

    @property
    def id(self) -> str:
        """`chatcmpl-...`, in every event of the reply."""

    @property
    def prompts(self) -> list[Ids]:
        """Copies of the prompts' ids, including those of media; most requests have one prompt. A
        prompt may be empty."""

    def media(self, prompt: int) -> list[Medium]:
        """The media of a prompt, in order."""

    @property
    def n_choices(self) -> int:
        """The number of replies requested: `n_per_prompt` for each prompt, in their order."""

    @property
    def n_per_prompt(self) -> int: ...
    @property
    def stream(self) -> bool: ...
    @property
    def n_predict(self) -> int:
        """The most tokens to generate; -1: no limit."""

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
    def agent(self) -> bytes:
        """JSON of a chat's leading system messages and its tools; empty if it has neither."""

    @property
    def has_reasoning_control(self) -> bool:
        """Whether its reasoning may be ended while it runs."""

    def upstream_body(self, choice: int, own: bytes) -> bytes:
        """The body of a llama-server's POST /completion for one choice: what llama-server's own
        endpoints make of this request, with the prompt as token ids, and the fields of `own`, a
        JSON object. Only with `Settings.is_upstream`."""

    def spans(self, prompt: int) -> npt.NDArray[np.int32]:
        """int32[n, 3]: role, first token and length of each message of a prompt, found by the
        template's delimiters; `ROLES` names the roles. Empty for a template without delimiters."""

    def reply_bytes(self, n_tokens: int) -> tuple[int, int, int]:
        """RAM that replies of so many tokens in each choice take at most, as far as more than their text is asked for
        (probabilities, biases, a grammar, many prompts), in bytes: what stays until they are sent; what one choice takes
        besides while it is written; how much of the former is there with each token that came."""

    def field(self, name: str) -> bytes | None:
        """JSON of a top-level field of the body, if it is one of `Settings.kept_fields`."""

    def settings(self, brief: bool) -> bytes:
        """JSON of the parameters in force: `generation_settings`; brief: as in GET /slots."""

    def next_prompt(self, message: bytes) -> Ids:
        """The tokens that every next request of this chat begins with, if its client sends the
        reply back as `Writer.message` returns it. Empty if this is not a chat, a very long one, or
        one whose client began the reply. Raises WireError."""

class Chunk:
    """The effect of one token on a reply."""

    @property
    def token(self) -> int: ...
    @property
    def text(self) -> bytes:
        """Text that is final now; empty while it may end in a stop string."""

    @property
    def stop(self) -> Literal["", "eos", "word", "limit"]:
        """Why the reply ends here; empty: it continues."""

class Received:
    """What one event of a llama-server's stream adds to a reply."""

    @property
    def progress(self) -> tuple[int, int, int, int] | None:
        """(total, cached, processed, time_ms) of the prompt; None: the event is not about that."""

    @property
    def chunk(self) -> Chunk | None: ...
    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens of the reply that are known since this event. llama-server names no token that ends
        within a character; such tokens are found by their text."""

    @property
    def is_last(self) -> bool: ...

class Reply:
    """One choice while it is generated: its sampler and its text. Any thread may use it; calls are
    serialized. If the request is for a llama-server, it has no sampler and its events come in by
    `received`."""

    def __init__(self, request: Request, choice: int) -> None:
        """Raises WireError for invalid samplers or a grammar that does not parse."""

    def received(self, event: bytes) -> Received:
        """Add an event of a llama-server's POST /completion, a JSON object. Raises WireError: the
        error that it is."""

    def evaluated_before(self, n: int, ms: float) -> None:
        """Of the prompt, `n` tokens were evaluated before llama-server got the request, so that it says
        that it reused them; all that took `ms`."""

    @property
    def upstream_id(self) -> str:
        """llama-server's name of a received reply; empty if it did not say."""

    @property
    def is_exact(self) -> bool:
        """Whether the ids of a received reply are certainly those that were sampled."""

    @property
    def n_reused(self) -> int:
        """How many tokens of its prompt llama-server said to have reused, with those that were
        evaluated before."""

    @property
    def n_unnamed(self) -> int:
        """Tokens of a received reply whose ids are not known: they came after the last text."""

    def accept_prompt(self, ids: Ids) -> None:
        """Let the penalties see the tokens that are evaluated before the reply."""

    def started(self, n_cached: int, n_processed: int, prompt_ms: float) -> None:
        """The prompt was evaluated: `n_cached` tokens were reused, `n_processed` evaluated. Only
        the first call counts."""

    def steps(
        self, ctx: int, index: int, draft: Ids, n_room: int, synthetic: Sequence[float] = ()
    ) -> list[Chunk]:
        """Sample from the logits of a batch in which `draft`, which may be empty, followed the newest
        token, which was at `index`. Returns the accepted tokens of the draft and the token after them,
        the same as steps without a draft would give; fewer if the reply ends. ctx: the address of the
        `llama_context`; n_room: how many tokens there is room for; the one after them ends the reply;
        synthetic: unless it is empty, drafted tokens are taken with these probabilities, right or not.

        Raises WireError: no token is left or continues the grammar (400), or logits are not finite
        (500). The reply cannot be continued then."""

    def limit(self, truncated: bool) -> None:
        """End the reply at a limit other than the request's. truncated: the context is full."""

    def truncate(self) -> None:
        """Mark the reply: earlier tokens were dropped because the context was full."""

    def end_reasoning(self) -> bool:
        """End its reasoning with the next tokens; False: it is not reasoning."""

    @property
    def request(self) -> Request: ...
    @property
    def choice(self) -> int: ...
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
        """How many of its tokens have their text in the reply: all except those cut off by a stop
        string, wholly or partly."""

    @property
    def timings(self) -> tuple[int, int, float, int, float]:
        """(cache_n, prompt_n, prompt_ms, predicted_n, predicted_ms)."""

    @property
    def drafted(self) -> tuple[int, int]:
        """(draft_n, draft_n_accepted): drafted tokens that were evaluated, and that were right."""

class Interruption:
    """Aborts an evaluation of a context. Any thread may call `ask`; the other calls are for the
    thread that evaluates."""

    def __init__(self, ctx: int) -> None:
        """ctx: the address of a `llama_context`, which must not evaluate after this object is
        gone."""

    def arm(self) -> None:
        """From here to `disarm` an evaluation may be aborted."""

    def disarm(self) -> None: ...
    def ask(self) -> None:
        """Abort the running or next evaluation, if it may be aborted: llama.cpp stops after the
        current node of the graph, and `llama_decode` returns 2."""

class Speculation:
    """Drafts the next tokens of running replies, by the model's flags: from a draft model, from
    n-grams, or both. Not thread-safe."""

    def __init__(
        self, model: Model, ctx: int, n_slots: int, n_threads: int, n_threads_batch: int
    ) -> None:
        """ctx: the address of the `llama_context` that verifies the drafts, which must outlive this
        object; the numbers of threads are those of a draft model, unless flags override them.

        Raises RuntimeError: unsupported types, or a draft model that is missing, cannot be loaded,
        has another vocabulary, or cannot forget a draft."""

    @staticmethod
    def is_asked_for(model: Model) -> bool:
        """Whether the model's flags ask for speculation."""

    def draft(self, asked: Sequence[tuple[int, Ids, int]]) -> list[Ids]:
        """A draft, possibly empty, for each (slot, tokens so far, the most tokens to draft). A slot
        is less than `n_slots` and stands for one growing text; with another text it starts over. A
        draft model that has to read much first does so over several calls, and drafts nothing until
        then. Raises WireError (500)."""

    def accept(self, slot: int, n_accepted: int) -> None:
        """How many tokens of the slot's last draft were right."""

    @property
    def synthetic(self) -> tuple[float, ...]:
        """With which probabilities drafted tokens are to be taken, right or not; empty: where they are
        right."""

class Head:
    """Drafts the next tokens of running replies from the model's hidden states: MTP, EAGLE-3, DFlash or
    DSpark. It reads every token that the model evaluates. Not thread-safe."""

    def __init__(self, model: Model, ctx: int, flags: int, n_running: int, path: str) -> None:
        """ctx: the address of the `llama_context` that verifies the drafts, which must outlive this
        object; flags: that of its `llama_context_params`; n_running: sequences that get drafts at once;
        path: of the model's file

        Raises RuntimeError: other types beside it, a model without such a head, one that was made for
        another model, or one that cannot forget a draft."""

    @staticmethod
    def is_asked_for(model: Model) -> bool:
        """Whether the model's flags ask for one."""

    @property
    def followed_context(self) -> int:
        """The address of the `llama_context` whose sequences are to be shared and cut as those of `ctx`
        are; 0: the head has no rows of its own."""

    @property
    def synthetic(self) -> tuple[float, ...]:
        """With which probabilities drafted tokens are to be taken, right or not; empty: where they are
        right."""

    @property
    def lag(self) -> int:
        """The row of a sequence's last token is computed this many tokens later."""

    def changed(self, seq: int, p: int) -> None:
        """What a sequence held from position `p` on is not what it was any more. To be called wherever
        `ctx` is cut or filled."""

    def follow(self, ids: Ids, pos: Ids, seqs: Ids) -> None:
        """Read a batch that `ctx` has just evaluated; the tokens of one sequence are beside each other.
        Raises WireError (500)."""

    def draft(self, asked: Sequence[tuple[int, int, int, int]]) -> list[Ids]:
        """A draft, possibly empty, for each (sequence, newest token, its position, the most tokens to
        draft). Raises WireError (500)."""

    def accept(self, seq: int, n_accepted: int) -> None:
        """How many tokens of the sequence's last draft were right; before anything else of it is
        evaluated."""

class Writer:
    """The bytes of one response. Any thread may use it; calls are serialized. Every call may raise
    WireError (500) if the generated text is not a reply in the model's format."""

    def __init__(self, request: Request, shown: bytes = b"") -> None:
        """shown: empty, or a JSON object whose fields are in every object of a response of
        /v1/responses, which then also says whether it came to its end."""

    def partial(self, chunk: Chunk) -> bytes:
        """The events of one token; empty if there are none, or if the reply is not streamed."""

    def progress(self, choice: int, total: int, cached: int, processed: int, time_ms: int) -> bytes:
        """The events of `prompt_progress`."""

    def final(
        self, reply: Reply, id_slot: int, n_cached: int, extra: bytes, shown: bytes = b""
    ) -> bytes:
        """The events that close one choice of a stream. Without streaming, the whole response at
        the call for its last choice, and nothing before. n_cached: `tokens_cached`; extra: empty,
        or a JSON object whose fields are added to the reply or its last event. shown: empty, or a JSON
        object whose fields replace those that are shown in this choice's response. A stream gets the text
        that `partial` has not written."""

    def response_id(self, choice: int) -> str:
        """The id of a choice's response, of /v1/responses."""

    def response(self, choice: int) -> bytes:
        """JSON of the object of a finished choice's response, of /v1/responses."""

    def end(self) -> bytes:
        """What follows the last choice of a stream; may be empty."""

    def message(self, choice: int) -> bytes:
        """JSON of the message of a finished choice, in OpenAI's form."""

def mended_json(body: bytes) -> bytes:
    """A text that is nearly JSON as JSON: without a byte-order mark, and with U+FFFD for each escaped
    half of a surrogate pair."""

class EmbeddingRequest:
    """POST /embeddings, or /v1/embeddings."""

    def __init__(self, model: Model, openai: bool, body: bytes) -> None:
        """Raises WireError."""

    @property
    def prompts(self) -> list[Ids]: ...
    @property
    def normalize(self) -> int:
        """`embd_normalize`: the normalization for the engine to apply."""

    def reply(self, rows: Sequence[npt.NDArray[np.float32]]) -> bytes:
        """The JSON reply. rows: float32[n, n_embd] for each prompt, with n = 1 with pooling, else
        one row per token."""

class RerankRequest:
    """POST /rerank."""

    def __init__(self, model: Model, body: bytes) -> None:
        """Raises WireError."""

    @property
    def prompts(self) -> list[Ids]:
        """One prompt for each document."""

    def reply(self, scores: Sequence[float]) -> bytes:
        """The JSON reply. scores: one for each document."""
