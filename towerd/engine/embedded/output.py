"""Generated tokens to the text a client sees: UTF-8 assembly, then stop strings."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from towerd.engine.base import Piece, TokenProbs
from towerd.engine.embedded.stops import StopMatcher
from towerd.engine.embedded.text import TextStream


@dataclass(frozen=True, slots=True)
class Emit:
    """What became certain with one token."""

    text: str
    ids: tuple[int, ...]
    """Tokens all of whose text is out (with this `text`); each token appears exactly once."""
    probs: tuple[TokenProbs, ...] = ()
    stopped: bool = False
    """A stop string was found; `word` names it."""
    word: str = ""

    def piece(self) -> Piece:
        """The engine event."""
        return Piece(self.text, self.ids, self.probs)


class OutputText:
    """One reply. Characters of text [0, sent) are out, [sent, decoded) wait for a stop string.

    A token is kept once the whole of its text is out; after a stop string the tokens that
    reach into it are not."""

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self.word = ""
        """The stop string that ended the reply, or ""."""
        self.n_kept = 0
        """Tokens whose text was sent, counted from the first."""
        self.has_new_line = False
        """Whether the text sent so far has a line break in it."""
        self._stream = TextStream()
        self._matcher = StopMatcher(stops)
        self._n_decoded = 0
        self._n_sent = 0
        self._waiting: deque[tuple[int, int, TokenProbs | None]] = deque()

    def push(self, token: int, piece: bytes, probs: TokenProbs | None = None) -> Emit:
        """Add a token; `piece` is b"" for tokens that render as nothing (EOG, control)."""
        text = self._stream.push(piece)
        self._n_decoded += len(text)
        # An unfinished character will be at least one more character; the token ends in it.
        end = self._n_decoded + self._stream.is_pending
        self._waiting.append((end, token, probs))
        matched = self._matcher.push(text)
        self.word = matched.word or ""
        return self._emit(matched.text)

    def finish(self) -> Emit:
        """The reply is over: release what was held back. After a stop string: nothing."""
        if self.word:
            return Emit("", ())
        emitted = self._emit(self._matcher.flush() + self._stream.flush())
        assert not self._waiting
        return emitted

    def _emit(self, text: str) -> Emit:
        self._n_sent += len(text)
        self.has_new_line = self.has_new_line or "\n" in text
        ids: list[int] = []
        probs: list[TokenProbs] = []
        while self._waiting and self._waiting[0][0] <= self._n_sent:
            _, token, prob = self._waiting.popleft()
            ids.append(token)
            if prob is not None:
                probs.append(prob)
        self.n_kept += len(ids)
        return Emit(text, tuple(ids), tuple(probs), bool(self.word), self.word)
