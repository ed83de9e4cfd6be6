"""A slot's state as llama-server saves it: one plain KV cache, or two when the model has
sliding-window layers (the full-attention layers, then the sliding-window ones), or a state that cannot
be cut, maybe behind a KV cache (see `towerd.slots.slot_states`).

A store keeps both as one row per token: the layout lists the full-attention planes first, then
the sliding-window ones. The server saves only the window's last rows, so a stored row may lack
its sliding-window planes; they are zero then, which no real row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from towerd.kernels import dispatch
from towerd.slots.compose import StateFrame, check_parts, state_size, write_state
from towerd.slots.errors import StateError
from towerd.slots.kind import DENSE, WHOLE, WINDOW, StateKind
from towerd.slots.layout import STATE_VERSION, KVLayout
from towerd.slots.reader import ByteReader
from towerd.slots.rows import KVRows
from towerd.slots.slot_states import SlotState, find_state, parse_slot_state
from towerd.slots.slotfile import FILE_MAGIC, HEADER_BYTES, parse_tokens, token_section
from towerd.slots.state import SequenceState, parse_state
from towerd.tokens import Ids

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """How one llama-server frames a slot's state."""

    layout: KVLayout
    n_full: int
    """Layers of `layout` that attend to everything; the rest have a sliding window."""
    n_stream: int
    v_trans: bool
    window: int = 0
    """Tokens that sliding-window layers attend to; 0: there are none, or it is not known."""
    kind: StateKind = DENSE

    @property
    def has_window(self) -> bool:
        """Whether there are sliding-window layers."""
        return self.n_full < self.layout.n_layer

    def frame(self, slot: int) -> StateFrame:
        """For the state of `slot`."""
        stream = slot if self.n_stream > 1 else 0
        return StateFrame(self.n_stream, stream, self.v_trans, slot)


@dataclass(frozen=True, slots=True, eq=False)
class SlotImage:
    """A parsed slot file. `full`: rows of positions [0, n), None for a kind that keeps none; `window`:
    the last of them; `state`: the state at the end, for kinds that have one."""

    tokens: Ids
    full: SequenceState | None
    window: SequenceState | None
    packed: bool
    state: SlotState | None = None

    @property
    def n(self) -> int:
        """Tokens that it is of."""
        return len(self.tokens)

    @property
    def full_rows(self) -> KVRows:
        """The rows of positions [0, n), for kinds that have rows."""
        assert self.full is not None
        return self.full.rows

    @property
    def window_from(self) -> int:
        """The first position with sliding-window rows; 0 without such layers."""
        return 0 if self.window is None else self.window.rows.p0

    def spec(self, window: int) -> ImageSpec:
        """How it is framed."""
        if self.full is None:
            assert self.state is not None
            state = self.state
            return ImageSpec(state.layout, 0, state.n_stream, False, 0, state.kind)
        full = self.full.rows.layout
        layout = full if self.window is None else _joined(full, self.window.rows.layout)
        kind = DENSE if self.window is None else WINDOW
        if self.state is not None:
            kind = self.state.kind
        frame = self.full.frame
        return ImageSpec(layout, full.n_layer, frame.n_stream, frame.v_trans, window, kind)

    def rows(self, layout: KVLayout, p0: int, p1: int) -> KVRows:
        """Rows [p0, p1) in the joined layout; what is not in the window is zero there."""
        full = self.full_rows.slice(p0, p1)
        if self.window is None:
            return full
        k, v = _padded(self.window.rows, p0, p1)
        return KVRows(layout, full.positions, full.k + k, full.v + v, full.ext)

    def to_bytes(self) -> bytes:
        """The file again; byte for byte the one that was parsed."""
        section = token_section(self.tokens, self.packed)
        states = [each for each in (self.full, self.window) if each is not None]
        n_rest = 0 if self.state is None else len(self.state.part)
        n_rows = sum(each.nbytes for each in states)
        out = np.empty(HEADER_BYTES + section.nbytes + n_rows + n_rest, np.uint8)
        at = _write_head(out, section)
        for state in states:
            state.write(out[at : at + state.nbytes])
            at += state.nbytes
        if self.state is not None:
            out[at:] = self.state.part
        return out.tobytes()


def parse_image(data: Bytes, *, cell_ext: bool = False) -> SlotImage:
    """Parse a slot file of one or two KV caches. Raises StateError for anything else: another
    version, media, recurrent state, holes, or rows that do not belong to the tokens."""
    tokens, packed, rest = _parse_head(data)
    full, window = _parse_states(rest, cell_ext)
    _check(tokens, full, window)
    return SlotImage(tokens, full, window, packed)


