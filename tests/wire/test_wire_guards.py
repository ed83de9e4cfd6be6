"""Requests that llama.cpp's code alone would not survive, and are answered all the same."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_wire import Talker, answer
from scripted_model import make_scripted_model

from towerd.errors import Unavailable
from towerd.model.deepstack import RUN_BYTES_MAX
from towerd.model.vocab import Vocab
from towerd.wire import EmbeddingRequest, Model, Reply, Request, Settings, WireError

LONG = "a" * 200_000
MODERATE_S = 5.0
"""Many times what it takes, and much less than without a bound."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Of a vocabulary that is split by a regular expression, which recurses at each letter."""
    path = tmp_path_factory.mktemp("deep") / "deep.gguf"
    make_scripted_model(path, ["zq"], pre="tekken")
    talker = Talker(path)
    vocab = Vocab(talker.ptr)
    assert vocab.is_deep
    settings = Settings(name="deep", n_ctx=2048, n_parallel=1).encode()
    yield Model(talker.address, settings, deep_stack=vocab.with_deep_stack)
    talker.close()


DEEP: list[tuple[Any, dict[str, Any]]] = [
    ("completion", {"prompt": LONG}),
    ("completion", {"prompt": [LONG]}),
    ("completion", {"prompt": [1, LONG]}),
    ("completion", {"prompt": "a", "logit_bias": [[LONG, 0]]}),
    ("completion", {"prompt": "a", "preserved_tokens": [LONG]}),
    ("completion", {"prompt": "a", "reasoning_budget_start_tag": LONG}),
    ("completion", {"prompt": "a", "message_delimiters": [{"role": "user", "delimiter": LONG}]}),
    ("chat", {"messages": [{"role": "user", "content": LONG}], "logit_bias": {LONG: 0}}),
    (
        "chat",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": LONG}]},
    ),
]


@pytest.mark.parametrize("case", DEEP, ids=lambda case: ",".join(case[1]))
def test_a_long_word(deep: Model, case: tuple[Any, dict[str, Any]]) -> None:
    """Wherever it stands it is tokenized; a longer one is refused."""
    endpoint, fields = case
    # llama.cpp refuses preserved tokens that are more than one token.
    if "preserved_tokens" not in fields:
        Reply(Request(deep, endpoint, json.dumps(fields).encode()), 0)
    longer = json.dumps(fields).replace(LONG, "a" * (RUN_BYTES_MAX + 1))
    with pytest.raises(WireError, match="without a break") as raised:
        Request(deep, endpoint, longer.encode())
    assert raised.value.status == 400


def test_a_long_word_to_embed(deep: Model) -> None:
    assert len(EmbeddingRequest(deep, True, json.dumps({"input": [LONG]}).encode()).prompts[0])


WIDE = {
    "one letter many times": "root ::= " + " | ".join(['"~"'] * 30_000),
    "a product": "\n".join(
        [
            "root ::= " + "|".join(['x "q"'] * 140),
            "x ::= " + "|".join(['y "r"'] * 140),
            "y ::= [a]",
        ]
    ),
    "empty in many ways": "\n".join(
        ["root ::= r0", *(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(60)), 'r60 ::= ""']
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_grammar(model: Model, name: str) -> None:
    """It is refused, before llama.cpp's sampler would compare each of its ways with every other."""
    request = Request(
        model, "completion", json.dumps({"prompt": "a", "grammar": WIDE[name]}).encode()
    )
    before = time.process_time()
    with pytest.raises(WireError, match="ways to begin a rule") as raised:
        Reply(request, 0)
    assert time.process_time() - before < MODERATE_S
    assert raised.value.status == 400


def test_a_long_enum(story: Talker, model: Model) -> None:
    words = [f"number {i} of many" for i in range(2_000)]
    body = {"prompt": "hi", "temperature": 0, "json_schema": {"enum": words}}
    before = time.process_time()
    got = answer(story, model, "completion", json.dumps(body).encode())
    assert time.process_time() - before < MODERATE_S
    assert json.loads(json.loads(got.body)["content"]) in words


def test_a_reply_begun_outside_its_schema(model: Model) -> None:
    """The refusal says why, and nothing is kept of it."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure"}]
    body = {"messages": messages, "response_format": {"type": "json_object"}}
    request = Request(model, "chat", json.dumps(body).encode())
    for _ in range(3):
        with pytest.raises(WireError, match="does not fit its grammar or schema") as raised:
            Reply(request, 0)
        assert raised.value.status == 400


def raising(error: Exception) -> Callable[[str], Any]:
    def tokenize(text: str) -> Any:
        raise error

    return tokenize


def test_errors_of_the_tokenizer(story: Talker, caplog: pytest.LogCaptureFixture) -> None:
    """An expected one is the client's to read; of another nothing leaves the log."""
    settings = Settings(name="x", n_ctx=2048, n_parallel=1).encode()
    busy = Model(story.address, settings, raising(Unavailable("Come back.")))
    with pytest.raises(WireError, match=r"^Come back\.$") as raised:
        Request(busy, "completion", b'{"prompt": "a"}')
    assert raised.value.status == 503
    broken = Model(story.address, settings, raising(KeyError("secret")))
    with caplog.at_level(logging.ERROR), pytest.raises(WireError) as raised:
        Request(broken, "completion", b'{"prompt": "a"}')
    assert raised.value.status == 500
    assert "secret" not in raised.value.message
    assert ".py" not in raised.value.message
    assert "secret" in caplog.text


def test_a_bias_for_each_token(model: Model) -> None:
    """As many keys as a vocabulary has tokens, by number or text; another object has fewer."""
    biases = {str(i): 0.5 for i in range(500)} | {f" {i}": -1 for i in range(120_000)}
    before = time.process_time()
    asked: dict[str, Any] = {
        "prompt": "a",
        "logit_bias": {"7": False} | {str(i): 1 for i in range(8, 500)},
    }
    few = Request(model, "completion", json.dumps(asked).encode())
    asked["logit_bias"] |= {str(i): 1 for i in range(1_000_000, 1_020_000)}  # of no token
    many = Request(model, "completion", json.dumps(asked).encode())
    assert many.settings(False) == few.settings(False)
    assert json.loads(many.settings(False))["logit_bias"]
    for wrong in ({"prompt": "a", "logit_bias": biases | {"x": {"y": biases}}}, {"x": biases}):
        with pytest.raises(WireError):
            Request(model, "completion", json.dumps(wrong).encode())
    with pytest.raises(WireError):
        Request(
            model, "completion", b'{"prompt": "a", "logit_bias": {' + b"1:2," * 5_000 + b'"1":1}}'
        )
    assert time.process_time() - before < MODERATE_S
