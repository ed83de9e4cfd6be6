"""Drafts are verified as if each token had been sampled alone, and drafting takes any text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from llama_wire import Talker

from towerd.models.bundled import bundled_model
from towerd.tokens import Ids
from towerd.wire import Chunk, Model, Reply, Request, Speculation, Writer

TEXT = "Once upon a time"
NGRAMS = (
    *("--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "2"),
    *("--spec-ngram-map-k-size-m", "4"),
)
OWN_DRAFT = ("-md", str(bundled_model()), "--spec-draft-n-max", "8", "-td", "1")


def ids_of(tokens: Any) -> Ids:
    return np.array(tokens, np.int32)


class Verifier:
    """A reply to one prompt in a context of its own, given drafts."""

    def __init__(self, talker: Talker, model: Model, **fields: Any) -> None:
        body = {"prompt": TEXT, "temperature": 0, "n_predict": 40, **fields}
        self.request = Request(model, "completion", json.dumps(body).encode())
        self.reply = Reply(self.request, 0)
        self._talker = talker
        prompt = self.request.prompts[0]
        talker.clear()
        talker.evaluate(prompt)
        self.reply.accept_prompt(prompt)
        self.reply.started(0, len(prompt), 1.0)
        self._n = len(prompt)

    def first(self, n_room: int = 1 << 20) -> list[Chunk]:
        return self.reply.steps(self._talker.context, -1, ids_of([]), n_room)

    def after(self, token: int, draft: list[int], n_room: int = 1 << 20) -> list[Chunk]:
        """Evaluate `token` and then the draft; its wrong tokens are removed from the context."""
        self._talker.evaluate_all([token, *draft], self._n)
        chunks = self.reply.steps(self._talker.context, 0, ids_of(draft), n_room)
        self._n += len(chunks)
        self._talker.cut(self._n)
        return chunks


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [chunk.token for chunk in chunks]


def plain(talker: Talker, model: Model, **fields: Any) -> list[int]:
    """The reply without drafts."""
    verifier = Verifier(talker, model, **fields)
    chunks = verifier.first()
    while not chunks[-1].stop:
        chunks += verifier.after(chunks[-1].token, [])
    return tokens_of(chunks)


def test_a_right_draft(story: Talker, model: Model) -> None:
    """All tokens are accepted, and one more is sampled."""
    right = plain(story, model)
    verifier = Verifier(story, model)
    assert tokens_of(verifier.first()) == right[:1]
    assert tokens_of(verifier.after(right[0], right[1:9])) == right[1:10]
    assert tokens_of(verifier.after(right[9], right[10:12])) == right[10:13]
    assert verifier.reply.drafted == (10, 10)


def test_a_wrong_draft(story: Talker, model: Model) -> None:
    """It is accepted up to the first wrong token, which is replaced by the right one."""
    right = plain(story, model)
    verifier = Verifier(story, model)
    verifier.first()
    assert tokens_of(verifier.after(right[0], [*right[1:4], 5, *right[5:8]])) == right[1:5]
    assert tokens_of(verifier.after(right[4], [7, 8, 9])) == right[5:6]
    assert verifier.reply.drafted == (10, 3)
    final = json.loads(Writer(verifier.request).final(verifier.reply, 0, 0, b""))
    assert final["timings"]["draft_n"] == 10
    assert final["timings"]["draft_n_accepted"] == 3


def test_a_draft_past_the_end(story: Talker, model: Model) -> None:
    """A reply ends in the middle of a right draft: at its limit, a stop string, its room."""
    right = plain(story, model)
    word = json.loads(model.detokenize(json.dumps({"tokens": right[3:4]}).encode()))["content"]
    for fields, n_room, stop in (
        ({"n_predict": 4}, 1 << 20, "limit"),
        ({"stop": [word]}, 1 << 20, "word"),
        ({}, 2, "limit"),
    ):
        verifier = Verifier(story, model, **fields)
        verifier.first()
        chunks = verifier.after(right[0], right[1:9], n_room)
        assert tokens_of(chunks) == right[1:4]
        assert [chunk.stop for chunk in chunks] == ["", "", stop]


def test_the_same_stream_for_a_seed(story: Talker, model: Model) -> None:
    """Drafts, right or wrong, take nothing out of the sampler's stream of numbers."""
    fields = {"temperature": 1.2, "seed": 9, "repeat_penalty": 1.2}
    right = plain(story, model, **fields)
    verifier = Verifier(story, model, **fields)
    said = tokens_of(verifier.first())
    while len(said) < len(right):
        at = len(said)
        draft = right[at : at + 3] if at % 2 else [300, 301]
        said += tokens_of(verifier.after(said[-1], draft[: len(right) - at - 1]))
    assert said == right


