"""One sequence's sampler: llama.cpp's samplers in llama-server's order and meaning.

The reference is llama.cpp's `common/sampling.cpp`. Used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import logging
import math
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np

from towerd.engine.base import Ids, SamplingParams, TokenProbs
from towerd.engine.embedded.gbnf import check_gbnf
from towerd.engine.embedded.probs import Floats, from_candidates, from_logits
from towerd.engine.embedded.vocab import Vocab
from towerd.errors import InvalidRequest, TowerdError

log = logging.getLogger("towerd.engine")

_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED
_INT32_MAX = (1 << 31) - 1
_FLOAT_MAX = 3.4e38
_MIROSTAT_M = 100
_BREAKERS_MAX = 64  # each is matched against every token of the vocabulary
GRAMMAR_STEP_S = 0.1
"""CPU time that a grammar may take for a token without being counted."""
GRAMMAR_SLOW_S_MAX = 2.0
"""What the slower ones of a reply may take together: all other replies wait meanwhile."""
_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])

_ALIASES = {
    "top-k": "top_k", "topk": "top_k", "top-p": "top_p", "topp": "top_p", "nucleus": "top_p",
    "min-p": "min_p", "minp": "min_p", "typ-p": "typ_p", "typp": "typ_p", "typ": "typ_p",
    "typical_p": "typ_p", "top-n-sigma": "top_n_sigma", "topnsigma": "top_n_sigma",
    "temp": "temperature",
}  # fmt: skip


class Candidates:
    """A llama_token_data_array over numpy memory: (id, logit, p)[n_vocab]."""

    def __init__(self, n_vocab: int) -> None:
        self._items = np.empty(n_vocab, _CANDIDATE)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = self._items.ctypes.data_as(lib.llama_token_data_p)
        self._raw = lib.llama_token_data_array()
        self.ref: Any = ctypes.byref(self._raw)

    def fill(self, logits: Floats) -> None:
        """All tokens with their logits, float32[n_vocab]; nothing selected."""
        self._items["id"] = self._ids
        self._items["logit"] = logits
        raw = self._raw
        raw.data, raw.size, raw.selected, raw.sorted = self._data, len(logits), -1, False

    def selected(self) -> int:
        """The token that a chain selected, or -1."""
        raw = self._raw
        at = int(raw.selected)
        return int(raw.data[at].id) if 0 <= at < int(raw.size) else -1

    def best(self) -> int:
        """The token with the highest logit (the first of equals) of a full, unsorted array."""
        return int(self._items["logit"].argmax())

    def left(self) -> tuple[Ids, Floats]:
        """Copies of the ids int32[n] and probabilities float32[n] that a chain left over."""
        size = int(self._raw.size)
        address = ctypes.addressof(self._raw.data.contents)
        memory = (ctypes.c_char * (size * _CANDIDATE.itemsize)).from_address(address)
        items = np.frombuffer(memoryview(memory), _CANDIDATE)
        return items["id"].copy(), items["p"].copy()


class Sampler:
    """Samples the tokens of one reply: per token `sample`, maybe `probs`, then `accept`."""

    def __init__(self, params: SamplingParams, vocab: Vocab, n_ctx: int) -> None:
        """Raises InvalidRequest: bad grammar (named with its line), values out of range."""
        _check(params)
        self._params = params
        self._vocab = vocab
        self._n_ctx = n_ctx
        seed = params.seed & _RANDOM_SEED
        self.seed = secrets.randbelow(_RANDOM_SEED) if seed == _RANDOM_SEED else seed
        """The seed in force; drawn here when the request asked for a random one."""
        self._penalty_n = _window(params.repeat_last_n, n_ctx)
        self._dry_n = _window(params.dry_penalty_last_n, n_ctx)
        # Below 1 the base means the default, as llama-server has it.
        self._dry_base = params.dry_base if params.dry_base >= 1 else SamplingParams().dry_base
        self._order = _known_samplers(params.samplers)
        self._biases = self._all_biases()
        self._bias_ids = np.array([t for t, _ in self._biases], np.int32)
        self._bias_values = np.array([b for _, b in self._biases], np.float32)
        self._only_bans = all(b == -math.inf for _, b in self._biases)
        self._banned = frozenset(t for t, _ in self._biases)
        self._history_n = self._needed_history()
        self._greedy = self._is_greedy()
        self._candidates: Candidates | None = None
        self._left: tuple[Ids, Floats] | None = None
        self._checked = -1
        self._slow_s = 0.0
        self._one = lib.llama_token_data(0, 1.0, 0.0)
        self._one_array = lib.llama_token_data_array()
        self._grammar: Any = self._make_grammar(params.grammar)
        self._chain: Any = self._make_chain()
        self._free = weakref.finalize(self, _free, self._chain, self._grammar)

    def close(self) -> None:
        """Free the native samplers; the object cannot be used afterwards."""
        self._free()
        self._chain = self._grammar = None

    def reset(self) -> None:
        """Back to the state before the first token; a fixed seed starts over."""
        self._left, self._checked = None, -1
        lib.llama_sampler_reset(self._chain)
        if self._grammar:
            lib.llama_sampler_reset(self._grammar)

    def accept_prompt(self, ids: Ids) -> None:
        """Let the penalties see the prompt, int32[n]; the grammar does not."""
        # Only the last tokens of the widest window make a difference.
        if self._history_n:
            for token in ids[-self._history_n :].tolist():
                lib.llama_sampler_accept(self._chain, token)

    def sample(self, ctx: Any, index: int) -> int:
        """Pick a token from the logits of batch position `index` of the last decode.

        Raises TowerdError when the grammar allows no token, or the logits are not numbers;
        InvalidRequest when the grammar is too slow."""
        logits = self._logits(ctx, index)
        token = self._pick(logits, constrained=False)
        if self._grammar:
            began_s = time.thread_time()
            token = self._constrained(logits, token)
            self._spent(time.thread_time() - began_s)
        if not math.isfinite(logits[token]):
            raise TowerdError("The model computed logits that are not numbers.")
        return token

    def accept(self, token: int) -> None:
        """The token joins the reply. Raises TowerdError if the grammar forbids it, InvalidRequest
        if the grammar is too slow."""
        if self._grammar:
            began_s = time.thread_time()
            # llama.cpp aborts the process when a grammar has to accept what it forbids.
            if token != self._checked and not self._allows(token):
                raise TowerdError(f"The grammar does not allow token {token} here.")
            self._checked = -1
            lib.llama_sampler_accept(self._grammar, token)
            self._spent(time.thread_time() - began_s)
        if self._history_n:
            lib.llama_sampler_accept(self._chain, token)

    def probs(self, ctx: Any, index: int, chosen: int) -> TokenProbs | None:
        """What `n_probs` asks for about the token just sampled; None when it is 0."""
        n = self._params.n_probs
        if n <= 0:
            return None
        if not self._params.post_sampling_probs:
            return from_logits(self._vocab, self._logits(ctx, index), chosen, n)
        if self._left is None:  # greedy: all the mass is on one token
            self._left = np.array([chosen], np.int32), np.ones(1, np.float32)
        return from_candidates(self._vocab, *self._left, chosen, n)

    # ---- one token --------------------------------------------------------------------------

    def _logits(self, ctx: Any, index: int) -> Floats:
        """float32[n_vocab], a view that the next decode overwrites."""
        pointer = lib.llama_get_logits_ith(ctx, index)
        if not pointer:
            raise TowerdError(f"No logits were computed for batch position {index}.")
        array = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * self._vocab.n_vocab))
        logits: Floats = np.frombuffer(memoryview(array.contents), np.float32)
        return logits

    def _pick(self, logits: Floats, *, constrained: bool) -> int:
        self._left = None
        if self._greedy and not constrained:
            return self._best(logits)
        if self._candidates is None:
            self._candidates = Candidates(self._vocab.n_vocab)
        candidates = self._candidates
        candidates.fill(self._biased(logits) if self._greedy else logits)
        if constrained:
            lib.llama_sampler_apply(self._grammar, candidates.ref)
            if self._greedy:
                return candidates.best()
        lib.llama_sampler_apply(self._chain, candidates.ref)
        token = candidates.selected()
        if token < 0:
            raise TowerdError("The samplers left no token to choose from.")
        if self._params.post_sampling_probs and self._params.n_probs > 0:
            self._left = candidates.left()
        return token

    def _constrained(self, logits: Floats, token: int) -> int:
        """`token` if the grammar allows it, else what is picked of those that it allows."""
        if not self._allows(token):
            token = self._pick(logits, constrained=True)
            if not self._allows(token):
                raise TowerdError("No token of the vocabulary continues the grammar here.")
        return token

    def _spent(self, step_s: float) -> None:
        """Account for what the grammar took. Its cost grows while it is followed if it allows the
        same text in many ways, which nobody can see from its rules."""
        if step_s < GRAMMAR_STEP_S:
            return
        self._slow_s += step_s
        if self._slow_s > GRAMMAR_SLOW_S_MAX:
            raise InvalidRequest(
                f"The grammar takes {step_s:.1f} s for a token here: let it allow fewer ways to "
                "say the same."
            )

    def _best(self, logits: Floats) -> int:
        """The token with the highest biased logit, the first of equals."""
        best = int(logits.argmax())
        if self._only_bans and best not in self._banned:  # the usual case needs no copy
            return best
        return int(self._biased(logits).argmax())

    def _biased(self, logits: Floats) -> Floats:
        if not self._biases:
            return logits
        biased = logits.copy()
        np.add.at(biased, self._bias_ids, self._bias_values)
        return biased

    def _allows(self, token: int) -> bool:
        """Whether the grammar can go on with this token."""
        one, array = self._one, self._one_array
        one.id, one.logit = token, 1.0
        array.data, array.size = ctypes.pointer(one), 1
        array.selected, array.sorted = -1, False
        lib.llama_sampler_apply(self._grammar, ctypes.byref(array))
        allowed = bool(one.logit != -math.inf)
        self._checked = token if allowed else -1
        return allowed

    # ---- construction -----------------------------------------------------------------------

    def _all_biases(self) -> list[tuple[int, float]]:
        biases = [(t, b) for t, b in self._params.logit_bias if 0 <= t < self._vocab.n_vocab]
        if self._params.ignore_eos:
            biases += [(t, -math.inf) for t in sorted(self._vocab.eog_ids)]
        return biases + [(t, -math.inf) for t in self._vocab.suppressed]

    def _needed_history(self) -> int:
        """How many accepted tokens the chain can look back at; 0: accepting does nothing."""
        p = self._params
        if p.mirostat:
            return 0
        penalties = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) != (1.0, 0.0, 0.0)
        n = self._penalty_n if penalties and "penalties" in self._order else 0
        dry = p.dry_multiplier != 0.0 and "dry" in self._order
        return max(n, self._dry_n if dry else 0)

    def _is_greedy(self) -> bool:
        """Whether the chain always ends in the highest biased logit.

        Temperature 0 leaves only the best of what the other samplers left; of those only XTC,
        typical-p and infill can drop or change the overall best."""
        p = self._params
        return (
            not p.mirostat
            and "temperature" in self._order
            and p.temperature <= 0
            and p.dynatemp_range <= 0
            and not self._history_n
            and not ("xtc" in self._order and p.xtc_probability > 0)
            and not ("typ_p" in self._order and p.typical_p < 1)
            and "infill" not in self._order
        )

    def _make_grammar(self, text: str) -> Any:
        if not text:
            return None
        check_gbnf(text, self._vocab)
        handle = lib.llama_sampler_init_grammar(self._vocab.ptr, text.encode(), b"root")
        if not handle:
            raise InvalidRequest("Failed to parse the grammar.")
        return handle

    def _make_chain(self) -> Any:
        params = lib.llama_sampler_chain_default_params()
        params.no_perf = True
        chain = lib.llama_sampler_chain_init(params)
        for handle in self._make_samplers():
            lib.llama_sampler_chain_add(chain, handle)
        return chain

    def _make_samplers(self) -> list[Any]:
        """llama-server's chain: biases, then mirostat or the samplers in order and `dist`."""
        p, n_vocab = self._params, self._vocab.n_vocab
        out: list[Any] = []
        if self._biases:
            array = (lib.llama_logit_bias * len(self._biases))(*self._biases)
            out.append(lib.llama_sampler_init_logit_bias(n_vocab, len(self._biases), array))
        if p.mirostat:
            out.append(lib.llama_sampler_init_temp(p.temperature))
            if p.mirostat == 1:
                out.append(
                    lib.llama_sampler_init_mirostat(
                        n_vocab, self.seed, p.mirostat_tau, p.mirostat_eta, _MIROSTAT_M
                    )
                )
            else:
                out.append(
                    lib.llama_sampler_init_mirostat_v2(self.seed, p.mirostat_tau, p.mirostat_eta)
                )
            return out
        makers = self._makers()
        return [*out, *(makers[name]() for name in self._order),
                lib.llama_sampler_init_dist(self.seed)]  # fmt: skip

    def _makers(self) -> dict[str, Callable[[], Any]]:
        p, keep = self._params, self._params.min_keep
        return {
            "penalties": lambda: lib.llama_sampler_init_penalties(
                self._vocab.n_vocab, self._penalty_n,
                p.repeat_penalty, p.frequency_penalty, p.presence_penalty,
            ),
            "dry": self._make_dry,
            "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(p.top_n_sigma),
            "top_k": lambda: lib.llama_sampler_init_top_k(p.top_k),
            "typ_p": lambda: lib.llama_sampler_init_typical(p.typical_p, keep),
            "top_p": lambda: lib.llama_sampler_init_top_p(p.top_p, keep),
            "min_p": lambda: lib.llama_sampler_init_min_p(p.min_p, keep),
            "xtc": lambda: lib.llama_sampler_init_xtc(
                p.xtc_probability, p.xtc_threshold, keep, self.seed
            ),
            "temperature": lambda: lib.llama_sampler_init_temp_ext(
                p.temperature, p.dynatemp_range, p.dynatemp_exponent
            ),
            "infill": lambda: lib.llama_sampler_init_infill(self._vocab.ptr),
        }  # fmt: skip

    def _make_dry(self) -> Any:
        p = self._params
        texts = [s.encode("utf-8", "surrogatepass") for s in p.dry_sequence_breakers]
        array = (ctypes.c_char_p * len(texts))(*texts)
        return lib.llama_sampler_init_dry(
            self._vocab.ptr, p.dry_multiplier, self._dry_base, p.dry_allowed_length, self._dry_n,
            array, len(texts),
        )  # fmt: skip


