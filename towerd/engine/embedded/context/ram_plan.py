"""RamPlan: what a model and its contexts take of a limited RAM, and the sizes with which they leave enough of it.

llama.cpp says how large the buffers of a context are only when it makes one. Two small ones tell the line on which larger
ones lie: rows and scores grow with the cells, all else stays.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.zero_pages import HostBuffer
from towerd.errors import ConfigError, ModelError
from towerd.llama_library import lib
from towerd.model.llama_log import buffers_made
from towerd.model.llama_model import LlamaModel
from towerd.model.row_memory import row_memory_of
from towerd.models.header import read_header
from towerd.settings.config import Config, defaults, partial_bytes
from towerd.settings.llama_flags import draft_model, media_flags
from towerd.system.process import return_free_memory
from towerd.system.ram_limit import GIVE_SHARE, GivenSizes, RamLimit
from towerd.wire import device_bytes

log = logging.getLogger(__name__)

ROOM_MIN = 64 << 20
"""Bytes beside model and contexts without which nothing can be answered."""
PROCESS_BYTES = 48 << 20
"""What a process takes of its own after its model was loaded: indexes, threads, the codec's small model."""
CONTEXT_SHARE = 0.6
"""Of what the weights leave, contexts whose size is not set take at most this share."""
CTX_MIN = 512
"""Fewer tokens of context are of no use."""
CTX_ENOUGH = 4096
"""A context of so many tokens is not made longer by smaller batches."""
DRAFT_BYTES = 128 << 20
"""What the context of a draft model takes besides its rows."""
COMPUTE_BYTES = 96 << 20
"""What the computations of the smallest context take, where it is not known yet: rather too much."""
MORE_SPARE = 4 << 20
"""No two starts take exactly the same."""
UBATCH_MIN = 64
_SIZES = 4
"""How many sizes of computations are tried: of 512, 256, 128 and 64 tokens."""
CELLS_ROUND = 256
_BODIES_SHARE = 16
"""Of several models, requests of one need at most one in so many parts of the limit."""
_SHARES = 4
"""The parts into which hot rows, blobs on their way, bodies, and all else divide the room."""


