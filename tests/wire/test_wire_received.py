"""Replies that come from a llama-server: every token id, although its stream does not name them all.

The oracle is the list of tokens that the events were made from, by llama-server's rules: no event while the
text ends within a character, and none of the text that a stop string may begin in.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_wire import Talker

from towerd.codec.forms.mini import PATH
from towerd.model.vocab import Vocab
from towerd.wire import Model, Reply, Request, WireError, Writer

TEXTS = ("a", "Once ", "é", "ß!", "你", "好", "🙂", "👩‍👩‍👧", "\n", "naïve", "…", "한국")
TIMINGS = {"cache_n": 2, "prompt_n": 5, "prompt_ms": 3.0, "predicted_n": 9, "predicted_ms": 8.0}


@pytest.fixture(scope="module")
def upstream() -> Iterator[tuple[Vocab, Model]]:
    """A byte-level BPE vocabulary, which has tokens of several bytes within characters."""
    talker = Talker(PATH)
    yield Vocab(talker.ptr), talker.model(is_upstream=True)
    talker.close()


def pieces(vocab: Vocab, ids: list[int]) -> list[bytes]:
    return [vocab.pieces[token] for token in ids]


def tokens_of(vocab: Vocab, text: str) -> list[int]:
    return [int(token) for token in vocab.tokenize(text, False, False)]


def bytes_of(vocab: Vocab, text: str) -> list[int]:
    """Tokens of a byte each."""
    return [vocab.pieces.index(bytes([byte])) for byte in text.encode()]


def is_whole(text: bytes) -> bool:
    """Whether a text does not end within a character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.end < len(text) or "unexpected end" not in error.reason
    return True


def stream(vocab: Vocab, ids: list[int], word: str = "") -> list[dict[str, Any]]:
    """The events of a reply of these tokens; word: a stop string."""
    text, n_sent, events = b"", 0, []
    stopped = False
    for n, (token, piece) in enumerate(zip(ids, pieces(vocab, ids), strict=True), 1):
        text += piece
        if not is_whole(text):
            continue
        unsent, content = text[n_sent:], b""
        if word and word.encode() in unsent:
            content, stopped = unsent[: unsent.index(word.encode())], True
        elif not any(unsent.endswith(word.encode()[:i]) for i in range(1, len(word.encode()))):
            content = unsent
        n_sent += len(content)
        event = {"content": content.decode(), "tokens": [token], "stop": False}
        events.append({**event, "tokens_predicted": n, "tokens_evaluated": 7})
        if stopped:
            break
    end = {"content": "", "tokens": [], "stop": True, "tokens_predicted": n, "truncated": False}
    kind = {"stop_type": "word" if stopped else "limit", "stopping_word": word if stopped else ""}
    events.append({**end, **kind, "has_new_line": b"\n" in text, "timings": TIMINGS})
    return events


def received(model: Model, events: list[dict[str, Any]], **body: Any) -> tuple[Reply, list[int]]:
    """A reply that these events were given to, and the ids that it told of."""
    data = json.dumps({"prompt": "Hi", "n_predict": 64, **body}).encode()
    reply = Reply(Request(model, "completion", data), 0)
    ids: list[int] = []
    for event in events:
        got = reply.received(json.dumps(event).encode())
        ids += got.ids
        assert got.is_last == event["stop"]
    return reply, ids


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_token_is_known(upstream: tuple[Vocab, Model], data: st.DataObject) -> None:
    """Whatever way the text is cut into tokens, by the tokenizer or byte by byte."""
    vocab, model = upstream
    parts = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=8))
    ids: list[int] = []
    for part in parts:
        ids += (bytes_of if data.draw(st.booleans()) else tokens_of)(vocab, part)
    reply, told = received(model, stream(vocab, ids))
    assert reply.text == "".join(parts).encode()
    assert reply.n_unnamed == 0
    if reply.is_exact:
        assert told == ids
    assert b"".join(pieces(vocab, told)) == "".join(parts).encode()


