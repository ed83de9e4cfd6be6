"""`.tower` files: what is written is read, and anything else is one error that says why."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from reworded import Reworded

from towerd.codec import varint
from towerd.codec.base import ids_hash, vocabulary_hash
from towerd.codec.codec import WrittenText
from towerd.codec.errors import CodecError
from towerd.codec.text import from_ids
from towerd.codec.varint import VarintReader
from towerd.codec.vocabulary import GgufVocabulary
from towerd.errors import NotSupported
from towerd.models.bundled import bundled_model
from towerd.search.speech import messages
from towerd.store import History
from towerd.store.catalog.identity import TokenizerIdentity
from towerd.store.catalog.vocabularies import KeptVocabulary, some_words
from towerd.store.sessions import history as history_turns
from towerd.store.sessions.history import MEDIA_MAX, NamedBase, PastTurn, media_keys
from towerd.store.sessions.media import FILE_BYTES_MAX, medium_key
from towerd.tokens import Ids
from towerd.tower_file import (
    COMPRESSED_BYTES_MAX,
    TURNS_MAX,
    CarriedMedium,
    Source,
    TowerFile,
    TowerFileError,
    put_bytes,
    put_compressed,
    put_words,
    read,
    read_compressed,
    without_media,
    write,
)

Pack = Callable[..., bytes]
FILES = Path(__file__).with_name("tower_files")
TURNS = (
    PastTurn(None, 0, 0, 30, 10, 39, 1.5, 2.5, True),
    PastTurn(0, 0, 38, 60, 5, 64, 3.5, 4.5, True),
    PastTurn(0, 0, 38, 60, 7, 0, 5.5, 6.5, False),
    PastTurn(None, 3, 0, 3, 0, 3, 7.5, 8.5, True),
)
BASES = (NamedBase("acme/garden", 1, 20, bytes(range(32))),)


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[GgufVocabulary]:
    with GgufVocabulary(bundled_model()) as opened:
        yield opened


@pytest.fixture(scope="module")
def pack(vocabulary: GgufVocabulary) -> Pack:
    """The bytes of a history's file."""
    return lambda history, **more: write(replace(file_of(history, vocabulary), **more))


def file_of(history: History, vocabulary: GgufVocabulary) -> TowerFile:
    identity = TokenizerIdentity("pieces", "rules")
    digest = vocabulary_hash(vocabulary)
    source = Source("stories.gguf", "a" * 64, digest, vocabulary.n_tokens, identity)
    return TowerFile(source, history, KeptVocabulary(vocabulary.pieces, vocabulary.names))


def text_of(ids: Ids, vocabulary: GgufVocabulary) -> str:
    """The text of ids, from the vocabulary of the model that they are of."""
    pieces = [vocabulary.pieces[id] or vocabulary.names[id] for id in ids.tolist() if id >= 0]
    return b"".join(pieces).decode("utf-8", "replace")


def spelled(vocabulary: GgufVocabulary, n_base: int = 20) -> TowerFile:
    """The file of a session of which only the first tokens are known to whoever writes it."""
    whole = text_history(vocabulary)
    rest = whole.stream[n_base:]
    written = WrittenText(from_ids(rest, vocabulary), len(rest), ids_hash(rest))
    file = file_of(replace(whole, stream=whole.stream[:n_base]), vocabulary)
    return replace(file, written=written)


def text_history(vocabulary: GgufVocabulary) -> History:
    """A history of words, control tokens and tokens that no tokenizer would write."""
    text = vocabulary.tokenize("Once upon a time, a dog met a cat – €5. ".encode())
    stream = np.resize(
        np.concatenate([[1], text, [2, 400, 401, 5 + 0xE2]]), history_of().stream.size
    )
    return replace(history_of(), stream=stream.astype(np.int32))


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
def test_files_of_earlier_releases(vocabulary: GgufVocabulary, path: Path) -> None:
    """Branches, a title, a base, times and a picture; without any table or model."""
    found = read(path.read_bytes())
    if "spelled" in path.stem:
        assert_same(found.whole(vocabulary), text_history(vocabulary))
        assert found.text() == text_of(text_history(vocabulary).stream, vocabulary)
        return
    expected = earlier_history()
    assert_same(found.history, expected)
    if path.stem == "version-1":
        with pytest.raises(TowerFileError, match="version 1, which holds no words"):
            found.text()
    else:
        assert len(found.sent()) == (path.stem == "version-3")
        ids = expected.ids(expected.leaf)
        assert found.text().replace("<__media__>", "") == text_of(ids, vocabulary)
        assert found.text().count("<__media__>") == 1


