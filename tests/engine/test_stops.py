from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerd.engine.embedded.output import OutputText
from towerd.engine.embedded.stops import STOPS_CHARS_MAX, StopMatcher
from towerd.errors import InvalidRequest

ALPHABET = st.text(alphabet="ab\n😀é", max_size=6)
STOPS = st.lists(st.text(alphabet="ab\n😀é", max_size=4), max_size=4)


def expected(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """llama-server's rule by brute force: after each piece look for the first stop in all text."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.find(s), i) for i, s in enumerate(stops) if s and s in text]
        if found:
            at, i = min(found)
            return text[:at], stops[i]
    return text, None


@given(st.lists(ALPHABET, max_size=10), STOPS)
def test_matches_brute_force(pieces: list[str], stops: list[str]) -> None:
    matcher, out, seen = StopMatcher(tuple(stops)), "", ""
    word = None
    for piece in pieces:
        matched = matcher.push(piece)
        out += matched.text
        seen += piece
        word = matched.word
        if word is not None:
            break
        held = len(seen) - len(out)
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert held == longest, "held back exactly what may still become a stop string"
    if word is None:
        out += matcher.flush()
    assert (out, word) == expected(pieces, stops)


def test_of_two_complete_stops_the_first_in_the_text_wins() -> None:
    assert StopMatcher(("bc", "abcd")).push("xabcd").word == "abcd"
    assert StopMatcher(("abc", "ab")).push("xabc").word == "abc"
    assert StopMatcher(("ab", "abc")).push("xabc").word == "ab"


def test_overlapping_stop_across_pieces() -> None:
    matcher = StopMatcher(("aab",))
    assert matcher.push("aa").text == ""
    assert matcher.push("a").text == "a"
    assert matcher.push("b").word == "aab"


def test_too_many_stops_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        StopMatcher(("x" * (STOPS_CHARS_MAX + 1),))
    StopMatcher(tuple(str(i) for i in range(2000)))


@given(
    st.lists(st.one_of(ALPHABET.map(str.encode), st.binary(max_size=3)), max_size=12),
    STOPS,
)
def test_output_accounts_for_every_token(pieces: list[bytes], stops: list[str]) -> None:
    ids: list[int] = []
    output, text = OutputText(tuple(stops)), ""
    for token, piece in enumerate(pieces):
        emitted = output.push(token, piece)
        text += emitted.text
        ids += emitted.ids
        if emitted.stopped:
            break
    last = output.finish()
    text += last.text
    ids += last.ids
    assert ids == list(range(output.n_kept)), "in order, each once, without gaps"
    whole = b"".join(pieces).decode("utf-8", "replace")
    if output.word:
        assert output.word in stops
        kept = b"".join(pieces[: output.n_kept]).decode("utf-8", "ignore")
        assert text.startswith(kept) or "\ufffd" in text
        assert whole.startswith(text + output.word)
    else:
        assert text == whole
        assert output.n_kept == len(pieces)


def test_tokens_that_reach_into_the_stop_string_are_not_kept() -> None:
    output = OutputText(("STOP",))
    assert output.push(1, b"one").ids == (1,)
    assert output.push(2, b" tw").text == " tw"
    assert output.push(3, b"oST").text == "o", "the certain part goes out, its token waits"
    assert output.push(4, b"").ids == ()
    emitted = output.push(5, b"OP and more")
    assert (emitted.stopped, emitted.word, emitted.text, emitted.ids) == (True, "STOP", "", ())
    assert output.n_kept == 2
    assert output.finish().text == ""


def test_held_back_text_comes_out_when_generation_ends() -> None:
    output = OutputText(("###",))
    assert output.push(1, b"a##").text == "a"
    assert output.push(2, b"").ids == ()
    last = output.finish()
    assert (last.text, last.ids, output.n_kept, output.word) == ("##", (1, 2), 2, "")


def test_characters_split_over_tokens() -> None:
    output = OutputText()
    raw = "😀".encode()
    assert output.push(1, raw[:2]).ids == ()
    assert output.push(2, raw[2:3]).text == ""
    emitted = output.push(3, raw[3:] + b"!")
    assert (emitted.text, emitted.ids) == ("😀!", (1, 2, 3))
    assert output.push(4, raw[:1]).ids == ()
    last = output.finish()
    assert (last.text, last.ids) == ("\ufffd", (4,))
