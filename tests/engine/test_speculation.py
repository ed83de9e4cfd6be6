"""Speculation: replies are those of a daemon without it, and so are the rows that stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Oracle, ask, check_greedy, settle, some_ids
from scripted_model import make_scripted_model
from services import EmbeddedService, OpenService
from speculating import EVEN, Said, drafted, gist, say

from lab.models.random_gguf import PRESETS, Shape, make_random_gguf
from towerd.api.http.metrics import Metrics
from towerd.engine.base import GenerateRequest, LiveBudget, Piece
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model

STORY = "Once upon a time there was a little dog. Once upon a time there was a little"
OTHER = "Lily and Tom went to the park. They saw a big tree. Lily and Tom"
OWN_DRAFT = ("-md", str(bundled_model()), "--spec-draft-n-max", "6")
NGRAMS = (
    *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1"),
    *("--spec-ngram-simple-size-m", "5"),
)


@pytest.fixture(scope="session")
def bad_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights behind the bundled model's vocabulary."""
    path = tmp_path_factory.mktemp("drafts") / "bad.gguf"
    make_random_gguf(path, replace(PRESETS["tiny"], n_layer=1), vocab=bundled_model())
    return path


@pytest.fixture
def opened(service_on: OpenService) -> Callable[..., Any]:
    """`async with opened(flags, ...)`: the bundled model with llama-server's flags."""

    @asynccontextmanager
    async def on(
        flags: tuple[str, ...] = (), model: Path | None = None, **settings: Any
    ) -> AsyncIterator[EmbeddedService]:
        path = model or bundled_model()
        async with service_on(path, llama_server_args=flags, **(EVEN | settings)) as service:
            yield service

    return on


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle(bundled_model(), **EVEN)
    yield made
    made.close()


def logprobs(answer: Said) -> list[float]:
    """Of each token and of those that were likely in its place."""
    places = answer.get("completion_probabilities", [])
    return [one["logprob"] for place in places for one in (place, *place["top_logprobs"])]


BODIES: dict[str, Said] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7},
    "penalties": {"temperature": 0.8, "seed": 3, "repeat_penalty": 1.3, "dry_multiplier": 0.8},
    "mirostat": {"temperature": 1.0, "seed": 11, "mirostat": 2},
    "grammar": {"grammar": 'root ::= ("the " | "dog " | "a ")+ "."', "n_predict": 40},
    "probabilities": {"n_probs": 3, "n_predict": 30},
    "one token": {"n_predict": 1},
    "two tokens": {"n_predict": 2},
    "to the end of the context": {"n_predict": -1, "ignore_eos": True},
}


@pytest.mark.parametrize("flags", [OWN_DRAFT, NGRAMS], ids=["draft model", "ngrams"])
async def test_replies_are_the_same(opened: Any, flags: tuple[str, ...]) -> None:
    """For one seed the same tokens, text, probabilities and reason to stop."""
    said: list[dict[str, Said]] = []
    for words in ((), flags):
        async with opened(words, ctx_size=256) as service:
            said.append({name: await say(service, STORY, **body) for name, body in BODIES.items()})
            await settle(service)
    without, speculating = said
    for name, answer in speculating.items():
        assert gist(answer) == gist(without[name]), name
        assert logprobs(answer) == pytest.approx(logprobs(without[name]), abs=1e-4)
        assert drafted(without[name]) == (0, 0)
    assert all(drafted(speculating[name])[1] for name in ("greedy", "to the end of the context"))


async def test_how_much_of_a_draft_is_right(opened: Any, bad_draft: Path) -> None:
    """Of a model's own guesses all, of random weights' next to nothing; the reply is the same."""
    async with opened(OWN_DRAFT) as service:
        own = await say(service, STORY)
    async with opened(("-md", str(bad_draft), "--spec-draft-n-max", "6")) as service:
        bad = await say(service, STORY)
    n, n_right = drafted(own)
    assert n == n_right > 60
    n, n_right = drafted(bad)
    assert n > 300
    assert n_right < 0.05 * n
    assert gist(own) == gist(bad)


