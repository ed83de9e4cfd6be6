"""What a quick benchmark has to do with its default model, counted, and how long that takes on two slow
cores: known before it begins, and at most QUICK_S_MAX."""

from __future__ import annotations

from dataclasses import dataclass

QUICK_S_MAX = 300.0
READ_PER_S = 25e9
"""Parameters times tokens of prompts in a second: half of what two cores of a Xeon at 2.8 GHz do."""
WRITTEN_PER_S = 8e9
"""The same for tokens that are generated one after the other."""
START_S = 8.0
"""From starting a server to its first answer."""
SMALL = 95_000_000
"""Parameters of the preset `small`."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a benchmark evaluates at most: nothing is reused where that is not certain."""

    parameters: int
    read: int
    """Tokens of prompts."""
    written: int
    """Tokens of replies."""
    starts: int = 1
    """How often a server starts."""
    choosing_s: float = 0.0
    """For each token of a prompt besides: choosing what stays live, 4.5 ms of CPU as measured."""
    other_s: float = 0.0
    """What is no evaluation, as measured."""

    @property
    def seconds(self) -> float:
        """The time on two slow cores."""
        read_s = self.parameters * self.read / READ_PER_S
        read_s += self.choosing_s * self.read + self.other_s
        return read_s + self.parameters * self.written / WRITTEN_PER_S + self.starts * START_S


def switch_work(rounds: int, restarted: int) -> Work:
    """Ten chats over a base of 400 tokens with 200 of their own. towerd evaluates what is new; a
    llama-server everything, at each switch."""
    n_chat, said, replied = 600, 8, 20
    ours = 400 + 10 * 200 + (10 * rounds + restarted) * said
    theirs = (10 * (1 + rounds) + restarted) * (n_chat + rounds * (said + replied))
    return Work(SMALL, ours + theirs, 2 * replied * (10 * (1 + rounds) + restarted), starts=4)


RESUME_WORK = Work(SMALL, 2048 + 6 * 32, 5 * 20 + 8, starts=6)
SWITCH_WORK = switch_work(rounds=2, restarted=3)