def test_who_asks_for_it(story: Talker) -> None:
    assert not Speculation.is_asked_for(story.model())
    assert Speculation.is_asked_for(story.model(flags=NGRAMS))
    assert Speculation.is_asked_for(story.model(flags=OWN_DRAFT))


def test_ngrams_of_each_slot(story: Talker) -> None:
    """What followed the same two tokens before, in this text alone."""
    drafts = Speculation(story.model(flags=NGRAMS), story.context, 2, 1, 1)
    seen = list(range(300, 340))
    text = [*seen, 310]
    found = []
    for _ in range(3):
        first, second = drafts.draft([(0, ids_of(text), 9), (1, ids_of(range(400, 440)), 9)])
        assert len(second) == 0
        text.append(int(text[-1]) + 1)
        found.append(first.tolist())
    assert found[-1] == [313, 314, 315, 316]
    drafts.accept(0, 4)
    [other] = drafts.draft([(0, ids_of(range(400, 430)), 9)])
    assert len(other) == 0
    assert [len(d) for d in drafts.draft([(0, ids_of([5]), 1)])] == [0]


def test_a_draft_model_guesses_what_the_model_says(story: Talker, model: Model) -> None:
    """Its own, behind texts of any length, that grow, shrink and change their slot."""
    drafts = Speculation(story.model(flags=OWN_DRAFT), story.context, 2, 1, 1)
    prompt = Request(model, "completion", json.dumps({"prompt": TEXT}).encode()).prompts[0].tolist()
    right = plain(story, model)
    for n in (1, 9, 3, 20):
        text = ids_of([*prompt, *right[:n]])
        first, second = drafts.draft([(n % 2, text, 8), (1 - n % 2, text, 2)])
        assert first.tolist() == right[n : n + 8]
        assert second.tolist() == right[n : n + 2]


def test_a_long_text_is_read_in_parts(story: Talker) -> None:
    """Nothing is drafted before the end is read, then something; and tokens that are none of the
    draft model's do no harm."""
    drafts = Speculation(story.model(flags=OWN_DRAFT), story.context, 1, 1, 1)
    text = np.random.default_rng(0).integers(260, 500, 2000).astype(np.int32)
    found = [len(drafts.draft([(0, text, 8)])[0]) for _ in range(20)]
    assert found[0] == 0
    assert found[-1] == 8
    assert found == sorted(found)
    text[-3] = -1
    assert [len(drafts.draft([(0, text, 8)])[0]) for _ in range(9)] == [0] * 9
    text[-3] = 1 << 30
    assert [len(drafts.draft([(0, text, 8)])[0]) for _ in range(9)] == [0] * 9


def test_texts_that_outgrow_the_draft_model(story: Talker) -> None:
    """Texts grow past its context and make way for shorter ones: each is drafted for again."""
    drafts = Speculation(story.model(flags=OWN_DRAFT), story.context, 1, 1, 1)
    rng = np.random.default_rng(1)
    for n in (30, 700, 200, 513, 3, 511):
        text = rng.integers(260, 500, n).astype(np.int32)
        n_drafted = 0
        for _ in range(12):
            draft = drafts.draft([(0, text, 8)])[0]
            n_drafted += len(draft)
            text = np.concatenate([text, draft, ids_of([300])])
        assert n_drafted >= 16
