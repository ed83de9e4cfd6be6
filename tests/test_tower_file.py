"""`.tower` files: what is written is read, and anything else is one error that says why."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towerd.codec import Codec
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model
from towerd.store import History
from towerd.store.sessions.history import NamedBase, PastTurn
from towerd.tokens import Ids
from towerd.tower_file import TURNS_MAX, SessionModel, TowerFileError, read, write

FILES = Path(__file__).with_name("tower_files")
TURNS = (
    PastTurn(None, 0, 0, 30, 10, 39, 1.5, 2.5, True),
    PastTurn(0, 0, 38, 60, 5, 64, 3.5, 4.5, True),
    PastTurn(0, 0, 38, 60, 7, 0, 5.5, 6.5, False),
    PastTurn(None, 3, 0, 3, 0, 3, 7.5, 8.5, True),
)
BASES = (NamedBase("acme/garden", 1, 20, bytes(range(32))),)


@pytest.fixture(scope="module")
def model() -> Iterator[SessionModel]:
    with GgufVocabulary(bundled_model()) as vocabulary:
        yield SessionModel("stories.gguf", "a" * 64, Codec(vocabulary))


def history_of(turns: tuple[PastTurn, ...] = TURNS, seed: int = 0) -> History:
    n = sum(turn.n - turn.n_shared for turn in turns)
    stream: Ids = np.random.default_rng(seed).integers(0, 512, n, np.int32)
    return History("chat/1", True, "A title – €", 1.25, 9.0, 1, turns, BASES, stream)


def earlier_history() -> History:
    """What the files in the folder hold; a picture stands among its tokens."""
    stream = (np.arange(history_of().stream.size) * 37 % 512).astype(np.int32)
    stream[10:13] = -5, -6, -7
    return replace(history_of(), stream=stream)


def assert_same(found: History, expected: History) -> None:
    assert replace(found, stream=expected.stream) == expected
    np.testing.assert_array_equal(found.stream, expected.stream)


def signed(data: bytes) -> bytes:
    """`data` with the length and the checksum that a writer would give it."""
    body = data[:5] + struct.pack("<Q", len(data)) + data[13:-16]
    return body + hashlib.blake2b(body, digest_size=16).digest()


@pytest.mark.parametrize("path", sorted(FILES.glob("*.tower")), ids=lambda path: path.stem)
def test_files_of_earlier_releases(model: SessionModel, path: Path) -> None:
    """Branches, a title, a base, times and a picture; without any table or mini model."""
    assert_same(read(path.read_bytes(), model), earlier_history())


def test_what_is_written_is_read(model: SessionModel) -> None:
    history = history_of()
    data = write(history, model)
    assert_same(read(data, model), history)
    assert len(data) < 800
    assert data == write(history, model)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), *[st.integers(0, 40)] * 3, st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_any_history(
    model: SessionModel, shapes: list[tuple[int, int, int, int, bool]], seed: int
) -> None:
    """Turns of any shape, each beginning like some earlier one."""
    turns: list[PastTurn] = []
    for place, (back, n_shared, n_prompt, n_cached, finished) in enumerate(shapes):
        origin = max(0, place - 1 - back) if place else 0
        n = n_prompt + 1
        shared = min(n_shared, n, turns[origin].n) if place else 0
        parent = origin if back % 2 and place else None
        turns.append(
            PastTurn(parent, origin, shared, n_prompt, 1, min(n, n_cached), 1.0, 2.0, finished)
        )
    history = replace(history_of(tuple(turns), seed), leaf=len(turns) - 1)
    found = read(write(history, model), model)
    assert_same(found, history)
    for place, turn in enumerate(turns):
        whole = found.ids(place)
        assert len(whole) == turn.n
        assert whole[: turn.n_shared].tolist() == found.ids(turn.origin)[: turn.n_shared].tolist()


def test_every_flipped_byte_and_every_cut_is_told(model: SessionModel) -> None:
    """No damage goes unnoticed, wherever it is."""
    data = write(history_of(), model)
    for at in range(len(data)):
        for bit in (0, 7):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(TowerFileError):
                read(bytes(bad), model)
        with pytest.raises(TowerFileError):
            read(data[:at], model)
    with pytest.raises(TowerFileError, match="damaged"):
        read(data + b"x", model)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no .tower file"),
        (b"GGUF" * 20, "no .tower file"),
        (b"TWRS\1", "truncated: it has only 5 bytes"),
        (b"TWRS\2" + bytes(60), "version 2, and this towerd reads up to 1: update towerd"),
        (b"TWRS\1" + struct.pack("<Q", 2**63) + bytes(60), "73 of its 9223372036854775808 bytes"),
    ],
)
def test_what_is_wrong_is_named(model: SessionModel, data: bytes, words: str) -> None:
    with pytest.raises(TowerFileError, match=words):
        read(data, model)


def test_a_newer_version_is_named_first(model: SessionModel) -> None:
    """Whatever a later format has, this reader says that it is later."""
    data = bytearray(write(history_of(), model))
    data[4] = 9
    with pytest.raises(TowerFileError, match="version 9"):
        read(signed(bytes(data)), model)


def test_another_model_is_named(model: SessionModel) -> None:
    """Another vocabulary is refused; other weights with the same one read the same tokens."""
    data = write(history_of(), model)
    with GgufVocabulary(file.PATH) as vocabulary:
        there = SessionModel("other.gguf", model.hash, Codec(vocabulary))
        with pytest.raises(TowerFileError, match=r"'stories.gguf', whose vocabulary \(512 tokens"):
            read(data, there)
    found = read(data, replace(model, hash="b" * 64))
    np.testing.assert_array_equal(found.stream, read(data, model).stream)


@pytest.mark.parametrize(
    "turn",
    [
        PastTurn(None, 1, 0, 0, 0, 0, 1.0, 1.0, True),
        PastTurn(None, 1, 0, 3, 0, 4, 1.0, 1.0, True),
        PastTurn(None, 1, 2, 3, 0, 3, 1.0, 1.0, True),
        PastTurn(None, 0, 41, 50, 0, 3, 1.0, 1.0, True),
        PastTurn(None, 0, 9, 8, 0, 3, 1.0, 1.0, True),
        PastTurn(None, -1, 0, 3, 0, 3, 1.0, 1.0, True),
        PastTurn(-1, 1, 0, 3, 0, 3, 1.0, 1.0, True),
        PastTurn(None, 1, 0, 3, 0, 3, float("nan"), 1.0, True),
        PastTurn(None, 1, 0, 3, 0, 3, 1.0, -1.0, True),
        PastTurn(None, 1, 0, 1 << 30, 0, 3, 1.0, 1.0, True),
    ],
)
def test_turns_that_cannot_be_are_refused(model: SessionModel, turn: PastTurn) -> None:
    """A file with a right checksum can still lie."""
    stream = np.zeros(40 + min(64, max(0, turn.n - turn.n_shared)), np.int32)
    lie = replace(history_of(), turns=(TURNS[0], turn), stream=stream)
    with pytest.raises(TowerFileError):
        read(write(lie, model), model)


def test_too_long_a_session_is_refused(model: SessionModel) -> None:
    """By the writer and by the reader."""
    one = PastTurn(None, 0, 0, 1, 0, 1, 1.0, 1.0, True)
    more = tuple(PastTurn(None, k, 0, 1, 0, 1, 1.0, 1.0, True) for k in range(TURNS_MAX + 1))
    for turns in (more, (replace(one, n_prompt=1 << 24),) * 17):
        with pytest.raises(TowerFileError, match="holds up to 4096 turns"):
            write(replace(history_of(), turns=turns), model)
    with pytest.raises(TowerFileError, match="Id 512 is not in the vocabulary"):
        write(replace(history_of((one,)), stream=np.array([512], np.int32)), model)


@given(st.integers(5, 10**6), st.integers(1, 255), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_damage_with_a_right_checksum(model: SessionModel, at: int, flip: int, grow: int) -> None:
    """Whatever a crafted file says: a history that fits together, or the one error."""
    data = bytearray(write_once(model))
    place = 13 + at % (len(data) - 13 - 16)
    data[place] ^= flip
    data[place:place] = b"\xff" * grow
    crafted = signed(bytes(data))
    tracemalloc.start()
    try:
        found = read(crafted, model)
    except TowerFileError:
        return
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8_000_000
    for place, turn in enumerate(found.turns):
        assert len(found.ids(place)) == turn.n


_written: list[bytes] = []


def write_once(model: SessionModel) -> bytes:
    if not _written:
        _written.append(write(history_of(), model))
    return _written[0]