async def test_a_stop_string_among_right_guesses(opened: Any) -> None:
    """What is behind it leaves no trace: not in the reply, nor in the context, nor in the store."""
    said = []
    for flags in ((), OWN_DRAFT):
        async with opened(flags) as service:
            whole = await say(service, STORY)
            words = whole["content"].split()
            answers = [await say(service, STORY, stop=[word]) for word in words[3:12]]
            said.append([gist(answer) for answer in answers])
            await settle(service)
            assert [answer["stop_type"] for answer in answers] == ["word"] * len(answers)
    assert said[0] == said[1]


async def test_the_end_among_right_guesses(opened: Any, tmp_path: Path) -> None:
    """Guesses that go past the end of a reply are not in it, and it ends as ever."""
    script = [f"<{i}>" for i in range(11)]
    make_scripted_model(tmp_path / "script.gguf", script)
    flags = ("-md", str(tmp_path / "script.gguf"), "--spec-draft-n-max", "8")
    async with opened(flags, model=tmp_path / "script.gguf") as service:
        answer = await say(service, "x")
        assert answer["content"] == "".join(script)
        assert answer["stop_type"] == "eos"
        assert drafted(answer)[1] > 6
        await settle(service)


async def test_cancelled_in_the_middle(opened: Any) -> None:
    """A chat that its client leaves holds what it was sent, and can continue."""
    async with opened(OWN_DRAFT) as service:
        whole = await ask(service, some_ids(20), 60)
        running = service.engine.generate(GenerateRequest(ids=some_ids(20), n_predict=200))
        async for event in running:
            if isinstance(event, Piece) and len(running.job.reply) > 5:
                break
        finish = await running.cancel()
        assert finish is not None
        running.release()
        await settle(service)
        again = await ask(service, some_ids(20), 60)
        assert again.ids == whole.ids


@pytest.mark.parametrize("flags", [OWN_DRAFT, NGRAMS], ids=["draft model", "ngrams"])
async def test_rows_are_those_of_prefill(
    opened: Any, oracle: Oracle, flags: tuple[str, ...]
) -> None:
    """A chat that was drafted continues, live and after a restart, as monolithic prefill does; what
    the store gives back are the very rows that were live. (With flash attention: without it where
    the cells lie decides how sums are rounded.)"""
    prompt = np.resize(some_ids(12), 60)
    async with opened(flags, flash_attn="on") as service:
        first = await ask(service, prompt, 40)
        assert service.engine.stats()["draft_tokens"] > 0
        longer = np.concatenate([prompt, first.ids, some_ids(9, 1)])
        again = await ask(service, longer, 1)
        assert again.finish.reuse.live == 60 + 39
        live = await ask(service, longer, 1)
        await settle(service)
    async with opened(flags, flash_attn="on") as service:
        stored = await ask(service, longer, 1)
        assert stored.finish.reuse.warm == live.finish.reuse.live == len(longer) - 1
    assert stored.probs == live.probs
    check_greedy(oracle, prompt.tolist(), first.ids)
    check_greedy(oracle, longer.tolist(), stored.ids)


async def test_side_by_side(opened: Any) -> None:
    """Chats that draft and chats that do not run in the same batches, each as if alone."""
    shapes: list[tuple[str, LiveBudget, Said]] = [
        (STORY, LiveBudget(), {}),
        (OTHER, LiveBudget("streaming", 48), {}),
        (OTHER, LiveBudget(), {"n_predict": 50}),
        (STORY, LiveBudget("streaming", 400), {"n_predict": 40}),
    ]
    async with opened(()) as service:
        alone = [await say(service, text, live, **body) for text, live, body in shapes]
    async with opened(OWN_DRAFT) as service:
        together = await asyncio.gather(
            *(say(service, text, live, **body) for text, live, body in shapes)
        )
        await settle(service)
    assert [gist(answer) for answer in together] == [gist(answer) for answer in alone]
    assert [drafted(answer)[0] > 0 for answer in together] == [True, False, True, False]


