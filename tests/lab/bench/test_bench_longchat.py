"""`towerctl bench longchat`: its recall against counting by hand, its data, and a run of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lab.bench.longchat import beyond, live, perplexity, policies, recall, retrieval
from lab.bench.longchat.recall import TOP, recalls
from lab.texts import documents
from lab.texts.tasks import pair
from lab.texts.tokenizer import TextTokenizer
from towerd.engine.base import LiveBudget
from towerd.errors import ConfigError
from towerd.models.bundled import RETRIEVAL_NAME, bundled_model
from towerd.settings.config import Config


def test_recall_of_sequential_pages_by_counting() -> None:
    """The keys that matter stand side by side, then far apart."""
    together = np.zeros((1, 1, 160, 8), np.float32)
    together[0, 0, 32:48, 0] = 1 + np.arange(16)
    query = np.zeros((1, 2, 1, 8), np.float32)
    query[..., 0] = 1
    found = recalls(together, query, budget=32)
    assert found["ranked"] == found["quest"] == 1.0
    chance = np.random.default_rng(3)
    apart = chance.standard_normal((1, 1, 640, 8), dtype=np.float32)
    apart[0, 0, ::40] = [9, 0, 0, 0, 0, 0, 0, 0] + 0.1 * apart[0, 0, ::40]
    found = recalls(apart, query, budget=32)
    assert found["ranked"] == found["quest"] == 2 / TOP
    assert found["icecache"] >= 4 * found["ranked"]


def test_loaded_pages_never_exceed_the_budget() -> None:
    pages = np.array([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    loaded = recall.loaded_tokens(pages, np.array([2, 0, 0, 3, 1]), 7)
    assert loaded.tolist() == [0, 1, 2, 3, 4, 5]  # page 3 does not fit, page 1 does


def test_pages_with_most_of_the_nearest_keys_come_first() -> None:
    pages = np.repeat(np.arange(5), (8, 16, 2, 4, 9))
    nearest = np.array([*range(8, 18), 24, 25, 0, 1, 2, 26, 30, 31])
    order = recall.page_order(pages, nearest)
    assert order.tolist() == [2, 1, 0, 3, 4, 4]


def row(policy: str, live: int, **more: Any) -> dict[str, Any]:
    return {"policy": policy, "scope": "layer", "live": live, **more}


def test_ratios_of_policies() -> None:
    """The worst of BUZZ over a rival where both have a row; the mean of a budget over its texts."""
    text, other = {"text": "a", "way": "prompt"}, {"text": "b", "way": "prompt"}
    rows = [
        row("buzz", 256, ratio=1.2, **text),
        row("h2o", 256, ratio=1.0, **text),
        row("buzz", 256, ratio=1.2, **other),
        row("h2o", 256, ratio=1.5, **other),
        row("h2o", 512, ratio=0.1, **other),
        row("buzz", 256, ratio=9.0, text="a", way="reply"),
    ]
    assert perplexity.worst_over(rows, "buzz", "h2o", "prompt") == pytest.approx(1.2)
    assert perplexity.worst_over(rows, "buzz", "h2o", "reply") is None
    assert perplexity.mean_ratio(rows, "prompt", LiveBudget("h2o", 256, "layer")) == pytest.approx(
        1.5**0.5
    )
    assert perplexity.mean_ratio(rows, "prompt", LiveBudget("h2o", 256, "head")) is None


def test_budgets_that_are_measured() -> None:
    """Every policy by layer with each budget; by head and for all with the first, but `streaming`, which
    is the same for all."""
    found = policies.lives((256, 512), ("streaming", "buzz"))
    assert set(found) == {
        LiveBudget(name, budget, "layer") for name in ("streaming", "buzz") for budget in (256, 512)
    } | {LiveBudget("buzz", 256, scope) for scope in ("head", "all")}


def test_what_is_told_and_asked() -> None:
    """What is asked for stands in the text, in the words that the reply is begun with."""
    with TextTokenizer(bundled_model()) as tokenizer:
        filler = tokenizer.ids("Once there was a tower. " * 800)
        told = [pair(f"{i:04x}", f"{i * 7:04x}") for i in range(400)]
        made = retrieval.document(tokenizer, filler, 3000, told)
        assert len(tokenizer.ids(made.text)) == made.n == pytest.approx(3000, abs=60)
        for asked in made.asked:
            if asked.kind in retrieval.TOLD:
                said = made.text.partition(asked.begin)[2].strip()
                assert asked.score(said) == 1
                assert asked.score(f"not {said}") == 0
            if asked.kind == "spread":
                places = [made.text.index(answer) for answer in asked.answers]
                assert places == sorted(places)
                assert max(places) - min(places) > 200
        assert {asked.kind for asked in made.asked} == set(retrieval.KINDS)
        few = retrieval.chosen(made.asked, 4)
        counts = Counter(asked.kind for asked in few)
        assert counts == {"passkeys": 4, "facts": 4, "pairs": 4, "quotes": 2, "spread": 2}
        short = retrieval.document(tokenizer, filler, 100, told)
        assert short.n > 1000  # what is told needs that much
        with pytest.raises(ConfigError, match="longer text"):
            retrieval.document(tokenizer, filler[:50], 3000)


def test_scores() -> None:
    """Of a quotation the share that is right from its beginning on, of several answers those that came."""
    quote = retrieval.Asked("quotes", "", "", ("one two three four",))
    assert quote.score(" one two thirty") == 10 / 18
    assert quote.score("one two three four five") == 1
    assert quote.score("no") == 0
    several = retrieval.Asked("spread", "", "", ("Oslo", "Rome"))
    assert several.score("Rome, then Paris") == 0.5
    assert retrieval.Asked("facts", "", "", ("1987",)).score(" 1987.") == 1


def test_shares_are_of_what_the_full_cache_finds() -> None:
    none = {"passkeys": 0.0, "pairs": 0.0}
    rows = [
        row("none", 0, tokens=1000, passkeys=4.0, pairs=2.0),
        row("h2o", 256, tokens=1000, passkeys=3.0, pairs=0.0),
        row("h2o", 512, tokens=1000, passkeys=4.0, pairs=2.0),
        row("none", 0, tokens=2000, **none),
        row("h2o", 256, tokens=2000, **none),
    ]
    small, large = LiveBudget("h2o", 256, "layer"), LiveBudget("h2o", 512, "layer")
    assert retrieval.share_found(rows, small, ("passkeys", "pairs")) == 0.5
    assert retrieval.share_found(rows, small, ("pairs",)) == 0
    assert retrieval.share_found(rows, large, ("passkeys",)) == 1
    assert retrieval.share_found(rows[3:], small, ("pairs",)) is None


def test_a_chat_of_three_contexts() -> None:
    """Its first tenth tells the keys; it is as long as three contexts."""
    with TextTokenizer(bundled_model()) as tokenizer:
        filler = tokenizer.ids("Once there was a tower. " * 800)
        chat = beyond.long_chat(tokenizer, filler, 800, 3)
        whole = "".join(chat.messages)
        assert len(tokenizer.ids(whole)) == pytest.approx(2400, abs=60)
        for asked in chat.asked:
            told = whole.index(f"{asked.begin} {asked.answers[0]}")
            assert len(tokenizer.ids(whole[:told])) < 240
        with pytest.raises(ConfigError, match="longer text"):
            beyond.long_chat(tokenizer, filler[:500], 800, 3)
    assert beyond.share([1, 0, 1], [1, 1, 0]) == 0.5
    assert beyond.share([1.0], [0.0]) is None


def write(path: Path, records: list[Any]) -> Path:
    text = "\n".join(json.dumps(record) for record in records)
    path.write_bytes(zstandard.compress(text.encode()))
    return path


@pytest.fixture
def meetings(tmp_path: Path) -> Path:
    turns = [["Ann", "we should paint the tower red " * 30], ["Ben", "no"]] * 4
    records = [{"split": split, "transcript": turns} for split in ("train", "test", "test")]
    return write(tmp_path / "meetings.jsonl.zst", records)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [[f"{i:04x}-key", f"{i * 7:04x}-value"] for i in range(6)]
    records = [{"ordered_kv_records": rows, "key": rows[i][0], "value": rows[i][1]} for i in (4, 1)]
    return write(tmp_path / "pairs.jsonl.zst", records)


def test_data_sets_are_read(meetings: Path, pairs: Path, tmp_path: Path) -> None:
    text = documents.read_meetings(meetings)
    assert text.count("\n") == 15
    assert text.startswith("Ann: we should paint")
    facts = documents.read_pairs(pairs)
    assert len(facts) == 6  # the second example tells the same keys
    assert (facts[4].question, facts[4].answer) == ('"0004": "', "001c")
    for read, wrong in (
        (documents.read_meetings, pairs),
        (documents.read_pairs, meetings),
        (documents.read_text, tmp_path / "none.txt"),
        (documents.read_meetings, bundled_model()),
    ):
        with pytest.raises(ConfigError):
            read(wrong)


def test_windows_are_runs_of_the_text() -> None:
    with TextTokenizer(bundled_model()) as tokenizer:
        text = "Once upon a time there was a tower. " * 20
        ids = tokenizer.ids(text)
        windows = tokenizer.windows(text, 3, 50)
        assert windows.shape == (3, 50)
        assert (windows[:, 0] == 1).all()
        assert windows[0, 1:].tolist() == ids[:49].tolist()
        assert windows[2, 1:].tolist() == ids[-49:].tolist()
        with pytest.raises(ConfigError, match="longer text"):
            tokenizer.windows("Once", 3, 50)


def test_a_quick_run(
    meetings: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small sizes, everything measured; the last line is one JSON object with the expected keys."""
    monkeypatch.setattr(retrieval, "N_PAIRS", 2)
    monkeypatch.setattr(retrieval, "DOORS", retrieval.DOORS[:2])
    monkeypatch.setattr(retrieval, "FACTS", retrieval.FACTS[:2])
    sizes = policies.Sizes((64,), 160, 24, 1, 80, (300,), 1, 160, 2, 160)
    monkeypatch.setattr(policies, "QUICK", sizes)
    monkeypatch.setattr(policies, "Config", partial(Config, threads=1, threads_batch=1))
    measured = ("streaming", "h2o", "buzz", "icecache")
    monkeypatch.setattr(policies, "lives", partial(policies.lives, policies=measured))

    def overhead(*_: Any, **__: Any) -> dict[str, float]:
        return recall.index_overhead(bundled_model(), 128, 8, 1)

    monkeypatch.setattr(policies, "index_overhead", overhead)
    model = bundled_model(RETRIEVAL_NAME)
    run = policies.run(model, True, text=None, meetings=meetings, pairs=pairs)
    report = asyncio.run(run)
    report.show()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in (
        "buzz_vs_h2o_ppl",
        "buzz_vs_streaming_ppl",
        "buzz_vs_h2o_reply_ppl",
        "best_ppl_64",
        "icecache_recall_vs_sequential",
        "icecache_recall_vs_ranked",
        "index_overhead",
    ):
        assert line[key] > 0
    assert line["best_ppl_64_policy"] in measured
    assert line["beyond_context_asked"] == 2
    assert {each["text"] for each in line["perplexity"]} == {"sample.txt", "meetings.jsonl.zst"}
    of_prompts = [each for each in line["perplexity"] if each["way"] == "prompt"]
    assert len(of_prompts) == 2 * (4 + 3 + 3)
    for each in line["perplexity"]:
        assert each["ratio"] > 0.5
        assert 0 < each["mean_live"] <= each["peak"] <= 64
        assert each["peak_bytes"] % each["peak"] == 0
        assert (each["aside_bytes"] > 0) == (each["policy"] == "icecache")
    for each in line["retrieval"]:
        assert (each["aside_bytes"] > 0) == (each["policy"] == "icecache")
    full, *bounded = line["retrieval"]
    assert full["policy"] == "none"
    for each in bounded:
        assert len(each["scores"]) <= 3 + 2
        for kind in retrieval.KINDS:
            assert 0 <= each[kind] <= 2


def test_the_time_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with little of everything: all rows can be recalled, those in the store, too."""
    monkeypatch.setattr(live, "Config", partial(Config, threads=1, threads_batch=1))
    monkeypatch.setattr(live, "REPLY_TOKENS", 4)
    monkeypatch.setattr(live, "PREFILL_TOKENS", 64)
    report = asyncio.run(live.run(bundled_model(RETRIEVAL_NAME), quick=True))
    figures = report.figures
    assert figures["tpot_speedup_1k"] == pytest.approx(
        figures["tpot_full_ms_1k"] / figures["tpot_live_ms_1k"]
    )
    assert figures["live_bytes_1k"] < figures["live_bytes_full_1k"] / 4
    assert figures["stored_bytes"] >= 1024 / 1056 * figures["live_bytes_full_1k"] * 0.9
    assert figures["recallable"] == figures["recallable_stored"] == 1
    assert set(report.targets) == {
        "tpot_speedup_1k",
        "aside_ratio",
        "aside_ratio_stored",
        "index_overhead",
    }