def parse_state_image(data: Bytes, spec: ImageSpec | None = None) -> SlotImage:
    """Parse a slot file of a model whose memory has a state. spec: how it is framed; None: that is
    found out. Raises StateError: another version, media, or a state that does not belong to the tokens."""
    tokens, packed, rest = _parse_head(data)
    if spec is None:
        state = find_state(rest, len(tokens))
    else:
        cell_ext, has_v = spec.layout.cell_ext, bool(spec.layout.v)
        state = parse_slot_state(rest, len(tokens), spec.kind, cell_ext=cell_ext, has_v=has_v)
    return SlotImage(tokens, state.rows, None, packed, state)


def parse_whole_image(data: Bytes) -> SlotImage:
    """Parse a slot file whose state is kept as it is. Raises StateError: another version, media."""
    tokens, packed, rest = _parse_head(data)
    state = parse_slot_state(rest, len(tokens), WHOLE)
    return SlotImage(tokens, None, None, packed, state)


def _parse_head(data: Bytes) -> tuple[Ids, bool, Bytes]:
    """The tokens, whether they are packed, and the bytes behind them."""
    reader = ByteReader(data)
    if reader.u32("magic") != FILE_MAGIC:
        raise StateError("not a slot file")
    version = reader.u32("version")
    if version != STATE_VERSION:
        raise StateError(f"slot file version {version}; towerd reads {STATE_VERSION}")
    n_words = reader.u32("token section size")
    words = reader.take(4 * n_words, f"token section of {n_words} words").view("<i4")
    tokens, packed = parse_tokens(words)
    return tokens, packed, reader.take(reader.remaining, "state")


def _parse_states(data: Bytes, cell_ext: bool) -> tuple[SequenceState, SequenceState | None]:
    """One state, or two of layers that have values."""
    try:
        return parse_state(ByteReader(data), cell_ext=cell_ext), None
    except StateError:
        reader = ByteReader(data)
        full = parse_state(reader, cell_ext=cell_ext, has_v=True, is_last=False)
        return full, parse_state(reader, cell_ext=cell_ext)


def _check(tokens: Ids, full: SequenceState, window: SequenceState | None) -> None:
    rows = full.rows
    if rows.p0 != 0 or not rows.is_consecutive or rows.p1 != len(tokens):
        raise StateError(
            f"{len(tokens)} tokens, but {len(rows)} rows at positions {rows.p0} to {rows.p1 - 1}"
        )
    if window is None:
        return
    if not window.rows.is_consecutive or window.rows.p1 != rows.p1:
        raise StateError("the sliding-window rows are not the last ones")
    if window.frame != full.frame or window.rows.layout.cell_ext:
        raise StateError("full-attention and sliding-window layers are framed differently")


# ---- composing ------------------------------------------------------------------------------


def image_size(spec: ImageSpec, n: int, n_window: int, n_state: int = 0) -> int:
    """Bytes of a slot file of `n` tokens with `n_window` sliding-window rows and a state part of
    `n_state` bytes."""
    size = HEADER_BYTES + 4 * (n + 4) + n_state
    if spec.kind.has_rows:
        size += state_size(_full_layout(spec), n, spec.n_stream)
    if spec.has_window:
        size += state_size(_window_layout(spec), n_window, spec.n_stream)
    return size


def window_rows(spec: ImageSpec, parts: Sequence[KVRows], n: int) -> list[KVRows]:
    """The sliding-window rows to restore with tokens [0, n), consecutive parts and before them
    one that no token attends to; [] without such layers.

    llama-server reuses a restored slot only if it holds a row before the window (its checkpoint
    gate asks for position < n - window). The saved rows are one short of that, but the row that
    is missing lies outside the window of every token to come, so its content does not matter."""
    if not spec.has_window:
        return []
    first = max(0, n - spec.window)
    if first < _real_from(spec, parts, n):
        first += 1  # the row at n - window is not in the next token's window either
    rows = [_window_part(spec, part, first, n) for part in parts if part.p1 > first and part.p0 < n]
    front = max(0, first - 2)
    gate = replace(
        rows[0].slice(rows[0].p0, rows[0].p0 + 1), positions=np.array([front], np.int32), blob=None
    )
    return [gate, *rows] if front < first else rows


def usable(spec: ImageSpec, parts: Sequence[KVRows], n: int) -> int:
    """How many of the first `n` tokens of `parts` can be restored so that llama-server uses
    them exactly: all, or with sliding-window layers the most whose window is stored; 0 none."""
    if not spec.has_window:
        return n
    if spec.window == 0:
        return 0  # not known yet
    real = _is_real(spec, parts, n)
    for end in range(n, spec.window, -1):
        missing = np.flatnonzero(~real[max(0, end - spec.window + 1) : end])
        if not len(missing):
            return end
    return 0


