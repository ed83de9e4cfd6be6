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
SMALL, RETRIEVAL, SMOLLM2 = 95_000_000, 720_000, 135_000_000
"""Parameters of the preset `small`, of the package's model for retrieval, and of the default model if it
was fetched."""


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


def _switch(rounds: int, restarted: int) -> Work:
    """Ten chats over a base of 400 tokens with 200 of their own. towerd evaluates what is new; a
    llama-server everything, at each switch."""
    n_chat, said, replied = 600, 8, 20
    ours = 400 + 10 * 200 + (10 * rounds + restarted) * said
    theirs = (10 * (1 + rounds) + restarted) * (n_chat + rounds * (said + replied))
    return Work(SMALL, ours + theirs, 2 * replied * (10 * (1 + rounds) + restarted), starts=4)


QUICK_WORK = {
    "bench.resume.session": Work(SMALL, 2048 + 6 * 32, 5 * 20 + 8, starts=6),
    "bench.switch": _switch(2, 3),
    "bench.memory": _switch(1, 1),
    # 1 to 8 streams twice on each server, then 1 and 8 with drafts, three times as long.
    "bench.concurrency": Work(SMALL, 2 * 4 * 15 * 32, 2 * 2 * (15 * 32 + 9 * 96), starts=4),
    # Three agents with 3,500 tokens each; llama-server evaluates them at each of three turns.
    "bench.tools": Work(SMALL, 3 * 3500 + 9 * 200 + 9 * 4300, 2 * 9 * 30, starts=2),
    # 1,023 tokens under eight budgets and once for recall; four questions of 512 tokens under seven.
    "bench.longchat.policies": Work(RETRIEVAL, 9 * 1023 + 7 * 4 * 512, 7 * 4 * 12, 2, 0.0045),
    # Six loads on each server; a router evaluates the whole chat again at each of four switches.
    "bench.models": Work(SMALL, 2 * 2 * 512 + 4 * 600 + 3 * 4 * 16, 2 * 10 * 8, starts=14),
    # 54 s with 50 s of CPU, of which the pauses and the starts do not grow.
    "bench.proxy": Work(0, 0, 0, starts=4, other_s=100),
    # 120 requests took 58 s of CPU, in both processes.
    "bench.soak": Work(0, 0, 0, other_s=500 * 0.5),
    # 5.4 s with 4.1 s of CPU.
    "bench.store": Work(0, 0, 0, starts=0, other_s=10),
    # Prefixes of 7,025 tokens, then 30 tables on 16 continuations of 64 tokens; drift on two.
    "bench.quality.formats": Work(SMOLLM2, 7025 + 30 * 16 * 64 + 6000, 0, starts=2),
    # A chat of 8,000 tokens takes 70.3 s to evaluate, twice that on slow cores, and one of 1,000; 20
    # sessions are coded, and one of 8,000 tokens decoded 27 times.
    "bench.cold": Work(SMOLLM2, 1000, 4, starts=3, other_s=2 * 70.3 + 60),
    # For each of two modules of 512 tokens: 2.8 times it is evaluated in three cases with two choices and
    # timed three times, with the text around it.
    "lab.bench.splice": Work(SMOLLM2, 2 * (28 * 9 * 52 + 8 * 704 + 6200), 0, starts=1),
    # 30.0 s with 21.5 s of CPU.
    "lab.bench.kernels.rates": Work(0, 0, 0, starts=0, other_s=60),
    # 24.5 s with 8.4 s of CPU; the rest waits for the store to settle.
    "lab.bench.footprint": Work(0, 0, 0, starts=0, other_s=33),
    # 3.1 s with 2.8 s of CPU.
    "lab.bench.latem.costs": Work(0, 0, 0, starts=0, other_s=6),
    # Three templates, without and with anticipation: five replies of 200 tokens, and 150 of thinking.
    "lab.bench.anticipation": Work(SMOLLM2, 6 * 5 * 300, 2 * 5 * (200 + 350 + 350), starts=6),
    # Two minutes on two cores; its pauses are scaled with the speed of the model.
    "lab.bench.agents.latency": Work(0, 0, 0, starts=0, other_s=240),
}
"""By the module, of the benchmarks whose work can be counted beforehand."""
OF_FILES = ("lab.bench.policy.hit_rates", "lab.bench.codec.sizes", "lab.bench.codec.unseen")
"""Benchmarks of files that the user names: how long they take depends on those."""