def test_what_is_written_is_read(pack: Pack) -> None:
    history = history_of()
    data = pack(history)
    assert_same(read(data).history, history)
    assert len(data) < 1400
    assert data == pack(history)


def test_a_text_whose_ids_nobody_had(vocabulary: GgufVocabulary) -> None:
    """Anyone reads the text; its tokenizer gives the ids; one that cuts otherwise gives an error."""
    found = read(write(spelled(vocabulary)))
    assert found.text() == text_of(text_history(vocabulary).stream, vocabulary)
    assert_same(found.whole(vocabulary), text_history(vocabulary))
    with pytest.raises(TowerFileError, match="cuts text into tokens otherwise"):
        found.whole(Reworded(vocabulary))


def test_ids_without_words_are_refused(vocabulary: GgufVocabulary) -> None:
    """Whatever the file says, each of its ids has a word."""
    data = write(file_of(history_of(), vocabulary))
    few = put_words(range(3), KeptVocabulary(vocabulary.pieces, vocabulary.names))
    whole = put_words(
        np.unique(history_of().stream).tolist(),
        KeptVocabulary(vocabulary.pieces, vocabulary.names),
    )
    assert whole in data
    with pytest.raises(TowerFileError, match="contradict"):
        read(signed(data.replace(whole, few)))