async def test_beside_a_chat_whose_attention_is_read(opened: Any) -> None:
    """The drafts of others are nothing that its policy goes by."""
    settings = {"retention": "h2o", "live_budget": 64}
    shapes = [(OTHER * 3, LiveBudget("h2o", 64)), (STORY, LiveBudget())]
    async with opened((), **settings) as service:
        alone = [await say(service, text, live) for text, live in shapes]
    async with opened(OWN_DRAFT, **settings) as service:
        together = await asyncio.gather(*(say(service, text, live) for text, live in shapes))
        await settle(service)
    assert [gist(answer) for answer in together] == [gist(answer) for answer in alone]
    assert [drafted(answer)[0] > 0 for answer in together] == [False, True]


async def test_no_request_is_preempted_for_a_draft(opened: Any) -> None:
    """With hardly a cell to spare replies run on, undrafted where there is no room."""
    texts = [STORY, OTHER, STORY + " cat", OTHER + " dog"]
    async with opened(()) as service:
        alone = [await say(service, text, n_predict=60, ignore_eos=True) for text in texts]
    async with opened(OWN_DRAFT, ctx_size=256, live_tokens=512) as service:
        together = await asyncio.gather(
            *(say(service, text, n_predict=60, ignore_eos=True) for text in texts)
        )
        assert service.engine.stats()["preemptions"] == 0
        await settle(service)
    assert [answer["ids"] for answer in together] == [answer["ids"] for answer in alone]


async def test_taken_up_again_after_giving_way(opened: Any) -> None:
    """A chat that is pushed out of the context in the middle of drafting continues as if it had
    not been."""
    texts = [STORY, OTHER, STORY + " cat", OTHER + " dog"]
    fields: Said = {"n_predict": 150, "ignore_eos": True}
    async with opened(()) as service:
        alone = [await say(service, text, **fields) for text in texts]
    async with opened(OWN_DRAFT, ctx_size=256, live_tokens=512) as service:
        together = await asyncio.gather(*(say(service, text, **fields) for text in texts))
        assert service.engine.stats()["preemptions"] > 0
        assert service.engine.stats()["draft_tokens_accepted"] > 100
        await settle(service)
    assert [answer["ids"] for answer in together] == [answer["ids"] for answer in alone]


async def test_past_the_end_of_the_context(opened: Any) -> None:
    """A chat that drops its oldest turns there does so at the same token, and continues the
    same."""
    said = []
    for flags in ((), OWN_DRAFT):
        async with opened(flags, ctx_size=256) as service:
            fields: Said = {"n_predict": 200, "ignore_eos": True}
            answer = await say(service, STORY * 4, LiveBudget("shift"), **fields)
            assert answer["truncated"]
            said.append(answer)
            await settle(service)
    assert gist(said[0]) == gist(said[1])
    assert drafted(said[1])[1] > 50


async def test_a_text_longer_than_the_draft_model_reads(opened: Any) -> None:
    """Of a long text the draft model has the end before it, and reads that beside the reply."""
    prompt = " ".join([STORY, OTHER] * 8)
    async with opened(()) as service:
        plain = await say(service, prompt, ignore_eos=True)
        assert plain["tokens_evaluated"] > 300
    async with opened(OWN_DRAFT) as service:
        answer = await say(service, prompt, ignore_eos=True)
        assert gist(answer) == gist(plain)
        assert drafted(answer)[1] > 20
        short = await say(service, STORY)
        n, n_right = drafted(short)
        assert n == n_right > 60, "the next text of the slot begins anew"


