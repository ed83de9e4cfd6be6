"""The parts of the pass-through that need no server: headers, splicing, events, conversions."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from towerd.api.proxy.headers import to_client, to_upstream
from towerd.api.proxy.metrics import merged
from towerd.api.proxy.splice import with_fields, without_token_ids
from towerd.api.proxy.watch import Dialect, EventSplitter, ReplyWatch, event_data
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


def test_token_ids_are_taken_out() -> None:
    """Only the reply's own `tokens`, whatever its text says."""
    text = b'{"content":"say \\"tokens\\":[7] or ,\\"tokens\\":[8]","tokens":[1,22,3],"stop":true}'
    assert without_token_ids(text) == text.replace(b"[1,22,3]", b"[]")
    assert without_token_ids(b'{"content":"a"}') == b'{"content":"a"}'


# --- events -------------------------------------------------------------------------------

EVENTS = [
    b'data: {"content":"a"}\n\n',
    b":\n\n",
    b'event: x\ndata: {"b":1}\n\n',
    b"data: [DONE]\n\n",
    b'event: y\r\ndata: {"c":"\xc3\xa9"}\r\n\r\n',
    b"id: 3\n\n",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=6), st.data())
def test_events_are_cut_wherever_the_bytes_arrive(events: list[bytes], data: st.DataObject) -> None:
    """However a stream is split into reads, the same events come out, and no byte is lost."""
    stream = b"".join(events) + b"data: rest"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    splitter = EventSplitter()
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += splitter.feed(stream[start:stop])
    assert found == events
    assert splitter.rest() == b"data: rest"


BREAKS = st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"data: x"])


@given(st.lists(BREAKS, max_size=12).map(b"".join), st.data())
def test_blank_lines_are_found_across_reads(stream: bytes, data: st.DataObject) -> None:
    """The same as in the whole stream at once, whatever stands where it is cut."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    splitter, found = EventSplitter(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += splitter.feed(stream[start:stop])
    ends = [match.end() for match in re.finditer(rb"\r?\n\r?\n", stream)]
    assert found == [stream[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert splitter.rest() == stream[ends[-1] if ends else 0 :]


def test_data_of_events() -> None:
    assert [event_data(event) for event in EVENTS] == [
        b'{"content":"a"}',
        b"",
        b'{"b":1}',
        b"[DONE]",
        b'{"c":"\xc3\xa9"}',
        b"",
    ]
    assert event_data(b"data: a\ndata:b\n\n") == b"a\nb"
    assert event_data(b"data: a\rdata: b\n\n") == b"a"
    assert event_data(b"data: a\r\n\r\n") == b"a"


@pytest.mark.parametrize(
    ("dialect", "events", "text", "stop", "counts"),
    [
        (
            Dialect.NATIVE,
            [
                '{"content":"He","tokens":[5],"stop":false}',
                '{"content":"y","tokens":[6],"stop":false}',
                '{"content":"","tokens":[],"stop":true,"stop_type":"word",'
                '"timings":{"cache_n":3,"prompt_n":2,"prompt_ms":1.5,"predicted_n":2,'
                '"predicted_ms":4}}',
            ],
            "Hey",
            "word",
            (3, 5, 2),
        ),
        (
            Dialect.CHAT,
            [
                '{"choices":[{"finish_reason":null,"delta":{"role":"assistant","content":null}}]}',
                '{"choices":[{"finish_reason":null,"delta":{"content":"Hey"}}]}',
                '{"choices":[{"finish_reason":"length","delta":{}}]}',
                '{"choices":[],"usage":{"completion_tokens":2,"prompt_tokens":5,'
                '"prompt_tokens_details":{"cached_tokens":3}}}',
                "[DONE]",
            ],
            "Hey",
            "limit",
            (3, 5, 2),
        ),
        (
            Dialect.COMPLETION,
            [
                '{"choices":[{"text":"Hey","finish_reason":"stop"}],"usage":{"prompt_tokens":5,'
                '"completion_tokens":2},"timings":{"cache_n":3,"prompt_n":2,"prompt_ms":0.1,'
                '"predicted_n":2,"predicted_ms":1.0}}'
            ],
            "Hey",
            "eos",
            (3, 5, 2),
        ),
        (
            Dialect.RESPONSES,
            [
                '{"type":"response.created","response":{"id":"r","status":"in_progress"}}',
                '{"type":"response.output_text.delta","delta":"Hey"}',
                '{"type":"response.completed","response":{"output":[],"usage":{"input_tokens":5,'
                '"output_tokens":2,"input_tokens_details":{"cached_tokens":3}}}}',
            ],
            "Hey",
            "eos",
            (3, 5, 2),
        ),
        (
            Dialect.RESPONSES,
            [
                '{"object":"response","output":[{"type":"reasoning","content":[{"text":"hm"}]},'
                '{"type":"message","content":[{"type":"output_text","text":"Hey"}]}],'
                '"usage":{"input_tokens":5,"output_tokens":2,'
                '"input_tokens_details":{"cached_tokens":3}}}'
            ],
            "Hey",
            "eos",
            (3, 5, 2),
        ),
        (
            Dialect.MESSAGES,
            [
                '{"type":"message_start","message":{"content":[],"usage":'
                '{"cache_read_input_tokens":3,"input_tokens":2,"output_tokens":0}}}',
                '{"type":"content_block_start","index":0,"content_block":{"type":"text"}}',
                '{"type":"content_block_delta","delta":{"type":"text_delta","text":"Hey"}}',
                '{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"x"}}',
                '{"type":"message_delta","delta":{"stop_reason":"max_tokens"},'
                '"usage":{"output_tokens":2}}',
                '{"type":"message_stop"}',
            ],
            "Hey",
            "limit",
            (3, 5, 2),
        ),
        (
            Dialect.MESSAGES,
            [
                '{"type":"message","content":[{"type":"text","text":"Hey"}],'
                '"stop_reason":"end_turn","usage":{"cache_read_input_tokens":3,"input_tokens":2,'
                '"output_tokens":2}}'
            ],
            "Hey",
            "eos",
            (3, 5, 2),
        ),
    ],
)
def test_watch(
    dialect: Dialect, events: list[str], text: str, stop: str, counts: tuple[int, int, int]
) -> None:
    """Text, end and figures of a reply in each dialect."""
    watch = ReplyWatch(dialect)
    for event in events:
        watch.see(event.encode())
    assert watch.text == text
    assert watch.stop == stop
    assert not watch.failed
    assert (watch.cache_n, watch.n_prompt, watch.n_predicted) == counts
    timings = watch.final_timings()
    assert (timings.cache_n, timings.prompt_n, timings.predicted_n) == (3, 2, 2)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_watch_sees_failures(dialect: Dialect) -> None:
    watch = ReplyWatch(dialect)
    watch.see(b'{"no": "such", "event": [1]}')
    watch.see(b"not JSON")
    watch.see(b'{"type": 7, "choices": "?", "content": 1}')
    assert not watch.is_over
    watch.see(b'{"error":{"code":500,"message":"m","type":"server_error"}}')
    assert watch.failed
    assert watch.is_over


# --- conversions --------------------------------------------------------------------------


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