@pytest.mark.parametrize("size", [1 << 20, 1024], ids=["word", "text"])
def test_a_short_file_of_a_long_text_is_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of many bytes, again and again: gigabytes from a file of a megabyte."""
    n = 200_000
    turns = (PastTurn(None, 0, 0, n - 1, 1, 0, 1.0, 1.0, True),)
    history = History("s", False, "", 1.0, 1.0, 0, turns, (), np.full(n, 5, np.int32))
    source = Source("model", "", b"12345678", 1000, TokenizerIdentity("ab" * 32))
    file = TowerFile(source, history, some_words(1000, {5: (b"a" * size, b"")}))
    with monkeypatch.context() as patched:
        patched.setattr("towerd.tower_file.WORD_BYTES_MAX", size)
        data = write(file)
    assert len(data) < 2 << 20
    with pytest.raises(TowerFileError, match="contradict" if size > 1024 else "204800000 bytes"):
        read(data)


def test_words_that_come_later_make_no_text_too_long() -> None:
    """Also control tokens, which a reader of messages takes apart."""
    ids = np.full(200_000, 5, np.int32)
    for both in ((b"a" * 1024, b""), (b"", b"<" * 1024)):
        words = some_words(1000, {5: both})
        for reader in (words.text, lambda ids, words=words: messages(ids, words)):
            with pytest.raises(NotSupported, match="204800000 bytes"):
                reader(ids)


def test_a_bomb_is_refused() -> None:
    """Few bytes that say that they stand for many."""
    zeros = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    reader = VarintReader(varint.put(1 << 30) + put_bytes(zeros))
    with pytest.raises(CodecError):
        read_compressed(reader)
    few = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    reader = VarintReader(varint.put(1 << 24) + put_bytes(few))
    with pytest.raises(TowerFileError, match="contradict"):
        read_compressed(reader)
    large = varint.put(COMPRESSED_BYTES_MAX + 1) + put_bytes(bytes(COMPRESSED_BYTES_MAX >> 8))
    with pytest.raises(CodecError):
        read_compressed(VarintReader(large))
    with pytest.raises(TowerFileError, match="holds up to"):
        put_compressed(bytes(COMPRESSED_BYTES_MAX + 1))
    honest = put_compressed(bytes(1 << 20))
    assert read_compressed(VarintReader(honest)) == bytes(1 << 20)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), *[st.integers(0, 40)] * 3, st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_any_history(pack: Pack, shapes: list[tuple[int, int, int, int, bool]], seed: int) -> None:
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
    found = read(pack(history)).history
    assert_same(found, history)
    for place, turn in enumerate(turns):
        whole = found.ids(place)
        assert len(whole) == turn.n
        assert whole[: turn.n_shared].tolist() == found.ids(turn.origin)[: turn.n_shared].tolist()


def seen(vocabulary: GgufVocabulary) -> TowerFile:
    """The file of a session with pictures: one, and two of one file, of which the last begins in what a turn shares with
    another one."""
    stream = history_of().stream.copy()
    stream[10:15] = *PICTURE, *OTHERS
    stream[36:38], stream[40] = CUT[:2], CUT[2]
    history = replace(history_of(), stream=stream)
    media = (
        carried(PICTURE, PNG),
        carried(OTHERS, JPEG),
        replace(carried(CUT, JPEG), ordinal=1),
    )
    return replace(file_of(history, vocabulary), media=media)


PICTURE, OTHERS, CUT = (-(1 << 31), -5, -6), (-(1 << 31) + 1, -8), (-(1 << 31), -9, -10)
PNG, JPEG = b"\x89PNG" * 50, b"\xff\xd8\xff" * 30


def carried(ids: tuple[int, ...], file: bytes) -> CarriedMedium:
    key = hashlib.blake2b(struct.pack(f"<{len(ids)}i", *ids), digest_size=16).digest()
    digest = hashlib.blake2b(file, digest_size=16).digest()
    return CarriedMedium(key, 0, digest, len(file))


def test_media_are_carried(vocabulary: GgufVocabulary) -> None:
    """Behind their session, each file once; without them a file is as before."""
    file = seen(vocabulary)
    session = write(file)
    assert session[4] == 3
    found = read(session + PNG + JPEG)
    assert_same(found.history, file.history)
    assert found.media == file.media
    sent = [(each.key, each.file, each.ordinal) for each in found.sent()]
    a, b, c = (each.key for each in file.media)
    assert sent == [(a, PNG, 0), (b, JPEG, 0), (c, JPEG, 1)]
    assert without_media(session + PNG + JPEG) == session
    assert write(replace(file, media=()))[4] == 2


def test_of_very_many_media_the_first_are_carried() -> None:
    """A reader takes no longer for what a writer would not have carried."""
    n = 2 * MEDIA_MAX
    stream = np.arange(-(1 << 31), -(1 << 31) + n, dtype=np.int32)
    turn = PastTurn(None, 0, 0, n, 0, 0, 1.0, 1.0, True)
    keys = media_keys(replace(history_of((turn,)), leaf=0, stream=stream))
    assert len(keys) == MEDIA_MAX
    assert carried((int(stream[0]),), PNG).key in keys


def test_what_turns_share_is_looked_through_once(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short file of turns that share thousands of pictures takes no minutes; one that carries none is not looked
    through at all."""
    n, n_turns, hashed = 1000, 200, []

    def counted(ids: Ids) -> bytes:
        hashed.append(len(ids))
        return medium_key(ids)

    monkeypatch.setattr(history_turns, "medium_key", counted)
    first = PastTurn(None, 0, 0, n, 0, 0, 1.0, 1.0, True)
    others = (PastTurn(0, 0, n, n + 1, 0, 0, 1.0, 1.0, True),) * (n_turns - 1)
    pictures = np.arange(n, dtype=np.int64) - (1 << 31)
    stream = np.concatenate([pictures, np.full(n_turns - 1, -5)]).astype(np.int32)
    history = replace(history_of((first, *others)), leaf=0, stream=stream)
    data = pack(history)
    read(data)
    assert not hashed
    keys = media_keys(history)
    expected = {carried((id,), PNG).key for id in pictures.tolist()}
    assert keys == expected | {carried((int(pictures[-1]), -5), PNG).key}
    assert sum(hashed) <= n + 2 * n_turns


def test_damaged_media_are_left_out(vocabulary: GgufVocabulary) -> None:
    """Whichever byte of them is another, and wherever the file is cut: its session is whole."""
    file = seen(vocabulary)
    session, n_here = write(file), set()
    for at in range(len(PNG + JPEG)):
        bad = bytearray(PNG + JPEG)
        bad[at] ^= 1
        found = read(session + bad)
        assert [each.file for each in found.sent()] == ([JPEG, JPEG] if at < len(PNG) else [PNG])
        cut = read(session + (PNG + JPEG)[:at])
        assert_same(cut.history, file.history)
        n_here.add(len(cut.sent()))
    assert n_here == {0, 1}
    for at in range(len(session)):
        bad = bytearray(session + PNG + JPEG)
        bad[at] ^= 1
        with pytest.raises(TowerFileError):
            read(bytes(bad))
        with pytest.raises(TowerFileError):
            read(session[:at])
    with pytest.raises(TowerFileError, match="have 290 bytes, and 291 are here"):
        read(session + PNG + JPEG + b"x")


