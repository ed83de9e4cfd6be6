"""A trace from a path, whatever its format."""

from __future__ import annotations

from pathlib import Path

from lab.replay import agentic, mooncake, recorded, workflows
from lab.replay.records import open_text
from lab.replay.trace import Trace, TraceError
from towerd.sessions.trace_recorder import FORMAT as RECORDED

_HEAD_CHARS = 4096


def load(path: Path, segment_tokens: int) -> Trace:
    """The trace of a file, or of all files of a folder of coding-agent sessions. Raises
    TraceError if the format is none of those in this package's README.md."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if ".json" in p.suffixes)
        if not files:
            raise TraceError(f"{path} has no trace files")
        return agentic.read(files, segment_tokens)
    with open_text(path) as stream:
        try:
            head = stream.read(_HEAD_CHARS)
        except (OSError, ValueError) as error:
            raise TraceError(f"{path.name} cannot be read: {error}") from error
    if f'"{agentic.FORMAT}"' in head:
        return agentic.read([path], segment_tokens)
    if f'"{RECORDED}"' in head:
        return recorded.read(path, segment_tokens)
    if '"workflow_id"' in head:
        return workflows.read(path, segment_tokens)
    if '"hash_ids"' in head:
        return mooncake.read(path, segment_tokens)
    raise TraceError(f"{path.name} is in no format that is known here")
