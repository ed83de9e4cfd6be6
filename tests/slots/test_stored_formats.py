"""Rows in stored formats: layouts, runs, and blobs composed from any mixture of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from format_oracle import STORED, decode, encode, floats, plane_of, random_rows, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.kernels.formats import BY_NAME
from towerd.slots.blob import blob_size, emit_blob, parse_blob
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout, Plane
from towerd.slots.rows import KVRows
from towerd.slots.runs import Runs


def layout_of(name: str, *, cell_ext: bool = False) -> KVLayout:
    """Two layers, rows of 64 and 96 elements."""
    k, v = plane_of(name, 64), plane_of(name, 96)
    return KVLayout((k, v), (v, k), cell_ext)


NATIVES = ("f16", "f32", "bf16", "q8_0", "q5_1")
F16 = layout_of("f16")
MIXED = KVLayout((Plane(1, 16), plane_of("f16", 64)), (plane_of("q4_0", 64), plane_of("f32", 32)))
TOLERANCE = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3, "q8_0": 0.02, "q5_1": 0.15, "q4_0": 0.4}
"""Named per destination: what rounding once more may change in numbers of a few units."""


def same(a: KVRows, b: KVRows) -> bool:
    """All bytes equal."""
    return (
        a.layout == b.layout
        and np.array_equal(a.positions, b.positions)
        and all(map(np.array_equal, a.planes(), b.planes()))
    )


# ---- layouts ------------------------------------------------------------------------------


def test_planes_are_stored_if_they_get_smaller() -> None:
    """Whole blocks and fewer bytes, or the plane stays as it is."""
    kept = MIXED.stored_as("q4h")
    assert [plane.format.name for plane in kept.planes] == ["f16", "q4h", "q4_0", "q4h"]
    assert [plane.row_bytes for plane in kept.planes] == [16, 36, 36, 18]
    assert [plane.n_elements for plane in kept.planes] == [p.n_elements for p in MIXED.planes]
    assert (kept.format_name, MIXED.format_name) == ("q4h", NATIVE)
    assert (kept.is_native, MIXED.is_native) == (False, True)
    assert MIXED.stored_as(NATIVE) is MIXED
    assert layout_of("q4_0").stored_as("q8") == layout_of("q4_0")


@pytest.mark.parametrize("name", STORED)
def test_a_stored_layout_converts_to_its_native_one(name: str) -> None:
    """The values are the same in both directions."""
    kept = F16.stored_as(name)
    assert kept.converts_to(F16)
    assert F16.converts_to(kept)
    assert not kept.converts_to(layout_of("f16", cell_ext=True))
    assert not kept.converts_to(KVLayout(F16.k, ()))
    assert not kept.converts_to(KVLayout(F16.v, F16.k))
    assert kept.token_bytes == sum(BY_NAME[name].row_bytes(n) for n in (64, 96, 96, 64))


@pytest.mark.parametrize("name", ["", "q9", "f16", "q8_0", "native ", "Q4H"])
def test_only_stored_formats_can_be_stored_in(name: str) -> None:
    """A cache type is no stored format, nor is any other word."""
    with pytest.raises(StateError, match="stored format"):
        F16.stored_as(name)
    with pytest.raises(StateError, match="stored format"):
        F16.k[0].stored_as(name)


def test_descriptions_from_outside_are_native() -> None:
    """Row identities never hold stored formats."""
    with pytest.raises(StateError, match="not a KV cache type"):
        KVLayout.from_json(F16.stored_as("q4h").to_json())
    with pytest.raises(StateError, match="no format"):
        Plane(9999, 32)


# ---- blobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("native", NATIVES)
@pytest.mark.parametrize("name", STORED)
def test_blob_holds_the_decoded_values(native: str, name: str) -> None:
    """A part in a stored format is decoded to the context's format in the blob."""
    layout = layout_of(native)
    rows = stored(random_rows(layout, 3, 40), name)
    blob = emit_blob([rows], layout=layout)
    assert len(blob) == blob_size(layout, 37)
    found = parse_blob(blob, layout=layout).rows
    assert found.p0 == 3
    for plane, kept, data, source in zip(
        layout.planes, rows.layout.planes, found.planes(), rows.planes(), strict=True
    ):
        if kept == plane:
            np.testing.assert_array_equal(data, source)
            continue
        values = decode(kept.format.name, source)
        if not BY_NAME[name].is_hadamard:  # no arithmetic but one rounding
            np.testing.assert_array_equal(data, encode(native, values))
        np.testing.assert_allclose(
            decode(native, data), values, atol=TOLERANCE[native], rtol=TOLERANCE[native]
        )


