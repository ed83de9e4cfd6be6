from __future__ import annotations

import collections
import dataclasses
import json
import math
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

import towerd.engine.base
from towerd.config import Config
from towerd.engine.base import Ids, SamplingParams, TokenProbs
from towerd.engine.embedded import sampler as sampler_module
from towerd.engine.embedded.context import LlamaContext
from towerd.engine.embedded.model import LlamaModel
from towerd.engine.embedded.sampler import Sampler
from towerd.engine.embedded.vocab import Vocab
from towerd.errors import InvalidRequest, TowerdError

BUNDLED = Path(towerd.engine.base.__file__).parents[1] / "data" / "stories260K.gguf"
SERVER = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "bin",
              "llama-server")  # fmt: skip
N_CTX = 512
PROMPT = "Once upon a time, there was a little girl named Lily. She"


class Loaded:
    """The bundled model in a context of its own, fed one token at a time."""

    def __init__(self) -> None:
        config = dataclasses.replace(Config(), threads=1, threads_batch=1, flash_attn="auto")
        self.model = LlamaModel(BUNDLED, config)
        self.vocab = Vocab(self.model.ptr)
        self.context = LlamaContext(self.model, config, n_cells=N_CTX, n_seqs=1)

    @property
    def ctx(self) -> Any:
        return self.context.ptr

    def evaluate(self, ids: Ids, pos: int) -> int:
        """Decode a run of tokens; the batch index of the last one."""
        index = self.context.batch.add(ids, pos, 0, logits_last=True)
        self.context.decode()
        return index

    def clear(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self.ctx), True)

    def generate(
        self, params: SamplingParams, n: int, prompt: str = PROMPT
    ) -> tuple[list[int], list[TokenProbs]]:
        self.clear()
        ids = self.vocab.tokenize(prompt, True, True)
        sampler = Sampler(params, self.vocab, N_CTX)
        sampler.accept_prompt(ids)
        index, pos = self.evaluate(ids, 0), len(ids)
        out: list[int] = []
        probs: list[TokenProbs] = []
        while len(out) < n:
            token = sampler.sample(self.ctx, index)
            prob = sampler.probs(self.ctx, index, token)
            sampler.accept(token)
            out.append(token)
            if prob is not None:
                probs.append(prob)
            if self.vocab.is_eog(token):
                break
            index = self.evaluate(np.array([token], np.int32), pos)
            pos += 1
        sampler.close()
        return out, probs


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    if not BUNDLED.exists():
        pytest.skip("the bundled model is not built")
    loaded = Loaded()
    yield loaded
    loaded.context.close()
    loaded.model.close()


# ---- llama-server as the oracle ---------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if not SERVER.exists() or not BUNDLED.exists():
        pytest.skip("llama-server is not installed")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [str(SERVER), "-m", str(BUNDLED), "--port", str(port), "-c", str(N_CTX), "-np", "1",
               "-t", "1", "--no-warmup", "--no-webui"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "llama-server ended"
        try:
            with urllib.request.urlopen(url + "/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("llama-server did not start")


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"prompt": PROMPT, "cache_prompt": False, "return_tokens": True} | body)
    request = urllib.request.Request(
        url + "/completion", data.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with penalties": {"temperature": 0.0, "repeat_penalty": 1.3, "repeat_last_n": 32},
    "greedy with typical_p": {"temperature": 0.0, "typical_p": 0.5},
    "greedy with xtc": {"temperature": 0.0, "xtc_probability": 0.9, "xtc_threshold": 0.05},
    "greedy with bias": {"temperature": 0.0, "logit_bias": [[395, -9.0], [300, 6.0], [300, 1.5]]},
    "greedy with ban": {"temperature": 0.0, "logit_bias": [[395, False], [13, False]]},
    "greedy ignoring EOS": {"temperature": 0.0, "ignore_eos": True, "n_predict": 200},
    "greedy grammar with bias": {
        "grammar": "root ::= [a-z ]+",
        "temperature": 0.0,
        "logit_bias": [[395, -50.0]],
    },
    "defaults": {},
    "hot": {"temperature": 1.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_k": 0, "top_p": 0.6, "min_p": 0.0},
    "min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.2},
    "typical": {"typical_p": 0.6},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "temperature": 1.2},
    "penalties": {"repeat_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "penalties over the prompt": {"repeat_penalty": 1.5, "repeat_last_n": 500},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 256},
    "dynatemp": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0},
    "logit_bias": {"logit_bias": [[395, -100.0], [300, 3.0], [1, False]], "temperature": 1.0},
    "ignore_eos": {"ignore_eos": True, "temperature": 1.5, "n_predict": 120},
    "order": {"samplers": ["temperature", "top_k", "penalties"], "repeat_penalty": 1.3},
    "no temperature": {"samplers": ["top_k"], "temperature": 0.0, "top_k": 8},
    "min_keep": {"min_keep": 5, "top_p": 0.1},
    "grammar": {"grammar": 'root ::= [A-Z] [a-z ]+ "."', "temperature": 1.0},
    "greedy grammar": {"grammar": 'root ::= "{" [0-9]+ "}"', "temperature": 0.0},
    "grammar with bias": {"grammar": "root ::= [a-z ]+", "logit_bias": [[395, -50.0]]},
}