SHAPE = Shape(4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=1e4, ftype="F32", window=24)


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "qwen35", "mamba", "rwkv7"])
async def test_states_that_cannot_be_cut(opened: Any, tmp_path: Path, arch: str) -> None:
    """Windows slide and recurrent states go back: a drafted reply is that of a daemon without
    drafts, and the chat that continues from it, after a restart too, is monolithic prefill's."""
    path = tmp_path / "model.gguf"
    make_random_gguf(path, replace(SHAPE, arch=arch))  # type: ignore[arg-type]
    prompt = (some_ids(60) % 148 + 300).tolist()
    few: Said = {"logit_bias": [[i, 50] for i in (300, 301, 302)], "n_predict": 60}
    async with opened((), path) as service:
        plain = await say(service, prompt, **few)
    oracle = Oracle(path, **EVEN)
    try:
        async with opened(NGRAMS, path) as service:
            answer = await say(service, prompt, **few)
            assert gist(answer) == gist(plain)
            n, n_right = drafted(answer)
            assert 0 < n_right < n
            longer = np.array([*prompt, *answer["ids"], *(some_ids(9, 1) % 148 + 300)])
            check_greedy(oracle, longer.tolist(), (await ask(service, longer, 6)).ids)
        async with opened(NGRAMS, path) as service:
            again = await ask(service, longer, 6)
            check_greedy(oracle, longer.tolist(), again.ids)
            assert again.finish.reuse.warm + again.finish.reuse.hot >= 60
    finally:
        oracle.close()


async def test_what_is_counted(opened: Any) -> None:
    """/metrics has llama-server's counters, which are the sums of what replies say."""
    async with opened(OWN_DRAFT) as service:
        answers = [await say(service, text) for text in (STORY, OTHER)]
        text = Metrics().render({"engine": service.engine.stats()}).decode()
        assert all(slot.speculative for slot in service.engine.slots())
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if "spec_decode_num" in line)
    prefix = "llamacpp:spec_decode_num_"
    assert float(found[prefix + "draft_tokens_total"]) == sum(drafted(a)[0] for a in answers)
    assert float(found[prefix + "accepted_tokens_total"]) == sum(drafted(a)[1] for a in answers)
    at = [v for k, v in found.items() if k.startswith(prefix + "accepted_tokens_per_pos_total{")]
    assert sum(map(float, at)) == float(found[prefix + "accepted_tokens_total"])
    assert 0 < float(found[prefix + "drafts_total"]) <= float(at[0]) * 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--spec-type", "draft-simple"), "name one with --model-draft"),
        (("-md", "/nowhere.gguf"), "-md: there is no file /nowhere.gguf"),
        (
            ("-md", str(bundled_model()), "--spec-type", "ngram-mod"),
            "needs --spec-type draft-simple",
        ),
        (("--spec-type", "ngram-cache", "-lcs", "/no/cache"), "/no/cache cannot be read"),
        (("--spec-type", "magic"), "--spec-type"),
        (("--draft-max", "4"), "use --spec-draft-n-max"),
    ],
)
async def test_refused_flags(opened: Any, words: tuple[str, ...], reason: str) -> None:
    """In one sentence at the start."""
    with pytest.raises(ConfigError, match=reason):
        async with opened(words):
            pass


async def test_refused_draft_models(opened: Any, tmp_path: Path) -> None:
    """One with other words, and one whose state cannot forget a draft."""
    make_random_gguf(tmp_path / "words.gguf", replace(PRESETS["tiny"], n_layer=1))
    with pytest.raises(ConfigError, match="vocab"):
        async with opened(("-md", str(tmp_path / "words.gguf"))):
            pass
    make_random_gguf(tmp_path / "mamba.gguf", replace(SHAPE, arch="mamba"), vocab=bundled_model())
    with pytest.raises(ConfigError, match="cannot take a draft back"):
        async with opened(("-md", str(tmp_path / "mamba.gguf"))):
            pass
