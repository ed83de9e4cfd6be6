"""Mooncake's traces: one request per line, with hash ids of 512-token blocks, global to the file.

{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}

The last block of an input is rarely full. Its id is not that of the block which the next turn
has in its place, so it is left out, as in an engine that caches full blocks: it counts as input
and is never found. An input of less than a block keeps its only block.
"""

from __future__ import annotations

from pathlib import Path

from lab.replay.records import TraceRecord, lines
from lab.replay.trace import Call, Trace, TraceError
from lab.replay.tree import TreeBuilder

BLOCK_TOKENS = 512
_NOBODY = -1


def read(path: Path, segment_tokens: int, calls_max: int | None = None) -> Trace:
    """The requests of a file in order. A request that continues the input of an earlier one belongs
    to the same session. Raises TraceError for bad records and a clock that goes back."""
    tree = TreeBuilder()
    numbers: dict[int, int] = {}
    rows: list[tuple[float, int]] = []
    for record in lines(path):
        if calls_max is not None and len(rows) >= calls_max:
            break
        time_s = record.number("timestamp") / 1000
        if rows and time_s < rows[-1][0]:
            raise TraceError(f"{record.where}: the clock goes back")
        n_tokens = record.integer("input_length", least=1)
        record.integer("output_length", default=0)
        ids = _ids(record, n_tokens)
        try:
            tree.add(None, 0, [numbers.setdefault(x, len(numbers)) for x in ids])
        except TraceError as error:
            raise TraceError(f"{record.where}: {error.message}") from error
        rows.append((time_s, n_tokens))
    parents, lengths, paths = tree.finish(max(1, segment_tokens // BLOCK_TOKENS))
    trace = Trace(path.name.split(".")[0], BLOCK_TOKENS, parents, lengths)
    trace.calls = _calls(rows, paths)
    return trace


def _ids(record: TraceRecord, n_tokens: int) -> list[int]:
    ids = record.integers("hash_ids")
    if len(ids) != -(-n_tokens // BLOCK_TOKENS):
        raise TraceError(
            f"{record.where}: {len(ids)} hash_ids do not make {n_tokens} tokens of input"
        )
    return ids[: max(1, n_tokens // BLOCK_TOKENS)]


def _calls(rows: list[tuple[float, int]], paths: list[tuple[int, ...]]) -> list[Call]:
    """Calls with their sessions: the deepest segment at which an earlier request ended."""
    owner: dict[int, int] = {}
    sessions: list[int] = []
    n_sessions = 0
    for path in paths:
        session = next((owner[s] for s in reversed(path) if s in owner), _NOBODY)
        if session == _NOBODY:
            session, n_sessions = n_sessions, n_sessions + 1
        sessions.append(session)
        owner[path[-1]] = session
    used: set[int] = set()
    calls: list[Call] = []
    for (time_s, n_tokens), path, session in zip(
        reversed(rows), reversed(paths), reversed(sessions), strict=True
    ):
        ends = tuple(segment for segment in path if segment not in used)[:1]
        calls.append(Call(time_s, path, n_tokens, session, ends=ends))
        used.update(path)
    return calls[::-1]
