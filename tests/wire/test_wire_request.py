"""What towerd itself reads from a request and from a running reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llama_wire import NO_DRAFT, TEMPLATES, Talker

from towerd.wire import Model, Reply, Request, Settings, WireError, recommended

Scripted = Callable[[Sequence[str]], Talker]
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Well?"},
]
QWEN = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text()


def request(model: Model, endpoint: Any, **fields: Any) -> Request:
    return Request(model, endpoint, json.dumps(fields).encode())


def test_fields_of_the_body(story: Talker) -> None:
    """Fields that are towerd's own are kept in every dialect, as they were sent."""
    model = story.model(kept_fields=("retention", "live_budget"))
    asked: dict[str, dict[str, Any]] = {
        "completion": {"prompt": "a"},
        "chat": {"messages": TURNS},
        "responses": {"input": "a"},
        "messages": {"messages": TURNS, "max_tokens": 3},
    }
    for endpoint, rest in asked.items():
        made = request(model, endpoint, retention="h2o", live_budget={"a": [1]}, seed=3, **rest)
        assert made.field("retention") == b'"h2o"'
        assert json.loads(made.field("live_budget") or b"") == {"a": [1]}
        assert made.field("seed") is None


def test_same_chat_in_each_dialect(story: Talker) -> None:
    """The same prompt, and the same agent."""
    model = story.model()
    chat = request(model, "chat", messages=[SYSTEM, *TURNS])
    messages = request(model, "messages", system="Be brief.", messages=TURNS, max_tokens=3)
    responses = request(model, "responses", instructions="Be brief.", input=TURNS[0]["content"])
    assert messages.prompts[0].tolist() == chat.prompts[0].tolist()
    assert chat.agent == messages.agent == responses.agent == b'[["Be brief."],null]'
    assert request(model, "chat", messages=TURNS).agent == b""
    assert request(model, "completion", prompt="a").agent == b""


def test_spans(scripted: Scripted) -> None:
    """Where each message begins and ends, by the tokens that the template puts between them."""
    talker = scripted(["<|im_start|>", "<|im_end|>"])
    made = request(talker.model(chat_template=QWEN), "chat", messages=[SYSTEM, *TURNS])
    ids, spans = made.prompts[0], made.spans(0)
    starts = np.flatnonzero(ids == 259)
    assert spans[:, 1].tolist() == starts[1:].tolist(), "the system message has no delimiter"
    assert (spans[:, 1] + spans[:, 2]).tolist() == [*starts[2:].tolist(), len(ids)]
    user, assistant = 3, 2
    assert spans[:, 0].tolist() == [user, assistant, user, assistant]


def test_tokenizer_is_asked(story: Talker) -> None:
    """A caching tokenizer replaces llama.cpp's if a prompt is one text."""
    asked: list[str] = []

    def tokenizer(text: str) -> Any:
        asked.append(text)
        return np.arange(3, dtype=np.int32)

    values = Settings(name="x", n_ctx=100, n_parallel=1).encode()
    model = Model(story.address, values, tokenizer)
    assert request(model, "completion", prompt="añb").prompts[0].tolist() == [0, 1, 2]
    assert request(model, "chat", messages=TURNS).prompts[0].tolist() == [0, 1, 2]
    assert len(request(model, "completion", prompt=["a", "b"]).prompts) == 2
    assert asked[0] == "añb"
    assert len(asked) == 2


def test_tokens_that_a_stop_cuts_off(story: Talker, model: Model) -> None:
    """Those whose text is not all in the reply are not kept."""
    plain = request(model, "completion", prompt="Once", n_predict=30, temperature=0)
    whole = Reply(plain, 0)
    tokens = [chunk.token for chunk in story.chunks(plain, whole)]
    assert whole.n_kept == len(tokens)
    word = whole.text[10:14].decode()
    cut = request(model, "completion", prompt="Once", n_predict=30, temperature=0, stop=word)
    reply = Reply(cut, 0)
    sent = b"".join(chunk.text for chunk in story.chunks(cut, reply))
    assert (reply.stop, reply.stopping_word.decode()) == ("word", word)
    assert sent == reply.text == whole.text[: whole.text.index(word.encode())]
    kept = tokens[: reply.n_kept]
    again = request(model, "completion", prompt=[*plain.prompts[0].tolist(), *kept], n_predict=1)
    assert len(again.prompts[0]) == len(plain.prompts[0]) + len(kept)
    assert reply.n_kept < len(tokens)


