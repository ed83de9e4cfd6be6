"""What a quick benchmark of the laboratory has to do with its default model, counted."""

from __future__ import annotations

from towerd.cli.bench.harness.work import SMALL, Work, switch_work

SMOLLM2 = 135_000_000
"""Parameters of the default model if it was fetched."""
QUICK_WORK = {
    "memory": switch_work(1, 1),
    # 1 to 8 streams twice on each server, then 1 and 8 with drafts, three times as long.
    "concurrency": Work(SMALL, 2 * 4 * 15 * 32, 2 * 2 * (15 * 32 + 9 * 96), starts=4),
    # Three agents with 3,500 tokens each; llama-server evaluates them at each of three turns.
    "tools": Work(SMALL, 3 * 3500 + 9 * 200 + 9 * 4300, 2 * 9 * 30, starts=2),
    # A text, a document, and a chat of three contexts in two of them; the text again for the 9 of 16 budgets
    # that count all queries, 60 tokens for each of 8 questions under each budget; a choice takes 0.1 s.
    "longchat.policies": Work(
        SMOLLM2,
        596 + 9 * 516 + 1100 + 23 * 8 * 60 + 2 * 2 * 1536,
        17 * 96 + 23 * 140,
        starts=4,
        other_s=0.1 * 22 * 9,
    ),
    # Six loads on each server; a router evaluates the whole chat again at each of four switches.
    "models": Work(SMALL, 2 * 2 * 512 + 4 * 600 + 3 * 4 * 16, 2 * 10 * 8, starts=14),
    # 54 s with 50 s of CPU, of which the pauses and the starts do not grow.
    "proxy": Work(0, 0, 0, starts=4, other_s=100),
    # 120 requests took 58 s of CPU, in both processes.
    "soak": Work(0, 0, 0, other_s=500 * 0.5),
    # Five engines, each 25 s of CPU until it is ready.
    "vllm.first_tokens": Work(0, 0, 0, starts=0, other_s=5 * 50),
    # 5.4 s with 4.1 s of CPU.
    "store": Work(0, 0, 0, starts=0, other_s=10),
    # Prefixes of 7,025 tokens, then 30 tables on 16 continuations of 64 tokens; drift on two.
    "quality.formats": Work(SMOLLM2, 7025 + 30 * 16 * 64 + 6000, 0, starts=2),
    # Prefixes of 4,600 tokens; 12 groups on two continuations of 64, three codings and three block formats on
    # four, some of them token by token; a chat of 2,048 once more. Learning takes 40 s.
    "transform.rates": Work(
        SMOLLM2, 4600 + 64 * (2 * 13 + 4 * 7) + 2048, 64 * 14, starts=3, other_s=80
    ),
    # A chat of 8,000 tokens takes 70.3 s to evaluate, twice that on slow cores, and one of 1,000; 20
    # sessions are coded, and one of 8,000 tokens decoded 27 times.
    "cold.chats": Work(SMOLLM2, 1000, 4, starts=3, other_s=2 * 70.3 + 60),
    # 30.0 s with 21.5 s of CPU.
    "kernels.rates": Work(0, 0, 0, starts=0, other_s=60),
    # 24.5 s with 8.4 s of CPU; the rest waits for the store to settle.
    "footprint.hierarchy": Work(0, 0, 0, starts=0, other_s=33),
    # 32 chats of two turns over four prompts of 1,000 tokens, replies of 16; a basis is learned from 3,000 tokens,
    # weighed on two continuations of 64 for each of 12 groups and measured on four; rows are encoded and frozen.
    "footprint.chats": Work(
        SMOLLM2,
        4 * 1000 + 32 * 2 * 120 + 4600 + 64 * (2 * 13 + 4 * 3),
        32 * 2 * 16 + 80 + 64 * 6,
        starts=5,
        other_s=80,
    ),
    # 24,000 tokens of the default model are evaluated at most, a fifth of them in the quick form; then fits.
    "prediction.gains": Work(SMOLLM2, 5000, 0, starts=1, other_s=72),
    # 3.1 s with 2.8 s of CPU.
    "latem.costs": Work(0, 0, 0, starts=0, other_s=6),
    # A chat of 2,048 tokens is evaluated at its start, and once more when the server is gone; warm-ups of 96 tokens.
    # The rest: 500 chats of random rows, pushed; the S3 server starts.
    "shared.resume": Work(SMALL, 2 * 2049 + 5 * 96, 5 * 16, starts=5, other_s=80),
    # Three templates, without and with anticipation: five replies of 200 tokens, and 150 of thinking.
    "prediction.anticipation": Work(SMOLLM2, 6 * 5 * 300, 2 * 5 * (200 + 350 + 350), starts=6),
    # Three sessions of 3,438 tokens on three servers, then 7,984 tokens behind nine changes on four; a
    # reply of 32 tokens is written once and asked for again twice, token by token.
    "volatile.served": Work(
        SMOLLM2, 3 * 3438 + 4 * 7984, 9 * (3 * 32 + 3) + 3 * 3 * 4 + 9 * 8, starts=4
    ),
    # Five cells with two seeds, each 26 s, half of them pauses; they are scaled with the speed of the model.
    "workflows.latency": Work(0, 0, 0, starts=0, other_s=10 * 26),
    # Two minutes on two cores; its pauses are scaled with the speed of the model.
    "agents.latency": Work(0, 0, 0, starts=0, other_s=240),
}
"""By the module, of the benchmarks whose work can be counted beforehand."""
OF_FILES = ("policy.hit_rates", "policy.states", "codec.sizes", "codec.unseen")
"""Benchmarks of files that the user names: how long they take depends on those."""
