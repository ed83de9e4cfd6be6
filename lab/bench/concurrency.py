"""`towerctl bench concurrency`: generated tokens per second at 1 to 8 streams, against
llama-server with the same flags, and what drafts are worth after a restart."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from lab.models.kept import random_model
from lab.models.random_gguf import PRESETS
from lab.models.shape import Arch, Guesses
from towerd.cli.bench.harness.client import Completion, complete, new_session
from towerd.cli.bench.harness.models import bench_model, random_prompt, vocab_size
from towerd.cli.bench.harness.report import Report
from towerd.cli.bench.harness.servers import ServerProcess, llama_server, towerd_server

_STREAMS = (1, 2, 4, 8)
# By default towerd uses no flash attention on a CPU, which suits one long conversation. For
# many short ones flash attention is faster, so both servers get it here.
_FLAGS = ("-c", "4096", "-np", "8", "-fa", "on")
_NGRAM = (
    *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "4"),
    *("--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "8"),
)
_HEAD = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
_PROMPT_TOKENS = 32
_REPEATS = 2
_CHAT_TOKENS = 1024
_JUDGED_TOKENS = 32
"""So many tokens of a reply does `acceptance_after_resume` count the drafts of."""
_ACCEPTANCE_MIN = 0.9


async def run(model: Path | None, quick: bool) -> Report:
    """Both servers, one after the other, on the same requests."""
    preset = "small" if quick else "1b"
    path = bench_model(model, preset)
    n_predict = 32 if quick else 48
    report = Report("concurrency", path.name)
    await _compare(report, path, n_predict, "", _STREAMS)
    report.target("ratio_8", least=0.95)
    # Replies that repeat one token: every draft from n-grams is right, so that the comparison is of
    # drafting, verifying and sending.
    repeats = {"logit_bias": [[vocab_size(path) - 1, 100.0]]}
    await _compare(report, path, 3 * n_predict, "ngram", (1,), _NGRAM, repeats)
    headed = _headed("glm4moe", preset, "right")
    await _compare(report, headed, 3 * n_predict, "spec", (1, 8), _HEAD)
    for n in (1, 8):
        report.target(f"ratio_spec_{n}", least=1.0)
    hybrid = _headed("qwen35", preset, "right")
    await _compare(report, hybrid, 3 * n_predict, "hybrid", (1,), _HEAD)
    await _return(report, _headed("glm4moe", preset, "of rows"))
    return report


def _headed(arch: Arch, preset: str, guesses: Guesses) -> Path:
    """The GGUF of a model with an MTP head, written to the user's cache on first use."""
    shape = replace(PRESETS[preset], arch=arch, n_mtp=1, guesses=guesses)
    name = f"mtp-{arch}-{guesses.replace(' ', '-')}-{preset}"
    return random_model(name, shape, announce=True)


async def _compare(
    report: Report,
    path: Path,
    n_predict: int,
    what: str,
    streams: Sequence[int],
    drafting: Sequence[str] = (),
    fields: dict[str, Any] | None = None,
) -> None:
    """Add the rates of both servers and their ratio. Keys have `what` in them, and the number of
    streams where there are several."""
    flags = (*_FLAGS, *drafting)
    n_vocab = vocab_size(path)
    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        with towerd_server(path, Path(folder) / "store", *flags) as server:
            ours = await _rates(server, n_predict, n_vocab, streams, fields or {})
    with llama_server(path, *flags, "-kvu") as server:
        theirs = await _rates(server, n_predict, n_vocab, streams, fields or {})
    for n in streams:
        key = "_".join([*filter(None, [what]), *([str(n)] if len(streams) > 1 else [])])
        report.figures[f"towerd_{key}_tokens_per_s"] = ours[n]
        report.figures[f"llama_server_{key}_tokens_per_s"] = theirs[n]
        report.figures[f"ratio_{key}"] = ours[n] / theirs[n]


async def _rates(
    server: ServerProcess,
    n_predict: int,
    n_vocab: int,
    streams: Sequence[int],
    fields: dict[str, Any],
) -> dict[int, float]:
    """Best of some repeats: generated tokens per second, excluding prompts."""
    rng = np.random.default_rng(3)
    rates: dict[int, float] = {}
    async with new_session() as session:
        await complete(session, server.url, random_prompt(rng, 16, n_vocab).tolist(), 8)
        for n in streams:
            tries = [
                await _one(session, server, n, n_predict, n_vocab, rng, fields)
                for _ in range(_REPEATS)
            ]
            rates[n] = max(tries)
    return rates


async def _one(
    session: aiohttp.ClientSession,
    server: ServerProcess,
    n_streams: int,
    n_predict: int,
    n_vocab: int,
    rng: np.random.Generator,
    fields: dict[str, Any],
) -> float:
    prompts = [random_prompt(rng, _PROMPT_TOKENS, n_vocab).tolist() for _ in range(n_streams)]
    for prompt in prompts:  # the prompts are cached, so that only generation is timed
        await complete(session, server.url, prompt, 0)
    started = time.perf_counter()
    await asyncio.gather(
        *(complete(session, server.url, prompt, n_predict, **fields) for prompt in prompts)
    )
    return n_streams * n_predict / (time.perf_counter() - started)


async def _return(report: Report, path: Path) -> None:
    """Drafts in the first tokens of a chat's turn: right after its last turn, and after a restart.
    The head's guesses are right where it has what it read of the chat."""
    rng, n_vocab = np.random.default_rng(5), vocab_size(path)
    chat = random_prompt(rng, _CHAT_TOKENS, n_vocab).tolist()
    flags = ("-c", "4096", "-np", "2", *_HEAD)

    async def turn() -> Completion:
        async with new_session() as session:
            answer = await complete(session, server.url, chat, _JUDGED_TOKENS)
        chat.extend([*answer.tokens, *random_prompt(rng, _PROMPT_TOKENS, n_vocab).tolist()])
        return answer

    with tempfile.TemporaryDirectory(prefix="towerd-bench-") as folder:
        with towerd_server(path, Path(folder) / "store", *flags) as server:
            await turn()
            stayed = await turn()
            server.stop()
            server.start()
            resumed = await turn()
    report.figures |= {
        "acceptance_stayed": _acceptance(stayed),
        "acceptance_resumed": _acceptance(resumed),
        "resumed_tokens": int(resumed.timings["cache_n"]),
        "acceptance_after_resume": _acceptance(resumed) / _acceptance(stayed),
    }
    report.target("acceptance_after_resume", least=_ACCEPTANCE_MIN)


def _acceptance(answer: Completion) -> float:
    """The share of drafted tokens that were right; 0 if none was drafted."""
    n_drafted = int(answer.timings.get("draft_n", 0))
    return int(answer.timings.get("draft_n_accepted", 0)) / n_drafted if n_drafted else 0.0
