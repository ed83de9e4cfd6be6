"""What becomes of a model of each architecture: a program that reads names from stdin, one a line, and writes an
outcome for each to stdout, one JSON object a line.

Each is tried in a process of its own, since llama.cpp ends the process for what it does not expect. It
is forked before llama.cpp has started a thread, so that it costs no start of Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from architectures import has_head, make_any_gguf
from oracle import Answer, Oracle, ask
from services import EmbeddedService, opener
from speculating import EVEN

from towerd.errors import TowerdError

CUT = 45
"""After so many tokens another prompt leaves the stored one; no checkpoint is there."""
EVERY = 16
"""Tokens between state checkpoints."""
HEAD = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "2")
SECONDS_MAX = 240
Reused: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a model of an architecture resumes.

    resumes: `any token`, `checkpoints`, `whole`, `refused`, or what went wrong
    why: the kind of its memory, or the sentence that refuses it
    drafts: with its head: `yes`, or the sentence that refuses it; empty for one without"""

    arch: str
    resumes: str
    why: str
    drafts: str = ""


def tokens(n: int, seed: int) -> list[int]:
    """Ordinary ones."""
    return [int(each) for each in np.random.default_rng(seed).integers(300, 448, n)]


def tried(arch: str, folder: Path) -> Outcome:
    """Make a model of it, ask, restart the engine, and ask for what is like it."""
    path = folder / "m.gguf"
    make_any_gguf(path, arch)
    try:
        kind, reused = asyncio.run(resumed(path, folder))
    except TowerdError as error:
        return Outcome(arch, "refused", str(error).replace(str(path), "FILE"))
    outcome = Outcome(arch, resumes_from(*reused), kind)
    if not has_head(arch):
        return outcome
    try:
        with_head, again = asyncio.run(resumed(path, folder, name="drafts", llama_server_args=HEAD))
    except TowerdError as error:
        return Outcome(arch, outcome.resumes, kind, str(error).replace(str(path), "FILE"))
    same = (with_head, resumes_from(*again)) == (kind, outcome.resumes)
    return Outcome(arch, outcome.resumes, kind, "yes" if same else f"{with_head}, {again}")


def resumes_from(n_cut: int, n_end: int) -> str:
    """By how many tokens were reused of a prompt that leaves the stored text after CUT, and of one that
    continues it."""
    if n_cut >= CUT:
        return "any token"
    if n_cut:
        return "checkpoints"
    return "whole" if n_end > CUT else "nothing"


async def resumed(path: Path, folder: Path, **settings: Any) -> tuple[str, Reused]:
    """The kind of the memory, and what was reused after a restart. Raises TowerdError if the model is
    refused, AssertionError for a reply that is not that of monolithic evaluation."""
    fixed = {"ctx_size": 256, "parallel": 2, "live_sequences": 4, "anticipate": False}
    opened = opener(folder, **EVEN, **fixed, checkpoint_tokens=EVERY)
    first = tokens(60, 1)
    async with opened(path, **settings) as service:
        kind = str(service.engine.stats()["state_kind"])
        one = await ask(service, first, 6)
        await written(service)
    oracle = Oracle(path, **EVEN)
    check(oracle, first, one)
    async with opened(path, **settings) as service:
        n_reused = []
        for prompt in (first[:CUT] + tokens(12, 2), first + one.ids + tokens(12, 3)):
            answer = await ask(service, prompt, 6)
            check(oracle, prompt, answer)
            reuse = answer.finish.reuse
            n_reused.append(reuse.live + reuse.hot + reuse.warm)
    oracle.close()
    return kind, (n_reused[0], n_reused[1])


async def written(service: EmbeddedService) -> None:
    """Wait until rows and states are on disk."""
    await service.engine.settle()
    await asyncio.to_thread(service.tiers.flush)
    if service.engine.checkpoint_tier is not None:
        await asyncio.to_thread(service.engine.checkpoint_tier.flush)
    await asyncio.to_thread(service.store.check_integrity)


def check(oracle: Oracle, prompt: list[int], answer: Answer) -> None:
    """Every token is the most likely one of monolithic evaluation, every reported log-probability its
    own, within what splitting that evaluation differently changes."""
    ids = np.array(prompt + answer.ids[:-1], np.int32)
    first = len(prompt) - 1
    expected = oracle.logprobs(ids, first)
    splits = [oracle.logprobs(ids, first, n) for n in (1, 17)]
    bound = 4 * max(float(np.abs(each - expected).max()) for each in splits) + 0.005
    assert len(answer.probs) == len(answer.ids) == len(expected)
    for row, probs, token in zip(expected, answer.probs, answer.ids, strict=True):
        assert np.delete(row, oracle.forbidden).max() - row[token] <= bound, "another token"
        for each, logprob in {**probs.top, token: probs.logprob}.items():
            assert abs(logprob - row[each]) <= bound, "another probability"


def outcome_of(arch: str) -> Outcome:
    """`tried` in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = os.fork()
        if child == 0:
            run_child(arch, folder)
        _, status = os.waitpid(child, 0)
        written = folder / "outcome"
        if written.exists():
            return Outcome(**json.loads(written.read_text()))
        log = (folder / "log").read_text(errors="replace")
        return Outcome(arch, f"ended with status {status}", log[-2000:])


def run_child(arch: str, folder: Path) -> None:
    """Leave the outcome in `folder`, and end."""
    signal.alarm(SECONDS_MAX)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        outcome = tried(arch, folder)
    except BaseException as error:
        outcome = Outcome(arch, "failed", "".join(traceback.format_exception(error))[-1500:])
    (folder / "outcome").write_text(json.dumps(asdict(outcome)))
    os._exit(0)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asdict(outcome_of(line.strip()))), flush=True)