def as_params(body: dict[str, Any]) -> SamplingParams:
    fields = {k: v for k, v in body.items() if k != "n_predict"}
    if "logit_bias" in fields:
        fields["logit_bias"] = tuple(
            (t, -math.inf if b is False else b) for t, b in fields["logit_bias"]
        )
    if "samplers" in fields:
        fields["samplers"] = tuple(fields["samplers"])
    return SamplingParams(**fields)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 4_000_000_000])
def test_same_tokens_as_llama_server(loaded: Loaded, server: str, name: str, seed: int) -> None:
    body = {"n_predict": 60, "seed": seed} | CASES[name]
    want = ask(server, body)["tokens"]
    got, _ = loaded.generate(as_params(body), body["n_predict"])
    if loaded.vocab.is_eog(got[-1]) and len(want) < len(got):
        got.pop()
    assert got == want


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_same_probabilities_as_llama_server(
    loaded: Loaded, server: str, post: bool, temperature: float
) -> None:
    body = {"temperature": temperature, "seed": 7, "n_probs": 5, "post_sampling_probs": post}
    answer = ask(server, body | {"n_predict": 12})
    _, got = loaded.generate(as_params(body), 12)
    value, top = ("prob", "top_probs") if post else ("logprob", "top_logprobs")
    assert len(got) == len(answer["completion_probabilities"])
    for mine, theirs in zip(got, answer["completion_probabilities"], strict=True):
        assert mine.chosen.id == theirs["id"]
        assert [t.id for t in mine.top] == [t["id"] for t in theirs[top]]
        assert [list(t.piece) for t in mine.top] == [t["bytes"] for t in theirs[top]]
        for a, b in zip([mine.chosen, *mine.top], [theirs, *theirs[top]], strict=True):
            found = math.exp(a.logprob) if post else a.logprob
            assert math.isclose(found, b[value], rel_tol=2e-3, abs_tol=2e-3)


# ---- on its own -------------------------------------------------------------------------------


def test_probabilities_are_a_softmax_of_the_logits(loaded: Loaded) -> None:
    _, probs = loaded.generate(SamplingParams(temperature=0.0, n_probs=512), 1)
    logprobs = np.array([t.logprob for t in probs[0].top])
    assert len(logprobs) == 512
    assert math.isclose(np.exp(logprobs).sum(), 1.0, rel_tol=1e-4)
    assert (np.diff(logprobs) <= 0).all()
    assert probs[0].chosen == probs[0].top[0], "greedy takes the best"


def test_the_same_seed_gives_the_same_tokens(loaded: Loaded) -> None:
    params = SamplingParams(temperature=1.5, seed=11)
    assert loaded.generate(params, 30)[0] == loaded.generate(params, 30)[0]
    other = dataclasses.replace(params, seed=12)
    assert loaded.generate(params, 30)[0] != loaded.generate(other, 30)[0]


def test_a_random_seed_is_reported_and_can_be_repeated(loaded: Loaded) -> None:
    sampler = Sampler(SamplingParams(seed=-1), loaded.vocab, N_CTX)
    assert 0 <= sampler.seed < 0xFFFFFFFF
    assert sampler.seed != Sampler(SamplingParams(seed=-1), loaded.vocab, N_CTX).seed
    assert Sampler(SamplingParams(seed=5), loaded.vocab, N_CTX).seed == 5


def test_reset_starts_over(loaded: Loaded) -> None:
    index = _prompt(loaded)
    for params in (
        SamplingParams(seed=3, temperature=2.0, top_k=0, repeat_penalty=2.0),
        SamplingParams(seed=3, temperature=2.0, grammar="root ::= [a-z]+"),
    ):
        sampler = Sampler(params, loaded.vocab, N_CTX)
        runs = []
        for _ in range(2):
            run = []
            for _ in range(5):
                run.append(sampler.sample(loaded.ctx, index))
                sampler.accept(run[-1])
            runs.append(run)
            sampler.reset()
        assert runs[0] == runs[1]


def _prompt(loaded: Loaded) -> int:
    loaded.clear()
    return loaded.evaluate(loaded.vocab.tokenize(PROMPT, True, True), 0)


def test_the_prompt_counts_for_penalties_only_as_far_as_the_window(loaded: Loaded) -> None:
    index = _prompt(loaded)
    ids = np.tile(loaded.vocab.tokenize(PROMPT, True, True), 50)
    for window in (0, 4, 64, -1):
        params = SamplingParams(seed=1, repeat_penalty=1.8, repeat_last_n=window, n_probs=5,
                                post_sampling_probs=True)  # fmt: skip
        tail = Sampler(params, loaded.vocab, N_CTX)
        tail.accept_prompt(ids)
        every = Sampler(params, loaded.vocab, N_CTX)
        for token in ids.tolist():
            every.accept(token)
        assert tail.sample(loaded.ctx, index) == every.sample(loaded.ctx, index)


