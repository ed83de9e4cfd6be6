"""A GGUF as a teacher: its tokenizer, its chat template, and its next-token distributions.

Everything goes through llama.cpp's C interface, so any model that llama.cpp runs can teach.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lab.texts.chat_records import ChatRecord, Message
from lab.train.data.form import EncodedRecord, Ids, mark_of
from lab.train.errors import TrainError
from towerd.llama_library import lib

F32 = npt.NDArray[np.float32]
BATCH = 64
"""Tokens evaluated at once: at most BATCH rows of logits are in memory."""
_INT32_P = ctypes.POINTER(ctypes.c_int32)
_PIECE_BYTES = 512


def _drop(_level: int, _text: bytes, _data: Any) -> None:
    """Discard a log message of llama.cpp."""


_drop_callback = lib.llama_log_callback(_drop)  # kept alive: llama.cpp keeps the pointer


def silence_llama_cpp() -> None:
    """Stop llama.cpp from printing in this process; failures are raised anyway."""
    lib.llama_log_set(_drop_callback, None)


@dataclass(frozen=True, slots=True)
class Targets:
    """The k likeliest next tokens after each of n tokens; all others have 1 - the sum of `p`."""

    ids: npt.NDArray[np.int64]
    """[n, k]"""
    p: F32
    """[n, k]"""


class Teacher:
    """A loaded model. Close it, or use it as a context manager. Raises TrainError."""

    def __init__(self, path: Path, n_ctx: int, *, n_threads: int | None = None) -> None:
        self.path = path
        self._model: Any = None
        self._context: Any = None
        if not path.is_file():
            raise TrainError(f"There is no teacher at {path}.")
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise TrainError(f"llama.cpp cannot load the teacher {path}.")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, BATCH, BATCH
        # An unquantized cache: the student learns the distribution, so nothing is rounded.
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if n_threads is not None:
            params.n_threads = params.n_threads_batch = n_threads
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise TrainError(f"The teacher {path} gets no context of {n_ctx} tokens.")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))
        template = lib.llama_model_chat_template(self._model, None)
        self.template: str | None = template.decode() if template else None

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`; with `special`, names of control tokens in it are parsed as tokens."""
        data = text.encode()
        room = len(data) + 8
        out = np.empty(room, np.int32)
        n = int(
            lib.llama_tokenize(
                self._vocab, data, len(data), out.ctypes.data_as(_INT32_P), room, False, special
            )
        )
        if n < 0:
            raise TrainError(f"The teacher {self.path} cannot tokenize its training text.")
        ids: list[int] = out[:n].tolist()
        return ids

    @property
    def begin(self) -> list[int]:
        """The ids that the tokenizer puts before a text: one or none."""
        adds = lib.llama_vocab_get_add_bos(self._vocab)
        return [int(lib.llama_vocab_bos(self._vocab))] if adds else []

    def name(self, token: int) -> str:
        """The text of a token; "" for none."""
        if token < 0:
            return ""
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        n = int(lib.llama_token_to_piece(self._vocab, token, buffer, _PIECE_BYTES, 0, True))
        return buffer.raw[: max(n, 0)].decode(errors="replace")

    @property
    def begin_name(self) -> str:
        return self.name(int(lib.llama_vocab_bos(self._vocab)))

    @property
    def end_name(self) -> str:
        return self.name(int(lib.llama_vocab_eos(self._vocab)))

    def targets(self, ids: Ids, k: int) -> Targets:
        """The teacher's distribution after each of ids [n], n at most its context."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        parts = []
        for first in range(0, len(ids), BATCH):
            parts.append(_top(self._logits(ids[first : first + BATCH], first), k))
        return Targets(np.concatenate([t.ids for t in parts]), np.concatenate([t.p for t in parts]))

    def greedy(self, ids: Ids, n_max: int) -> list[int]:
        """The likeliest continuation of ids [n], at least one, up to `n_max` tokens, an end of
        generation or the end of the context."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        logits = self._logits(ids[:BATCH], 0)
        for first in range(BATCH, len(ids), BATCH):
            logits = self._logits(ids[first : first + BATCH], first)
        said: list[int] = []
        n_max = min(n_max, int(lib.llama_n_ctx(self._context)) - len(ids))
        while len(said) < n_max:
            token = int(logits[-1].argmax())
            if lib.llama_vocab_is_eog(self._vocab, token):
                break
            said.append(token)
            logits = self._logits(np.array([token], np.uint32), len(ids) + len(said) - 1)
        return said

    def close(self) -> None:
        """Free the model."""
        if self._context:
            lib.llama_free(self._context)
            self._context = None
        if self._model:
            lib.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> Teacher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _logits(self, ids: Ids, first: int) -> F32:
        """[n, n_vocab] logits after ids [n], whose positions start at `first`."""
        n = len(ids)
        batch = lib.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(ids.tolist()):
                batch.token[i], batch.pos[i], batch.logits[i] = token, first + i, 1
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
            status = lib.llama_decode(self._context, batch)
        finally:
            lib.llama_batch_free(batch)
        if status != 0:
            raise TrainError(
                f"The teacher {self.path} failed to evaluate (llama_decode: {status})."
            )
        rows = lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(rows, (n, self.n_vocab)).copy()


