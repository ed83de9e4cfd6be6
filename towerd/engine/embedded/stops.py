"""Stop strings found in a stream of text, across any boundaries."""

from __future__ import annotations

from dataclasses import dataclass

from towerd.errors import InvalidRequest

STOPS_CHARS_MAX = 32_768
"""All stop strings of one request together; the automaton has one state per character."""


@dataclass(frozen=True, slots=True)
class Matched:
    """What one push made certain."""

    text: str
    """Text that no stop string can claim any more."""
    word: str | None = None
    """The stop string found; `text` then ends right before it and the matcher is done."""


class StopMatcher:
    """An Aho-Corasick automaton: constant work per character whatever the number of stops.

    Of the stops that are complete after a push the one that starts first wins, then the one
    listed first (llama-server's rule). Held back is exactly the longest suffix that begins a
    stop string, so at most the longest stop minus one character."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Empty strings are ignored. Raises InvalidRequest over `STOPS_CHARS_MAX` characters."""
        self.stops = tuple(s for s in stops if s)
        if sum(map(len, self.stops)) > STOPS_CHARS_MAX:
            raise InvalidRequest(f"Stop strings may have {STOPS_CHARS_MAX} characters together.")
        self._held = ""
        self._state = 0
        self._build()

    def push(self, text: str) -> Matched:
        """Feed text that directly follows what was pushed before."""
        if not self.stops:
            return Matched(text)
        seen = self._held + text
        offset = len(self._held)
        state, best = self._state, None
        for i, char in enumerate(text):
            state = self._step(state, char)
            node = state if self._word[state] is not None else self._output[state]
            while node:
                index = self._word[node]
                assert index is not None
                found = (offset + i + 1 - self._depth[node], index)
                best = found if best is None else min(best, found)
                node = self._output[node]
        self._state = state
        if best is not None:
            self._held = ""
            return Matched(seen[: best[0]], self.stops[best[1]])
        cut = len(seen) - self._depth[state]
        self._held = seen[cut:]
        return Matched(seen[:cut])

    def flush(self) -> str:
        """The end of the text: what was held back is not a stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, char: str) -> int:
        while (to := self._next[state].get(char)) is None:
            if not state:
                return 0
            state = self._fail[state]
        return to

    def _build(self) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._word: list[int | None] = [None]
        for index, stop in enumerate(self.stops):
            self._insert(stop, index)
        n = len(self._next)
        self._fail, self._output = [0] * n, [0] * n
        todo = list(self._next[0].values())
        for node in todo:  # breadth first: a node's links only point to shallower nodes
            for char, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                todo.append(child)
            fail = self._fail[node]
            self._output[node] = fail if self._word[fail] is not None else self._output[fail]

    def _insert(self, stop: str, index: int) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._word.append(None)
            node = self._next[node][char]
        if self._word[node] is None:
            self._word[node] = index