def test_a_grammar_that_nothing_continues_is_an_error_not_an_abort(loaded: Loaded) -> None:
    index = _prompt(loaded)
    digits = [(t, -math.inf) for t, p in enumerate(loaded.vocab.pieces) if p.strip().isdigit()]
    bytes_of_digits = tuple(digits)
    params = SamplingParams(grammar="root ::= [0-9]+", logit_bias=bytes_of_digits)
    sampler = Sampler(params, loaded.vocab, N_CTX)
    try:
        token = sampler.sample(loaded.ctx, index)
    except TowerdError:
        return
    assert loaded.vocab.pieces[token].strip().isdigit(), "llama.cpp found a digit after all"


def test_a_forbidden_token_cannot_be_accepted(loaded: Loaded) -> None:
    sampler = Sampler(SamplingParams(grammar='root ::= "x"'), loaded.vocab, N_CTX)
    for token in (loaded.vocab.eos_id, loaded.vocab.pieces.index(b"1")):
        with pytest.raises(TowerdError):
            sampler.accept(token)


def test_many_samplers_in_turn_do_not_disturb_each_other(loaded: Loaded) -> None:
    index = _prompt(loaded)
    params = [SamplingParams(seed=s, temperature=1.5, repeat_penalty=1.1) for s in range(6)]
    alone = []
    for p in params:
        sampler = Sampler(p, loaded.vocab, N_CTX)
        alone.append([_step(sampler, loaded, index) for _ in range(10)])
    together = [Sampler(p, loaded.vocab, N_CTX) for p in params]
    mixed: list[list[int]] = [[] for _ in params]
    for _ in range(10):
        for out, sampler in zip(mixed, together, strict=True):
            out.append(_step(sampler, loaded, index))
    assert mixed == alone


def _step(sampler: Sampler, loaded: Loaded, index: int) -> int:
    token = sampler.sample(loaded.ctx, index)
    sampler.accept(token)
    return token


def test_unknown_samplers_are_ignored(loaded: Loaded) -> None:
    params = SamplingParams(seed=2, samplers=("tfs_z", "Top-K", "temp", "quadratic"))
    plain = SamplingParams(seed=2, samplers=("top_k", "temperature"))
    assert loaded.generate(params, 20)[0] == loaded.generate(plain, 20)[0]


def test_huge_windows_cost_nothing(loaded: Loaded) -> None:
    params = SamplingParams(repeat_penalty=1.1, repeat_last_n=(1 << 31) - 1, dry_multiplier=1.0,
                            dry_penalty_last_n=(1 << 31) - 1)  # fmt: skip
    Sampler(params, loaded.vocab, N_CTX).close()


def test_a_grammar_that_gets_slow_is_given_up(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that allows the same text in more and more ways ends its own reply, with its name."""
    monkeypatch.setattr(sampler_module, "GRAMMAR_STEP_S", 0.01)
    monkeypatch.setattr(sampler_module, "GRAMMAR_SLOW_S_MAX", 0.1)
    gbnf = 'root ::= "a" root "b" | "a" root "c" | "a"'
    sampler = Sampler(SamplingParams(grammar=gbnf), loaded.vocab, N_CTX)
    token = loaded.vocab.pieces.index(b"a")
    with pytest.raises(InvalidRequest, match="The grammar takes"):
        collections.deque(map(sampler.accept, [token] * 20))


def test_closing_twice_is_harmless(loaded: Loaded) -> None:
    sampler = Sampler(SamplingParams(grammar='root ::= "x"'), loaded.vocab, N_CTX)
    sampler.close()
    sampler.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"repeat_penalty": 0.0},
        {"repeat_penalty": -1.0},
        {"repeat_penalty": 1e-45},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"presence_penalty": 1e300},
        {"mirostat": 3},
        {"min_keep": -1},
        {"n_probs": -1},
        {"top_k": 1 << 40},
        {"repeat_last_n": -2},
        {"repeat_last_n": 1 << 31},
        {"dry_allowed_length": -1},
        {"dry_sequence_breakers": ("x",) * 65},
        {"logit_bias": ((3, math.nan),)},
        {"logit_bias": ((3, math.inf),)},
        {"grammar": "root ::= ("},
    ],
)
def test_values_out_of_range_are_refused(loaded: Loaded, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Sampler(SamplingParams(**fields), loaded.vocab, N_CTX)


def test_logit_bias_outside_the_vocabulary_is_ignored(loaded: Loaded) -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((-5, 9.0), (1 << 30, 9.0)))
    assert loaded.generate(params, 5) == loaded.generate(SamplingParams(temperature=0.0), 5)