def _top(logits: F32, k: int) -> Targets:
    k = min(k, logits.shape[1])
    ids = np.argpartition(logits, -k, axis=1)[:, -k:]
    top = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - top).sum(axis=1, keepdims=True)
    p = np.exp(np.take_along_axis(logits, ids, axis=1) - top) / total
    return Targets(ids.astype(np.int64), p.astype(np.float32))


class TeacherForm:
    """Conversations in the teacher's own chat template and tokens; plain text without roles if it
    has no template, or the template refuses these roles."""

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher
        self._template: jinja2.Template | None = None
        if teacher.template is not None:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _refuse
            try:
                self._template = environment.from_string(teacher.template)
            except jinja2.TemplateError:
                self._template = None

    @property
    def n_vocab(self) -> int:
        return self._teacher.n_vocab

    @property
    def fingerprint(self) -> str:
        with self._teacher.path.open("rb") as file:
            return f"teacher-1-{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def encode(self, records: Sequence[ChatRecord]) -> list[EncodedRecord]:
        return [self._encode(record) for record in records]

    def question(self, content: str) -> Ids:
        """The prompt that asks for an answer to a user's first message. Raises TrainError for a
        model without a chat template."""
        prompt = self._render([Message("user", content)], asks=True)
        if prompt is None:
            raise TrainError(f"{self._teacher.path} has no chat template that takes a question.")
        if self._teacher.begin:
            prompt = prompt.removeprefix(self._teacher.begin_name)
        ids = [*self._teacher.begin, *self._teacher.tokenize(prompt, special=True)]
        return np.array(ids, dtype=np.uint32)

    def _encode(self, record: ChatRecord) -> EncodedRecord:
        """The mark of a token is that of its message's role; the template's text around a message
        belongs to the message."""
        ids = list(self._teacher.begin)
        marks = [mark_of(record.messages[0].role)] * len(ids)
        parts = self._rendered(record.messages)
        for i, message in enumerate(record.messages):
            if parts is not None:
                tokens = self._teacher.tokenize(parts[i], special=True)
            else:
                tokens = self._teacher.tokenize(message.content + "\n", special=False)
            ids += tokens
            marks += [mark_of(message.role)] * len(tokens)
        return EncodedRecord(np.array(ids, dtype=np.uint32), np.array(marks, dtype=np.uint8))

    def _rendered(self, messages: Sequence[Message]) -> list[str] | None:
        """The text that each message adds to the prompt; None if the template refuses them."""
        parts: list[str] = []
        shown = ""
        for i in range(len(messages)):
            whole = self._render(messages[: i + 1])
            if whole is None or not whole.startswith(shown):
                return None
            parts.append(whole[len(shown) :])
            shown = whole
        if self._teacher.begin:
            parts[0] = parts[0].removeprefix(self._teacher.begin_name)
        return parts

    def _render(self, messages: Sequence[Message], *, asks: bool = False) -> str | None:
        if self._template is None or any(m.role not in ("user", "assistant") for m in messages):
            return None
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                bos_token=self._teacher.begin_name,
                eos_token=self._teacher.end_name,
                add_generation_prompt=asks,
            )
        except (jinja2.TemplateError, TypeError, ValueError):
            return None


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
