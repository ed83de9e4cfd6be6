"""How prompts change from one request to the next: as agent programs change them, and as none should be
answered from the rows of before."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from lab.bench.volatile.prompts import (
    ADDED_TOOL,
    FLIPPED,
    PERSONAS,
    SWAPPED_TOOLS,
    AgentPrompt,
    AgentShape,
    AgentTurn,
    definition,
    reminder_text,
    session,
    session_line,
)

Rng = np.random.Generator
Change = Callable[[AgentPrompt, Rng], AgentPrompt]

_DATE = re.compile(r"2026-11-(\d\d)")
_NAMED = re.compile(r"`(\w+)`")
_PATH = re.compile(r"\b\w+/\w+\.py\b")
_UNRELATED = AgentShape(rules=1, tools=1, memory=1, tasks=3, code_lines=14)


def date(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """A day later; as many tokens as before."""
    later = _DATE.sub(lambda found: f"2026-11-{int(found[1]) + 1:02}", prompt.environment)
    return replace(prompt, environment=later)


def environment(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """Another date, another directory, more changed files."""
    changed = date(prompt, rng).environment.replace("/src/", "/src/checkouts-2026/")
    paths = sorted(set(_PATH.findall(_said(prompt))))
    more = "".join(f"\n?? {path.removesuffix('.py')}_notes.txt" for path in paths[:3])
    return replace(prompt, environment=changed + more)


def session_id(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """Another session or version in the first line."""
    return replace(prompt, session_line=session_line(rng))


def persona(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """Somebody else answers."""
    others = [each for each in PERSONAS if each != prompt.persona]
    return replace(prompt, persona=others[rng.integers(len(others))])


def memory(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """The memory file grew by two lines."""
    lines = (
        f"On 2026-11-{rng.integers(1, 28):02} the user asked for shorter answers.",
        "The tests take less than a minute; run all of them before an answer.",
    )
    at = len(prompt.memory) // 2
    return replace(prompt, memory=(*prompt.memory[:at], *lines, *prompt.memory[at:]))


def reminder(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """The reminder, which moves to each new message of a person, says something new."""
    return replace(prompt, reminder=reminder_text(rng))


def tool_added(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """One more tool, somewhere in the list."""
    at = int(rng.integers(len(prompt.tools)))
    added = definition(*ADDED_TOOL)
    return replace(prompt, tools=(*prompt.tools[:at], added, *prompt.tools[at:]))


def rule(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """One rule says the opposite."""
    rules = tuple(FLIPPED.get(said, said) for said in prompt.rules)
    return replace(prompt, rules=rules)


def oldest_dropped(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """The frontend's window is full: the oldest turns are gone."""
    return replace(prompt, turns=prompt.turns[2 * max(1, len(prompt.turns) // 6) :])


def compaction(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """The older turns became a summary; the last ones survive."""
    n = _older(prompt)
    names = ", ".join(f"`{name}`" for name in _names(prompt)[:4])
    paths = ", ".join(sorted(set(_PATH.findall(_said(prompt))))[:4])
    summary = (
        "This chat continues an earlier one, which was too long. In short: the user asked about "
        f"{names}. The agent read {paths}, searched for uses and ran the tests, which passed. Nothing "
        "was committed. Go on where it ended."
    )
    return replace(prompt, turns=(AgentTurn("user", summary), *prompt.turns[n:]))


def shared_words(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """The memory becomes a text out of pieces of the history, in another order: its words and names say
    something else."""
    words = _said(prompt).split()
    lines: list[str] = []
    while sum(map(len, lines)) < sum(map(len, prompt.memory)):
        at = rng.integers(len(words), size=3)
        lines.append(" ".join(word for i in at for word in words[i : i + rng.integers(4, 9)]))
    return replace(prompt, memory=tuple(lines))


def swapped_tools(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """Every name that the history uses stands for a tool that does something else."""
    others = {each[0]: definition(*each) for each in SWAPPED_TOOLS}
    tools = (others.get(tool["function"]["name"], tool) for tool in prompt.tools)
    return replace(prompt, tools=tuple(tools))


def unrelated(prompt: AgentPrompt, rng: Rng) -> AgentPrompt:
    """The older turns are another session's; the last ones are kept and now mean something else."""
    n = _older(prompt)
    other = session(int(rng.integers(1000, 2000)), _UNRELATED)
    return replace(prompt, turns=(*other.turns[:n], *prompt.turns[n:]))


GOOD: Mapping[str, Change] = {
    "date": date,
    "environment": environment,
    "session_id": session_id,
    "persona": persona,
    "memory": memory,
    "reminder": reminder,
    "tool_added": tool_added,
    "rule": rule,
    "oldest_dropped": oldest_dropped,
    "compaction": compaction,
}
"""Behind these the rows of the rest may stay."""
BAD: Mapping[str, Change] = {
    "shared_words": shared_words,
    "swapped_tools": swapped_tools,
    "unrelated": unrelated,
}
"""Behind these they must not."""
CHANGES: Mapping[str, Change] = {**GOOD, **BAD}


def _said(prompt: AgentPrompt) -> str:
    return "\n".join(turn.text for turn in prompt.turns)


def _names(prompt: AgentPrompt) -> list[str]:
    return list(dict.fromkeys(_NAMED.findall(_said(prompt))))


def _older(prompt: AgentPrompt) -> int:
    """How many turns are before the kept ones, a third; an odd number, so that an assistant's is next."""
    return len(prompt.turns) // 6 * 2 + 1
