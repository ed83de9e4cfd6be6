"""Traces that the daemon recorded itself (towerd/sessions/trace_recorder.py): a head line, then one
line per request.

Lines are in the order in which answers ended; calls are in the order of the requests.
"""

from __future__ import annotations

from pathlib import Path

from lab.replay.records import TraceRecord, lines
from lab.replay.trace import Call, Trace, TraceError
from lab.replay.tree import BlockPrompt, TreeBuilder
from towerd.sessions.trace_recorder import FORMAT

_Row = tuple[TraceRecord, BlockPrompt, int]


class _RecordedReader:
    """Numbers blocks and sessions in order of first appearance."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tree = TreeBuilder()
        self.rows: list[_Row] = []
        self._numbers: dict[int, int] = {}
        self._before: dict[str, list[int]] = {}
        self._sessions: dict[str, int] = {}

    def add(self, record: TraceRecord) -> None:
        name = record.text("s")
        before = self._before.get(name, [])
        n_kept = record.integer("kept")
        if n_kept > len(before):
            raise TraceError(f"{record.where}: 'kept' is more than the session had")
        ids = before[:n_kept] + record.integers("new")
        if len(ids) != max(1, record.integer("in", least=1) // self.block_tokens):
            raise TraceError(f"{record.where}: the blocks do not make up 'in'")
        self._before[name] = ids
        numbers = [self._numbers.setdefault(x, len(self._numbers)) for x in ids]
        try:
            prompt = self.tree.add(None, 0, numbers)
        except TraceError as error:
            raise TraceError(f"{record.where}: {error.message}") from error
        session = self._sessions.setdefault(name, len(self._sessions))
        self.rows.append((record, prompt, session))


def read(path: Path, segment_tokens: int) -> Trace:
    """The requests of a file, interleaved as recorded. Raises TraceError."""
    reader: _RecordedReader | None = None
    for record in lines(path):
        if reader is None:
            if record.text("format") != FORMAT:
                raise TraceError(f"{path.name}: the format is not {FORMAT}")
            reader = _RecordedReader(record.integer("block_size", least=1))
        else:
            reader.add(record)
    if reader is None or not reader.rows:
        raise TraceError(f"{path.name} has no requests")
    blocks_max = max(1, segment_tokens // reader.block_tokens)
    parents, lengths, paths = reader.tree.finish(blocks_max)
    trace = Trace(path.name.split(".")[0], reader.block_tokens, parents, lengths)
    trace.calls = _calls(reader.rows, paths)
    return trace


def _calls(rows: list[_Row], paths: list[tuple[int, ...]]) -> list[Call]:
    calls: list[Call] = []
    used: set[int] = set()
    for record, prompt, session in sorted(rows, key=lambda row: -row[0].number("t")):
        path = paths[prompt.index]
        calls.append(
            Call(
                record.number("t"),
                path,
                record.integer("in"),
                session,
                record.text("stop", ""),
                record.number("api_time", 0.0),
                record.text("agent", ""),
                () if path[-1] in used else path[-1:],
                record.integer("base", 0),
            )
        )
        used.update(path)
    return calls[::-1]
