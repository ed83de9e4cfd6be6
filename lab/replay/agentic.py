"""Coding-agent sessions: files of `{"format": "agentic-coding-trace/1", "sessions": [...]}`.

Block ids are only valid within one session. The tool definitions and the system prompt at
the start of a session (`tool_tokens` + `system_tokens`) are taken to be the same text in every
session with the same two lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lab.replay.records import TraceRecord, document
from lab.replay.trace import Call, Trace, TraceError
from lab.replay.tree import BlockPrompt, TreeBuilder

FORMAT = "agentic-coding-trace/1"
_SERVICE_S = 5.0
"""Used where the source has no time for the answer: about the median of those that have one."""
_DEPTH_MAX = 8
_Row = tuple[float, BlockPrompt, TraceRecord, int]


class _AgenticReader:
    """Numbers the blocks of all sessions and collects their requests."""

    def __init__(self) -> None:
        self.tree = TreeBuilder()
        self.rows: list[list[_Row]] = []
        self.block_tokens = 0
        self._n_blocks = 0
        self._n_streams = 0
        self._shared: dict[tuple[int, int, int], int] = {}

    def add(self, session: TraceRecord) -> None:
        """One session with its sub-agents."""
        block_tokens = session.integer("block_size", least=1)
        if self.block_tokens not in (0, block_tokens):
            raise TraceError(f"{session.where}: block_size differs from that of other sessions")
        self.block_tokens = block_tokens
        local: dict[int, int] = {}
        rows = list(self._walk(session, session, local, 0.0, 0))
        self.rows.append(sorted(rows, key=lambda row: row[0]))

    def _walk(
        self,
        owner: TraceRecord,
        session: TraceRecord,
        local: dict[int, int],
        start_s: float,
        depth: int,
    ) -> Iterator[_Row]:
        if depth > _DEPTH_MAX:
            raise TraceError(f"{owner.where}: sub-agents are nested too deep")
        stream, self._n_streams = self._n_streams, self._n_streams + 1
        before: BlockPrompt | None = None
        last_s = 0.0
        for request in owner.records("requests"):
            at_s = request.number("t")
            if at_s < last_s:
                raise TraceError(f"{request.where}: the clock goes back")
            last_s = at_s
            if "requests" in request.value:
                yield from self._walk(request, session, local, start_s + at_s, depth + 1)
                continue
            prompt = self._prompt(owner, request, before, local)
            if prompt is not None:
                before = prompt
                yield start_s + at_s, prompt, request, stream

    def _prompt(
        self,
        owner: TraceRecord,
        request: TraceRecord,
        before: BlockPrompt | None,
        local: dict[int, int],
    ) -> BlockPrompt | None:
        """The blocks of a request; None if it does not fill a block."""
        n_max = -(-request.integer("in", least=1) // self.block_tokens)
        code = request.integers("h")
        if len(code) % 2 == 0:
            raise TraceError(f"{request.where}: field 'h' must be a number and pairs")
        n_kept, n_new = code[0], sum(code[2::2])
        if n_kept + n_new > n_max:
            raise TraceError(f"{request.where}: 'h' has more blocks than 'in' has tokens")
        if n_kept + n_new == 0:
            return None
        ids = [x for a, n in zip(code[1::2], code[2::2], strict=True) for x in range(a, a + n)]
        if before is None and not local:
            self._share(owner, ids, local)
        new: list[int] = []
        for x in ids:
            number = local.get(x)
            if number is None:
                number = local[x] = self._n_blocks
                self._n_blocks += 1
            new.append(number)
        try:
            return self.tree.add(before, n_kept, new)
        except TraceError as error:
            raise TraceError(f"{request.where}: {error.message}") from error

    def _share(self, owner: TraceRecord, ids: list[int], local: dict[int, int]) -> None:
        """Give the leading blocks of a session the same numbers as in other sessions with the same
        lengths."""
        lengths = (owner.integer("tool_tokens", 0), owner.integer("system_tokens", 0))
        for i, x in enumerate(ids[: sum(lengths) // self.block_tokens]):
            key = (*lengths, i)
            if key not in self._shared:
                self._shared[key] = self._n_blocks
                self._n_blocks += 1
            local[x] = self._shared[key]


def read(paths: list[Path], segment_tokens: int, sessions_max: int | None = None) -> Trace:
    """All sessions of the files, each from time 0; see `interleave`. Raises TraceError."""
    reader = _AgenticReader()
    for path in paths:
        content = document(path)
        if content.text("format") != FORMAT:
            raise TraceError(f"{path.name}: the format is not {FORMAT}")
        for session in content.records("sessions"):
            if sessions_max is None or len(reader.rows) < sessions_max:
                reader.add(session)
    if not reader.tree.n_blocks:
        raise TraceError("the trace has no requests")
    blocks_max = max(1, segment_tokens // reader.block_tokens)
    parents, lengths, tree_paths = reader.tree.finish(blocks_max)
    trace = Trace("coding", reader.block_tokens, parents, lengths, is_woven=False)
    for number, rows in enumerate(reader.rows):
        trace.calls += _session_calls(number, rows, tree_paths)
    return trace


def _session_calls(
    number: int, rows: list[_Row], tree_paths: list[tuple[int, ...]]
) -> Iterator[Call]:
    last_of = {row[3]: i for i, row in enumerate(rows)}
    for i, (time_s, prompt, request, stream) in enumerate(rows):
        path = tree_paths[prompt.index]
        yield Call(
            time_s,
            path,
            request.integer("in"),
            number,
            request.text("stop", ""),
            request.number("api_time", _SERVICE_S),
            ends=path[-1:] if last_of[stream] == i else (),
        )
