"""Sessions as recorded: how long their prompts are, what they share, and when they come back.

`sessions.json` keeps some sessions of each trace whole, evenly spaced by what they read in all, so that a few
stand for thousands with everything that goes together in a session. `learn` makes it of traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from lab.replay.load import load
from lab.replay.trace import Call, Trace, TraceError

KEPT = Path(__file__).parent / "sessions.json"
SAMPLE = 32
"""Sessions that are kept of a trace."""
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_HUB_CHILDREN = 8
"""More sequels than that: a text that many sessions begin with, not a turn that one continues."""
_SEGMENT_TOKENS = 1 << 30


class RecordedSession(msgspec.Struct, frozen=True, array_like=True):
    """One session. Lengths in tokens; the three lists have an entry a turn."""

    base: int
    """Which text it begins with that other sessions of the trace have, too; -1: none."""
    shared: int
    """The length of that text."""
    prompts: tuple[int, ...]
    lost: tuple[int, ...]
    """What a prompt no longer has of the end of the one before."""
    pauses_s: tuple[int, ...]
    """Since the prompt before; 0 at first."""


class Sample(msgspec.Struct, frozen=True):
    """Some sessions of a trace, and what all of them are like."""

    trace: str
    n_sessions: int
    n_turns: int
    tokens: int
    """Of all prompts."""
    turns_a_session: tuple[float, ...]
    """At QUANTILES, as the next three."""
    new_tokens: tuple[float, ...]
    """Of a prompt, that the one before had not; those of the text that is shared, too."""
    shared_tokens: tuple[float, ...]
    pauses_s: tuple[float, ...]
    shapes: tuple[RecordedSession, ...]

    @property
    def weight(self) -> float:
        """Tokens of a session's prompts in the whole trace, over those of a session that was kept."""
        kept = sum(sum(shape.prompts) for shape in self.shapes) / len(self.shapes)
        return self.tokens / self.n_sessions / kept


def kept_samples(path: Path = KEPT) -> list[Sample]:
    """Those of a file that `save` wrote. Raises TraceError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Sample])
    except (OSError, msgspec.MsgspecError) as error:
        raise TraceError(f"{path} has no samples of sessions: {error}") from error


def save(samples: Sequence[Sample], path: Path) -> None:
    """Write samples, a session a line. Raises OSError."""
    text = msgspec.json.encode(list(samples)).decode()
    path.write_text(text.replace('"shapes":[[', '"shapes":[\n[').replace("]],[", "]],\n[") + "\n")


def learn(path: Path, n: int = SAMPLE) -> Sample:
    """A sample of `n` sessions of a trace in any format of `lab.replay`. Raises TraceError."""
    trace = load(path, _SEGMENT_TOKENS)
    sessions = _conversations(trace)
    shapes = _shapes(trace, sessions)
    ranked = sorted(shapes, key=lambda shape: (sum(shape.prompts), shape.prompts))
    places = [(2 * i + 1) * len(ranked) // (2 * n) for i in range(min(n, len(ranked)))]
    turns = [turn for shape in shapes for turn in _new_and_pause(shape)]
    return Sample(
        trace.name,
        len(shapes),
        len(turns),
        trace.n_input_tokens,
        _quantiles([len(shape.prompts) for shape in shapes]),
        _quantiles([new for new, _ in turns]),
        _quantiles([shape.shared for shape in shapes]),
        _quantiles([pause for _, pause in turns if pause is not None]),
        tuple(ranked[place] for place in places),
    )


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(x), 1) for x in np.quantile(values, QUANTILES)) if values else ()


def _new_and_pause(shape: RecordedSession) -> list[tuple[int, int | None]]:
    before, found = 0, []
    for i, (prompt, lost) in enumerate(zip(shape.prompts, shape.lost, strict=True)):
        found.append((prompt - kept_of(before, lost, prompt), shape.pauses_s[i] if i else None))
        before = prompt
    return found


def kept_of(before: int, lost: int, prompt: int) -> int:
    """Tokens that a prompt begins with as the one before did."""
    return max(0, min(before - lost, prompt))


def _conversations(trace: Trace) -> list[list[Call]]:
    """The calls of a trace by conversation: each continues the one that it has most of. An agent and its sub-agents
    are several."""
    n_children = [len(list(trace.children(segment))) for segment in range(len(trace.parents))]
    is_common = [n > _HUB_CHILDREN for n in n_children]
    if not trace.is_woven:
        readers = _readers([(call.session, call) for call in trace.calls])
        is_common = [len(readers[segment]) > 1 for segment in range(len(trace.parents))]
    found: list[list[Call]] = []
    owner: dict[int, int] = {}
    for call in sorted(trace.calls, key=lambda each: each.time_s):
        own = [segment for segment in call.path if not is_common[segment]]
        last = next((owner[s] for s in reversed(own) if s in owner), len(found))
        if last == len(found):
            found.append([])
        found[last].append(call)
        # where sessions are told apart already, whoever read a text of its own is the one that continues it
        owner.update(dict.fromkeys(call.path[-1:] if trace.is_woven else own, last))
    return found


def _readers(calls: Iterable[tuple[int, Call]]) -> dict[int, set[int]]:
    """Of each segment, the numbers of those who read it."""
    found: dict[int, set[int]] = {}
    for number, call in calls:
        for segment in call.path:
            found.setdefault(segment, set()).add(number)
    return found


def _shapes(trace: Trace, sessions: list[list[Call]]) -> list[RecordedSession]:
    readers = _readers((number, call) for number, calls in enumerate(sessions) for call in calls)
    depths = [n * trace.block_tokens for n in trace.depths()]
    numbers: dict[int, int] = {}
    return [_shape(calls, depths, readers, numbers) for calls in sessions]


def _shape(
    calls: list[Call], depths: list[int], readers: dict[int, set[int]], numbers: dict[int, int]
) -> RecordedSession:
    base, shared = -1, 0
    for segment in calls[0].path:
        if len(readers[segment]) < 2 or depths[segment] > calls[0].n_tokens:
            break
        base, shared = segment, depths[segment]
    if base >= 0:
        base = numbers.setdefault(base, len(numbers))
    lost, pauses = [0], [0]
    for before, call in zip(calls, calls[1:], strict=False):
        same = 0
        for one, other in zip(before.path, call.path, strict=False):
            if one != other:
                break
            same = depths[one]
        lost.append(depths[before.path[-1]] - same)
        pauses.append(round(call.time_s - before.time_s))
    prompts = tuple(call.n_tokens for call in calls)
    return RecordedSession(base, shared, prompts, tuple(lost), tuple(pauses))