@dataclass(frozen=True, slots=True)
class BufferLine:
    """Bytes of a context's buffers by its cells."""

    fixed: int
    of_cell: int

    def at(self, n_cells: int) -> int:
        """Bytes of a context of so many cells."""
        return self.fixed + self.of_cell * n_cells

    def cells_within(self, n_bytes: int) -> int:
        """Cells of the largest context that takes no more, a multiple of CELLS_ROUND; 0: even a small one takes more."""
        n_cells = (n_bytes - self.fixed) // max(1, self.of_cell)
        return max(0, n_cells // CELLS_ROUND * CELLS_ROUND)


@dataclass(frozen=True, slots=True)
class RamPlan:
    """The sizes in force. config: with the ubatch_size that is used."""

    config: Config
    n_ctx: int
    n_cells: int
    room: int
    """Bytes that are left beside them."""


def measured_line(model: LlamaModel, config: Config, n_seqs: int) -> BufferLine:
    """What contexts of this model take. Raises ModelError: not even a small one can be made."""
    n_cells = -(-max(config.ubatch_size, config.batch_size, n_seqs) // CELLS_ROUND) * CELLS_ROUND
    sizes = []
    for n in (n_cells, 2 * n_cells):
        buffers_made()
        LlamaContext(model, config, n_cells=n, n_seqs=n_seqs).close()
        made = buffers_made(in_ram=True)
        sizes.append(sum(each for name, each in made.items() if name != "model"))
    of_cell = -(-max(0, sizes[1] - sizes[0]) // n_cells)
    return BufferLine(max(0, sizes[0] - of_cell * n_cells), of_cell)


def check_weights(
    files: Sequence[Path], config: Config, ram: RamLimit, *, may_exceed: bool = False
) -> None:
    """Before a model is loaded. may_exceed: the limit was not set, and the weights are mapped: if they take more than
    there is, the system reads them again and again, and there is no limit. Raises ConfigError if what of the files
    stays in RAM takes more than there is."""
    if not ram.is_limited:
        return
    return_free_memory()  # a model that was unloaded may have left some
    n_bytes = sum(_size(path) for path in files) + _size_of_others(config)
    left = ram.left_at_start() - PROCESS_BYTES - ROOM_MIN
    if n_bytes > left:
        n_bytes = int(n_bytes * (1 - _share_on_gpus(files[0], config)))
    if n_bytes <= left:
        return
    own = _mib((ram.bytes_max or ram.address_max) - left)
    what = f"the weights take {_mib(n_bytes)}, and towerd itself {own}"
    if may_exceed and ram.bytes_max:
        log.warning(
            f"{what}, where the container or unit may have {_mib(ram.bytes_max)}: parts of the weights are read from "
            "the disk again and again, and no request is refused for want of RAM. Give it more, or set --ram-max"
        )
        ram.bytes_max = 0
        return
    more = n_bytes - left + _smallest_context(files[0], config)
    raise _too_much(ram, what, more, "serve a smaller model")


def _share_on_gpus(path: Path, config: Config) -> float:
    """Share of the layers, from 0 to 1, whose weights a GPU holds."""
    if config.gpu_layers == 0 or not lib.llama_supports_gpu_offload():
        return 0.0
    try:
        model = LlamaModel(path, replace(config, progress_fd=None), vocab_only=True)
    except ModelError:
        return 0.0  # it is refused when it is loaded
    try:
        n_layer = max(1, int(model.key("block_count", "1")))
        devices = device_bytes(model.address)
        rows = row_memory_of(devices, n_layer=n_layer, gpu_layers=config.gpu_layers, ram=0)
        return rows.n_on_gpu / rows.n_layer
    finally:
        model.close()


def _smallest_context(path: Path, config: Config) -> int:
    """Bytes that a context takes at most that is as long as was asked for, or just long enough to be of use."""
    try:
        rows = _tokens_least(config) * read_header(path).token_bytes
    except ModelError:
        rows = 0
    draft = DRAFT_BYTES if draft_model(config.llama_server_args) else 0
    return 2 * rows + COMPUTE_BYTES + draft


def planned(
    model: LlamaModel,
    config: Config,
    ram: RamLimit,
    wanted: tuple[int, int],
    attention: Callable[[Config, int], str],
    n_seqs: Callable[[Config], int],
    others: int,
) -> RamPlan:
    """The sizes with which a model that was just loaded keeps to the limit.

    wanted: tokens of a conversation and cells, as they would be without a limit. attention: the flash_attn of a context
    of so many cells. others: bytes of the loaded weights that are not resident yet, and of what is to be loaded
    behind them.

    Raises ConfigError if sizes that were set, or the smallest ones, do not fit."""
    left = ram.left_at_start() - others - PROCESS_BYTES
    before = ram.given
    if before is not None and (before.path, before.wanted) == (model.path, wanted):
        return _again(before, model, config, n_seqs, left)
    n_ctx, n_cells = wanted
    best: tuple[Config, BufferLine, int] | None = None
    for each in _with_smaller_batches(config):
        each = replace(each, flash_attn=attention(each, n_cells))
        try:
            line = _with_others(measured_line(model, each, n_seqs(each)), config)
        except ModelError as error:
            log.debug("a small context cannot be made: %s", error.message)
            continue
        most = line.cells_within(left - ROOM_MIN)
        if not config.ctx_size and not config.live_tokens:
            most = max(min(most, CTX_MIN), min(most, line.cells_within(int(CONTEXT_SHARE * left))))
        if best is None or most >= best[2]:
            best = each, line, most
        if most >= min(n_ctx, CTX_ENOUGH):
            break
    if best is None or best[2] < CTX_MIN:
        what, more = "the weights leave no room for a context", None
        if best is not None:
            n_least = _tokens_least(config)
            more = best[1].at(n_least) + ROOM_MIN - left
            what = f"a context of {n_least} tokens takes {_mib(best[1].at(n_least))} beside the weights"
        raise _too_much(ram, what, more, "serve a smaller model")
    found = _within(best, config, ram, wanted, left)
    used = found.config
    batches = used.ubatch_size, used.live_sequences, used.flash_attn
    ram.given = GivenSizes(model.path, wanted, found.n_ctx, found.n_cells, found.room, *batches)
    return found


def _tokens_least(config: Config) -> int:
    """The cells of the smallest context that will do."""
    n_cells = max(CTX_MIN, config.live_tokens or config.ctx_size)
    return -(-n_cells // CELLS_ROUND) * CELLS_ROUND


def _again(
    before: GivenSizes,
    model: LlamaModel,
    config: Config,
    n_seqs: Callable[[Config], int],
    left: int,
) -> RamPlan:
    """The sizes that a model had before it was unloaded."""
    used = replace(
        config,
        ubatch_size=before.ubatch_size,
        live_sequences=before.live_sequences,
        flash_attn=before.flash_attn,
    )
    line = _with_others(measured_line(model, used, n_seqs(used)), config)
    room = max(ROOM_MIN, min(before.room, left - line.at(before.n_cells)))
    return RamPlan(used, before.n_ctx, before.n_cells, room)


def _within(
    best: tuple[Config, BufferLine, int],
    config: Config,
    ram: RamLimit,
    wanted: tuple[int, int],
    left: int,
) -> RamPlan:
    used, line, most = best
    n_ctx, n_cells = wanted
    said = config.live_tokens or config.ctx_size
    if said > most:
        flag = "--live-tokens" if config.live_tokens else "--ctx-size"
        raise _too_much(
            ram,
            f"{flag} {said} takes {_mib(line.at(said))} with this model",
            line.at(_tokens_least(config)) - line.at(most),
            f"lower it to {most}, or quantize the cache with --cache-type-k q8_0 --cache-type-v q8_0",
        )
    if not said:
        if n_ctx > most:
            log.warning(
                f"the context has {most:,} tokens instead of {n_ctx:,}: {ram.text} has room for no more; raise it, or "
                "set --ctx-size"
            )
        n_ctx, n_cells = min(n_ctx, most), min(n_cells, most)
    elif not config.live_tokens:
        n_cells = max(config.ctx_size, min(n_cells, line.cells_within(int(CONTEXT_SHARE * left))))
    n_cells = -(-n_cells // CELLS_ROUND) * CELLS_ROUND
    return RamPlan(used, n_ctx, n_cells, max(ROOM_MIN, left - line.at(n_cells)))


def check_started(ram: RamLimit) -> None:
    """Once all is loaded. Raises ConfigError if what was not foreseen, such as a draft model's context, has taken the room
    for requests."""
    left = ram.left()
    if left < ROOM_MIN // 2:
        what = f"model, contexts and towerd itself take {_mib(ram.taken())}"
        raise _too_much(ram, what, ROOM_MIN - left, "lower --ctx-size")


def within_room(config: Config, room: int) -> Config:
    """The settings with the caches that so much RAM has room for."""
    share = room // _SHARES
    return replace(
        config,
        hot_bytes=min(config.hot_bytes, share),
        recall_bytes=min(
            config.recall_bytes, share // 3
        ),  # chats that do not run share twice as much
    )


def room_wanted(config: Config) -> int:
    """RAM beside model and contexts that a process makes use of."""
    bodies = min(_SHARES * config.request_bytes_max, config.ram_max // _BODIES_SHARE)
    caches = _SHARES * max(config.hot_bytes, partial_bytes(config))
    return max(2 * ROOM_MIN, bodies, caches)


def untouched_bytes(buffers: Sequence[HostBuffer]) -> int:
    """Bytes of these that take no RAM yet."""
    libc = ctypes.CDLL(None)  # finding it by its name would start a program each time
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    page, n_bytes = mmap.PAGESIZE, 0
    for buffer in buffers:
        start = -(-buffer.base // page) * page
        size = (buffer.base + buffer.n_bytes) // page * page - start
        in_ram = ctypes.create_string_buffer(size // page)
        if not libc.mincore(start, size, in_ram):
            n_bytes += page * in_ram.raw.count(b"\0", 0, size // page)
    return n_bytes


def _with_smaller_batches(config: Config) -> list[Config]:
    """The settings, and those with smaller computations and fewer conversations that stay live, as far as these have
    their default sizes and no medium or text to embed needs the batch."""
    found, ubatch, n_live = [config], config.ubatch_size, config.live_sequences
    known = defaults()
    is_whole = config.embeddings or config.reranking or media_flags(config.llama_server_args).path
    has_batch = ubatch == known["ubatch_size"] and not is_whole
    has_live = n_live == known["live_sequences"]
    while (has_batch or has_live) and len(found) < _SIZES:
        ubatch = max(UBATCH_MIN, ubatch // 2) if has_batch else ubatch
        n_live = max(config.parallel, n_live // 2) if has_live else n_live
        found.append(replace(config, ubatch_size=ubatch, live_sequences=n_live))
    return found


def _with_others(line: BufferLine, config: Config) -> BufferLine:
    """What a context takes with those that are as long beside it: the one for embeddings, and a draft model's."""
    n = 2 if config.embeddings or config.reranking else 1
    fixed, of_cell = n * line.fixed, n * line.of_cell
    if path := draft_model(config.llama_server_args):
        with suppress(ModelError):  # it is refused when it is opened
            of_cell += read_header(Path(path)).token_bytes
            fixed += DRAFT_BYTES
    return BufferLine(fixed, of_cell)


def _size_of_others(config: Config) -> int:
    paths = draft_model(config.llama_server_args), media_flags(config.llama_server_args).path
    return sum(_size(Path(path)) for path in paths if path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # whoever opens it says why


def _too_much(ram: RamLimit, what: str, n_more: int | None, instead: str) -> ConfigError:
    more = "" if n_more is None else f" by {_mib(int(n_more / GIVE_SHARE) + MORE_SPARE)}"
    return ConfigError(f"{ram.text} is too little: {what}. Raise it{more}, or {instead}.")


def _mib(n_bytes: int) -> str:
    return f"{-(-n_bytes // 2**20):,} MiB"