def write_image(
    spec: ImageSpec,
    tokens: Ids,
    parts: Sequence[KVRows],
    window: Sequence[KVRows],
    slot: int,
    out: Bytes,
    state: Bytes | None = None,
) -> None:
    """Fill `out` (exactly `image_size` bytes of new memory) with the slot file of `tokens`, whose
    rows are `parts` (consecutive from 0, maybe in stored formats). state: the state part, for kinds that
    have one. StateError if they do not fit."""
    if state is not None:
        out[len(out) - len(state) :] = state
        out = out[: len(out) - len(state)]
    if not spec.kind.has_rows:
        _write_head(out, token_section(tokens, True))
        return
    frame = spec.frame(slot)
    layout = _full_layout(spec)
    full = [_full_part(spec, part) for part in parts]
    check_parts(full, frame, layout)
    if sum(map(len, full)) != len(tokens):
        raise StateError(f"{len(tokens)} tokens for {sum(map(len, full))} rows")
    at = _write_head(out, token_section(tokens, True))
    end = at + state_size(layout, len(tokens), spec.n_stream)
    write_state(out[at:end], full, frame, None, dispatch.THREADS, layout, is_new=True)
    if spec.has_window:
        write_state(
            out[end:], window, frame, None, dispatch.THREADS, _window_layout(spec), is_new=True
        )


def _write_head(out: Bytes, section: npt.NDArray[np.int32]) -> int:
    out[:HEADER_BYTES] = np.array([FILE_MAGIC, STATE_VERSION, len(section)], "<u4").view(np.uint8)
    end = HEADER_BYTES + section.nbytes
    out[HEADER_BYTES:end] = section.view(np.uint8)
    return end


# ---- full-attention and sliding-window planes -------------------------------------------------


def _joined(full: KVLayout, window: KVLayout) -> KVLayout:
    return KVLayout(full.k + window.k, full.v + window.v, full.cell_ext)


def _full_layout(spec: ImageSpec) -> KVLayout:
    n, layout = spec.n_full, spec.layout
    return KVLayout(layout.k[:n], layout.v[:n], layout.cell_ext) if spec.has_window else layout


def _window_layout(spec: ImageSpec) -> KVLayout:
    n, layout = spec.n_full, spec.layout
    return KVLayout(layout.k[n:], layout.v[n:])


def _full_part(spec: ImageSpec, part: KVRows) -> KVRows:
    if not spec.has_window:
        return part
    n, own = spec.n_full, part.layout
    layout = KVLayout(own.k[:n], own.v[:n], own.cell_ext)
    return part.layers(0, n, layout, part.ext)


def _window_part(spec: ImageSpec, part: KVRows, p0: int, p1: int) -> KVRows:
    n, own = spec.n_full, part.layout
    layout = KVLayout(own.k[n:], own.v[n:])
    return part.slice(p0, p1).layers(n, own.n_layer, layout, None)


def _is_real(spec: ImageSpec, parts: Sequence[KVRows], n: int) -> npt.NDArray[np.bool_]:
    """bool[n]: which of the first positions have sliding-window rows. The first such layer's
    keys show it: no real row is all zero, and if one were, nothing would be lost."""
    real = np.zeros(n, np.bool_)
    for part in parts:
        if part.p0 >= n:
            break
        end = min(part.p1, n)
        plane, keys = part.layout.k[spec.n_full], part.k[spec.n_full][: end - part.p0]
        if plane.format.is_quantized:
            keys = dispatch.transcoded(keys, plane.format.name, "f32")
            real[part.p0 : end] = keys.view(np.float32).any(axis=1)
        else:
            real[part.p0 : end] = keys.any(axis=1)
    return real


def _real_from(spec: ImageSpec, parts: Sequence[KVRows], n: int) -> int:
    """The first position from which on every one has sliding-window rows."""
    missing = np.flatnonzero(~_is_real(spec, parts, n))
    return int(missing[-1]) + 1 if len(missing) else 0


def _padded(rows: KVRows, p0: int, p1: int) -> tuple[tuple[Bytes, ...], tuple[Bytes, ...]]:
    """K and V planes of [p0, p1), zero where `rows` has none."""
    if rows.p0 <= p0:
        inside = rows.slice(p0, p1)
        return inside.k, inside.v
    start = min(rows.p0, p1) - p0

    def pad(plane: Bytes) -> Bytes:
        out = np.zeros((p1 - p0, plane.shape[1]), np.uint8)
        out[start:] = plane[: p1 - p0 - start]
        return out

    return tuple(map(pad, rows.k)), tuple(map(pad, rows.v))
