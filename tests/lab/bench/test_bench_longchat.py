"""`towerctl bench longchat`: its recall against counting by hand, its data, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lab.bench.longchat import policies, recall, retrieval
from lab.bench.longchat.perplexity import budget_of_same_mean, live_by_token, worst_ratios
from lab.bench.longchat.recall import TOP, recalls
from lab.texts import documents
from lab.texts.tasks import pair
from lab.texts.tokenizer import TextTokenizer
from towerd.engine.base import LiveBudget
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model


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


def test_budgets_of_the_same_mean() -> None:
    """The mean by counting what the policies do; BUZZ needs more room for the same."""

    def mean(name: str, budget: int, n: int) -> float:
        return float(live_by_token(LiveBudget(name, budget), n).mean())

    assert mean("streaming", 64, 64) == pytest.approx(32.5)
    rest = np.mean(np.arange(57, 65))  # an eviction frees 8
    assert mean("streaming", 64, 128) == pytest.approx((32.5 + rest) / 2)
    wide = budget_of_same_mean(64, 512)
    assert 64 < wide < 160
    assert mean("buzz", wide - 1, 512) < mean("streaming", 64, 512) <= mean("buzz", wide, 512)
    assert budget_of_same_mean(100, 100) == 100


def test_worst_ratios() -> None:
    rows = [
        {"buzz": 1.2, "h2o": 1.0, "streaming": 1.5, "buzz_mean": 1.1},
        {"buzz": 1.2, "h2o": 1.5, "streaming": 1.0},
    ]
    assert worst_ratios(rows) == {
        "buzz_vs_h2o_ppl": 1.2,
        "buzz_vs_streaming_ppl": 1.2,
        "buzz_mean_vs_h2o_ppl": 1.1,
        "buzz_mean_vs_streaming_ppl": pytest.approx(1.1 / 1.5),
    }


def test_what_is_told_and_asked() -> None:
    """All facts stand in the text, in the words that ask for them; pairs as many as fit."""
    with TextTokenizer(bundled_model()) as tokenizer:
        task = retrieval.facts(tokenizer, "Once there was a tower. " * 200, 600)
        places = [task.text.index(f"{fact.begin} {fact.answer}.") for fact in task.asked]
        assert len(tokenizer.ids(task.text)) == pytest.approx(600, abs=40)
        assert places == sorted(places)
        assert places[0] > 20
        told = [pair(f"{i:04x}", f"{i * 7:04x}") for i in range(400)]
        task = retrieval.pairs(tokenizer, told, 600, 4)
        assert len(task.asked) == 4
        for asked in task.asked:
            assert f"{asked.begin}{asked.answer}" in task.text
        n_told = task.text.count("\n")
        assert sum(len(tokenizer.ids(fact.text)) for fact in told[:n_told]) <= 600
        assert sum(len(tokenizer.ids(fact.text)) for fact in told[: n_told + 1]) > 600


def test_shares_are_of_what_the_full_cache_finds() -> None:
    rows = [
        {"live": 256, "full": 4, "streaming": 1},
        {"live": 256, "full": 0, "streaming": 0},
        {"live": 512, "full": 4, "streaming": 3},
    ]
    assert retrieval.share_found(rows, "streaming", 256) == 0.25
    assert retrieval.share_found(rows[1:], "streaming", 256) is None


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
    import asyncio

    monkeypatch.setattr(policies, "QUICK_BUDGETS", (40,))
    monkeypatch.setattr(policies, "POLICIES", ("streaming", "h2o", "buzz", "icecache"))
    monkeypatch.setattr(policies, "QUICK_TEXT_TOKENS", 160)
    monkeypatch.setattr(policies, "LENGTHS", (420,))

    def overhead(*_: Any, **__: Any) -> dict[str, float]:
        return recall.index_overhead(bundled_model(), 128, 8, 1)

    monkeypatch.setattr(policies, "index_overhead", overhead)
    report = asyncio.run(policies.run(None, True, text=None, meetings=meetings, pairs=pairs))
    report.show()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in (
        "buzz_vs_h2o_ppl",
        "buzz_vs_streaming_ppl",
        "buzz_mean_vs_h2o_ppl",
        "icecache_recall_vs_sequential",
        "icecache_recall_vs_ranked",
        "index_overhead",
    ):
        assert line[key] > 0
    assert {row["text"] for row in line["perplexity"]} == {"sample.txt", "meetings.jsonl.zst"}
    for row in line["perplexity"]:
        assert row["buzz"] > 0.5
        assert row["mean_live"]["buzz"] < row["mean_live"]["streaming"] < 40
        assert row["mean_live"]["buzz_mean"] >= row["mean_live"]["streaming"] - 1
    tasks = {(row["task"], row["tokens"], row["live"]) for row in line["retrieval"]}
    assert tasks == {("facts", 448, 40), ("pairs", 448, 40)}
    for row in line["retrieval"]:
        assert len(row["depths"]["full"]) == row["asked"]
        assert len(row["depths"]["icecache"]) == row["full"] >= row["icecache"]