@pytest.mark.parametrize(
    "change",
    [
        {"key": bytes(16)},
        {"n_bytes": 0},
        {"n_bytes": FILE_BYTES_MAX + 1},
        {"ordinal": 1 << 14},
        {"digest": hashlib.blake2b(JPEG, digest_size=16).digest()},
    ],
)
def test_media_that_cannot_be_are_refused(
    vocabulary: GgufVocabulary, change: dict[str, Any]
) -> None:
    """A name of none of the session's media, a file that is too large or another one's, and one medium twice."""
    file = seen(vocabulary)
    first, *rest = file.media
    for media in ((replace(first, **change), *rest), (first, first, *rest)):
        with pytest.raises(TowerFileError):
            read(write(replace(file, media=media)) + PNG + JPEG)


def test_every_flipped_byte_and_every_cut_is_told(pack: Pack) -> None:
    """No damage goes unnoticed, wherever it is."""
    data = pack(history_of())
    for at in range(len(data)):
        for bit in (0, 7):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(TowerFileError):
                read(bytes(bad))
        with pytest.raises(TowerFileError):
            read(data[:at])
    with pytest.raises(TowerFileError, match="damaged"):
        read(data + b"x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a .tower file"),
        (b"GGUF" * 20, "not a .tower file"),
        (b"TWRS\1", "truncated: it has only 5 bytes"),
        (b"TWRS\4" + bytes(60), "version 4, and this towerd reads up to 3: update towerd"),
        (b"TWRS\1" + struct.pack("<Q", 2**63) + bytes(60), "73 of its 9223372036854775808 bytes"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, words: str) -> None:
    with pytest.raises(TowerFileError, match=words):
        read(data)


def test_a_newer_version_is_named_first(pack: Pack) -> None:
    """Whatever a later format has, this reader says that it is later."""
    data = bytearray(pack(history_of()))
    data[4] = 9
    with pytest.raises(TowerFileError, match="version 9"):
        read(signed(bytes(data)))


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
def test_turns_that_cannot_be_are_refused(pack: Pack, turn: PastTurn) -> None:
    """A file with a right checksum can still lie."""
    stream = np.zeros(40 + min(64, max(0, turn.n - turn.n_shared)), np.int32)
    lie = replace(history_of(), turns=(TURNS[0], turn), stream=stream)
    with pytest.raises(TowerFileError):
        read(pack(lie))


def test_too_long_a_session_is_refused(pack: Pack) -> None:
    """By the writer and by the reader."""
    one = PastTurn(None, 0, 0, 1, 0, 1, 1.0, 1.0, True)
    more = tuple(PastTurn(None, k, 0, 1, 0, 1, 1.0, 1.0, True) for k in range(TURNS_MAX + 1))
    for turns in (more, (replace(one, n_prompt=1 << 24),) * 17):
        with pytest.raises(TowerFileError, match="holds up to 4096 turns"):
            pack(replace(history_of(), turns=turns))
    with pytest.raises(TowerFileError, match="Id 512 is not in the vocabulary"):
        pack(replace(history_of((one,)), stream=np.array([512], np.int32)))


@given(st.integers(5, 10**6), st.integers(1, 255), st.integers(0, 4), st.integers(0, 2))
@settings(max_examples=400, deadline=None)
def test_damage_with_a_right_checksum(
    vocabulary: GgufVocabulary, at: int, flip: int, grow: int, kind: int
) -> None:
    """Whatever a crafted file says: a history that fits together, or the one error."""
    data = bytearray(written_once(vocabulary)[kind])
    place = 13 + at % (len(data) - 13 - 16)
    data[place] ^= flip
    data[place:place] = b"\xff" * grow
    crafted = signed(bytes(data))
    tracemalloc.start()
    try:
        found = read(crafted)
        history = found.whole(vocabulary)
        assert found.text() is not None
    except TowerFileError:
        return
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8_000_000
    for place, turn in enumerate(history.turns):
        assert len(history.ids(place)) == turn.n


_written: list[bytes] = []


def written_once(vocabulary: GgufVocabulary) -> list[bytes]:
    """A file of ids, one of a text, and one with media."""
    if not _written:
        files = file_of(history_of(), vocabulary), spelled(vocabulary), seen(vocabulary)
        _written.extend(map(write, files))
    return _written