def _free(chain: Any, grammar: Any) -> None:
    for handle in (chain, grammar):
        if handle:
            lib.llama_sampler_free(handle)


def _window(last_n: int, n_ctx: int) -> int:
    """Tokens to look back at; -1 is the context. llama.cpp allocates the whole window, and no
    reply ever has more than a context of history."""
    return n_ctx if last_n < 0 else min(last_n, n_ctx)


def _known_samplers(names: tuple[str, ...]) -> list[str]:
    """Canonical names in order. Unknown ones are skipped, as llama-server does: clients send
    the sampler lists of other servers."""
    known = frozenset(_ALIASES.values()) | {"penalties", "dry", "xtc", "infill"}
    out: list[str] = []
    for name in names:
        canonical = _ALIASES.get(name.lower(), name.lower())
        if canonical in known:
            out.append(canonical)
        else:
            log.debug("unknown sampler ignored", extra={"sampler": name})
    return out


def _check(p: SamplingParams) -> None:
    """Refuse what would make llama.cpp divide by zero, allocate absurdly or abort."""
    for name in ("temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p",
                 "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p",
                 "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier",
                 "dry_base", "mirostat_tau", "mirostat_eta"):  # fmt: skip
        if not abs(getattr(p, name)) <= _FLOAT_MAX:
            raise InvalidRequest(f"{name} must be a finite number.")
    if p.repeat_penalty < 1 / _FLOAT_MAX:
        raise InvalidRequest("repeat_penalty must be greater than 0.")
    if p.mirostat not in (0, 1, 2):
        raise InvalidRequest("mirostat must be 0, 1 or 2.")
    for name in ("min_keep", "n_probs", "dry_allowed_length"):
        if not 0 <= getattr(p, name) <= _INT32_MAX:
            raise InvalidRequest(f"{name} must be between 0 and {_INT32_MAX}.")
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        if not -1 <= getattr(p, name) <= _INT32_MAX:
            raise InvalidRequest(f"{name} must be between -1 and {_INT32_MAX}.")
    if len(p.dry_sequence_breakers) > _BREAKERS_MAX:
        raise InvalidRequest(f"dry_sequence_breakers may have {_BREAKERS_MAX} entries.")
    if any(math.isnan(b) or b == math.inf for _, b in p.logit_bias):
        raise InvalidRequest("A logit_bias must be a number below infinity.")
    if not -_INT32_MAX - 1 <= p.top_k <= _INT32_MAX:
        raise InvalidRequest(f"top_k must not be over {_INT32_MAX}.")