def test_ends(story: Talker, model: Model) -> None:
    """A reply ends with its context, and where towerd says so."""
    made = request(model, "completion", prompt="Once", temperature=0)
    reply = Reply(made, 0)
    story.clear()
    story.evaluate(made.prompts[0])
    reply.accept_prompt(made.prompts[0])
    reply.started(1, 4, 12.5)
    assert reply.steps(story.context, -1, NO_DRAFT, 0)[0].stop == "limit"
    cached, processed, prompt_ms, n_predicted, predicted_ms = reply.timings
    assert (cached, processed, n_predicted) == (1, 4, 1)
    assert prompt_ms == pytest.approx(12.5)
    assert predicted_ms >= 0
    other = Reply(made, 0)
    before = other.stop
    other.limit(True)
    assert (before, other.stop) == ("", "limit")


def test_reasoning_is_ended(scripted: Scripted) -> None:
    """The next tokens are what ends it."""
    talker = scripted(["<think>", "\nHm", " so", " much", " to", " think", " of"])
    model = talker.model(chat_template=QWEN)
    made = request(
        model, "chat", messages=TURNS, reasoning_control=True, max_tokens=30, temperature=0
    )
    reply = Reply(made, 0)
    for chunk in talker.chunks(made, reply):
        if chunk.text == b" so":
            assert reply.end_reasoning()
    assert reply.text.startswith(b"<think>\nHm so</think>")
    assert not reply.end_reasoning()


def test_what_a_model_recommends() -> None:
    """Sampling that a GGUF's metadata names, under the names of a request."""
    found = recommended(
        {
            "general.sampling.temp": "0.6",
            "general.sampling.top_k": "20",
            "general.sampling.sequence": "top_k;temperature",
            "general.sampling.min_p": "x",
            "general.name": "x",
        }
    )
    assert found == {"temperature": 0.6, "top_k": 20, "samplers": ["top_k", "temperature"]}


def test_defaults(story: Talker) -> None:
    """What a model recommends and a daemon sets holds for requests that do not say otherwise."""
    model = story.model(defaults={"temperature": 0.5, "n_predict": 7, "stop": ["x"]})
    made = request(model, "completion", prompt="a")
    said = json.loads(made.settings(False))
    assert (said["temperature"], said["stop"], made.n_predict) == (0.5, ["x"], 7)
    assert request(model, "completion", prompt="a", n_predict=-1).n_predict == 7
    assert request(model, "completion", prompt="a", n_predict=3).n_predict == 3
    assert json.loads(model.props())["default_generation_settings"]["params"]["temperature"] == 0.5


def test_what_continues_takes_the_place_of_a_beginning(story: Talker) -> None:
    """Its numbers are those of the whole prompt; what is told by the beginning is not told."""
    model = story.model()
    whole = request(model, "chat", messages=[SYSTEM, *TURNS]).prompts[0]
    known = np.array([9, 8, 7], np.int32)
    body = json.dumps({"messages": [SYSTEM, *TURNS]}).encode()
    made = Request(model, "chat", body, continued=(known, 5))
    assert made.prompts[0].tolist() == [9, 8, 7, *whole[5:].tolist()]
    assert (made.agent, len(made.spans(0)), len(made.next_prompt(b"{}"))) == (b"", 0, 0)
    for ids, n in ((known, len(whole) + 1), (np.array([-5], np.int32), 1)):
        with pytest.raises(WireError):
            Request(model, "chat", body, continued=(ids, n))
