"""Start-up of the embedded engine: load, size the context, check the state format, identify its rows.

Everything here runs once, on a worker thread, before the first request.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from towerd.engine.base import KEPT_FIELDS, ModelInfo
from towerd.engine.embedded.context.adapters import Adapters, load_adapters
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.memory import SequenceMemory, n_seqs_of, open_memory
from towerd.engine.embedded.context.ram_plan import (
    check_weights,
    planned,
    room_wanted,
    untouched_bytes,
    within_room,
)
from towerd.engine.embedded.context.taps import Taps
from towerd.errors import ConfigError, ModelError
from towerd.kernels.formats import BY_NAME
from towerd.model.llama_log import buffers_made, last_errors
from towerd.model.llama_model import LlamaModel, check_reply_flags
from towerd.model.model_file import Memo, file_hash, weights_hash
from towerd.model.retokenize import Retokenizer
from towerd.model.row_flags import (
    CacheFraming,
    has_rotation,
    is_rotated,
    row_overrides,
    whole_arch,
)
from towerd.model.row_memory import RowMemory, row_memory
from towerd.model.vocab import Vocab
from towerd.models.bundled import find_model
from towerd.models.hub.file_names import parts_of
from towerd.models.known import metadata_of
from towerd.settings.config import UNQUANTIZED, WATCHING, Config, partial_bytes
from towerd.settings.llama_flags import adapter_files, media_flags, named_files, words_of
from towerd.slots.errors import StateError
from towerd.slots.kind import DENSE, WHOLE, WINDOW
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.row_identity import RowIdentity, tokenizer_hash
from towerd.slots.selftest import check_slot_file, self_test
from towerd.store import Catalog
from towerd.system.machine import own_resident_bytes
from towerd.system.ram_limit import MEDIA_SHARE, TEXT_SHARE, RamLimit, own_bytes
from towerd.wire import Model, Projector, ProjectorOptions, Settings, recommended

log = logging.getLogger(__name__)

T = TypeVar("T")

N_CTX_DEFAULT_MAX = 32768
_CELLS_ROUND = 256
_LIVE_RAM_SHARE = 8
"""The default live context takes at most 1 / _LIVE_RAM_SHARE of RAM."""
_LIVE_GPU_SHARE = 2
"""On a GPU it takes at most 1 / _LIVE_GPU_SHARE of what the weights left free: compute buffers need memory, too."""
SEGMENT_BYTES = 2048
"""What a segment takes in the prefix tree and in what follows it."""
_SCORE_BYTES = 4
_SCORES_RAM_SHARE = 8
"""The scores of one batch may take at most 1 / _SCORES_RAM_SHARE of RAM."""


@dataclass(frozen=True, slots=True)
class Core:
    """A loaded model with its context, checked and ready to be scheduled."""

    model: LlamaModel
    context: LlamaContext
    vocab: Vocab
    info: ModelInfo
    n_ctx: int
    memory: SequenceMemory
    adapters: Adapters
    why_not_movable: str
    """Why rows cannot be moved to another place, or "" if they can."""
    projector: Projector | None = None
    """Encodes media; None if the model takes none."""
    taps: Taps | None = None
    """Reads the context's graphs; None unless the daemon was started with a policy that needs it."""
    ram: RamLimit = field(default_factory=RamLimit)

    def text_bytes_max(self, config: Config) -> int:
        """Bytes of text that are tokenized at once."""
        return min(config.text_bytes_max(self.n_ctx), self.ram.room // TEXT_SHARE)

    @property
    def can_slice(self) -> bool:
        """Whether stored state can be cut at any token."""
        return self.memory.kind.can_slice

    @property
    def layout(self) -> KVLayout:
        return self.info.row_identity.layout

    def close(self) -> None:
        self.ram.take_back()
        self.context.close()
        self.model.close()


def check_before_loading(config: Config) -> None:
    """Look for the files beside the model, and read the flags about replies: to load it may take minutes.
    Raises ConfigError."""
    config.chat_template_source()
    for flag, path in named_files(config.llama_server_args):
        if not Path(path).is_file():
            raise ConfigError(
                f"{flag}: there is no file {path}.", public=f"The file of {flag} is missing."
            )
    check_reply_flags(config)


def load_core(config: Config, catalog: Catalog, ram: RamLimit | None = None) -> Core:
    """Load `config.model` (or the default); `catalog` remembers the file's hash. ram: what it keeps to; None: no
    limit.

    Raises ModelError, also for a state format that fails the self-test (with the version), and
    ConfigError for sizes that are not possible."""
    check_before_loading(config)
    path, ram = find_model(config.model), ram or RamLimit(address_max=0)
    if ram.is_limited and path.is_file():
        may_exceed = config.mmap and config.has_container_limit
        check_weights(parts_of(path), config, ram, may_exceed=may_exceed)
    before = own_bytes()
    buffers_made()  # those of other models
    model = LlamaModel(path, config)
    gpu_bytes = buffers_made(in_ram=False).get("model", 0)
    projector: Projector | None = None
    try:
        projector = on_short_lived_thread(lambda: open_projector(model, config, catalog))
        tree = _tree_bytes(catalog) if ram.is_limited else 0
        loaded = own_bytes() - before
        context, n_ctx, taps = _open_context(model, config, ram, loaded, tree)
    except Exception:
        del projector
        model.close()
        raise
    try:
        vocab = Vocab(model.ptr)
        memory = on_short_lived_thread(lambda: _probe(context, model))
        info = replace(_info(model, vocab, config, memory, catalog), gpu_bytes=gpu_bytes)
        if projector is not None:
            check_projector(projector, config, memory)
            info = replace(info, has_media=True)
        files, applied = adapter_files(config.llama_server_args)
        adapters = load_adapters(model, files, catalog, applied=applied)
    except Exception:
        ram.take_back()
        context.close()
        model.close()
        raise
    parts = (context, vocab, info, n_ctx, memory, adapters, memory.kind.why_not_movable)
    return Core(model, *parts, projector, taps, ram)


def _open_context(
    model: LlamaModel, config: Config, ram: RamLimit, resident: int, tree: int
) -> tuple[LlamaContext, int, Taps | None]:
    """The context of a model of which so many bytes are resident, the tokens of a conversation, and what reads its
    graphs. tree: bytes that the store's prefix tree will take. Raises ModelError, ConfigError."""
    rows = row_memory(model, config, config.ram_bytes)
    n_ctx, n_cells = _sizes(model, config, rows)

    def attention(config: Config, n_cells: int) -> str:
        return flash_attention(config, rows, n_head=model.n_head, n_cells=n_cells)

    def n_seqs_for(config: Config) -> int:
        return on_short_lived_thread(lambda: n_seqs_of(model, config, rows))

    room = 0
    if ram.is_limited:
        others = tree + (max(0, model.size_bytes - resident) if not rows.n_on_gpu else 0)
        sizes = n_ctx, n_cells
        found = planned(model, config, ram, sizes, attention, n_seqs_for, others)
        config, n_ctx, n_cells, room = found.config, found.n_ctx, found.n_cells, found.room
    else:
        config = replace(config, flash_attn=attention(config, n_cells))
    n_seqs = n_seqs_for(config)
    taps = Taps() if config.retention in WATCHING else None
    buffers_made()  # those of trials
    context = LlamaContext(model, config, n_cells=n_cells, n_seqs=n_seqs, taps=taps)
    made = buffers_made()
    if ram.is_limited:
        if config.behind_router:  # what it has no use for is for other models
            room = ram.keep_to(room, room_wanted(config))
        ram.leave_room(room, lambda: untouched_bytes(context.host_buffers))
        config = within_room(config, room)
    logging.getLogger("towerd.memory").info(
        memory_line(model.size_bytes, made, context.n_cells, config)
    )
    return context, n_ctx, taps


def _tree_bytes(catalog: Catalog) -> int:
    return SEGMENT_BYTES * int(catalog.rows("SELECT count(*) FROM segments")[0][0])


def memory_line(weights: int, buffers: Mapping[str, int], n_cells: int, config: Config) -> str:
    """What memory is reserved for and how much of it is in RAM, in one sentence. weights: bytes;
    buffers: see `buffers_made`."""
    compute = buffers.get("compute", 0) + buffers.get("output", 0)
    live = sum(buffers.values()) - compute - buffers.get("model", 0)
    how = "mapped" if config.mmap else "read"
    parts = [
        f"weights {_mib(weights)} ({how})",
        f"{n_cells:,} live tokens {_mib(live)}",
        f"compute buffers {_mib(compute)}",
        f"up to {_mib(config.hot_bytes)} for hot conversations (--hot-bytes)",
    ]
    if (partial := partial_bytes(config)) > 0:
        parts.append(f"up to {_mib(partial)} for what left the context (--recall-bytes)")
    if config.ram_max:
        parts.append(f"all of it at most {_mib(config.ram_max)} (--ram-max)")
    resident = own_resident_bytes()
    now = "" if resident is None else f"; {_mib(resident)} of RAM in use now"
    return ", ".join(parts) + now


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def _sizes(model: LlamaModel, config: Config, rows: RowMemory) -> tuple[int, int]:
    """(tokens per sequence, cells of the context)"""
    n_ctx = config.ctx_size or min(model.n_ctx_train, N_CTX_DEFAULT_MAX)
    is_stretched = (
        config.rope_freq_base or config.rope_freq_scale or row_overrides(config.load_words, {})
    )
    if n_ctx > model.n_ctx_train and not is_stretched:
        log.warning(
            f"--ctx-size {n_ctx} is more than the {model.n_ctx_train} tokens that the model was "
            "trained on; beyond these its replies may make no sense."
        )
    layout = declared_layout(model, config)
    if config.live_tokens:
        n_cells = config.live_tokens
    else:
        n_cells = max(n_ctx, min(4 * n_ctx, affordable_cells(layout, rows)))
    if n_cells < n_ctx:
        raise ConfigError(
            f"--live-tokens {n_cells} is less than --ctx-size {n_ctx}; "
            "one full conversation has to fit the live context."
        )
    return n_ctx, -(-n_cells // _CELLS_ROUND) * _CELLS_ROUND


def affordable_cells(layout: KVLayout, rows: RowMemory) -> int:
    """How many cells the default live context may have."""
    return rows.n_affordable(
        layout.token_bytes, ram_share=_LIVE_RAM_SHARE, gpu_share=_LIVE_GPU_SHARE
    )


def declared_layout(model: LlamaModel, config: Config) -> KVLayout:
    """The layout according to the metadata; the probe finds the real one."""
    n_head = _largest(model, "attention.head_count", 1)
    n_embd = int(model.key("embedding_length", "0"))
    head_k = int(model.key("attention.key_length", str(n_embd // max(1, n_head))))
    head_v = int(model.key("attention.value_length", str(head_k)))
    n_kv = _largest(model, "attention.head_count_kv", n_head)
    n_layer = int(model.key("block_count", "1"))
    k, v = BY_NAME[config.cache_type_k], BY_NAME[config.cache_type_v]
    try:
        k_plane = Plane(k.ggml_type, k.row_bytes(n_kv * head_k))
        v_plane = Plane(v.ggml_type, v.row_bytes(n_kv * head_v))
    except (StateError, ValueError) as error:
        raise ConfigError(
            f"Cache types {k.name}/{v.name} do not fit this model: {error}."
        ) from error
    return KVLayout((k_plane,) * n_layer, (v_plane,) * n_layer)


def on_short_lived_thread(work: Callable[[], T]) -> T:
    """Run `work`, which computes, on a thread that ends with it.

    OpenMP keeps a team of threads for each thread that ever computed. With more threads than
    cores libgomp sleeps at barriers instead of spinning, and every step of the inference thread
    takes twice as long: 26 ms instead of 12 for a token of the 100M shape on two cores
    (`GOMP_SPINCOUNT` in the manual of libgomp)."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _largest(model: LlamaModel, name: str, default: int) -> int:
    """A metadata value that may be a list, one for each layer; at least 1."""
    values = model.key(name, str(default)).strip("[]").split(",")
    return max(1, *(int(value) for value in values))


def _probe(context: LlamaContext, model: LlamaModel) -> SequenceMemory:
    """Decode two tokens and check our reading of their state byte for byte.

    Raises ModelError if this llama.cpp writes another format, in which nothing may be stored."""
    seq, ids = context.n_seqs - 1, np.array([0, 0], np.int32)
    try:
        memory = open_memory(context, model)
        context.batch.add(ids, 0, seq, logits_last=True)
        context.decode()
        handle, name = tempfile.mkstemp(suffix=".slot")
        os.close(handle)
        try:
            context.save_file(seq, name, ids)
            check_slot_file(Path(name).read_bytes(), context.get_state(seq))
            if memory.kind is DENSE:
                self_test(context.get_state(seq), [0, 1], memory.layout)
        finally:
            os.unlink(name)
            context.seq_rm(seq)
    except StateError as error:
        raise ModelError(
            f"{error}; install the llama-cpp-python version that towerd names."
        ) from error
    return memory


def _info(
    model: LlamaModel,
    vocab: Vocab,
    config: Config,
    memory: SequenceMemory,
    catalog: Catalog,
) -> ModelInfo:
    layout, n_cells = memory.layout, memory.context.n_cells
    rotated = has_rotation(os.environ)
    arch = model.arch
    if memory.kind is WHOLE:
        framing = CacheFraming(config.cache_type_k, config.cache_type_v, memory.context.v_trans)
        arch = whole_arch(arch, framing, is_rotated=rotated)
    n_head_kv = _largest(model, "attention.head_count_kv", 1)
    row_identity = RowIdentity(
        model_hash=weights_hash(model.files, catalog),
        arch=arch,
        tokenizer=tokenizer_hash(vocab.pieces),
        rope=model.rope(config),
        lora=(),
        layout=layout,
        rot_k=rotated and bool(layout.k) and is_rotated(layout.k[0], n_head_kv),
        rot_v=rotated and bool(layout.v) and is_rotated(layout.v[0], n_head_kv),
        long_context=model.is_long_context(n_cells),
    )
    return ModelInfo(
        path=str(model.path),
        alias=config.aliases[0] if config.aliases else model.path.name,
        aliases=config.aliases,
        tags=config.tags,
        description=model.description(),
        n_vocab=vocab.n_vocab,
        n_ctx_train=model.n_ctx_train,
        n_embd=model.n_embd,
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        vocab_type=vocab.vocab_type,
        bos_token=vocab.bos_text,
        eos_token=vocab.eos_text,
        chat_template=model.metadata.get("tokenizer.chat_template", ""),
        row_identity=row_identity,
        kv_bytes_per_token=layout.token_bytes,
        metadata=model.metadata,
    )


def flash_attention(config: Config, rows: RowMemory, *, n_head: int, n_cells: int) -> str:
    """Return `on`, `off` or, to let llama.cpp decide, `auto`. n_head: query heads of the widest layer;
    n_cells: cells of the context.

    llama.cpp's own "auto" takes flash attention wherever it exists. On CPUs that is slower for
    everything but long prompts: its kernel visits a query's keys one at a time unless a batch has 64
    queries. Measured on the 1B shape in Q8_0 with an f16 cache (2 cores of a Xeon with AMX,
    2026-11-21), seconds for one batch, flash attention on / off:

        tokens   depth 2,048     depth 8,192
        1        0.096 / 0.059   0.334 / 0.107
        9        0.536 / 0.131   2.131 / 0.310
        64       0.496 / 0.528   1.415 / 1.539
        512      4.681 / 4.375   11.70 / 12.59

    Without flash attention every token of a batch is scored against every cell in use, those of other
    sequences included. The scheduler therefore keeps few idle cells, and the scores need memory."""
    if config.flash_attn != "auto":
        return config.flash_attn
    if rows.n_on_gpu or config.cache_type_v not in UNQUANTIZED:
        return "auto"
    scores_bytes = config.ubatch_size * n_cells * n_head * _SCORE_BYTES
    return "off" if scores_bytes <= rows.ram // _SCORES_RAM_SHARE else "auto"


def open_projector(model: LlamaModel, config: Config, memo: Memo) -> Projector | None:
    """What --mmproj names, or None. `memo` remembers the file's hash. Raises ConfigError."""
    flags = media_flags(config.llama_server_args)
    if not flags.path:
        return None
    path = Path(flags.path)
    try:
        digest = f"{file_hash(path, memo)} {flags.image_min_tokens} {flags.image_max_tokens}"
    except ModelError as error:
        raise ConfigError(f"--mmproj: {error}") from error
    options = ProjectorOptions(
        path=str(path),
        digest=digest,
        n_threads=config.threads,
        use_gpu=flags.offload,
        image_min_tokens=flags.image_min_tokens,
        image_max_tokens=flags.image_max_tokens,
        warmup=flags.warmup,
    )
    try:
        return Projector(model.address, options.encode())
    except RuntimeError as error:
        raise ConfigError(f"--mmproj: {error}: {last_errors() or 'no reason given'}.") from error


def check_projector(projector: Projector, config: Config, memory: SequenceMemory) -> None:
    """Raises ConfigError if the rows of media cannot be stored."""
    if projector.uses_mrope and memory.kind is WINDOW:
        path = media_flags(config.llama_server_args).path
        raise ConfigError(
            f"--mmproj {path}: this model has sliding windows, and pictures with positions of several "
            "components (M-RoPE), whose rows this engine does not store: leave --mmproj out, or use "
            "--engine llama-server with -- --mmproj FILE."
        )


def open_wire(core: Core, config: Config, retokenizer: Retokenizer) -> Model:
    """Raises ConfigError: a chat template that does not parse or renders no example, a flag's value
    that llama.cpp does not take."""
    settings = Settings(
        name=core.info.alias,
        n_ctx=core.n_ctx,
        text_bytes_max=core.text_bytes_max(config),
        media_bytes_max=core.ram.room // MEDIA_SHARE if core.ram.is_limited else 0,
        n_parallel=config.parallel,
        n_batch=config.batch_size,
        chat_template=config.chat_template_source() or _known_template(core),
        defaults={**recommended(core.info.metadata), "n_predict": config.n_predict},
        flags=tuple(words_of(config.llama_server_args, "wire")),
        kept_fields=KEPT_FIELDS,
    )

    def tokenize(text: str) -> Any:
        return retokenizer.tokenize(text, add_special=True, parse_special=True)

    try:
        deep_stack = core.vocab.with_deep_stack if core.vocab.is_deep else None
        return Model(core.model.address, settings.encode(), tokenize, core.projector, deep_stack)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"llama.cpp refuses a chat template or flag: {error}.") from error


def _known_template(core: Core) -> str:
    """What a known model's template is replaced by; empty: the GGUF's own is used."""
    return metadata_of(core.model.path).get("tokenizer.chat_template", "")
