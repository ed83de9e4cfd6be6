"""Sampling fields of a request body, as llama-server reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from towerd.api import fields
from towerd.api.fields import INT32_MAX, Body
from towerd.api.off_loop import by_size, size_of
from towerd.engine.base import DEFAULT_SAMPLERS, Engine, SamplingParams
from towerd.errors import InvalidRequest, NotSupported

DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class Number:
    """One numeric field: its bounds, and whether a value outside is an error or is clamped."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    strict: bool = False


NUMBERS: Mapping[str, Number] = {
    "temperature": Number(low=0.0),
    "dynatemp_range": Number(),
    "dynatemp_exponent": Number(),
    "top_k": Number(0, INT32_MAX, whole=True),
    "top_p": Number(0.0, 1.0),
    "min_p": Number(0.0, 1.0),
    "top_n_sigma": Number(),
    "xtc_probability": Number(0.0, 1.0),
    "xtc_threshold": Number(0.0, 1.0),
    "typical_p": Number(),
    "repeat_last_n": Number(0, INT32_MAX, whole=True, strict=True),
    "repeat_penalty": Number(),
    "presence_penalty": Number(),
    "frequency_penalty": Number(),
    "dry_multiplier": Number(),
    "dry_base": Number(),
    "dry_allowed_length": Number(0, INT32_MAX, whole=True, strict=True),
    "dry_penalty_last_n": Number(-1, INT32_MAX, whole=True, strict=True),
    "mirostat": Number(0, 2, whole=True),
    "mirostat_tau": Number(),
    "mirostat_eta": Number(),
    "min_keep": Number(0, INT32_MAX, whole=True, strict=True),
}

CANONICAL_SAMPLERS = ("dry", "top_k", "top_p", "top_n_sigma", "typ_p", "min_p", "temperature", "xtc",
                      "infill", "penalties", "adaptive_p")  # fmt: skip
SAMPLER_LETTERS: Mapping[str, str] = {
    "d": "dry", "k": "top_k", "y": "typ_p", "p": "top_p", "s": "top_n_sigma", "m": "min_p",
    "t": "temperature", "x": "xtc", "i": "infill", "e": "penalties", "a": "adaptive_p",
}  # fmt: skip
SAMPLER_NAMES: Mapping[str, str] = {
    spelling: name
    for name in CANONICAL_SAMPLERS
    for spelling in (name, name.replace("_", "-"), name.replace("_", ""))
} | {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}