@pytest.mark.parametrize("name", ["q8", "q8h", "q6h", "q5", "q4h", "q4a"])
def test_stored_rows_are_near_the_native_ones(name: str) -> None:
    """There and back: the error is that of the format's bits."""
    rows = random_rows(F16, 0, 64)
    found = parse_blob(emit_blob([stored(rows, name)], layout=F16)).rows
    step = 6.5 / 2 ** int(name[1])  # the widest of 32 normal numbers spans about so much
    for mine, theirs in zip(floats(found), floats(rows), strict=True):
        assert float(np.sqrt(np.mean((mine - theirs) ** 2))) < step / 2


formats_of_parts = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([NATIVE, "q4h", "q6", "q8ah"])),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("layout", [F16, MIXED, layout_of("f16", cell_ext=True)])
@given(
    parts=formats_of_parts,
    v_trans=st.booleans(),
    n_stream=st.integers(1, 3),
    n_threads=st.sampled_from([1, 3]),
)
@settings(deadline=None, max_examples=40)
def test_any_mixture_composes(
    layout: KVLayout, parts: list[tuple[int, str]], v_trans: bool, n_stream: int, n_threads: int
) -> None:
    """Each position of the blob is what its own part gives alone; native ones are untouched."""
    if v_trans and layout is MIXED:
        v_trans = False  # llama.cpp has no transposed quantized V
    rows = random_rows(layout, 5, 5 + sum(n for n, _ in parts))
    at, kept = 5, []
    for n, name in parts:
        part = rows.slice(at, at + n)
        kept.append(part if name == NATIVE else stored(part, name))
        at += n
    frame: dict[str, Any] = {"n_stream": n_stream, "stream": n_stream - 1, "v_trans": v_trans}
    blob = emit_blob(kept, layout=layout, n_threads=n_threads, **frame)
    found = parse_blob(blob, cell_ext=layout.cell_ext, layout=layout)
    assert found.frame.v_trans == v_trans
    for part in kept:
        alone = parse_blob(emit_blob([part], layout=layout), cell_ext=layout.cell_ext).rows
        assert same(found.rows.slice(part.p0, part.p1), alone)
        if part.layout.is_native:
            assert same(alone, rows.slice(part.p0, part.p1))
    if layout.cell_ext:
        np.testing.assert_array_equal(found.rows.ext, rows.ext)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("blob", ["f16", "q8_0", "v_trans", "streams", "mrope", "mla"])
def test_real_blobs(real_blobs: dict[str, tuple[bytes, bool]], blob: str, name: str) -> None:
    """What llama.cpp wrote, kept in a stored format, is framed again as it was, and holds the
    values that plain numpy decodes."""
    data, cell_ext = real_blobs[blob]
    state = parse_blob(data, cell_ext=cell_ext)
    layout = state.rows.layout
    kept = stored(state.rows, name)
    frame: dict[str, Any] = {
        "n_stream": state.frame.n_stream,
        "stream": state.frame.stream,
        "v_trans": state.frame.v_trans,
        "seq_id": state.frame.seq_id,
    }
    again = emit_blob([kept], layout=layout, **frame)
    assert len(again) == len(data)
    found = parse_blob(again, cell_ext=cell_ext, layout=layout)
    assert (found.frame.stream, found.frame.v_trans, found.frame.seq_id) == (
        state.frame.stream,
        state.frame.v_trans,
        state.frame.seq_id,
    )
    for mine, theirs, plane in zip(floats(found.rows), floats(kept), layout.planes, strict=True):
        bound = TOLERANCE[plane.format.name] * max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(mine, theirs, atol=bound)


@pytest.mark.parametrize("v_trans", [False, True])
def test_llama_continues_from_decoded_rows(
    open_context: Callable[..., Any], ids: npt.NDArray[np.int32], v_trans: bool
) -> None:
    """A context accepts the blob, and its next logits are close to those of the original rows."""
    source = open_context(v_trans=v_trans)
    source.decode(ids[:40], 0)
    rows = parse_blob(source.blob()).rows
    expected = source.decode(ids[40:42], 40)
    spread = float(np.ptp(expected))
    for name, share in (("q8h", 0.01), ("q6h", 0.04), ("q4h", 0.2)):
        context = open_context(v_trans=v_trans)
        parts = [rows.slice(0, 4), stored(rows.slice(4, 30), name), rows.slice(30, 40)]
        assert context.restore(emit_blob(parts, layout=rows.layout, v_trans=v_trans))
        found = context.decode(ids[40:42], 40)
        assert 0 < float(np.abs(found - expected).max()) < share * spread