def test_most_are_certain(upstream: tuple[Vocab, Model]) -> None:
    """Of texts as the tokenizer cuts them, hardly any has two ways."""
    vocab, model = upstream
    chance, n_exact = random.Random(1), 0
    for _ in range(200):
        text = "".join(chance.choices(TEXTS, k=6))
        reply, told = received(model, stream(vocab, tokens_of(vocab, text)))
        n_exact += reply.is_exact and told == tokens_of(vocab, text)
    assert n_exact >= 190


@pytest.mark.parametrize("word", ["好", "🙂!", "b"])
def test_stop_strings(upstream: tuple[Vocab, Model], word: str) -> None:
    """The tokens whose text is sent are kept, those of the stop string are not."""
    vocab, model = upstream
    ids = tokens_of(vocab, f"a你 {word} and more")
    reply, told = received(model, stream(vocab, ids, word), stop=[word])
    assert (reply.stop, reply.stopping_word) == ("word", word.encode())
    assert reply.text == "a你 ".encode()
    kept = told[: reply.n_kept]
    assert kept == ids[: len(kept)]
    assert "a你 ".encode().startswith(b"".join(pieces(vocab, kept)))


def test_a_reply_cut_within_a_character(upstream: tuple[Vocab, Model]) -> None:
    """Tokens after the last text that was sent are counted, not guessed."""
    vocab, model = upstream
    ids = [*tokens_of(vocab, "a "), bytes_of(vocab, "🙂")[0]]
    reply, told = received(model, stream(vocab, ids))
    assert told == ids[:-1]
    assert reply.n_unnamed == 1
    assert reply.timings == (2, 5, 3.0, len(ids), 8.0)


def test_errors_and_progress(upstream: tuple[Vocab, Model]) -> None:
    """An error is raised with llama-server's status; news of the prompt is no token."""
    _, model = upstream
    reply = Reply(Request(model, "completion", b'{"prompt": "Hi"}'), 0)
    progress = {"total": 7, "cache": 2, "processed": 4, "time_ms": 3}
    got = reply.received(json.dumps({"prompt_progress": progress, "stop": False}).encode())
    assert (got.progress, got.chunk, got.ids) == ((7, 2, 4, 3), None, ())
    error = {"error": {"code": 503, "message": "gone", "type": "unavailable_error"}}
    with pytest.raises(WireError, match="gone") as caught:
        reply.received(json.dumps(error).encode())
    assert caught.value.status == 503


def test_what_was_evaluated_before(upstream: tuple[Vocab, Model]) -> None:
    """llama-server takes it for reused: it was in the slot when the request came."""
    _, model = upstream
    reply = Reply(
        Request(model, "completion", b'{"prompt": [1, 2, 3, 4, 5, 6], "stream": true}'), 0
    )
    reply.evaluated_before(2, 30.0)
    progress = {"total": 6, "cache": 5, "processed": 6, "time_ms": 10}
    got = reply.received(json.dumps({"prompt_progress": progress, "stop": False}).encode())
    assert got.progress == (6, 3, 6, 40)
    timings = {"cache_n": 5, "prompt_n": 1, "prompt_ms": 10.0, "predicted_ms": 7.0}
    said = {"content": "a", "tokens": [300], "tokens_predicted": 1, "stop": False}
    reply.received(json.dumps(said | {"timings": timings}).encode())
    assert reply.timings == (3, 3, 40.0, 1, 7.0)
    assert reply.n_reused == 5


def test_the_body_that_is_sent(upstream: tuple[Vocab, Model]) -> None:
    """Token ids, the fields of the request that are known or not, and none that was worked in."""
    _, model = upstream
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "temperature": 0.25,
        "a_field_of_tomorrow": {"x": [1]},
        "seed": 7,
        "n": 1,
        "response_format": {"type": "json_object"},
    }
    request = Request(model, "chat", json.dumps(chat).encode())
    sent = json.loads(request.upstream_body(0, b'{"id_slot": 3}'))
    assert sent["prompt"] == request.prompts[0].tolist()
    assert (sent["id_slot"], sent["seed"], sent["temperature"]) == (3, 7, 0.25)
    assert sent["a_field_of_tomorrow"] == {"x": [1]}
    assert sent["grammar_type"] == "tool_calls"
    assert not {"messages", "response_format", "n", "chat_parser", "chat_format"} & set(sent)
    assert Writer(request).end() == b"data: [DONE]\n\n"
