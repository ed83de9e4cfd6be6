"""`towerctl bench cold`: which texts count, and a run of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click
import pytest
import zstandard

from lab.bench.cold import chats as cold
from lab.texts.chat_template import held_out


def records(path: Path, *sources: str) -> Path:
    lines = [
        json.dumps(
            {"src": f"{name}/1", "messages": [{"role": "user", "content": f"of {name} " * 9}]}
        )
        for name in sources
    ]
    path.write_bytes(zstandard.compress("\n".join(lines).encode()))
    return path


def test_only_sources_that_the_codec_was_not_trained_on_count(tmp_path: Path) -> None:
    """gpteacher and t0 are in the manifest of the codec's models, sgd is not."""
    text = held_out(records(tmp_path / "some.jsonl.zst", "gpteacher", "sgd", "t0")).decode()
    assert "of sgd" in text
    assert "of gpteacher" not in text
    assert "of t0" not in text
    with pytest.raises(click.ClickException, match="trained on every source"):
        held_out(records(tmp_path / "none.jsonl.zst", "gpteacher", "md"))


def test_bits_are_told_by_text_and_a_long_chat_thaws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts: random letters take more bits than one sentence over and over."""
    monkeypatch.setattr(cold, "TOKENS", 120)
    monkeypatch.setattr(cold, "LONG_TOKENS", 400)
    monkeypatch.setattr(cold, "BASE_TOKENS", 20)
    easy, hard = tmp_path / "easy.txt", tmp_path / "hard.txt"
    easy.write_text("The cat saw a big red ball. " * 400)
    hard.write_text("".join(chr(97 + i * i % 641 * 7 % 26) for i in range(8000)))
    report = asyncio.run(
        cold.run(None, True, data=None, texts=(easy, hard), meetings=None, vocab=None)
    )
    figures = report.figures
    assert figures["text"] == "easy.txt, hard.txt"
    assert figures["bits_per_token easy.txt"] < figures["bits_per_token hard.txt"]
    mean = (figures["bits_per_token easy.txt"] + figures["bits_per_token hard.txt"]) / 2
    assert figures["bits_per_token"] == pytest.approx(mean)
    assert 1e3 * figures["resume_without_rows_s"] >= figures["thaw_8k_prefill_ms"] > 0
    assert figures["thaw_8k_decode_ms"] > 0
    assert figures["resume_with_rows_s"] > 0
    assert figures["decode_speedup"] == pytest.approx(
        figures["decode_tok_s"] / figures["decode_in_order_tok_s"]
    )
    assert figures["decode_chunks"] == 1
    assert figures["decode_bytes_ratio"] == 1
