"""Trace files: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lab.replay import agentic, mooncake
from lab.replay.trace import TraceError

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "traces"


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def request(at_ms: int, ids: list[int], n_tokens: int = 0) -> dict[str, Any]:
    return {
        "timestamp": at_ms,
        "input_length": n_tokens or 512 * len(ids),
        "output_length": 5,
        "hash_ids": ids,
    }


def test_mooncake(tmp_path: Path) -> None:
    """Blocks that are used together are one segment; ends and branches cut."""
    path = write(
        tmp_path / "chat.jsonl",
        request(0, [7, 8, 9]),
        request(5, [7, 8, 9, 10, 11], 2500),
        request(5, [7, 8, 30]),
        request(9, [40]),
    )
    trace = mooncake.read(path, 1 << 20)
    assert trace.name == "chat"
    assert trace.parents == [-1, 0, 1, 0, -1]
    assert trace.n_blocks == [2, 1, 1, 1, 1]
    assert [call.path for call in trace.calls] == [(0, 1), (0, 1, 2), (0, 3), (4,)]
    assert [call.time_s for call in trace.calls] == [0.0, 0.005, 0.005, 0.009]
    assert [call.session for call in trace.calls] == [0, 0, 1, 2]
    assert [call.ends for call in trace.calls] == [(), (1,), (0,), (4,)]
    assert trace.n_distinct_blocks == 6, "block 11 is not full"
    assert trace.n_input_tokens == 3 * 512 + 2500 + 3 * 512 + 512
    assert mooncake.read(path, 512).n_blocks == [1] * 6
    assert len(mooncake.read(path, 512, calls_max=2).calls) == 2


def test_zstd(tmp_path: Path) -> None:
    """Compressed or not is seen from the bytes."""
    text = json.dumps(request(0, [1])) + "\n"
    path = tmp_path / "x.jsonl"
    path.write_bytes(zstandard.compress(text.encode()))
    assert len(mooncake.read(path, 512).calls) == 1
    path.write_bytes(zstandard.compress(text.encode() * 5000)[:-9])
    with pytest.raises(TraceError):
        mooncake.read(path, 512)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "expected a JSON object"),
        ({"timestamp": 0}, "'input_length' must be a number"),
        (request(0, [1]) | {"timestamp": "soon"}, "'timestamp' must be a number"),
        (request(0, [1]) | {"timestamp": float("nan")}, "'timestamp' is nan"),
        (request(-1, [1]), "'timestamp' is -1"),
        (request(0, [1]) | {"input_length": 1.5}, "must be a whole number"),
        (request(0, [1]) | {"input_length": True}, "must be a number"),
        (request(0, [1]) | {"hash_ids": [1, -2]}, "must hold whole numbers"),
        (request(0, [1]) | {"hash_ids": "1"}, "must be a list"),
        (request(0, [1, 2], 5), "2 hash_ids do not make 5 tokens"),
        (request(0, [5, 6, 5]), "follows two different blocks"),
        (request(0, [6, 2]), "follows two different blocks"),
    ],
)
def test_mooncake_bad_records(tmp_path: Path, record: Any, message: str) -> None:
    """The message names the line."""
    path = write(tmp_path / "bad.jsonl", request(0, [5, 6]), record)
    with pytest.raises(TraceError, match=f"bad.jsonl:2.*{message}"):
        mooncake.read(path, 512)


def test_mooncake_clock_goes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", request(5, [1]), request(4, [1]))
    with pytest.raises(TraceError, match=r"x.jsonl:2: the clock goes back"):
        mooncake.read(path, 512)


def test_not_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{]\n")
    with pytest.raises(TraceError, match="x.jsonl:1 is not JSON"):
        mooncake.read(path, 512)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="cannot be read"):
        mooncake.read(path, 512)
    with pytest.raises(TraceError, match="cannot be opened"):
        mooncake.read(tmp_path / "none", 512)


def session(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"block_size": 64, "requests": list(requests), "tool_tokens": 128, **more}


def coded(at_s: float, h: list[int], n_blocks: int, **more: Any) -> dict[str, Any]:
    return {"t": at_s, "in": 64 * n_blocks, "out": 1, "h": h, **more}


def agentic_file(tmp_path: Path, *sessions: Any, name: str = agentic.FORMAT) -> list[Path]:
    path = tmp_path / "sessions.json"
    path.write_text(json.dumps({"format": name, "sessions": list(sessions)}))
    return [path]


def test_agentic(tmp_path: Path) -> None:
    """Ids are decoded; two sessions share what their lengths say; sub-agents are requests."""
    sub = {"t": 3.0, "type": "subagent", "requests": [coded(0.5, [0, 70, 2], 2)]}
    paths = agentic_file(
        tmp_path,
        session(
            coded(0.0, [0, 1, 4], 4, stop="tool_use", api_time=2.5),
            sub,
            coded(4.0, [3, 50, 1, 60, 2], 6),
        ),
        session(coded(0.0, [0, 1, 3], 3)),
    )
    trace = agentic.read(paths, 1 << 20)
    assert trace.block_tokens == 64
    assert [call.path for call in trace.calls] == [(0, 1, 2), (3,), (0, 1, 4), (0, 5)]
    assert trace.n_blocks == [2, 1, 1, 2, 3, 1]
    assert [call.time_s for call in trace.calls] == [0.0, 3.5, 4.0, 0.0]
    assert [call.session for call in trace.calls] == [0, 0, 0, 1]
    assert [call.ends for call in trace.calls] == [(), (3,), (4,), (5,)]
    assert (trace.calls[0].stop, trace.calls[0].service_s) == ("tool_use", 2.5)
    assert len(agentic.read(paths, 64, sessions_max=1).calls) == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"block_size": 64}, "'requests' must be a list"),
        ({"requests": []}, "'block_size' must be a number"),
        (session(coded(0, [0, 1], 1)), "'h' must be a number and pairs"),
        (session(coded(0, [1], 1)), "keeps 1 blocks of one that has 0"),
        (session(coded(0, [0, 1, 10**12], 2)), "more blocks than 'in'"),
        (session(coded(0, [0, 1, 2, 1, 1], 3)), "follows two different"),
        (session(coded(5, [0, 1, 1], 1), coded(4, [1, 2, 1], 2)), "clock goes back"),
        (session({"t": 0.0, "in": 64}), "'h' must be a list"),
        (session(coded(0, [0, 1, 1], 1), block_size=32), "block_size differs"),
        (7, "expected a JSON object"),
    ],
)
def test_agentic_bad_sessions(tmp_path: Path, bad: Any, message: str) -> None:
    paths = agentic_file(tmp_path, session(coded(0.0, [0, 1, 1], 1)), bad)
    with pytest.raises(TraceError, match=message):
        agentic.read(paths, 64)


def test_agentic_bad_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the format is not"):
        agentic.read(agentic_file(tmp_path, name="other/1"), 64)
    with pytest.raises(TraceError, match="no requests"):
        agentic.read(agentic_file(tmp_path), 64)
    nested = session(coded(0.0, [0, 1, 1], 1))
    for _ in range(20):
        nested = session(nested | {"t": 0.0})
    with pytest.raises(TraceError, match="nested too deep"):
        agentic.read(agentic_file(tmp_path, nested), 64)


@pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not here")
def test_shared_traces() -> None:
    """The counts that their documentation gives."""
    chat = mooncake.read(TRACES / "mooncake_synthetic.jsonl.zst", 2048)
    assert len(chat.calls) == 3993
    n_blocks = sum(-(-call.n_tokens // 512) for call in chat.calls)
    assert n_blocks == 121_877
    assert all(
        sum(chat.n_blocks[s] for s in call.path) == max(1, call.n_tokens // 512)
        for call in chat.calls
    )
    assert sum(not call.ends for call in chat.calls) > 1000, "many inputs are continued"
    path = TRACES / "agentic_coding" / "sessions_12.json.zst"
    coding = agentic.read([path], 2048)
    assert all(
        sum(coding.n_blocks[s] for s in call.path) * 64 <= call.n_tokens for call in coding.calls
    )