MODEL_KEYS: Mapping[str, str] = {
    "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold", "temp": "temperature", "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty", "mirostat": "mirostat", "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}  # fmt: skip
"""Metadata below `general.sampling.` -> the field whose default it is."""

SEED_MASK = 0xFFFFFFFF
BIASED_TEXTS_MAX = 1024


def default_sampling(metadata: Mapping[str, str]) -> SamplingParams:
    """What a request gets that says nothing: llama-server's defaults, or what the model's metadata
    recommends. A value that is no number is passed over, as by llama-server."""
    values: dict[str, Any] = {}
    for key, name in MODEL_KEYS.items():
        with suppress(KeyError, ValueError, OverflowError):
            number = float(metadata[f"general.sampling.{key}"])
            values[name] = int(number) if NUMBERS[name].whole else number
    if sequence := metadata.get("general.sampling.sequence"):
        names = (SAMPLER_NAMES.get(name.lower()) for name in sequence.split(";"))
        values["samplers"] = tuple(name for name in names if name in DEFAULT_SAMPLERS)
    return replace(DEFAULTS, **values)


async def parse_sampling(
    body: Body, engine: Engine, *, grammar: str, n_probs_max: int
) -> SamplingParams:
    """The sampling parameters of a body whose grammar is settled already.

    Raises InvalidRequest naming the field, NotSupported for samplers this engine lacks."""
    _refuse_unsupported(body)
    default = default_sampling(engine.info.metadata)
    values: dict[str, Any] = {name: _number(body, name, default) for name in NUMBERS}
    if values["dry_base"] < 1.0:
        values["dry_base"] = DEFAULTS.dry_base
    return SamplingParams(
        seed=_seed(body),
        logit_bias=await _logit_bias(body, engine),
        grammar=grammar,
        samplers=_samplers(body, default),
        dry_sequence_breakers=_breakers(body),
        ignore_eos=fields.boolean(body, "ignore_eos", False),
        n_probs=_n_probs(body, n_probs_max),
        post_sampling_probs=fields.boolean(body, "post_sampling_probs", False),
        **values,
    )


def _number(body: Body, name: str, default: SamplingParams) -> float | int:
    rule = NUMBERS[name]
    if body.get(name) is None:
        unsaid: float | int = getattr(default, name)
        return unsaid
    read = fields.integer if rule.whole else fields.number
    value: float | int = read(name, body[name])
    if rule.strict:
        fields.check_range(name, value, rule.low, rule.high)
        return value
    clamped = max(rule.low, min(rule.high, value))
    return int(clamped) if rule.whole else clamped


def _seed(body: Body) -> int:
    if body.get("seed") is None:
        return DEFAULTS.seed
    seed = fields.integer("seed", body["seed"]) & SEED_MASK
    return -1 if seed == SEED_MASK else seed


def _n_probs(body: Body, n_probs_max: int) -> int:
    name = fields.present(body, "n_probs", "logprobs")
    if name is None:
        return 0
    value = body[name]
    if name == "logprobs" and isinstance(value, bool):
        return int(value)
    n_probs = fields.integer(name, value)
    fields.check_range(name, n_probs, 0, n_probs_max)
    return n_probs


def _samplers(body: Body, default: SamplingParams) -> tuple[str, ...]:
    value = body.get("samplers")
    if value is None:
        return default.samplers
    if isinstance(value, str):
        names = [SAMPLER_LETTERS.get(letter) for letter in value]
    else:
        names = [SAMPLER_NAMES.get(name.lower()) for name in fields.strings(body, "samplers")]
    for name in names:
        if name in ("infill", "adaptive_p"):
            raise NotSupported(
                f"Field 'samplers': the embedded engine has no sampler '{name}'; "
                "the llama-server engine has"
            )
    return tuple(name for name in names if name is not None)


def _breakers(body: Body) -> tuple[str, ...]:
    if body.get("dry_sequence_breakers") is None:
        return DEFAULTS.dry_sequence_breakers
    breakers = tuple(fields.strings(body, "dry_sequence_breakers"))
    if not breakers:
        raise InvalidRequest("Field 'dry_sequence_breakers': must be a non-empty array of strings")
    return breakers


async def _logit_bias(body: Body, engine: Engine) -> tuple[tuple[int, float], ...]:
    """`[[id or text, bias], ...]` or `{"id or text": bias}`; a bias of false bans the token."""
    value = body.get("logit_bias")
    if value is None:
        return ()
    known, texts = await by_size(size_of(value), _biases, value, engine.info.n_vocab)
    for text, bias in texts:
        for token in await engine.tokenize(text, add_special=False, parse_special=False):
            known[int(token)] = known.get(int(token), 0.0) + bias
    return tuple(known.items())


def _biases(value: Any, n_vocab: int) -> tuple[dict[int, float], list[tuple[str, float]]]:
    """Biases by id, those of one id added up, and biases by text. Ids outside the vocabulary
    are passed over."""
    if isinstance(value, dict):
        pairs = [(_id_or_text(key), bias) for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = [_pair(item) for item in value]
    else:
        raise fields.wrong_type("logit_bias", "array or object", value)
    ids: dict[int, float] = {}
    texts: list[tuple[str, float]] = []
    for what, raw in pairs:
        bias = -math.inf if raw is False else fields.number("logit_bias", raw)
        if isinstance(what, str):
            texts.append((what, bias))
        elif 0 <= what < n_vocab:
            ids[what] = ids.get(what, 0.0) + bias
    if len(texts) > BIASED_TEXTS_MAX:
        raise InvalidRequest(f"Field 'logit_bias': at most {BIASED_TEXTS_MAX} texts are allowed")
    return ids, texts


def _id_or_text(key: str) -> int | str:
    try:
        return int(key, 10)
    except ValueError:
        return key


def _pair(item: Any) -> tuple[int | str, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise InvalidRequest("Field 'logit_bias': each entry must be a [token, bias] pair")
    what, bias = item
    if isinstance(what, str):
        return what, bias
    return fields.integer("logit_bias", what), bias


def _refuse_unsupported(body: Body) -> None:
    """Fields that would change the text and that this engine does not have."""
    asked = [name for name in ("lora", "grammar_triggers", "suffix") if body.get(name)]
    asked += [name for name in ("grammar_lazy", "echo") if body.get(name) is True]
    for name, on in (("n_indent", 1), ("t_max_predict_ms", 1), ("adaptive_target", 0)):
        if body.get(name) is not None and fields.number(name, body[name]) >= on:
            asked.append(name)
    if asked:
        raise NotSupported(
            f"Field '{asked[0]}': the embedded engine does not support it; "
            "the llama-server engine does"
        )
