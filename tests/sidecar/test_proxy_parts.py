"""The parts of the pass-through that need no server: headers, splicing, metrics."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from towerd.api.relay.headers import to_client, to_upstream
from towerd.api.relay.media import with_fields
from towerd.api.relay.routes import merged
from towerd.engine.llama_server.process.upstream_counters import counters, difference, without

# --- headers ------------------------------------------------------------------------------


def test_headers_to_upstream() -> None:
    """The client's key and name for us stay here, as does what is about its connection."""
    headers = CIMultiDict(
        [
            ("Host", "localhost:8080"), ("authorization", "Bearer clients"),
            ("X-API-Key", "clients"), ("Cookie", "a=b"), ("Origin", "http://localhost"),
            ("Connection", "keep-alive, X-Hop"), ("Keep-Alive", "timeout=5"), ("X-Hop", "1"),
            ("TE", "trailers"), ("Transfer-Encoding", "chunked"), ("Upgrade", "websocket"),
            ("Proxy-Authorization", "x"), ("Expect", "100-continue"), ("Content-Length", "7"),
            ("X-Towerd-Session", "diary"), ("Content-Type", "application/json"),
            ("Accept", "*/*"), ("X-Custom", "1"), ("X-Custom", "2"),
        ]
    )  # fmt: skip
    sent = to_upstream(headers, {"Authorization": "Bearer private"})
    assert sorted(sent.items()) == [
        ("Accept", "*/*"),
        ("Authorization", "Bearer private"),
        ("Content-Type", "application/json"),
        ("X-Custom", "1"),
        ("X-Custom", "2"),
    ]
    assert "Authorization" not in to_upstream(headers, {})


def test_headers_to_client() -> None:
    """llama-server's answers about origins and keys are not ours."""
    headers = CIMultiDict(
        [
            ("Content-Type", "text/event-stream"), ("Content-Length", "3"), ("ETag", '"a"'),
            ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked"), ("Connection", "close"),
            ("Access-Control-Allow-Origin", "*"), ("Server", "llama.cpp"), ("Set-Cookie", "a=b"),
            ("X-Towerd-Session", "forged"), ("Process-Start-Time-Unix", "1"),
        ]
    )  # fmt: skip
    assert set(to_client(headers)) == {
        "Content-Type",
        "Content-Length",
        "ETag",
        "Content-Encoding",
        "Process-Start-Time-Unix",
    }


# --- splicing -----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON), st.dictionaries(st.text(), JSON), st.booleans())
def test_spliced_fields_win(document: dict[str, Any], fields: dict[str, Any], spaced: bool) -> None:
    """Every reader that takes the last of equal keys, as llama-server does, sees our values, and
    the rest of the document as it was."""
    text = json.dumps(document, indent=2 if spaced else None).encode() + b" \n" * spaced
    spliced = with_fields(text, fields)
    assert json.loads(spliced) == {**document, **fields}
    assert msgspec.json.decode(spliced) == {**document, **fields}


def test_splicing_leaves_the_bytes_alone() -> None:
    text = b'{"temperature":0.70000000000000001,"x":[1,\t2],"n":1e-05, "u":"\\u00e9"}'
    assert with_fields(text, {"id_slot": 1}) == text[:-1] + b',"id_slot":1}'
    assert with_fields(b" { } ", {"id_slot": 1}) == b'{"id_slot":1}'
    with pytest.raises(ValueError, match="not a JSON object"):
        with_fields(b"[1]", {"a": 1})


# --- metrics ------------------------------------------------------------------------------


def test_metrics_of_both() -> None:
    """llama-server's figures stand as it wrote them, towerd's follow, and no name comes twice."""
    theirs = b"# HELP llamacpp:a A.\n# TYPE llamacpp:a counter\nllamacpp:a 7\n"
    own = b"# HELP llamacpp:a Ours.\n# TYPE llamacpp:a counter\nllamacpp:a 5\ntowerd_b 1\n"
    assert merged(theirs, own) == theirs + b"towerd_b 1\n"
    assert merged(theirs.rstrip(b"\n"), own) == theirs + b"towerd_b 1\n"


def test_what_the_probe_counted_is_taken_off() -> None:
    """From counters alone, to the digit; one that began anew is left as it is."""
    before = b"# TYPE l:a counter\nl:a 2\n# TYPE l:b counter\nl:b 0.25\n# TYPE l:g gauge\nl:g 9\n"
    after = before.replace(b"l:a 2", b"l:a 7").replace(b"0.25", b"0.3").replace(b"l:g 9", b"l:g 11")
    added = difference(counters(after), counters(before))
    assert added == {b"l:a": 5, b"l:b": Decimal("0.05")}
    assert without(after, added) == before.replace(b"l:g 9", b"l:g 11")
    restarted = before.replace(b"l:a 2", b"l:a 1")
    assert b"\nl:a 1\n" in without(restarted, added)
    assert without(after, {}) == after


@pytest.mark.parametrize("value", [b"1e+", b"1.2.3", b"-", b"+Inf", b"1e999999999"])
def test_a_sample_that_is_no_plain_number_stays(value: bytes) -> None:
    """Metrics of another build: what cannot be read is not counted, and sent on as it came."""
    text = b"# TYPE l:a counter\nl:a %s\n# TYPE l:b counter\nl:b 3\n" % value
    assert counters(text) == {b"l:b": 3}
    assert without(text, {b"l:a": Decimal(1), b"l:b": Decimal(1)}) == text.replace(b"b 3", b"b 2")
