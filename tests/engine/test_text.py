from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from towerd.engine.embedded.text import TextStream


def feed(data: bytes, cuts: list[int]) -> tuple[str, list[str]]:
    stream, parts = TextStream(), []
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    for a, b in zip(edges, edges[1:], strict=False):
        parts.append(stream.push(data[a:b]))
    parts.append(stream.flush())
    return "".join(parts), parts


@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=12))
def test_any_bytes_in_any_pieces_decode_as_a_whole(data: bytes, cuts: list[int]) -> None:
    assert feed(data, cuts)[0] == data.decode("utf-8", "replace")


@given(st.text(max_size=20), st.lists(st.integers(0, 1000), max_size=12))
def test_valid_text_never_shows_a_replacement(text: str, cuts: list[int]) -> None:
    whole, parts = feed(text.encode(), cuts)
    assert whole == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in p for p in parts)


def test_half_a_character_is_held_and_becomes_a_replacement_at_the_end() -> None:
    stream = TextStream()
    assert stream.push("😀".encode()[:3]) == ""
    assert stream.is_pending
    assert stream.flush() == "\ufffd"
    stream = TextStream()
    assert stream.push("é".encode()[:1]) + stream.push("é".encode()[1:]) == "é"
    assert not stream.is_pending


def test_lone_bytes_are_certain_at_once() -> None:
    stream = TextStream()
    assert stream.push(b"a\xff\x80b") == "a\ufffd\ufffdb"
    assert stream.push(b"\xe2\x28") == "\ufffd("