def test_into_a_buffer_that_held_something_else() -> None:
    """Every byte of the blob is written, whatever the buffer was used for before."""
    rows = [stored(random_rows(F16, 0, 33), "q4h"), random_rows(F16, 33, 40)]
    out = np.full(blob_size(F16, 40) + 99, 0xAA, np.uint8)
    blob = emit_blob(rows, layout=F16, v_trans=True, out=out)
    assert bytes(blob) == bytes(emit_blob(rows, layout=F16, v_trans=True))
    assert (out[len(blob) :] == 0xAA).all()


def test_what_cannot_be_composed() -> None:
    """Other values, gaps, stored formats as the destination, and the transposed q8_0."""
    rows = stored(random_rows(F16, 0, 8), "q4h")
    for parts, layout, message in (
        ([rows], None, "stored formats"),
        ([rows], rows.layout, "stored formats"),
        ([rows], KVLayout(F16.v, F16.k), "other values"),
        ([rows, random_rows(F16, 9, 12)], F16, "begins at 9"),
        ([rows, random_rows(F16, 8, 12)], None, "different layouts"),
        ([], F16, "no rows"),
    ):
        with pytest.raises(StateError, match=message):
            emit_blob(parts, layout=layout)
    with pytest.raises(StateError, match="cannot be transposed"):
        emit_blob([rows], layout=layout_of("q8_0"), v_trans=True)


@pytest.mark.parametrize("name", STORED)
def test_blobs_with_stored_formats_are_refused(name: str) -> None:
    """Bytes from outside cannot smuggle a stored format in."""
    type_id = BY_NAME[name].type_id
    blob = bytearray(emit_blob([random_rows(F16, 0, 4)]))
    at = blob.index((1).to_bytes(4, "little") + (128).to_bytes(8, "little"))
    blob[at : at + 4] = type_id.to_bytes(4, "little")
    with pytest.raises(StateError, match=f"ggml type {type_id} is not a KV cache type"):
        parse_blob(bytes(blob))


# ---- runs ---------------------------------------------------------------------------------


@given(parts=formats_of_parts, cuts=st.lists(st.integers(0, 60), max_size=4))
@settings(deadline=None, max_examples=40)
def test_runs_are_one_value(parts: list[tuple[int, str]], cuts: list[int]) -> None:
    """However runs are cut, the pieces are the rows that were put in."""
    rows = random_rows(MIXED, 7, 7 + sum(n for n, _ in parts))
    at, kept = 7, []
    for n, name in parts:
        part = rows.slice(at, at + n)
        kept.append(part if name == NATIVE else stored(part, name))
        at += n
    runs = Runs.of(kept)
    assert (runs.p0, runs.p1, len(runs)) == (rows.p0, rows.p1, len(rows))
    assert runs.nbytes == sum(part.nbytes for part in kept)
    assert runs.n_approximate == sum(len(part) for part in kept if part.layout != MIXED)
    assert runs.is_native == (runs.n_approximate == 0)
    assert runs.fits(MIXED)
    pieces = [runs]
    for cut in cuts:
        pieces = [
            half
            for piece in pieces
            for half in (piece.split(cut) if piece.p0 < cut < piece.p1 else (piece,))
        ]
    blob = bytes(emit_blob(kept, layout=MIXED))
    assert bytes(emit_blob([p for piece in pieces for p in piece], layout=MIXED)) == blob
    assert bytes(emit_blob(list(runs.copy()), layout=MIXED)) == blob
    with pytest.raises(StateError, match="no rows"):
        runs.slice(0, 7)


def test_runs_without_sense_are_refused() -> None:
    """Nothing, gaps, and rows of different models."""
    rows = random_rows(F16, 0, 8)
    for parts, message in (
        ((), "no rows"),
        ((rows, random_rows(F16, 9, 10)), "begins at 9"),
        ((rows, random_rows(MIXED, 8, 9)), "different values"),
    ):
        with pytest.raises(StateError, match=message):
            Runs(parts)
    holes = KVRows(
        F16, np.array([0, 2], np.int32), tuple(p[:2] for p in rows.k), tuple(p[:2] for p in rows.v)
    )
    with pytest.raises(StateError, match="gaps"):
        Runs.of(holes)
    assert not Runs.of(rows).fits(MIXED)
    runs = Runs.of(rows)
    assert Runs.of(runs) is runs
