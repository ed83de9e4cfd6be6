"""`towerctl bench longchat`: its recall against counting by hand, its data, and a run of it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from towerd.cli.bench import longchat_recall, longchat_texts
from towerd.cli.bench.longchat_recall import TOP, recalls
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model
from towerd.retention.base import View
from towerd.retention.factory import open_retention

torch = pytest.importorskip("torch")

longchat = importlib.import_module("towerd.cli.bench.longchat")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    loaded = longchat_recall._loaded(pages, np.array([2, 0, 0, 3, 1]), 7)
    assert loaded.tolist() == [0, 1, 2, 3, 4, 5]  # page 3 does not fit, page 1 does


def test_pages_with_most_of_the_nearest_keys_come_first() -> None:
    pages = np.repeat(np.arange(5), (8, 16, 2, 4, 9))
    nearest = np.array([*range(8, 18), 24, 25, 0, 1, 2, 26, 30, 31])
    order = longchat_recall._page_order(pages, nearest)
    assert order.tolist() == [2, 1, 0, 3, 4, 4]


def test_budgets_of_the_same_mean() -> None:
    """The mean by counting what the policies do; BUZZ needs more room for the same."""
    assert longchat.mean_live("streaming", 64, 64) == pytest.approx(32.5)
    rest = np.mean(np.arange(57, 65))  # room is made for 8 at a time
    assert longchat.mean_live("streaming", 64, 128) == pytest.approx((32.5 + rest) / 2)
    wide = longchat.budget_of_same_mean(64, 512)
    wanted = longchat.mean_live("streaming", 64, 512)
    assert 64 < wide < 128
    assert (
        longchat.mean_live("buzz", wide - 1, 512) < wanted <= longchat.mean_live("buzz", wide, 512)
    )
    assert longchat.budget_of_same_mean(100, 100) == 100


@pytest.mark.parametrize("live", [50, 100, 400])
def test_buzz_by_what_an_eviction_leaves(live: int) -> None:
    """In the long run about as many as are asked for, and never more than the most."""
    config, most = longchat.buzz_after(live)
    policy, step = open_retention(config), longchat.step_of(most)
    stay, left = np.empty(0, np.int64), []
    for first in range(0, 20 * most, step):
        if len(stay) + step > most:
            view = View(stay, first, mass=np.zeros(len(stay), np.float32))
            stay = policy.keep(view, most - step)
            left.append(len(stay))
        stay = np.concatenate([stay, np.arange(first, first + step)])
        assert len(stay) <= most
    assert np.mean(left[2:]) == pytest.approx(live, rel=0.1)


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
    text = longchat_texts.read_meetings(meetings)
    assert text.count("\n") == 15
    assert text.startswith("Ann: we should paint")
    (facts, asked), second = longchat_texts.read_pairs(pairs, 9)
    assert (facts[asked].question, facts[asked].answer) == ('"0004": "', "001c")
    assert second[1] == 1
    for read, wrong in (
        (longchat_texts.read_meetings, pairs),
        (lambda path: longchat_texts.read_pairs(path, 3), meetings),
        (longchat_texts.read_text, tmp_path / "none.txt"),
        (longchat_texts.read_meetings, bundled_model()),
    ):
        with pytest.raises(ConfigError):
            read(wrong)


def test_windows_are_runs_of_the_text() -> None:
    with longchat_texts.Speaker(bundled_model()) as speaker:
        text = "Once upon a time there was a tower. " * 20
        ids = speaker.ids(text)
        windows = speaker.windows(text, 3, 50)
        assert windows.shape == (3, 50)
        assert (windows[:, 0] == 1).all()
        assert windows[0, 1:].tolist() == ids[:49].tolist()
        assert windows[2, 1:].tolist() == ids[-49:].tolist()
        with pytest.raises(ConfigError, match="longer text"):
            speaker.windows("Once", 3, 50)


def test_a_quick_run(
    meetings: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small sizes, everything measured; the last line is one JSON object with the keys we owe."""
    import asyncio

    monkeypatch.setattr(longchat, "BUDGETS", (40,))
    monkeypatch.setattr(longchat, "POLICIES", ("streaming", "h2o", "buzz", "icecache"))
    monkeypatch.setattr(longchat, "TEXT_TOKENS_MAX", 80)
    monkeypatch.setattr(longchat, "RETRIEVAL_TOKENS", (120,))
    monkeypatch.setattr(longchat, "RETRIEVAL_BUDGETS", (256,))

    def overhead(*_: Any, **__: Any) -> dict[str, float]:
        return longchat_recall.index_overhead(bundled_model(), 128, 8, 1)

    monkeypatch.setattr(longchat, "index_overhead", overhead)
    report = asyncio.run(
        longchat.run(None, True, text=None, meetings=meetings, pairs=pairs, retrieval=None)
    )
    report.show()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in ("buzz_vs_h2o_ppl", "buzz_vs_streaming_ppl", "buzz_mean_vs_h2o_ppl",
                "icecache_recall_vs_sequential", "icecache_recall_vs_ranked", "index_overhead"):  # fmt: skip
        assert line[key] > 0
    assert all(row["buzz_after"] is None for row in line["perplexity"])
    assert "buzz_after_vs_h2o_ppl" not in line
    assert {row["text"] for row in line["perplexity"]} == {"sample.txt", "meetings.jsonl.zst"}
    assert all(row["buzz"] > 0.5 for row in line["perplexity"])
    tasks = {(row["task"], row["live"]) for row in line["retrieval"]}
    assert tasks == {(t, n) for t in ("pass key in 120", "75 pairs") for n in ("full", "256")}
    assert [len(r["depths"]["full"]) for r in line["retrieval"] if r["live"] == "full"] == [5, 2]
